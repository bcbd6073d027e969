"""`ownloop export`: a checkpoint as a model directory, with a card.

The card (README.md) says from what a model was made, how, and with which results. Its head is in the form that the
Hugging Face Hub reads: https://huggingface.co/docs/hub/model-cards
"""

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from controller.commands.command import OfCheckpoint, TakesFields
from controller.commands.output import CapturedOutput
from controller.commands.processes import finish
from controller.commands.saved_recipe import RECIPE_FILE, command_of, find_run
from controller.runs.folder import CONFIG_FILE, METRICS, read_json, read_metrics
from controller.runs.loop_config import options_of
from controller.runs.recording import write_whole

_CARD = "README.md"
_FROM_TRAINING = (
    "reward_mean",
    "loss",
    "kl_reference",
    "kl_generator",
    "logprob_mismatch_mean",
    "completion_tokens_mean",
)


@dataclass(frozen=True, kw_only=True)
class Export(OfCheckpoint, TakesFields):
    """Writes a checkpoint as a Hugging Face directory.

    Fields that a resume may change, such as --hosts, are options, too.
    """

    name: Annotated[str, Positional, arg(metavar="RUN")]
    """A run's folder, or its name within --runs."""
    to: Annotated[Path | None, arg(metavar="DIR")] = None
    """A new folder, by default RUN/exports/step-N; with --adapter, RUN/exports/step-N-adapter."""
    adapter: bool = False
    """Write the adapter alone, for peft and vLLM, in place of the model with the adapter merged into it."""

    def run(self) -> int:
        """Prints the directory on standard output."""
        from controller.commands.resume import resumed_configuration
        from controller.runs.checkpoints import checkpoint_of, export_checkpoint

        run = find_run(self.name, self.runs)
        checkpoint = checkpoint_of(run, self.step)
        directory = self.to or run / "exports" / (f"{checkpoint.name}-adapter" if self.adapter else checkpoint.name)
        with CapturedOutput() as output, tempfile.TemporaryDirectory(prefix="ownloop-export-") as scratch:
            config = resumed_configuration(run, self.fields)
            if self.adapter and options_of(config).lora is None:
                raise ValueError(f"--adapter is given, and {run} trained the model itself; leave it out")
            try:
                logs = logs_of_export(run, output)
            except OSError:  # with --to, the run may be another user's, or on a disk that is read-only
                logs = logs_of_export(Path(scratch), output)
            finish(export_checkpoint(config, checkpoint, directory, logs, output.say, alone=self.adapter), output)
            if not self.adapter:
                add_model_card(run, name_of_data(config), directory, int(checkpoint.name.rpartition("-")[2]))
            print(directory, file=output.terminal)
        return 0


def logs_of_export(folder: Path, output: CapturedOutput) -> Path:
    """The folder of an export's logs, to which this process's output goes from now on."""
    logs = folder / "logs" / "export"
    logs.mkdir(parents=True, exist_ok=True)
    output.move_to(logs / "export.log")
    return logs


def name_of_data(config: object) -> str:
    """What a configuration trains on, in a few words."""
    options = options_of(config)
    data = options.env or options.data
    return str(data.name if hasattr(data, "name") else type(data).__name__)


def add_model_card(run: Path, data: str, model: Path | None = None, step: int | None = None) -> None:
    """Writes the card of the model that `run` exported to `model`, by default its own folder `model`.

    `data` names what was trained on. `step` is the checkpoint's; None is the end of the run. Does nothing if there is
    no such directory.
    """
    directory = model or run / "model"
    if (directory / "config.json").is_file():
        # A path in the command need not be Unicode.
        write_whole(directory / _CARD, "\n".join(_card(run, data, step)).encode(errors="replace"))


def _card(run: Path, data: str, step: int | None) -> Iterator[str]:
    config = read_json(run / CONFIG_FILE)
    rows = [row for row in read_metrics(run / METRICS) if step is None or row["step"] <= step]
    last = int(max((row["step"] for row in rows), default=0))
    base = str(config.get("model", "unknown"))
    repository, _, commit = base.partition("@")
    yield from ("---", "library_name: transformers", "tags:", "- ownloop")
    if commit:
        yield f"base_model: {repository}"
    yield from ("---", "", f"# {run.name}", "")
    yield f"`{base}`, trained with ownloop for {last} step{'s' * (last != 1)}."
    if (run / RECIPE_FILE).is_file():
        yield from ("", "```bash", command_of(run), "```")
    yield from ("", "## Data", "", f"{data}:", "", "```json", json.dumps(_data(config), indent=2), "```")
    yield from _metrics(rows)
    yield from ("", "## Configuration", "", "```json", json.dumps(config, indent=2), "```", "")


def _data(config: Mapping[str, object]) -> dict[str, object]:
    """The fields that say what was trained on."""
    names = ("env", "data", "num_eval", "seed")
    return {name: config[name] for name in names if name in config}


def _metrics(rows: Sequence[Mapping[str, float]]) -> Iterator[str]:
    evaluations = [row for row in rows if any(name.startswith("eval_") for name in row)]
    names = [name for name in (evaluations[-1] if evaluations else {}) if f"{name}_low" in evaluations[-1]]
    if names:
        shown, last = evaluations[:1] * (len(evaluations) > 1) + evaluations[-1:], evaluations[-1]
        steps = " | ".join(f"after step {row['step']:.0f}" for row in shown)
        yield from ("", "## Held-out", "", f"| | {steps} | 95 % interval |", "|---|" + "---|" * (len(shown) + 1))
        for name in names:
            values = " | ".join(f"{row.get(name, math.nan):.3f}" for row in shown)
            interval = f"{last[f'{name}_low']:.3f} to {last[f'{name}_high']:.3f}"
            yield f"| {name.removeprefix('eval_')} | {values} | {interval} |"
    steps = [row for row in rows if "seconds_step" in row]
    shown = [name for name in _FROM_TRAINING if steps and name in steps[-1]]
    if shown:
        yield from (
            "",
            "## In training",
            "",
            f"| | step {steps[0]['step']:.0f} | step {steps[-1]['step']:.0f} |",
            "|---|---|---|",
        )
        for name in shown:
            yield f"| {name} | {steps[0].get(name, math.nan):.4g} | {steps[-1][name]:.4g} |"
