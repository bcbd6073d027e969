"""`ownloop serve`, `key` and `certs`: a server for scripts that use the official `tinker` SDK, its users, and TLS.

These commands are entry points of the group `ownloop.commands` in pyproject.toml.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from controller.commands.command import TakesFields, gathered
from controller.commands.output import CapturedOutput
from controller.commands.processes import finish
from controller.commands.recipes import override
from rl.checks import how_to_install

if TYPE_CHECKING:
    from controller.server.config import ServeConfig


@dataclass(frozen=True, kw_only=True)
class Serve(TakesFields):
    """Serves models to scripts that use the tinker SDK."""

    def run(self) -> int:
        """Serves until a signal ends it. Returns 1 if the processes failed."""
        if not all(importlib.util.find_spec(package) for package in ("tinker", "sqlalchemy", "zstandard")):
            raise ValueError(f"ownloop serve needs packages that are not installed: {how_to_install('tinker')}")
        from controller.runs.models import resolve_model
        from controller.server.config import model_options
        from controller.server.keys import Keys, needs_keys

        with CapturedOutput() as output:
            config = configuration(self.fields)
            needs_keys(config, Keys(config.folder))
            models = {name: resolve_model(name, output.say) for name in config.model}
            model_options(config, models)  # refuses what is unclear before processes start
            (config.folder / "logs").mkdir(parents=True, exist_ok=True)
            output.move_to(config.folder / "logs" / "server.log")
            from controller.server.serving import serve

            finish(serve(config, models, lambda text: print(text, file=output.terminal)), output)
        return 0


def configuration(overrides: Sequence[str]) -> "ServeConfig":
    """What to serve, by these options. Raises ValueError without `--model`, and as `override` does."""
    from controller.processes.place import gpus_here
    from controller.server.config import ServeConfig
    from generator.config import GeneratorConfig
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
        from controller.server.keys import Keys

        keys = Keys(self.folder)
        if self.action == "list":
            for name, about in keys.list().items():
                print(f"{name}  {about}")
        elif self.action == "add":
            print(keys.add(str(self.name), operator=self.operator))
        else:
            keys.revoke(str(self.name))
        return 0


@dataclass(frozen=True, kw_only=True)
class Certs:
    """Makes TLS certificates for the hosts of a lab."""

    hosts: Annotated[tuple[str, ...], Positional, arg(metavar="HOST ...")]
    """A host's name as the others know it, and its other names and addresses after commas: n1,10.0.0.1."""
    to: Path = Path("certs")
    """Where the certificates go."""

    def __post_init__(self) -> None:
        """Raises ValueError if no host is named."""
        if not self.hosts:
            raise ValueError("HOST is missing: a host's name as the others know it; see ownloop certs --help")

    def run(self) -> int:
        """Makes the certificates."""
        from controller.hosts.certificates import CA_KEY, make_certificates

        for folder in make_certificates(self.to, self.hosts):
            print(f"{folder}: copy this folder to {folder.name} as ~/.config/ownloop/certs")
        print(f"{self.to / CA_KEY} lets further hosts in; keep it to yourself. Anyone who has a host's key.pem can run")
        print("any program on every host of this authority.")
        return 0
