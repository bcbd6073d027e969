"""Linear layers that an adapter can be switched on in, and the low-rank product that it adds.

A layer holds no adapter: the engine of an adapter lends its A and B to the layers for the time of a call. Recomputed
activations therefore see the same adapter, because the backward pass belongs to the call. `new_parameters` makes the A
and B of a new adapter, and `merged_weight` the weights of the adapted model.
"""

import contextlib
import hashlib
import math
from collections.abc import Collection, Generator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl.lora import ATTENTION_MODULES, FURTHER_ATTENTION_MODULES, MLP_MODULES, UNEMBED_MODULES, LoRAConfig, tensor_name
from rl.system.hardware import available_memory_bytes
from rl.system.ranks import all_gather

# A parameter, its gradient and its two moments, in float32.
_BYTES_PER_PARAMETER = 16


class LowRank(NamedTuple):
    """One layer's part of an adapter."""

    a: Tensor
    """[rank, in] float32"""
    b: Tensor
    """[out, rank] float32"""
    scale: float

    def down(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., rank], scaled, in the dtype of `x`."""
        return F.linear(x, self.a.to(x.dtype)) * self.scale

    def product(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out] in the dtype of `x`."""
        return F.linear(self.down(x), self.b.to(x.dtype))


class Adaptable(nn.Linear):
    """A linear layer to whose output the adapter in use adds its own. An output projection is computed by scoring."""

    hf_module: str = ""
    """The layer's Hugging Face name, such as `model.layers.0.self_attn.q_proj`."""
    low_rank: LowRank | None = None
    """The adapter in use. A tuple, so that its parameters do not become the layer's."""
    num_alike: int = 1
    """Ranks that compute the layer whole, of the same inputs. Their gradients of an adapter are equal."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[..., in] -> [..., out]"""
        y = super().forward(x)
        if self.low_rank is None:
            return y
        if isinstance(x, DTensor) and isinstance(y, DTensor) and isinstance(self.weight, DTensor):
            return y + _sharded_product(self.low_rank, x, y, self.weight)
        return y + self.low_rank.product(x)


def _sharded_product(whole: LowRank, x: DTensor, y: DTensor, weight: DTensor) -> DTensor:
    """The product in the placement of `y`: for a weight of which ranks hold rows (dim 0) or columns (dim 1).

    Every rank holds A and B whole and computes with the part that fits its part of the weight. Its gradients of A and B
    are then parts of sums over the group, as they are over data-parallel ranks.
    """
    mesh, (placement,) = weight.device_mesh, weight.placements
    assert isinstance(placement, Shard)
    size, rank = mesh.size(), mesh.get_local_rank()
    if placement.dim == 0:
        part = whole._replace(b=whole.b.chunk(size)[rank])
        grad: Placement = Partial()
    else:
        part = whole._replace(a=whole.a.chunk(size, dim=1)[rank])
        grad = x.placements[0]
    product = part.product(x.to_local(grad_placements=[grad]))
    return DTensor.from_local(product, mesh, y.placements, run_check=False)


def own_rows(weight: DTensor, low_rank: LowRank | None) -> tuple[Tensor, dist.ProcessGroup, LowRank | None]:
    """Of a weight whose rows a tensor-parallel group shares: this rank's rows, the group, and as many of B's rows."""
    mesh = weight.device_mesh
    if low_rank is not None:
        low_rank = low_rank._replace(b=low_rank.b.chunk(mesh.size())[mesh.get_local_rank()])
    return weight.to_local(), mesh.get_group(), low_rank


def adaptable_layers(model: nn.Module) -> dict[str, Adaptable]:
    """The layers of a model that can be adapted, by Hugging Face name."""
    return {module.hf_module: module for module in model.modules() if isinstance(module, Adaptable)}


@contextlib.contextmanager
def adapted(layers: Mapping[str, Adaptable], low_ranks: Mapping[str, LowRank]) -> Generator[None]:
    """Within the block, the layers add the products of these names; other layers add nothing."""
    for name, low_rank in low_ranks.items():
        layers[name].low_rank = low_rank
    try:
        yield
    finally:
        for name in low_ranks:
            layers[name].low_rank = None


def freeze(model: nn.Module, dtype: torch.dtype) -> None:
    """Turns parameters that are not loaded yet into frozen ones of `dtype`. Buffers stay as they are."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)


def new_parameters(
    config: LoRAConfig, layers: Mapping[str, Adaptable], device: torch.device
) -> dict[str, nn.Parameter]:
    """The parameters of a new adapter of these layers, by PEFT's names.

    As in PEFT, A is uniform within 1 / sqrt(in) of 0 and B is zero. A depends on the seed and the layer's name alone,
    so that every layout begins with the same adapter.
    """
    parameters: dict[str, nn.Parameter] = {}
    for name, layer in layers.items():
        digest = hashlib.sha256(f"{config.seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
        bound = 1 / math.sqrt(layer.in_features)
        a = torch.empty(config.rank, layer.in_features).uniform_(-bound, bound, generator=generator)
        b = torch.zeros(layer.out_features, config.rank)
        parameters[tensor_name(name, "A")] = nn.Parameter(a.to(device))
        parameters[tensor_name(name, "B")] = nn.Parameter(b.to(device))
    return parameters


def check_targets(config: LoRAConfig, names: Collection[str], *, has_experts: bool) -> None:
    """Raises ValueError if a model whose adaptable layers have these names lacks projections that `config` adapts.

    Of a model with experts, whose feed-forward networks are not adapted, the MLP's may be missing.
    """
    groups = {
        "train_attn": ATTENTION_MODULES,
        "train_mlp": () if has_experts else MLP_MODULES,
        "train_unembed": UNEMBED_MODULES,
    }
    present = {name.rpartition(".")[2] for name in names}
    if present.intersection(FURTHER_ATTENTION_MODULES):
        del groups["train_attn"]  # these take the place of some or all of the others
    for field, modules in groups.items():
        missing = [module for module in modules if module not in present]
        if getattr(config, field) and missing:
            raise ValueError(
                f"LoRAConfig.{field} is True, but the model has no projection named {' or '.join(missing)}; "
                f"it must be False for this model"
            )
    if not any(map(config.adapts, names)):
        raise ValueError(
            "LoRAConfig adapts nothing of this model: experts are not adapted, so train_attn or train_unembed must "
            "be True"
        )


def check_memory(config: LoRAConfig, layers: Mapping[str, Adaptable], device: torch.device) -> None:
    """Raises ValueError if there is no room for the adapter, its gradient and its optimizer state."""
    sizes = [layer.in_features + layer.out_features for name, layer in layers.items() if config.adapts(name)]
    needed = _BYTES_PER_PARAMETER * config.rank * sum(sizes)
    available = available_memory_bytes()
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        available = torch.cuda.mem_get_info(device)[0] + unused
    if needed > available:
        raise ValueError(
            f"an adapter of rank {config.rank} needs {needed / 1e9:.2f} GB for parameters, gradient and optimizer "
            f"state, and {available / 1e9:.2f} GB are free; drop another adapter, or choose a smaller LoRAConfig.rank"
        )


def all_names(names: Collection[str]) -> set[str]:
    """The names of all ranks. A collective."""
    return {name for of_rank in all_gather(list(names)) for name in of_rank}


@torch.no_grad()
def merged_weight(weight: Tensor, low_rank: LowRank) -> Tensor:
    """A weight [out, in] plus the product of an adapter, in float32, sharded as the weight is."""
    if not isinstance(weight, DTensor):
        return weight.float() + low_rank.scale * (low_rank.b @ low_rank.a)
    shape, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    rows, columns = (slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    local = weight.to_local().float() + low_rank.scale * (low_rank.b[rows] @ low_rank.a[:, columns])
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
