"""What a script needs to start a trainer and a generator; the processes, the loops and the command line behind it.

A name is imported from its module when it is first used, so importing this package loads nothing else.
"""

TYPE_CHECKING = False  # as type checkers know it; a command must not be interrupted in an import before it begins
if TYPE_CHECKING:
    from controller.launching.launcher import Launcher, launch
    from controller.runs.models import resolve_model
    from generator.config import GeneratorConfig
    from rl.lora import LoRAConfig
    from rl.types import AdamParams, SamplingParams
    from trainer.config import TrainerConfig

__all__ = [
    "AdamParams",
    "GeneratorConfig",
    "Launcher",
    "LoRAConfig",
    "SamplingParams",
    "TrainerConfig",
    "launch",
    "resolve_model",
]
_MODULES = {
    "AdamParams": "rl.types",
    "GeneratorConfig": "generator.config",
    "Launcher": "controller.launching.launcher",
    "LoRAConfig": "rl.lora",
    "SamplingParams": "rl.types",
    "TrainerConfig": "trainer.config",
    "launch": "controller.launching.launcher",
    "resolve_model": "controller.runs.models",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
