"""The generator of a replay: its rollouts were recorded, so it samples nothing and has no process."""

from collections.abc import Sequence

from generator.config import GeneratorConfig
from rl.configuration import configuration
from rl.lora import LivePolicy, Policy
from rl.protocols import Generator
from rl.types import Completion, PullMode, SamplingParams


@configuration
class OfflineGeneratorConfig(GeneratorConfig):
    """Marks a run without a generator: no process is started, and no process pulls the pushed weights."""


class OfflineGenerator:
    """Satisfies `rl.protocols.Generator` for a loop whose rollouts are recorded."""

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1, *, policy: Policy = None
    ) -> list[Completion]:
        """Raises AssertionError: a replay takes its rollouts from the recording."""
        del prompt_tokens, sampling, num_samples, policy
        raise AssertionError("a replay samples nothing")

    async def pull_model_state_dict(
        self,
        version: int,
        *,
        policy: LivePolicy = None,
        frozen: bool = False,
        mode: PullMode = "drain",
        keep_prefix_cache: bool = False,
    ) -> None:
        """Does nothing: the weights are not used."""

    async def drop_policy(self, policy: Policy) -> None:
        """Does nothing: there are no weights."""

    async def stop(self) -> None:
        """Does nothing: there is no process to end."""


async def offline_generator() -> Generator:
    """The generator of a replay; a launcher starts it as any other."""
    return OfflineGenerator()
