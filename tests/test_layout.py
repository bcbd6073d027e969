"""Ratchets on the shape of the repository: which package may import which, and pages that stay short."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("rl", "trainer", "generator", "controller", "configs")
PLUGINS = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
FORBIDDEN = {
    "rl": {"monarch", "vllm", "torchtitan", "torchstore", "trainer", "generator", "controller", "configs"},
    "trainer": {"generator", "controller", "configs", "vllm"},
    "generator": {"trainer", "controller", "configs", "torchtitan"},
    "controller": {"configs"},
    "configs": set[str](),
    "benchmarks": {"tests"},
}
ROOMS = (
    *("rl/system", "rl", "rl/weights", "trainer", "generator"),
    *("controller/processes", "controller/handles", "controller/launching", "controller/runs"),
    *("controller/loops", "controller/commands", "configs"),
)
"""From the bottom to the top. A room imports from those below it."""
MAX_LOOP_FILE_LINES = 90
MAX_FUNCTION_LINES = 50
MAX_README_LINES = 120


def sources(*folders: str) -> list[Path]:
    """Python files below these folders, as paths relative to the root."""
    return sorted(path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py"))


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file of the repository."""
    return ast.parse((ROOT / path).read_text())


def imported_modules(tree: ast.AST) -> set[str]:
    """The modules that a module imports anywhere, functions included."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a module comes from"
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            first = node.args[0]
            names |= {str(first.value)} if isinstance(first, ast.Constant) else set()
    return names


def imported_packages(tree: ast.AST) -> set[str]:
    """The top-level packages among them."""
    return {name.partition(".")[0] for name in imported_modules(tree)}


def project(folder: str) -> dict[str, object]:
    """The table `project` of a folder's pyproject.toml."""
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]


def room_of(name: str) -> str | None:
    """The room of a module, the most exact one; None for what is in none."""
    path = name.replace(".", "/")
    return max((room for room in ROOMS if path.startswith(f"{room}/")), key=len, default=None)


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_one_way(package: str) -> None:
    for path in sources(package):
        wrong = imported_packages(parsed(path)) & FORBIDDEN[package]
        assert not wrong, f"{path} imports {', '.join(sorted(wrong))}"


def test_no_room_imports_from_one_above() -> None:
    for path in sources(*PACKAGES):
        ours = room_of(str(path))
        for name in imported_modules(parsed(path)) if ours else ():
            theirs = room_of(name)
            assert not (ours and theirs) or ROOMS.index(theirs) <= ROOMS.index(ours), f"{path} imports {name}"


def test_the_core_imports_no_plugin() -> None:
    for path in sources(*PACKAGES):
        found = {name for name in imported_packages(parsed(path)) if name.startswith("ownloop_")}
        assert not found, f"{path} imports {', '.join(sorted(found))}"


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_imports_only_plugins_that_it_requires(plugin: str) -> None:
    required = re.findall(r"ownloop-(\w+)", str(project(f"plugins/{plugin}")["dependencies"]))
    allowed = {f"ownloop_{name}" for name in (plugin, *required)}
    for path in sources(f"plugins/{plugin}/ownloop_{plugin}", f"plugins/{plugin}/configs"):
        found = {name for name in imported_packages(parsed(path)) if name.startswith("ownloop_")}
        assert found <= allowed, f"{path} imports {', '.join(sorted(found - allowed))}"


def test_import_check_sees_every_form_of_import() -> None:
    code = "import vllm.engine\ndef f():\n    from torchtitan.models import x\nimportlib.import_module('monarch.actor')"
    assert imported_packages(ast.parse(code)) == {"vllm", "torchtitan", "monarch"}


def test_no_module_is_named_after_a_dependency() -> None:
    # A module `vllm.py` beside another would be imported in its place whenever a file is run by its path.
    ours = {*PACKAGES, "tests", "benchmarks", *(f"ownloop_{name}" for name in PLUGINS)}
    taken = set(packages_distributions()) - ours
    for path in sources(*PACKAGES, "benchmarks"):
        for name in (path.stem, *path.parent.parts[1:]):
            assert name not in taken, f"{path}: {name} is an installed package"


def test_top_level_packages_shadow_no_standard_module() -> None:
    assert not set(PACKAGES) & sys.stdlib_module_names


@pytest.mark.parametrize("folder", [".", *(f"plugins/{name}" for name in PLUGINS)])
def test_a_wheel_holds_every_package(folder: str) -> None:
    wheel = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    name = Path(folder).name
    own = set(PACKAGES) if folder == "." else {f"ownloop_{name}"}
    configs = {"configs"} if (ROOT / folder / "configs").is_dir() else set[str]()
    assert set(wheel["packages"]) == own | configs


def test_a_loop_is_one_page() -> None:
    folders = ("controller", *(f"plugins/{name}/ownloop_{name}" for name in PLUGINS))
    loops = [path for path in sources(*folders) if "\nasync def train(" in (ROOT / path).read_text()]
    assert {path.stem for path in loops} >= {"grpo", "grpo_async", "dapo", "ppo", "accumulate", "sft", "dpo"}
    assert {str(path) for path in loops if len((ROOT / path).read_text().splitlines()) > MAX_LOOP_FILE_LINES} == set()


def test_functions_stay_readable() -> None:
    long: dict[str, int] = {}
    for path in sources(*PACKAGES, "tests", "benchmarks", "plugins"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    long[f"{path}:{node.name}"] = num_lines
    assert not long


def test_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_no_file_names_a_home_directory_or_an_index() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    pattern = re.compile(r"(?<![\w.])/(home|root|Users)/\w|(--(extra-)?index-url|find-links)[ =]+[a-z]+:/")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in tracked.splitlines():
        if name.endswith((".py", ".md", ".toml", ".lock", ".sh", ".yml", ".yaml", "Makefile", ".ci/run")):
            found = pattern.search((ROOT / name).read_text())
            assert not found, f"{name}: {found.group()}"
