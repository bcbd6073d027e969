"""The generator of a run that samples nothing, because its rollouts were recorded."""

from collections.abc import Sequence
from dataclasses import dataclass

from generator.config import GeneratorConfig
from rl.types import Completion, PullMode, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineGeneratorConfig(GeneratorConfig):
    """A generator that is not there: nothing is started for it, weights that are pushed are pulled by nobody."""


class OfflineGenerator:
    """Satisfies `rl.protocols.Generator` for a loop whose rollouts are recorded."""

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1
    ) -> list[Completion]:
        """Raises AssertionError: a recorded problem is not sampled from."""
        del prompt_tokens, sampling, num_samples
        raise AssertionError("a replay samples nothing")

    async def pull_model_state_dict(
        self, version: int, *, mode: PullMode = "drain", keep_prefix_cache: bool = False
    ) -> None:
        """There is nobody to use the weights."""

    async def stop(self) -> None:
        """There is nothing to end."""
