"""The output projection of a policy: scores target tokens without returning the logits."""

from dataclasses import dataclass

import torch
from torchtitan.models.common import Linear

from trainer.engines.logprobs import logprobs_and_entropy


class LogprobHead(Linear):
    """A `Linear` whose forward goes on to the log-probs, so that FSDP gathers its weight once for all chunks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Same fields as `Linear.Config`."""

    def forward(
        self, input: torch.Tensor, targets: torch.Tensor, *, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """input [S, D], targets [S] -> log-probs [S] float32, entropies [S] float32 if asked for."""
        weight, group = self.weight, None
        return logprobs_and_entropy(input, weight, targets, entropy=entropy, group=group)
