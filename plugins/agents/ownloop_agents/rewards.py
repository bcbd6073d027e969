"""Rewards of programs: by their status, by commands and calls in fresh sandboxes, and by a file that they left."""

import contextlib
import json
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ownloop_sandbox.sandboxes import Work

if TYPE_CHECKING:
    from ownloop_agents.programs import AgentTask, Attempt
_PYTHON = re.compile(r"python[0-9.]*$")


async def exit_code(task: "AgentTask", work: Work, attempt: "Attempt") -> float:
    """The reward 1 for a program that ended with status 0, otherwise 0."""
    del task, work
    return float(attempt.exit_code == 0)


@dataclass(frozen=True, slots=True)
class Command:
    """The reward 1 if a command ends with status 0, with the files that the task names and its hidden ones.

    Of a Python program (`python3 test.py`, `python3 -m pytest`, `python3 -m unittest`, `pytest`), it is paid only if
    the program came to its end by itself, with at least one test of pytest passed, and if the work under test did not
    skip one. Of any other command the status is all that is known: work that ends the command with status 0 is paid.

    Work that runs within its tests' process can still do what no command can see from there: return a value that claims
    to be equal to every other, or rewrite the process that tests it. `Calls` compares in a process of its own.
    """

    argv: Sequence[str]
    time_limit_s: float = 60.0

    async def __call__(self, task: "AgentTask", work: Work, attempt: "Attempt") -> float:
        """See `Reward`. Raises RuntimeError if the command cannot be started: that is no fault of the attempt.

        Of a Python program that is known before the work runs. Other commands say so with the statuses 126 and 127, as
        a shell does, and work that they run may say the same.
        """
        del work
        proven, mark = _proven(self.argv), secrets.token_hex(16)
        said = json.dumps({"mark": mark, "trusted": [*task.hidden]}) if proven else ""
        ended = await attempt.run(proven or self.argv, self.time_limit_s, said=said)
        if f"{mark}?" in ended.output if proven else ended.exit_code in (126, 127):
            raise RuntimeError(f"the reward's command cannot be started: {' '.join(self.argv)}: {ended.output[-200:]}")
        return float(ended.exit_code == 0 and (proven is None or mark in ended.output))


def _proven(argv: Sequence[str]) -> list[str] | None:
    """The command that says with a mark that a Python program came to its end. None for another command."""
    first, *rest = argv
    if PurePosixPath(first).name in ("pytest", "py.test"):
        found = shutil.which(first)
        shebang = Path(found).read_bytes().split(b"\n")[0].decode(errors="replace") if found else ""
        first, rest = shebang[2:].strip() if _PYTHON.search(shebang) else "python3", ["-m", "pytest", *rest]
    if _PYTHON.match(PurePosixPath(first).name) is None:
        return None
    options: list[str] = []
    while rest and rest[0].startswith("-") and (how := re.fullmatch(r"-(\w*)([mc])", rest[0])) is None:
        options.append(rest.pop(0))
        if options[-1] in ("-W", "-X") and rest:
            options.append(rest.pop(0))
        if options[-1] == "-":
            return None  # a program of standard input
    if not rest:
        return None
    if rest[0].startswith("-") and (how := re.fullmatch(r"-(\w*)([mc])", rest[0])) is not None:
        options += [f"-{how[1]}"] * bool(how[1])
        rest[0] = f"-{how[2]}"
    return [first, *options, "-c", _text("inner_proof.py"), *rest]


@dataclass(frozen=True, slots=True)
class Calls:
    """The reward 1 if a function of the work returns what it should, for all arguments.

    The work runs in a sandbox of its own, which never has the expected values; they are compared here. So arguments and
    values are what JSON can say, and the values of all cases 32 KiB at most. The file finds others beside it.
    """

    file: str
    name: str
    cases: Sequence[tuple[Sequence[object], object]]
    """Arguments, and the expected value."""
    time_limit_s: float = 60.0

    def __post_init__(self) -> None:
        """Raises ValueError or TypeError for values that JSON cannot say, and ValueError for too many."""
        if (size := len(json.dumps([case[1] for case in self.cases], allow_nan=False))) > _MOST_VALUES:
            raise ValueError(f"Calls.cases has {size} bytes of expected values as JSON; it may have {_MOST_VALUES}")

    async def __call__(self, task: "AgentTask", work: Work, attempt: "Attempt") -> float:
        """See `Reward`."""
        del task, work
        mark = secrets.token_hex(16)
        said = json.dumps(
            {"mark": mark, "file": self.file, "name": self.name, "given": [list(c[0]) for c in self.cases]}
        )
        ended = await attempt.run(["python3", "-I", "-c", _CALL], self.time_limit_s, said=said)
        _, _, found = ended.output.rpartition(mark)
        with contextlib.suppress(ValueError, RecursionError):
            return float(_same(json.loads(found), json.loads(json.dumps([case[1] for case in self.cases]))))
        return 0.0


_MOST_VALUES = 1 << 15  # half of the output that a box keeps
_CALL = """
import json, os, sys
from importlib.machinery import SourceFileLoader
from types import ModuleType
asked = json.load(sys.stdin)
out = os.dup(1)
folder, file = os.path.split(os.path.abspath(asked["file"]))
sys.path.insert(0, folder)
work = ModuleType(file.partition(".")[0])
sys.modules[work.__name__], work.__file__ = work, asked["file"]
exec(SourceFileLoader(work.__name__, asked["file"]).get_code(work.__name__), vars(work))
found = [getattr(work, asked["name"])(*given) for given in asked["given"]]
os.write(out, (asked["mark"] + json.dumps(found)).encode())
os._exit(0)
"""


def _same(one: object, other: object) -> bool:
    """Whether two values of JSON are equal, with types: 1 is not true."""
    if isinstance(one, list) and isinstance(other, list):
        both: zip[tuple[Any, Any]] = zip(one, other, strict=False)
        return len(one) == len(other) and all(_same(*pair) for pair in both)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return isinstance(one, bool) == isinstance(other, bool) and one == other


@dataclass(frozen=True, slots=True)
class RewardFile:
    """The number that a file of the program's folder holds. An attempt without such a file fails."""

    name: str

    async def __call__(self, task: "AgentTask", work: Work, attempt: "Attempt") -> float:
        """See `Reward`."""
        del task, attempt
        return float(work.read(self.name, most=100))


@cache
def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
