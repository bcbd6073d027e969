"""The torchtitan engine: torchtitan's model, parallelized by torchtitan, driven by our loop.

With more than one rank torchtitan's `parallelize_fn` applies tensor, context and expert parallelism, activation
checkpointing and FSDP2. With one rank nothing is sharded and `MasterWeights` does the mixed precision. Pipeline
parallelism is not offered.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rl.packing import PackedRow, pad_row
from trainer.config import TrainerConfig
from trainer.engines.hf_config import read_hf_config
from trainer.engines.model_check import describe_model
from trainer.engines.ranks import choose_device, init_process_group
from trainer.engines.titan.attention import attention_masks, shared_attention_masks, shares_prefixes
from trainer.engines.titan.build import build_model
from trainer.engines.titan.context import gather_scored, row_multiple, share_row
from trainer.engines.titan.experts import split_experts
from trainer.engines.titan.models import named_parameters
from trainer.engines.torch_engine import TorchEngine


class TitanEngine(TorchEngine):
    """One rank of a torchtitan model."""

    def __init__(self, config: TrainerConfig) -> None:
        """Builds and loads the model. Raises ValueError for a model or a layout that cannot be trained."""
        hf_config = read_hf_config(config.model)
        device = choose_device()
        torch.manual_seed(config.seed)
        init_process_group(config, device)
        self._decoder, self._context_mesh = build_model(config, hf_config, device)
        super().__init__(
            config,
            self._decoder,
            dict(named_parameters(self._decoder)),
            describe_model(config.model, config.head),
            device,
        )

    @property
    def shares_prefixes(self) -> bool:
        return shares_prefixes(self._device)

    def hf_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            yield from split_experts(name, parameter)

    def _score(self, row: PackedRow, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        row = pad_row(row, row_multiple(self._config, self._device))
        tokens, positions = self._tensor(row.tokens), self._tensor(row.positions)
        scored, targets = self._tensor(row.scored), self._tensor(row.loss_inputs["target_tokens"])
        if self._context_mesh is None:
            masks = attention_masks(self._decoder, positions[None], row.documents)
            return self._decoder(tokens[None], positions[None], masks, scored=scored, targets=targets, entropy=entropy)
        share = share_row(len(tokens), scored, self._context_mesh.get_local_rank(), self._context_mesh.size())
        masks = shared_attention_masks(self._decoder, positions[None], row.documents, share, self._context_mesh)
        values = self._decoder(
            tokens[share.rows][None],
            positions[share.rows][None],
            masks,
            scored=share.scored,
            targets=targets[share.where],
            entropy=entropy,
        )
        group = self._context_mesh.get_group()
        logprobs, entropies = (gather_scored(v, share, len(scored), group) if v is not None else None for v in values)
        assert logprobs is not None
        return logprobs, entropies
