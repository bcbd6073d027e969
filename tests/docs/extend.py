"""Writes docs/extend.md from docstrings and from what plug-ins import: `python -m tests.docs.extend`."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "extend.md"
CORE = ("rl", "trainer", "generator", "controller")
KINDS = {
    "commands": {
        "controller.commands.command_line:Command": "`ownloop NAME` loads it; `ownloop --help` reads its source"
    },
    "engines": {
        "trainer.engine_table:EngineEntry": "`TrainerConfig` reads it; each rank of a trainer loads the engine"
    },
    "families": {
        "rl.system.hf_config:ModelFamily": "each process that reads a model's `config.json` looks through all"
    },
    "algorithms": {"rl.algorithms:Algorithms": "the controller looks for a recipe's `loss` and `advantage` in all"},
    "observers": {
        "controller.runs.observers:Observer": "each run makes those that watch every run, and those in `log`"
    },
    "generators": {
        "generator.openai_calls:Serving": "a generator's process loads it at the first such call",
        "generator.engine_part:EnginePart": "the controller and each rank of a generator make those that its "
        "`GeneratorConfig` names",
    },
    "hosts": {"controller.launching.hosts:Hosts": "`--hosts NAME ...` calls `from_words` of the class"},
    "transports": {"rl.weights.version:Transport": "trainer and generator make one where weights travel by it"},
}
"""Kind of entry points -> the types that it names, and who uses them when."""
_HEAD = '''# Plug-ins: the interface of the core

A plug-in is an installed distribution with entry points of the groups `ownloop.KIND`. The name of an entry point is
what users write; its value names a part in a module:

```text
[project.entry-points."ownloop.observers"]
alarm = "my_package.parts:Alarm"
```

A command, a loss with an advantage, an observer, and the rows of an engine and of a family of models, whose own modules
are imported where they are used:

```python
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from controller.runs.observers import Observer
from rl.advantages import group_mean
from rl.algorithms import Algorithms
from rl.losses import get_loss
from rl.system.hf_config import ModelFamily
from trainer.engine_table import EngineEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """How many rows a run's metrics have."""

    run_folder: Path

    def run(self) -> int:
        print(len((self.run_folder / "metrics.jsonl").read_text().splitlines()))
        return 0


class Alarm(Observer):
    """Says when the gradient of a step is long."""

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        if metrics.get("grad_norm", 0.0) > 100:
            print(f"step {metrics['step']:.0f}: gradient norm {metrics['grad_norm']:.0f}")


ALGORITHMS = Algorithms(
    losses={"my_ppo": get_loss("ppo")}, advantages={"squashed": lambda rewards: group_mean(rewards).clip(-1, 1)}
)
ENGINE = EngineEntry(engine="my_package.engine:MyEngine", layout_check="my_package.checks:check_layout")
FAMILY = ModelFamily(architectures=("MyForCausalLM",), engines=("fsdp2",), check="my_package.checks:check_model")
```

For hosts and transports see [`plugins/hosts`](../plugins/hosts), for a generator's
requests [`plugins/agents`](../plugins/agents).

`ownloop list --plugins` shows what is installed, and what is missing or broken. A broken part raises `ValueError` for
who names it; where every run looks at all parts of a kind, it is left out with a warning. The plug-ins of this
repository are in [`plugins/`](../plugins); an engine is shown [step by step](add_an_engine.md), and so is
[a loss](add_a_loss.md). `python -m tests.docs.extend` writes this page from docstrings, and a test compares the two.
'''
_MODULES = """## Modules that plug-ins import

What plug-ins use of the core: a change there is a change for them. Other modules are internal.

| module | what it is |
|---|---|
"""


def source_of(module: str) -> Path:
    """The file of a module of this repository."""
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imported_modules() -> list[str]:
    """The modules of the core that the packages and recipes of plug-ins import, sorted."""
    found: set[str] = set()
    for file in (*ROOT.glob("plugins/*/ownloop_*/**/*.py"), *ROOT.glob("plugins/*/configs/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {name if source_of(name).is_file() else node.module for name in names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
    return sorted(name for name in found if name.partition(".")[0] in CORE)


def page() -> str:
    """The whole page."""
    rows = "".join(f"| `{name}` | {_first_line(name)} |\n" for name in imported_modules())
    return "\n".join((_HEAD, *_kinds(), _MODULES + rows))


def _kinds() -> Iterator[str]:
    for kind, types in KINDS.items():
        yield f"## ownloop.{kind}\n"
        for target, used in types.items():
            text = ast.get_docstring(_class(target)) or ""
            members = "".join(f"* `{name}`: {said}\n" for name, said in _members(target))
            listed = f"\n{members}" if members else ""
            yield f"`{target.replace(':', '.')}`: {used}.\n\n{text}\n{listed}"


def _class(target: str) -> ast.ClassDef:
    module, _, name = target.partition(":")
    tree = ast.parse(source_of(module).read_text(encoding="utf-8"))
    (node,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)
    return node


def _members(target: str) -> Iterator[tuple[str, str]]:
    """Each public field and method of a class with the first line of what is said of it."""
    node = _class(target)
    for each, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and not each.name.startswith("_"):
            yield each.name, " ".join((ast.get_docstring(each) or "").partition("\n\n")[0].split())
        target_ = each.target if isinstance(each, ast.AnnAssign) else None
        if isinstance(each, ast.Assign):
            target_ = each.targets[0]
        said = following.value if isinstance(following, ast.Expr) else None
        if isinstance(target_, ast.Name) and isinstance(said, ast.Constant):
            yield target_.id, " ".join(str(said.value).split())


def _first_line(module: str) -> str:
    docstring = ast.get_docstring(ast.parse(source_of(module).read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
