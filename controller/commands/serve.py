"""`ownloop serve --model NAME [--model NAME ...]`: a server for scripts that use the official `tinker` SDK."""

import argparse
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from controller.commands.command import FAILED, Commands
from controller.commands.output import CapturedOutput
from controller.commands.processes import StopSignals, adopt_orphans, end_descendants
from controller.commands.recipes import override
from rl.checks import how_to_install

if TYPE_CHECKING:
    from controller.server.config import ServeConfig


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "serve", help="serve a model to scripts that use the tinker SDK", allow_abbrev=False, add_help=False
    )
    parser.set_defaults(command=serve)


def serve(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Serves until a signal ends it. Returns 1 if the processes failed."""
    del options
    if not all(importlib.util.find_spec(package) for package in ("tinker", "sqlalchemy", "zstandard")):
        raise ValueError(f"ownloop serve needs packages that are not installed: {how_to_install('tinker')}")
    from controller.runs.models import resolve_model
    from controller.server.config import model_options
    from controller.server.keys import Keys, needs_keys

    with CapturedOutput() as output:
        config = configuration(overrides)
        needs_keys(config, Keys(config.folder))
        models = {name: resolve_model(name, lambda text: print(text, file=output.errors)) for name in config.model}
        model_options(config, models)  # refuses what is unclear before processes start
        (config.folder / "logs").mkdir(parents=True, exist_ok=True)
        output.move_to(config.folder / "logs" / "server.log")
        from controller.server.serving import serve as run_server

        adopt_orphans()
        with StopSignals(lambda: None) as stop:
            try:
                stop.run(run_server(config, models, lambda text: print(text, file=output.terminal)))
            except ValueError:
                raise
            except Exception as error:
                print(f"error: {type(error).__name__}: {error}", file=output.errors)
                return FAILED
            except BaseException:
                if stop.received is None:
                    raise
                return 128 + stop.received
            finally:
                end_descendants(grace_s=0.5)
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
    options = _with_models_together(overrides)
    config = override(default, options, "ownloop serve", "Serves models to scripts that use the tinker SDK.")
    if not config.model:
        raise ValueError("--model is missing: a directory, a name of `ownloop model`, or ORG/NAME on the hub")
    return config


def _with_models_together(options: Sequence[str]) -> list[str]:
    """`--model A --model B` as `--model A B`: of an option that comes twice, the last one would count."""
    models: list[str] = []
    others: list[str] = []
    into = others
    for option in options:
        if option == "--model":
            into = models
        elif option.startswith("--model="):
            models.append(option.partition("=")[2])
            into = others
        elif option.startswith("--"):
            into = others
            others.append(option)
        else:
            into.append(option)
    return [*others, *(["--model", *models] if models else [])]
