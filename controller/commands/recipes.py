"""Recipes by name: `ownloop list`, finding them without importing them, and overriding their fields by options.

A recipe is a module in `configs/`, or any Python file, given by its path. The first line of its docstring says which
hardware it is for. Its function `recipe()` returns the configuration of a loop: an instance of the loop's class, or of
a class that the recipe itself derives from it.
"""

import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from controller.commands.command import from_words, gathered
from controller.commands.command_line import HELP, Command
from controller.runs.loop_config import LoopConfig, options_of
from controller.runs.observers import Observer
from rl.algorithms import Algorithms
from rl.checks import check_known, errors_of_user_code
from rl.configuration import is_rare
from rl.system.hf_config import ModelFamily
from rl.system.plugins import KINDS, OURS, Plugin, how_to_install, installed, is_installed, load
from rl.system.secret_fields import with_hidden_secrets
from trainer.engine_table import EngineEntry

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo


@dataclass(frozen=True, kw_only=True)
class List:
    """Lists the recipes and the hardware that each is for; or losses, advantages or plug-ins."""

    plugins: bool = False
    """List the installed plug-ins, what each brings, and what is missing or broken."""
    losses: bool = False
    """List the losses that `loss` may name: formula, the inputs that each needs, its options, its paper."""
    advantages: bool = False
    """List the functions that `advantage` may name."""

    def run(self) -> int:
        """Prints a line per recipe, without importing any of them; or what is asked for instead."""
        asked = {"plugins": plugin_lines, "losses": loss_lines, "advantages": advantage_lines}
        if lines := [line for name, list_them in asked.items() if getattr(self, name) for line in list_them()]:
            print(*lines, sep="\n")
            return 0
        files = recipe_files()
        width = max(map(len, files), default=0)
        for name, file in files.items():
            print(f"{name:<{width}}  {describe(file)}")
        return 0


def plugin_lines() -> Iterator[str]:
    """Each installed plug-in, what it brings and what is wrong with it; then those of ours that are not installed."""
    plugins = installed()
    for plugin in plugins:
        yield f"{plugin.name} {plugin.version}"
        brings = {kind: [e.name for e in plugin.entries if e.group == f"ownloop.{kind}"] for kind in KINDS}
        brings["recipes"] = OURS.get(plugin.name.removeprefix("ownloop-"), {}).get("recipes", "").split()
        if not any(brings.values()):
            brings["package"] = [plugin.name.replace("-", "_")]
        yield from (f"  {kind:<11} {', '.join(names)}" for kind, names in brings.items() if names)
        yield from (f"  {fault}" for entry in plugin.entries if (fault := _fault(entry)))
    if not plugins:
        yield "no plug-in is installed"
    if missing := [name for name in OURS if not is_installed(f"ownloop-{name}")]:
        yield f"not installed: {', '.join(missing)}; {how_to_install('ownloop-NAME')}"


def _fault(entry: EntryPoint) -> str:
    """What keeps a part from working, in a sentence; empty for nothing."""
    kind = entry.group.removeprefix("ownloop.")
    wanted = {"algorithms": Algorithms, "commands": type[Command], "engines": EngineEntry, "families": ModelFamily,
              "observers": type[Observer]}.get(kind)  # fmt: skip
    if wanted is None:  # to load a part of a generator would take seconds
        return ""
    try:
        loaded = load(entry, wanted)
    except ValueError as error:
        return str(error)
    package = ""
    if isinstance(loaded, EngineEntry) or (isinstance(loaded, type) and issubclass(loaded, Observer)):
        package = loaded.requires
    if not package or importlib.util.find_spec(package) is not None:
        return ""
    return f"{entry.name!r} needs {package}, which is not installed: {how_to_install(package)}"


def loss_lines() -> Iterator[str]:
    """Name, docstring, inputs and options of every loss, then the losses of pairs, as lines of Markdown."""
    from rl.algorithms.preferences import PAIR_LOSSES
    from rl.losses import all_losses, option_defaults

    alike = {
        "tokens": "A mean over tokens",
        "sequences": "A mean over sequences, each of the mean over its tokens",
        "constant": "A sum over tokens / (sequences x `max_tokens`)",
    }
    for name, loss in sorted(all_losses().items()):
        needs = ", ".join(f"`{each}`" for each in ("target_tokens", *loss.required_inputs))
        options = ", ".join(f"`{key} = {value!r}`" for key, value in option_defaults(loss.function).items())
        yield from (f"## {name}", "", inspect.getdoc(loss.function) or "", "")
        yield f"{alike[loss.normaliser]} in recipes. Needs {needs}."
        yield from (f"Options: {options}." if options else "It has no options of its own.", "")
    yield from ("# Losses of pairs", "", "`--loss NAME` in recipes of the loop `dpo`.", "")
    for name, function in sorted(PAIR_LOSSES.items()):
        yield from (f"## {name}", "", inspect.getdoc(function) or "", "")


def advantage_lines() -> Iterator[str]:
    """Name and docstring of every advantage function, as lines of Markdown."""
    from rl.advantages import all_advantages

    for name, function in sorted(all_advantages().items()):
        yield from (f"## {name}", "", inspect.getdoc(function) or "", "")


def recipe_files() -> dict[str, Path]:
    """Name -> file of every recipe of the core and of installed plug-ins, sorted by name.

    A plug-in has its recipes in a folder `configs` beside its package. No `configs` is imported: a package of another
    project may have that name.
    """
    packages = {Path(__file__).parents[1], *(path for plugin in installed() for path in _packages_of(plugin))}
    folders = {path.with_name("configs") for path in packages}
    files = (file for folder in folders for file in folder.glob("*.py") if not file.name.startswith("_"))
    return {file.stem: file for file in sorted(files)}


def _packages_of(plugin: Plugin) -> Iterator[Path]:
    """The folders of the packages that a plug-in's entry points are in, and of the one that is named as it is."""
    for name in {plugin.name.replace("-", "_"), *(entry.module.partition(".")[0] for entry in plugin.entries)}:
        spec = importlib.util.find_spec(name)
        yield from map(Path, (spec.submodule_search_locations or ()) if spec else ())


def find_recipe(name: str) -> Path:
    """The file of a recipe given by name or path. Raises ValueError, naming the nearest name, if there is none."""
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise ValueError(f"there is no recipe file {name}")
        return Path(name)
    if "/" in name:
        raise ValueError(f"{name} is neither a recipe's file, which ends in .py, nor a run that this command reads")
    files = recipe_files()
    check_known("recipe", name, files, "recipes")
    return files[name]


def configuration(recipe: str, options: Sequence[str], command: str) -> Any:
    """The configuration of a recipe with the fields that `options` name replaced. Raises as `override` does."""
    file = find_recipe(recipe)
    return override(load_recipe(file), options, f"ownloop {command} {recipe}", describe(file))


def runnable_configuration(recipe: str, options: Sequence[str], command: str) -> Any:
    """As `configuration`. Raises ValueError for a recipe for GPUs where none is visible, too."""
    config = configuration(recipe, options, command)
    check_hardware(find_recipe(recipe), config)
    return config


def check_hardware(file: Path, config: object) -> None:
    """Raises ValueError, naming the recipe for the CPU, for a recipe for GPUs where none is visible.

    A recipe is for GPUs if its name ends in `_gpu`. On a CPU its model and its settings would take days. GPUs of other
    hosts are counted when those are asked.
    """
    if not file.stem.endswith("_gpu") or options_of(config).hosts is not None:
        return
    from controller.processes.place import gpus_here

    if not gpus_here():
        loop = file.stem.removesuffix("_gpu").rpartition("_")[0]
        on_cpu = [name for name in recipe_files() if re.fullmatch(rf"{re.escape(loop)}_[^_]+_cpu", name)]
        instead = f"run {' or '.join(on_cpu)} instead" if on_cpu else "run a recipe whose name ends in _cpu instead"
        raise ValueError(f"recipe {file.stem} is for GPUs, and no GPU is visible here; {instead}")


def describe(file: Path) -> str:
    """The first line of a recipe's docstring, read without running the file."""
    with errors_of_user_code(f"recipe {file}"):
        docstring = ast.get_docstring(ast.parse(file.read_bytes(), str(file)))
    return docstring.splitlines()[0] if docstring else ""


def load_recipe(file: Path, source: str | None = None) -> Any:
    """Runs a recipe's file, or `source` in its place, and returns the configuration that `recipe()` returns."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses defined in the recipe look up their module by name.
    sys.modules.setdefault(file.stem, module)
    with contextlib.ExitStack() as unloaded, errors_of_user_code(f"recipe {file}"):
        unloaded.callback(_forget, module)
        if source is None:
            spec.loader.exec_module(module)
        else:
            exec(compile(source, file, "exec"), module.__dict__)
        make = getattr(module, "recipe", None)
        if not callable(make):
            raise ValueError(f"recipe {file} has no function recipe()")
        config = make()
        unloaded.pop_all()
    if not dataclasses.is_dataclass(config):
        raise ValueError(f"recipe() of {file} returned a {type(config).__name__}; a dataclass is needed")
    return config


def _forget(module: ModuleType) -> None:
    """Unloads a recipe that failed: another one of its name may follow."""
    if sys.modules.get(module.__name__) is module:
        del sys.modules[module.__name__]


def override(config: Any, options: Sequence[str], program: str, description: str = "") -> Any:
    """`config` with the fields that `options` name ("--trainer.seed", "1") replaced.

    Raises ValueError, in one line, for an unknown option (naming the nearest) and for a value that its field refuses.
    Raises CommandEndedError with the help for --help.
    """
    options, asks_help = gathered(options, "--hosts"), bool(HELP & set(options))
    if any(option.replace("_", "-").startswith("--lora-learning-rate") for option in options) and not asks_help:
        raise ValueError("--lora-learning-rate is a recipe's --learning-rate for adapters; give --learning-rate")
    config = _with_optional_parts(config, options, asks_help=asks_help)
    known, registry = all_options(config), _registry()
    if asks_help:
        config = with_hidden_secrets(config)
        _leave_out_rare_fields(registry)
    return from_words(
        type(config), options, program, options=known, default=config, description=description, registry=registry
    )


def _with_optional_parts(config: Any, options: Sequence[str], prefix: str = "--", *, asks_help: bool = False) -> Any:
    """`config` with a default in the place of None where `options` name a field of what could be there: `--lora.rank`.

    With `--help`, every field of `config` itself has a default.
    """
    hints, parts = get_type_hints(type(config)), dict[str, object]()
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name.replace('_', '-')}.", getattr(config, field.name)
        named = any(option.replace("_", "-").startswith(name) for option in options)
        if value is None and (named or asks_help):
            part: Any = next(filter(dataclasses.is_dataclass, get_args(hints[field.name])), None)
            parts |= {field.name: part()} if part else {}
            if named and field.name == "lora" and isinstance(config, LoopConfig):
                parts |= config.suited_to_an_adapter
        elif named and dataclasses.is_dataclass(value):
            parts[field.name] = _with_optional_parts(value, options, name)
    return dataclasses.replace(config, **parts) if parts else config


def all_options(config: Any) -> list[str]:
    """Every option of a configuration, also of the parts that it does not have yet."""
    return option_names(_with_optional_parts(config, (), asks_help=True))


def option_names(config: "DataclassInstance", prefix: str = "--") -> list[str]:
    """Every option of a configuration. The options of nested dataclasses have a dot: `--trainer.seed`."""
    names: list[str] = []
    for field in dataclasses.fields(config):
        name = prefix + field.name.replace("_", "-")
        value = getattr(config, field.name)
        names.append(name)
        if isinstance(value, bool):
            names.append(f"{prefix}no-{field.name.replace('_', '-')}")
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names += option_names(value, name + ".")
    return names


def _registry() -> "ConstructorRegistry":
    """tyro's rules and two more: hosts, and a field typed as a protocol has the options of the dataclass it holds."""
    from tyro.constructors import (
        ConstructorRegistry,
        PrimitiveConstructorSpec,
        PrimitiveTypeInfo,
        StructConstructorSpec,
    )

    from controller.launching.hosts import METAVAR, Hosts, parse_hosts

    registry = ConstructorRegistry()

    def protocol_rule(info: "StructTypeInfo") -> "StructConstructorSpec | None":
        kind = type(info.default)
        if not getattr(info.type, "_is_protocol", False) or not dataclasses.is_dataclass(kind):
            return None
        made = ConstructorRegistry.get_struct_spec(dataclasses.replace(info, type=kind))
        return made if isinstance(made, StructConstructorSpec) else None

    def hosts_rule(info: "PrimitiveTypeInfo") -> "PrimitiveConstructorSpec[Any] | None":
        if info.type != Hosts | None:
            return None
        return PrimitiveConstructorSpec(
            nargs="*",
            metavar=METAVAR,
            instance_from_str=parse_hosts,
            is_instance=lambda value: value is None or isinstance(value, Hosts),
            str_from_instance=lambda value: [] if value is None else [str(value)],
        )

    registry.struct_rule(protocol_rule)
    registry.primitive_rule(hosts_rule)
    return registry


def _leave_out_rare_fields(registry: "ConstructorRegistry") -> None:
    """For the help, which then has room for what many need."""
    from tyro.constructors import ConstructorRegistry, StructConstructorSpec

    without = set[object]()

    def help_rule(info: "StructTypeInfo") -> "StructConstructorSpec | None":
        if info.type in without or not dataclasses.is_dataclass(info.type):
            return None
        without.add(info.type)  # so that tyro's own rule makes it
        made = ConstructorRegistry.get_struct_spec(info)
        without.remove(info.type)
        if not isinstance(made, StructConstructorSpec):
            return None
        return dataclasses.replace(
            made, fields=tuple(each for each in made.fields if not is_rare(info.type, each.name))
        )

    registry.struct_rule(help_rule)
