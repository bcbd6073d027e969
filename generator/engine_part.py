"""Parts of plug-ins that change how a generator's engine computes.

The controller imports this module, so it does not import vLLM.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl.checks import unknown_name
from rl.protocols import Schedule
from rl.system.plugins import find, named_by

if TYPE_CHECKING:  # the imports would load vLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    from generator.config import GeneratorConfig
    from rl.weights.version import VersionRecord


class EnginePart:
    """Changes how a generator's engine computes. An entry point of `ownloop.generators` names a subclass.

    `GeneratorConfig` names the parts of its engine by their entry points, in `numerics` and `speculation.source`. The
    controller makes a part to check it, and each rank's process makes one for its engine. A method that is not
    overridden changes nothing.
    """

    def __init__(self, config: "GeneratorConfig", *, has_gpu: bool) -> None:
        """Takes the configuration, whose `model` is the model's directory. Loads neither torch nor vLLM."""
        self.config = config
        self.has_gpu = has_gpu

    def check(self) -> None:
        """Raises ValueError for what the part cannot do, before any process starts."""

    def env(self) -> Mapping[str, str]:
        """Variables of each rank's environment, set before the process imports anything."""
        return {}

    def engine_args(self) -> Mapping[str, object]:
        """Options of vLLM's `EngineArgs`, which replace those of the core."""
        return {}

    def before_build(self) -> None:
        """Patches vLLM, after the core's own patches."""

    def after_build(self, engine: "LLMEngine") -> None:
        """Gets the engine before its first request."""

    def check_version(self, record: "VersionRecord") -> None:
        """Raises ValueError for a version with whose weights the trainer computes otherwise than this engine."""

    @staticmethod
    def schedule(config: Any) -> Schedule:
        """The order of events of the run `config.schedule`. Raises ValueError if this part's numbers cannot repeat."""
        raise ValueError(f"schedule is {config.schedule}, and numerics is {config.numerics!r}; it must be 'bitwise'")

    def take_metrics(self) -> Mapping[str, float]:
        """Metrics since the last call, for the step's line in metrics.jsonl. Called from another thread."""
        return {}


def engine_parts(config: "GeneratorConfig", *, has_gpu: bool) -> list[EnginePart]:
    """Makes the parts that a configuration names. Raises ValueError for one that no installed plug-in has."""
    source = "" if config.speculation is None else config.speculation.source
    named = {"GeneratorConfig.numerics": config.numerics, "Speculation.source": source}
    parts: list[EnginePart] = []
    for field, name in named.items():
        if not name:
            continue
        part = find("generators", name, type[EnginePart])
        if part is None:
            raise unknown_name(field, name, named_by("generators"), "generators")
        parts.append(part(config, has_gpu=has_gpu))
    return parts


def recorded_schedule(config: Any) -> Schedule | None:
    """The order of events that a loop of this configuration repeats, if any. Raises ValueError if it cannot."""
    part = find("generators", config.numerics, type[EnginePart]) or EnginePart
    return None if config.schedule is None else part.schedule(config)
