"""torchtitan's decoders as policies or critics: their forward pass ends in log-probs of target tokens, or in values.

Scoring is part of the model's forward pass, so that FSDP gathers the output projection once for all chunks and frees it
like any other parameter.
"""

from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.llama3 import Llama3Model
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.protocols.sharding import ShardingConfig

from trainer.engines.pytorch.logprobs import logprobs_and_entropy, values
from trainer.engines.pytorch.low_rank import Adaptable


class LogprobHead(Adaptable, Linear):
    """A `Linear` whose forward pass returns log-probs instead of logits."""

    hidden_gradient: Placement = Partial()
    """Placement of the hidden states' gradient over tensor-parallel ranks: a sum over their parts of the vocabulary."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Same fields as `Linear.Config`."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden: Tensor, targets: Tensor, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [S, D], targets [S] -> log-probs [S] float32, entropies [S] float32 if asked for."""
        weight, group, low_rank = self.weight, None, self.low_rank
        if isinstance(weight, DTensor):  # tensor parallelism: this rank's rows of the vocabulary
            mesh = weight.device_mesh
            weight, group = weight.to_local(), mesh.get_group()
            if low_rank is not None:
                low_rank = low_rank._replace(b=low_rank.b.chunk(mesh.size())[mesh.get_local_rank()])
        return logprobs_and_entropy(hidden, weight, targets, entropy=entropy, group=group, low_rank=low_rank)


class ValueHead(Linear):
    """A `Linear` with one output, the value of a position. Every tensor-parallel rank computes the same."""

    hidden_gradient: Placement = Replicate()
    """As `LogprobHead.hidden_gradient`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Same fields as `Linear.Config`."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden: Tensor, targets: Tensor, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [S, D] -> values [S] float32, and None because a value head has no entropies."""
        del targets, entropy
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return values(hidden, weight), None


def _shard_head_only(head: Linear.Config) -> None:
    """Leaves an output projection's weight sharded by rows, and a value head's whole.

    Inputs and outputs stay plain tensors: the head itself deals with tensor parallelism.
    """
    assert head.sharding_config is not None
    head.sharding_config = ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.I)}
        if isinstance(head, ValueHead.Config)
        else head.sharding_config.state_shardings
    )


class _Policy(Decoder):
    """The forward pass that both families share."""

    # Upstream's switch for losses that apply the output projection themselves; here `forward` does.
    _skip_lm_head = True

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        tokens: Tensor,
        positions: Tensor,
        attention_masks: Any,
        *,
        scored: Tensor,
        targets: Tensor,
        entropy: bool,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Scores the positions `scored` [S] of one packed row: tokens and positions [1, L], targets [S].

        Returns log-probs [S] float32 and entropies [S] float32 if asked for. Only scored positions go through the
        output projection. A value head returns values [S] float32 and None. In a pipeline, every stage but the first
        takes hidden states [1, L, D] instead of tokens, and every stage but the last returns them.
        """
        hidden = super().forward(tokens, positions, attention_masks)
        if self.lm_head is None:
            return hidden
        if isinstance(hidden, DTensor):
            hidden = hidden.to_local(grad_placements=[self.lm_head.hidden_gradient])
        return self.lm_head(hidden.squeeze(0).index_select(0, scored), targets, entropy=entropy)


class LlamaPolicy(_Policy, Llama3Model):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A Llama that scores."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        """Same fields as `Llama3Model.Config`."""

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Sets how every parameter and activation is sharded."""
            Llama3Model.Config.update_from_config(self, config=config, **kwargs)
            _shard_head_only(self.lm_head)


class Qwen3Policy(_Policy, Qwen3Model):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A Qwen3 that scores."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        """Same fields as `Qwen3Model.Config`."""

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Sets how every parameter and activation is sharded."""
            Qwen3Model.Config.update_from_config(self, config=config, **kwargs)
            _shard_head_only(self.lm_head)
