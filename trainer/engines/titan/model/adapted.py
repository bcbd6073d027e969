"""torchtitan's `Linear` with an adapter, and how a model's configuration comes to use it.

Under tensor parallelism every rank holds A and B whole and computes with the part that fits its part of the weight. A
rank's gradients of A and B are then parts of sums over the group, as they are over data-parallel ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torchtitan.models.common import Linear
from torchtitan.protocols.model_spec import ModelSpec

from trainer.engines.pytorch.low_rank import Adaptable, LowRank
from trainer.engines.titan.model.specs import hf_name


class AdaptedLinear(Adaptable, Linear):
    """A `Linear` to whose output the adapter in use adds its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Same fields as `Linear.Config`."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[..., in] -> [..., out]"""
        y = super().forward(x)
        if self.low_rank is None:
            return y
        if isinstance(x, DTensor) and isinstance(y, DTensor) and isinstance(self.weight, DTensor):
            return y + _sharded_product(self.low_rank, x, y, self.weight)
        return y + self.low_rank.product(x)


def _sharded_product(whole: LowRank, x: DTensor, y: DTensor, weight: DTensor) -> DTensor:
    """The product in the placement of `y`: for a weight of which ranks hold rows (dim 0) or columns (dim 1)."""
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


def make_adaptable(spec: ModelSpec) -> None:
    """Replaces the projections of attention and of dense feed-forward networks, as torchtitan's converters do."""
    for name, config, parent, attribute in list(spec.model.traverse(Linear.Config)):
        if type(config) is not Linear.Config or ".router." in name:
            continue
        adapted = AdaptedLinear.Config(**{f.name: getattr(config, f.name) for f in fields(config) if f.init})
        assert isinstance(attribute, str)  # the list of layers holds no projections
        setattr(parent, attribute, adapted)


def name_adaptable(parts: Sequence[nn.Module]) -> None:
    """Tells every layer that can be adapted its Hugging Face name."""
    for part in parts:
        for name, module in part.named_modules():
            if isinstance(module, Adaptable):
                module.hf_module = hf_name(f"{name}.weight").removesuffix(".weight")
