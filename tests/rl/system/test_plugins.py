"""Plug-ins: a broken one hurts only who asks for it, a missing one is named, and the table of ours is true."""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.commands.command_line import parse_command
from controller.commands.recipes import find_recipe
from controller.runs.folder import RunFolder
from controller.runs.observers import Observers, check_observers
from rl.advantages import all_advantages
from rl.checks import named_function
from rl.losses import all_losses, get_loss
from rl.system import plugins
from rl.system.hf_config import find_family, proven_architectures
from rl.system.plugins import KINDS, OURS, find, load_all, why_absent
from tests.made_up_plugin import write_plugin
from trainer.engine_table import all_engines, find_engine

ROOT = Path(__file__).parents[3]
FOLDERS = {path.parent.name: path.parent for path in ROOT.glob("plugins/*/pyproject.toml")}
BROKEN = "import a_module_that_nobody_has\n"
CAUSE = r"ownloop-shelf 1\.0 is broken: .*'part' of ownloop\.{} \(shelf_part:PART\).* No module named 'a_module_that_"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No test sees what another one has loaded."""
    plugins.clear()
    yield
    plugins.clear()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core without plug-ins."""
    monkeypatch.setattr(plugins, "entry_points", lambda **_: ())
    monkeypatch.setattr(plugins, "distributions", lambda **_: ())


def break_plugin(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str = BROKEN) -> str:
    """A plug-in with the name of one of ours, whose part cannot be imported. Returns what says so."""
    write_plugin(tmp_path / "site", {f"{kind}.part": "shelf_part:PART"}, name="ownloop-shelf", shelf_part=source)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "shelf_part", raising=False)
    return CAUSE.format(kind)


ASKED: dict[str, Any] = {
    "commands": lambda: parse_command(["part"]),
    "engines": lambda: find_engine("part"),
    "observers": lambda: check_observers(["part"]),
    "generators": lambda: find("generators", "part", object),
    "hosts": lambda: find("hosts", "part", object),
    "transports": lambda: find("transports", "part", object),
    "families": lambda: find("families", "part", object),
    "algorithms": lambda: get_loss("sapo"),
}
OTHERS: dict[str, Any] = {
    "commands": lambda: parse_command(["runs"]),
    "engines": lambda: find_engine("fsdp2"),
    "families": lambda: find_family({"architectures": ["LlamaForCausalLM"]}),
    "algorithms": lambda: get_loss("ppo"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:the plug-in")
def test_a_broken_plugin_hurts_only_who_asks_for_it(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = break_plugin(kind, tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=broken):
        ASKED[kind]()
    OTHERS.get(kind, lambda: None)()


@pytest.mark.parametrize(
    ("kind", "ask"),
    [
        ("engines", all_engines),
        ("families", proven_architectures),
        ("algorithms", all_losses),
        ("algorithms", all_advantages),
        ("observers", lambda: load_all("observers", object)),
    ],
)
def test_who_lists_all_parts_is_warned_once(
    kind: str, ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UserWarning, match=break_plugin(kind, tmp_path, monkeypatch)) as warned:
        assert [ask(), ask()]
    assert len(warned) == 1


def test_a_part_of_another_type_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_plugin("observers", tmp_path, monkeypatch, "PART = RunFolder = 3\n")
    with pytest.raises(ValueError, match=r"'part' of ownloop\.observers .* is 3; .*Observer"):
        check_observers(["part"])


RAISING = """
from controller.runs.observers import Observer


class PART(Observer):
    def __init__(self, folder):
        super().__init__(folder)
        self.seen = folder.path.parent / "seen"
        {begin}

    def log_metrics(self, metrics):
        self.seen.write_text(str(metrics["step"]))
        if metrics["step"] == 2:
            raise ConnectionError("no answer")
"""


@pytest.mark.parametrize("begin", ["pass", "raise KeyError('place')"])
def test_an_observer_that_raises_is_left_out(begin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_plugin("observers", tmp_path, monkeypatch, RAISING.format(begin=begin))
    folder, warnings = RunFolder(tmp_path / "run", {}), list[str]()
    observers = Observers([], folder, warnings.append)
    for step in (1.0, 2.0, 3.0):
        observers.log_metrics({"step": step})
    observers.close()
    assert len(folder.metrics()) == 3
    (warning,) = warnings
    assert warning.startswith("part is left out")
    assert ("KeyError" in warning) == (begin != "pass")
    assert begin != "pass" or (tmp_path / "seen").read_text() == "2.0"
    if begin != "pass":
        with pytest.raises(ValueError, match="log names 'part': KeyError"):
            Observers(["part"], folder, warnings.append)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("ask", "plugin"),
    [
        (lambda: parse_command(["serve"]), "server"),
        (lambda: find_engine("megatron"), "megatron"),
        (lambda: get_loss("sapo"), "shelf"),
        (lambda: check_observers(["wandb"]), "report"),
        (lambda: find_family({"architectures": ["GptOssForCausalLM"]}), "families"),
        (lambda: find_family({"architectures": ["Qwen3VLForConditionalGeneration"]}), "vision"),
    ],
)
def test_the_plugin_that_has_a_name_is_named(ask: Any, plugin: str) -> None:
    with pytest.raises(ValueError, match=f"`pip install ownloop-{plugin}`"):
        ask()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("kind", "name", "plugin"), [("advantages", "max_rl", "shelf"), ("hosts", "ssh", "hosts"), ("losses", "ppo", "")]
)
def test_a_name_is_looked_up_by_its_kind(kind: str, name: str, plugin: str) -> None:
    assert f"ownloop-{plugin}`" in why_absent(kind, name) if plugin else why_absent(kind, name) == ""


@pytest.mark.usefixtures("alone")
def test_a_recipe_and_a_module_of_a_missing_plugin_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.commands.recipes.recipe_files", dict[str, Path])
    with pytest.raises(ValueError, match=r"'math_grpo_smollm2_cpu'.*`pip install ownloop-tasks`"):
        find_recipe("math_grpo_smollm2_cpu")
    monkeypatch.setitem(sys.modules, "ownloop_tasks", None)
    with pytest.raises(ValueError, match=r"'ownloop_tasks\.x:reward'.*`pip install ownloop-tasks`"):
        named_function("reward", "ownloop_tasks.x:reward")
    with pytest.raises(ValueError, match=r"ownloop_tasks\.x:loss.*`pip install ownloop-tasks`"):
        get_loss("ownloop_tasks.x:loss")


def test_the_plugins_are_listed_with_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    entries = {"engines.fast": "row:ROW", "observers.seen": "seen:Seen"}
    source = "from trainer.engine_table import EngineEntry\nROW = EngineEntry('a:b', 'c:d', requires='nobody_has')\n"
    write_plugin(tmp_path, entries, row=source, seen=BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    assert parse_command(["list", "--plugins"]).run() == 0
    output = capfd.readouterr().out
    (text,) = re.findall(r"^mine 1\.0\n((?:  .*\n)+)", output, re.MULTILINE)
    engines, observers, *faults = text.splitlines()
    assert (engines.split(), observers.split()) == (["engines", "fast"], ["observers", "seen"])
    assert len(faults) == 2
    assert "'fast' needs nobody_has" in text
    assert "'seen' of ownloop.observers" in text


@pytest.mark.usefixtures("alone")
def test_a_core_alone_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    assert parse_command(["list", "--plugins"]).run() == 0
    first, second = capfd.readouterr().out.splitlines()
    assert first == "no plug-in is installed"
    assert second.startswith(f"not installed: {', '.join(OURS)}; ")


def entries_of(plugin: str) -> dict[str, dict[str, str]]:
    """Kind -> name -> value, of the entry points in a plug-in's pyproject.toml."""
    project = tomllib.loads((FOLDERS[plugin] / "pyproject.toml").read_text())["project"]
    return {group.removeprefix("ownloop."): named for group, named in project.get("entry-points", {}).items()}


@pytest.mark.parametrize("plugin", FOLDERS)
def test_the_table_of_our_plugins_is_what_they_bring(plugin: str) -> None:
    table = {kind: names.split() for kind, names in OURS[plugin].items()}
    brought = entries_of(plugin)
    assert brought.keys() <= set(KINDS)
    expected = {kind: sorted(named) for kind, named in brought.items() if kind != "algorithms"}
    if "families" in brought:
        sources = " ".join(file.read_text() for file in FOLDERS[plugin].glob("ownloop_*/*.py"))
        expected["families"] = sorted(
            {name for names in re.findall(r"architectures=\((.*?)\)", sources) for name in re.findall(r"\w+", names)}
        )
    if recipes := sorted(file.stem for file in FOLDERS[plugin].glob("configs/*.py") if file.stem != "__init__"):
        expected["recipes"] = recipes
    assert {kind: names for kind, names in table.items() if kind not in ("losses", "advantages")} == expected
    assert ("algorithms" in brought) == bool({"losses", "advantages"} & table.keys())


def test_every_row_of_the_table_is_a_plugin() -> None:
    assert OURS.keys() == FOLDERS.keys()
    assert all(re.fullmatch(r"[a-z]+", name) for name in OURS)
