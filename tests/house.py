"""The shape of the house in numbers: `python -m tests.house` prints each with its limit. `test_layout.py` holds them.

.venv/bin/python -m tests.house
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("rl", "trainer", "generator", "controller", "configs")
OPTIONAL = (
    "controller/server/",
    "controller/agents/",
    "controller/frameworks/",
    "configs/agent_",
    "controller/hosts/starting/",
    "controller/planning/",
    "controller/runs/report/",
    *(f"controller/runs/{name}" for name in ("all_words", "comparison", "mismatch")),
    *(f"controller/runs/loggers/{name}" for name in ("event_files", "trackio_run", "wandb_run")),
    *(f"controller/commands/{name}" for name in ("check_parts", "compare", "host_commands", "model_directory")),
    *("generator/cpu/image_attention", "generator/cpu/routes"),
    *(f"controller/commands/{name}" for name in ("report_run", "sweep")),
    "trainer/engines/contract/",
    "trainer/engines/mcore/",
    "trainer/engines/mfsdp/",
    *("trainer/families/", "trainer/step_profile.py"),
    *("rl/vision/", "generator/image_prompts.py", "configs/guess_"),
    *("rl/advantages/published_advantages.py", "rl/losses/published_losses.py", "rl/losses/traced_loss.py"),
    *("rl/rollouts/self_play.py", "rl/envs/even_words.py", "rl/envs/guess_number.py"),
    *("rl/weights/gpu_memory.py", "rl/weights/nccl.py"),
    *("configs/mixture_smollm2_cpu.py", "rl/envs/check.py", "rl/envs/mixture.py"),
    *("configs/reward_smollm2_cpu.py", "rl/envs/judged.py", "rl/envs/reward_model.py"),
    *(f"rl/envs/{name}" for name in ("calculator", "mcp_server", "python_arithmetic", "sandbox/", "tools")),
    *("configs/calculator_", "configs/code_", "configs/tool_", "rl/envs/code_problems.py"),
    *("configs/gsm8k_", "configs/math_", "rl/envs/math_"),
    *("configs/distill_", "configs/self_distill_", "controller/loops/distill.py", "rl/algorithms/distillation.py"),
)
"""Optional parts, by the beginning of their paths. Entry points or recipes name them; no core module imports them."""
ROOMS = (
    *("rl/system", "rl", "rl/weights", "trainer", "generator"),
    *("controller/processes", "controller/hosts", "controller/handles", "controller/launching", "controller/runs"),
    *("controller/loops", "controller/commands", "controller/planning", "controller/server"),
    *("controller/agents", "controller/frameworks", "configs"),
)
"""From the bottom to the top. A room imports from those below it."""
LOOP = Path("controller/loops/grpo.py")
SHORT_FILE_LINES = 70


def sources(*folders: str) -> list[Path]:
    """Python files below these folders, as paths relative to the root."""
    return sorted(path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file of the repository."""
    return ast.parse((ROOT / path).read_text())


def lines_of(path: Path) -> int:
    """Number of lines of a file of the repository."""
    return len((ROOT / path).read_text().splitlines())


def is_core(path: Path) -> bool:
    """Whether a file belongs to no optional part."""
    return not str(path).startswith(OPTIONAL)


@cache
def imports(path: Path) -> frozenset[Path]:
    """The files of the product that a file imports, wherever it does so."""
    found: set[Path] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {file for alias in node.names if (file := _file(alias.name)) is not None}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                file = _file(f"{node.module}.{alias.name}") or _file(node.module)
                found |= set() if file is None else {file}
    return frozenset(found - {path})


def _file(module: str) -> Path | None:
    path = Path(module.replace(".", "/"))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if path.parts[0] in PACKAGES and (ROOT / file).is_file():
            return file
    return None


def reached(start: Path) -> set[Path]:
    """All files of the product that a file needs, itself among them, with what those import in functions."""
    found, pending = {start}, [start]
    while pending:
        new = imports(pending.pop()) - found
        found |= new
        pending += new
    return found


def short_files_of_one() -> list[Path]:
    """Short modules that one other module imports. They could be part of it."""
    importers = Counter(file for path in sources(*PACKAGES) for file in imports(path))
    files = (path for path in sources(*PACKAGES) if path.name != "__init__.py")
    return [path for path in files if importers[path] == 1 and lines_of(path) < SHORT_FILE_LINES]


def definitions(name: str) -> list[Path]:
    """Where the product defines functions of this name."""
    found: list[Path] = []
    for path in sources(*PACKAGES):
        for node in ast.walk(tree(path)):
            found += [path] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name else []
    return found


def project_imports_of_readme() -> int:
    """Import statements of the project's packages in the README's loop."""
    return len(re.findall(rf"^from ({'|'.join(PACKAGES)})\b", (ROOT / "README.md").read_text(), re.MULTILINE))


def comments_per_100_lines() -> float:
    """Comments of the product per 100 lines of code, which are neither empty nor docstrings nor comments alone."""
    comments = code = 0
    for path in sources(*PACKAGES):
        text = (ROOT / path).read_text()
        marks = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
        held: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            comments += token.type == tokenize.COMMENT
            held |= set() if token.type in marks else set(range(token.start[0], token.end[0] + 1))
        code += len(held - set(_docstring_lines(path)))
    return 100 * comments / code


def _docstring_lines(path: Path) -> Iterator[int]:
    """Lines of strings that are statements: docstrings, and what is said below a field."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def room_of(path: Path) -> str | None:
    """The room that a file is in, the most exact one; None for what stands before the rooms."""
    return max((room for room in ROOMS if str(path).startswith(f"{room}/")), key=len, default=None)


def arrows_up() -> list[tuple[Path, Path]]:
    """Every import of a room by one below it."""
    found: list[tuple[Path, Path]] = []
    for path in sources(*PACKAGES):
        for target in imports(path):
            ours, theirs = room_of(path), room_of(target)
            if ours and theirs and ROOMS.index(theirs) > ROOMS.index(ours):
                found.append((path, target))
    return found


def core_imports_of_parts() -> list[tuple[Path, Path]]:
    """Imports of optional parts by core modules."""
    core = [path for path in sources(*PACKAGES) if is_core(path)]
    return [(path, target) for path in core for target in imports(path) if not is_core(target)]


def tests_that_name_what_they_cover() -> tuple[int, int]:
    """How many test files begin with a line `Covers:`, and how many there are."""
    files = [path for path in sources("tests") if path.name.startswith("test_")]
    return sum("Covers: " in (ast.get_docstring(tree(path)) or "") for path in files), len(files)


def covered() -> dict[Path, list[str]]:
    """What each test file's line `Covers:` names: files, and folders with a slash at their end."""
    texts = {path: ast.get_docstring(tree(path)) or "" for path in sources("tests") if path.name.startswith("test_")}
    return {path: re.findall(r"[\w.]+(?:/[\w.]*)*", text.partition("Covers: ")[2]) for path, text in texts.items()}


def uncovered() -> list[Path]:
    """Product files that no test file names."""
    named = {name for names in covered().values() for name in names}
    folders = tuple(name for name in named if name.endswith("/"))
    files = [path for path in sources(*PACKAGES) if path.name != "__init__.py"]
    return [path for path in files if str(path) not in named and not (folders and str(path).startswith(folders))]


def numbers() -> dict[str, float]:
    """Every number of the table that `test_layout.py` holds."""
    product = sources(*PACKAGES)
    core = [path for path in product if is_core(path)]
    named, tests = tests_that_name_what_they_cover()
    return {
        "product files": len(product),
        "core files": len(core),
        "core lines": sum(map(lines_of, core)),
        f"files under {SHORT_FILE_LINES} lines with one importer": len(short_files_of_one()),
        "files that a loop's page reaches": len(reached(LOOP)),
        "definitions of forward_backward": len(definitions("forward_backward")),
        "project imports of README's loop": project_imports_of_readme(),
        "imports of optional parts by the core": len(core_imports_of_parts()),
        "imports from a room above": len(arrows_up()),
        "test files that do not say what they cover": tests - named,
        "product files that no test file names": len(uncovered()),
    }


def details() -> list[str]:
    """What stands behind the numbers that should be small."""
    pairs = [*(("part", *pair) for pair in core_imports_of_parts()), *(("room above", *pair) for pair in arrows_up())]
    return [
        *(f"into a {what}: {path} imports {target}" for what, path, target in pairs),
        *(f"no test names it: {path}" for path in uncovered()),
        *(f"short, of one importer: {path} ({lines_of(path)})" for path in short_files_of_one()),
    ]


def main() -> None:
    """Prints the table, and what stands behind it."""
    for name, number in {**numbers(), "comments per 100 lines of code": round(comments_per_100_lines(), 1)}.items():
        print(f"{number:>8g}  {name}")
    print(*details(), sep="\n")


if __name__ == "__main__":
    main()
