"""Ratchets on the shape of the repository: import directions, names, sizes. They may be tightened, not loosened.

Covers: tests/house.py
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests import house
from tests.house import PACKAGES, ROOT, lines_of, sources
from tests.house import tree as parsed

FORBIDDEN = {
    "rl": {"monarch", "vllm", "torchtitan", "torchstore", "trainer", "generator", "controller", "configs"},
    "trainer": {"generator", "controller", "configs", "vllm"},
    "generator": {"trainer", "controller", "configs", "torchtitan"},
    "controller": {"configs"},
    "configs": set[str](),
    "benchmarks": {"tests"},
}
# Parts that an entry point names, and no other module of the product.
OPTIONAL_PARTS = ("trainer.engines.mcore", "trainer.engines.mfsdp")
TOP_LEVEL = {
    *PACKAGES,
    *("tests", "benchmarks", "requirements", "docs", "examples"),
    *("README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md", "LICENSE", "Makefile", "pyproject.toml"),
    *(".ci", ".github", ".gitignore", ".pre-commit-config.yaml", "Dockerfile", ".dockerignore"),
}
MAX_CONFIG_FIELDS = 20
MAX_ALL_CONFIG_FIELDS = 150
MAX_LOOP_LINES = 50
MAX_LOOP_FILE_LINES = 90
MAX_LOOP_IMPORTS = 10
MAX_FILE_LINES = 400  # more than 300 only where the file serves one idea
# The numbers of tests/house.py, as they are. They may fall.
MOST = {
    "product files": 360,
    "core files": 202,
    "core lines": 34_089,
    "files under 70 lines with one importer": 1,
    "files that a loop's page reaches": 109,
    "definitions of forward_backward": 9,
    "project imports of README's loop": 3,
    "imports of optional parts by the core": 0,
    "imports from a room above": 0,
    "test files that do not say what they cover": 0,
    "product files that no test file names": 0,
}
LEAST_COMMENTS = 5.0  # per 100 lines of code; each says why
MAX_FUNCTION_LINES = 50
MAX_TEST_NAME = 60
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# File names that several folders use, because the files play the same part in each. Any other name is used once.
SHARED_NAMES = {"_compat", "actor", "base", "config", "engine", "layout_check", "ranks", "run"}


def imported_packages(tree: ast.AST) -> set[str]:
    """Top-level names that a module imports anywhere, functions included."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a module comes from"
            names.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant):
                names.add(str(first.value).partition(".")[0])
    return names


def config_fields() -> dict[str, int]:
    """Number of fields of every dataclass whose name ends in Config."""
    counts: dict[str, int] = {}
    for path in sources(*PACKAGES):
        for node in ast.walk(house.tree(path)):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
                if any("Protocol" in ast.unparse(base) for base in node.bases):
                    continue
                fields = [line for line in node.body if isinstance(line, ast.AnnAssign)]
                counts[f"{path}:{node.name}"] = sum("ClassVar" not in ast.unparse(line.annotation) for line in fields)
    return counts


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_one_way(package: str) -> None:
    for path in sources(package):
        wrong = imported_packages(house.tree(path)) & FORBIDDEN[package]
        assert not wrong, f"{path} imports {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("part", OPTIONAL_PARTS)
def test_only_an_entry_point_names_an_optional_part(part: str) -> None:
    name = re.compile(rf"(?<![\w.]){re.escape(part)}(?!\w)")
    folder = Path(part.replace(".", "/"))
    named = [str(path) for path in sources(*PACKAGES) if name.search((ROOT / path).read_text())]
    assert [path for path in named if not Path(path).is_relative_to(folder)] == []
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert f"{part}:ENTRY" in [target for group in points.values() for target in group.values()]


def test_the_page_of_the_architecture_has_every_entry_point() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, parts in points.items():
        (row,) = (line for line in page.splitlines() if line.startswith("|") and f"`{group}`" in line.split("|")[1])
        assert [name for name in parts if f"`{name}`" not in row] == [], group


def test_tests_import_no_benchmark() -> None:
    # Tests and benchmarks change for different reasons. What both need is in rl/tiny_models.py, the package
    # that it tests, or one of two rigs of benchmarks.
    rigs = "from benchmarks.simulated_hosts import", "from benchmarks.locked_environment import"
    for path in sources("tests"):
        if path.parts[1] != "benchmarks":
            text = (ROOT / path).read_text().replace(rigs[0], "from rl import").replace(rigs[1], "from rl import")
            assert "benchmarks" not in imported_packages(ast.parse(text)), f"{path} imports benchmarks"


def test_import_check_sees_every_form_of_import() -> None:
    code = "import vllm.engine\ndef f():\n    from torchtitan.models import x\nimportlib.import_module('monarch.actor')"
    assert imported_packages(ast.parse(code)) == {"vllm", "torchtitan", "monarch"}


def test_no_module_is_named_after_a_dependency() -> None:
    # A module `vllm.py` beside another would be imported in its place whenever a file is run by its path.
    taken = set(packages_distributions()) - {*PACKAGES, "tests", "benchmarks"}
    for path in sources(*PACKAGES, "benchmarks"):
        for name in (path.stem, *path.parent.parts[1:]):
            assert name not in taken, f"{path}: {name} is an installed package"


def test_files_that_play_different_parts_have_different_names() -> None:
    names = Counter(path.stem for path in sources(*PACKAGES) if path.stem != "__init__")
    assert {name for name, count in names.items() if count > 1} <= SHARED_NAMES


def test_top_level_packages_shadow_no_standard_module() -> None:
    assert not set(PACKAGES) & sys.stdlib_module_names


def test_top_level_holds_what_the_design_names() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = {line.partition("/")[0] for line in tracked.splitlines()}
    assert found <= TOP_LEVEL, f"unexpected at the top level: {sorted(found - TOP_LEVEL)}"


def test_wheel_holds_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == set(PACKAGES)


def test_config_fields_stay_few() -> None:
    counts = config_fields()
    assert max(counts.values()) <= MAX_CONFIG_FIELDS, counts
    assert sum(counts.values()) <= MAX_ALL_CONFIG_FIELDS, counts


def loops() -> list[str]:
    """Every module of the controller that defines a loop."""
    return [str(path) for path in sources("controller") if "\nasync def train(" in (ROOT / path).read_text()]


def test_loops_are_found() -> None:
    names = ("grpo", "grpo_async", "sft", "dpo")
    assert {f"controller/loops/{name}.py" for name in names} <= set(loops())


@pytest.mark.parametrize("loop", loops())
def test_a_loop_is_one_page(loop: str) -> None:
    lines = (ROOT / loop).read_text().splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith("async def train("))
    assert len(lines) <= MAX_LOOP_FILE_LINES
    assert len(lines) - start <= MAX_LOOP_LINES


@pytest.mark.parametrize("loop", loops())
def test_a_loop_imports_few_modules(loop: str) -> None:
    statements = ast.parse((ROOT / loop).read_text()).body
    modules = [node for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]
    assert len(modules) <= MAX_LOOP_IMPORTS


def test_files_stay_readable() -> None:
    long = {str(p): n for p in sources(*PACKAGES, "tests", "benchmarks") if (n := lines_of(p)) > MAX_FILE_LINES}
    assert not long


def test_the_house_grows_no_worse() -> None:
    found = house.numbers()
    assert {name: number for name, number in found.items() if number > MOST.get(name, number)} == {}, house.details()
    assert round(house.comments_per_100_lines(), 1) >= LEAST_COMMENTS


def test_what_tests_cover_exists() -> None:
    for path, names in house.covered().items():
        assert [name for name in names if not (ROOT / name).exists()] == [], path


def test_functions_stay_readable() -> None:
    long: dict[str, int] = {}
    for path in sources(*PACKAGES, "tests", "benchmarks"):
        for node in ast.walk(house.tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    long[f"{path}:{node.name}"] = num_lines
    assert not long


def test_names_of_tests_stay_short() -> None:
    names = {node.name for path in sources("tests") for node in ast.walk(parsed(path)) if isinstance(node, FUNCTIONS)}
    assert [name for name in sorted(names) if name.startswith("test_") and len(name) > MAX_TEST_NAME] == []


def test_readme_stays_short() -> None:
    assert lines_of(Path("README.md")) <= 150


def test_every_module_says_what_it_does() -> None:
    for path in sources(*PACKAGES, "benchmarks", "examples"):
        text = (ROOT / path).read_text()
        assert not text or ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


def test_prose_is_plain() -> None:
    """Docstrings, comments, messages and pages say what a thing does. Only in quotes `nobody` is a name, of a user."""
    forbidden = re.compile(
        r"\b(whoever|whatever|those (that|of)|what it|is told|tells|for ever|dear|go(es)? on)\b|(?<![`\"])\bnobody\b",
        re.IGNORECASE,
    )
    pages = [Path("README.md"), Path("CONTRIBUTING.md"), *(p.relative_to(ROOT) for p in (ROOT / "docs").glob("*.md"))]
    for path in [*sources(*PACKAGES), *pages]:
        for number, line in enumerate((ROOT / path).read_text().splitlines(), start=1):
            assert not (found := forbidden.search(line)), f"{path}:{number}: {found.group()!r} in: {line.strip()}"


def test_no_file_names_a_home_directory_or_an_index() -> None:
    pattern = re.compile(r"(?<![\w.])/(home|root|Users)/\w|(--(extra-)?index-url|find-links)[ =]+[a-z]+:/")
    files = [
        *sources(*PACKAGES, "tests", "benchmarks", "examples"),
        *(
            p.relative_to(ROOT)
            for folder in ("requirements", "docs", ".github/workflows")
            for p in (ROOT / folder).iterdir()
        ),
        *(p.relative_to(ROOT) for p in ROOT.glob("*.md")),
    ]
    for path in [*files, Path("Makefile"), Path("pyproject.toml"), Path(".ci/run"), Path(".pre-commit-config.yaml")]:
        found = pattern.search((ROOT / path).read_text())
        assert not found, f"{path}: {found.group()}"
