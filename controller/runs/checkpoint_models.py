"""Models out of checkpoints: one step of a run as a Hugging Face directory."""

from pathlib import Path
from typing import Any

from controller.hosts.host_groups import kept_allocations
from controller.launching.launcher import Launcher
from controller.runs.models import Tell, resolve_model
from rl.checks import check_empty_folder
from rl.runs.folder import LOOP_FILE, complete_checkpoints, read_json

_POLICY = "policy"


def checkpoint_of(run: Path, step: int | None) -> Path:
    """The checkpoint of a step, or the newest. Raises ValueError, naming the steps that have one, if there is none."""
    complete = {_step_of(path): path for path in complete_checkpoints(run / "checkpoints")}
    if not complete:
        raise ValueError(f"{run} has no complete checkpoint")
    if step is None:
        return complete[max(complete)]
    if step not in complete:
        raise ValueError(f"{run} has no checkpoint of step {step}; it has those of {', '.join(map(str, complete))}")
    return complete[step]


def _step_of(checkpoint: Path) -> int:
    return read_json(checkpoint / LOOP_FILE)["step"]


async def export_checkpoint(config: Any, checkpoint: Path, directory: Path, log_dir: Path, tell: Tell) -> None:
    """Writes the policy of a checkpoint to `directory`. `config` is the configuration of its run.

    Starts the run's trainer, on its hosts if it has some, which loads the checkpoint. Raises ValueError if `directory`
    holds something, and for a checkpoint without a policy.
    """
    check_empty_folder(directory)
    if not (checkpoint / _POLICY).is_dir():
        raise ValueError(f"{checkpoint} holds no {_POLICY!r}, the trainer whose model is exported")
    model = resolve_model(config.model, tell)
    async with kept_allocations(tell), Launcher(log_dir, getattr(config, "hosts", None)) as launcher:
        # With its generator's configuration the trainer exports in that dtype, as at the run's end.
        trainer = await launcher.trainer(model, config.trainer, generator=getattr(config, "generator", None))
        await trainer.load_checkpoint(checkpoint / _POLICY)
        await trainer.export_hf(directory)
