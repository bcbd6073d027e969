"""The fsdp2 engine: any causal language model of transformers under torch's `fully_shard`.

Data parallelism: sharded (FSDP2), replicated, or both (HSDP). Families that read images bring tensor parallelism. With
one rank nothing is sharded. Attention is transformers' own, with a mask that separates documents, so a prefix that
datums share is computed once per datum.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainer.config import TrainerConfig
from trainer.engines.hf.transformers_policy import TransformersPolicy
from trainer.engines.model_check import describe_model
from trainer.engines.pytorch.engine import TorchEngine
from trainer.engines.pytorch.ranks import DTYPES, choose_device, init_process_group
from trainer.engines.pytorch.row_runner import SequentialRows


class Fsdp2Engine(TorchEngine):
    """One rank of a transformers model."""

    def __init__(self, config: TrainerConfig) -> None:
        """Builds and loads the model. Raises ValueError for a model or a layout that cannot be trained."""
        device = choose_device()
        torch.manual_seed(config.seed)
        init_process_group(config, device)
        dtype = DTYPES[config.compute_dtype]
        trained = config.train_vision and not config.is_frozen
        self._policy = TransformersPolicy(config.model, config.head, dtype, config.head_dtype, train_vision=trained)
        if config.activation_checkpointing == "full":
            self._policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        if config.is_frozen:
            self._policy.freeze(dtype, adapt_vision=config.train_vision)
        if config.num_ranks > 1:
            _shard(self._policy, config, device)
        parameters = self._policy.load(config.model, device)
        info = describe_model(config.model, config.head)
        rows = SequentialRows(partial(self._policy.score, device=device), config.num_ranks, device)
        super().__init__(config, self._policy, parameters, info, device, rows)
        self._policy.check(device)
        self._reshard()

    def _views(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        return self._policy.views(name, tensor)

    def _buffers(self) -> Mapping[str, Tensor]:
        return self._policy.buffers_by_name()


def _shard(policy: TransformersPolicy, config: TrainerConfig, device: torch.device) -> None:
    """Shards every block of the model, and the rest of it as one more block."""
    degrees = (config.data_parallel_replicate, config.data_parallel_shard, config.tensor_parallel)
    mesh = init_device_mesh(device.type, degrees, mesh_dim_names=("replicate", "shard", "tensor"))
    alike = policy.split(mesh["tensor"]) if config.tensor_parallel > 1 else ()
    of_data = mesh["replicate", "shard"] if config.data_parallel_replicate > 1 else mesh["shard"]
    # All ranks share what tensor-parallel ranks compute alike, and each of these adds its whole gradient to the sum.
    of_all = init_device_mesh(device.type, (config.num_ranks,)) if alike else of_data
    units = [(module, of_all, config.tensor_parallel) for module in alike]
    units += [(module, of_data, 1) for module in (*policy.layers(), policy) if module not in alike]
    # Without `output_dtype`, hidden states and logits keep the dtype in which they are computed.
    precision = MixedPrecisionPolicy(param_dtype=DTYPES[config.compute_dtype], reduce_dtype=torch.float32)
    for module, sharing, times in units:
        sharded = fully_shard(module, mesh=sharing, mp_policy=precision, ignored_params=policy.frozen_parts())
        assert isinstance(sharded, FSDPModule)
        # Gradients are sums over ranks, and gloo has no reduction that also scales.
        sharded.set_gradient_divide_factor(times)
        sharded.set_force_sum_reduction_for_comms(True)
