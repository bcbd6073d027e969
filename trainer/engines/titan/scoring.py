"""torchtitan's decoders as policies: their forward pass ends in log-probs of target tokens instead of logits.

Scoring is part of the model's own forward pass so that FSDP gathers the output projection once, for all chunks, and
frees it like any other parameter.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.llama3 import Llama3Model
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.protocols.sharding import ShardingConfig

from trainer.engines.logprobs import logprobs_and_entropy


class LogprobHead(Linear):
    """A `Linear` whose forward goes on to the log-probs."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Same fields as `Linear.Config`."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden: Tensor, targets: Tensor, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [S, D], targets [S] -> log-probs [S] float32, entropies [S] float32 if asked for."""
        weight, group = self.weight, None
        if isinstance(weight, DTensor):  # tensor parallelism: this rank's rows of the vocabulary
            weight, group = weight.to_local(), weight.device_mesh.get_group()
        return logprobs_and_entropy(hidden, weight, targets, entropy=entropy, group=group)


def _shard_head_only(head: Linear.Config) -> None:
    """Leaves a head's weight sharded by rows; inputs and outputs stay plain tensors, which `LogprobHead` deals with."""
    assert head.sharding_config is not None
    head.sharding_config = ShardingConfig(state_shardings=head.sharding_config.state_shardings)


class _Policy(Decoder):
    """What both families share."""

    # Upstream's switch for losses that apply the output projection themselves.
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
    ) -> tuple[Tensor, Tensor | None]:
        """Scores the positions `scored` [S] of one packed row: tokens and positions [1, L], targets [S].

        Returns log-probs [S] float32 and entropies [S] float32 if asked for. Only scored positions go through the
        output projection.
        """
        hidden = super().forward(tokens, positions, attention_masks)
        if isinstance(hidden, DTensor):  # its gradient comes from each tensor-parallel rank's part of the vocabulary
            hidden = hidden.to_local(grad_placements=[Partial()])
        return self.lm_head(hidden[0].index_select(0, scored), targets, entropy=entropy)


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
