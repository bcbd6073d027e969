"""`ownloop serve`, `key` and `export-tinker`: a server for scripts that use the official `tinker` SDK, and its users.

These commands are entry points of the group `ownloop.commands` in pyproject.toml.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from controller.commands.command import TakesFields, gathered
from controller.commands.export_run import logs_of_export
from controller.commands.output import CapturedOutput
from controller.commands.processes import finish
from controller.commands.recipes import override
from rl.system.plugins import how_to_install

if TYPE_CHECKING:
    from ownloop_server.config import ServeConfig


@dataclass(frozen=True, kw_only=True)
class Serve(TakesFields):
    """Serves models to scripts that use the tinker SDK."""

    def run(self) -> int:
        """Serves until a signal ends it. Returns 1 if the processes failed."""
        _check_installed("ownloop serve")
        from controller.runs.models import resolve_model
        from ownloop_server.config import model_options
        from ownloop_server.keys import Keys, needs_keys

        with CapturedOutput() as output:
            config = configuration(self.fields)  # before processes start: a mistake in an option costs no waiting
            needs_keys(config, Keys(config.folder))
            models = {name: resolve_model(name, output.say) for name in config.model}
            model_options(config, models)  # refuses what is unclear before processes start
            (config.folder / "logs").mkdir(parents=True, exist_ok=True)
            output.move_to(config.folder / "logs" / "server.log")
            from ownloop_server.serving import serve

            finish(serve(config, models, lambda text: print(text, file=output.terminal)), output)
        return 0


def configuration(overrides: Sequence[str]) -> "ServeConfig":
    """What to serve, by these options. Raises ValueError without `--model`, and as `override` does."""
    from controller.processes.place import gpus_here
    from generator.config import GeneratorConfig
    from ownloop_server.config import ServeConfig
    from rl.system.hardware import cpu_dtype
    from trainer.config import TrainerConfig

    dtype = "bfloat16" if gpus_here() else cpu_dtype()
    default = ServeConfig(
        trainer=TrainerConfig(compute_dtype=dtype), generator=GeneratorConfig(dtype=dtype, max_num_seqs=128)
    )
    config = override(default, gathered(overrides, "--model"), "ownloop serve", Serve.__doc__ or "")
    if not config.model:
        raise ValueError("--model is missing: a directory, a name of `ownloop model`, or ORG/NAME on the hub")
    return config


@dataclass(frozen=True, kw_only=True)
class ExportTinker:
    """Writes a checkpoint that a client of `ownloop serve` saved as a Hugging Face directory."""

    path: Annotated[str, Positional, arg(metavar="tinker://RUN/weights/NAME")]
    """The checkpoint; `ownloop export tinker://...` does the same."""
    folder: Path = Path("gateway")
    """The --folder of the server."""
    adapter: bool = False
    """Write only the adapter, for peft."""
    to: Annotated[Path | None, arg(metavar="DIR")] = None
    """A new folder, by default within FOLDER/exports."""

    def run(self) -> int:
        """Prints the directory on standard output."""
        _check_installed("a tinker:// path")
        from ownloop_server.archive import export_saved, find_saved

        saved = find_saved(self.folder, self.path)
        directory = self.to or self.folder / "exports" / self.path.removeprefix("tinker://").replace(":", "-")
        with CapturedOutput() as output:
            logs = logs_of_export(self.folder, output)
            finish(export_saved(saved, directory, logs, adapter_only=self.adapter), output)
            print(directory, file=output.terminal)
        return 0


def _check_installed(what: str) -> None:
    """Raises ValueError, saying how to install them, if packages of the server are missing."""
    # `find_spec` imports nothing, so the check is quick
    if not all(importlib.util.find_spec(package) for package in ("tinker", "sqlalchemy", "zstandard")):
        raise ValueError(f"{what} needs packages that are not installed: {how_to_install('ownloop-server')}")


@dataclass(frozen=True, kw_only=True)
class Key:
    """Makes and revokes the keys of `ownloop serve`."""

    action: Annotated[Literal["add", "list", "revoke"], Positional]
    """Prints a new key, shows who has one, or takes one back; a running server notices at once."""
    name: Annotated[str | None, Positional, arg(metavar="NAME")] = None
    """The user, for add and revoke."""
    folder: Path = Path("gateway")
    """The --folder of the server."""
    operator: bool = False
    """add: a user who sees and manages everyone's runs."""

    def __post_init__(self) -> None:
        """Raises ValueError if there is no user to give a key, or to take it from."""
        if self.action != "list" and self.name is None:
            raise ValueError(f"ownloop key {self.action} needs the user's NAME")

    def run(self) -> int:
        """Changes or prints the keys."""
        from ownloop_server.keys import Keys

        keys = Keys(self.folder)
        if self.action == "list":
            for name, about in keys.list().items():
                print(f"{name}  {about}")
        elif self.action == "add":
            print(keys.add(str(self.name), operator=self.operator))  # shown once: the file keeps a digest
        else:
            keys.revoke(str(self.name))
        return 0
