"""Programming problems from a dataset: the model writes Python, and tests score it in a sandbox.

    CodeProblems(dataset="google-research-datasets/mbpp", subset="full", eval_split="test")
    CodeProblems(dataset="problems.jsonl")                 JSON lines, Parquet or CSV, or a folder of such files

The tests run in another process than the code that they test (`code_process.py`), which sees the arguments of calls and
not what is expected. The plug-in's page says what this cannot tell from a solution.
"""

import ast
import re
import secrets
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, cast

from pydantic import Field, NonNegativeInt

from ownloop_sandbox import Sandbox, find_way, run_python
from ownloop_tasks.data_sets import load_columns, text_of
from rl.configuration import Several, configuration, holds
from rl.data.rows import content_id, python_order, spaced_alike, split, stream, without_held_out
from rl.protocols import Done, Prompt
from rl.rollouts.guard import DEFAULT_TIME_LIMIT_S
from rl.types import Answer, PathOrName

_OPENING = re.compile(r"[ \t]*+(`{3,}+|~{3,}+)[ \t]*+\{?\.?([\w+#.-]*+)[^`]*+")
_QUOTES = re.compile(r"""\\.|\"{3}|'{3}|["'#]""")
_PYTHON = ("python", "python3", "py", "py3")


@configuration
class CodeProblems:
    """A dataset's problems. Reward 1 if the code passes all tests of its problem, 0 otherwise."""

    dataset: PathOrName
    """`ORG/NAME` of the Hugging Face Hub, a local folder, or a file: .jsonl, .json, .parquet or .csv."""
    subset: str | None = None
    """The dataset's configuration, if it has several."""
    revision: str | None = None
    """A branch, tag or commit of the Hub's repository. None: its main branch."""
    train_split: str = "train"
    """The split to train on. A single file has the split "train" alone."""
    eval_split: str | None = None
    """The split to evaluate on; its questions are left out of training. None holds out a tenth of `train_split`."""
    question: str = "text"
    """Name of the column of questions."""
    tests: str = "test_list"
    """Name of the column of tests: a list of Python statements that raise where the code is wrong, or one text."""
    setup: str = ""
    """Name of a column of code that runs before the answer's, such as imports; empty for none."""
    solution: str = ""
    """Name of a column of right code, which `check-env` runs; empty for none."""
    template: Annotated[str, holds("{question}")] = (
        "{question}\nYour code must pass these tests:\n{tests}\nWrite it in one block of ```python."
    )
    """The prompt; `{question}` stands for the problem, and `{tests}` for its first `num_shown` tests."""
    num_shown: NonNegativeInt = 3
    """How many tests a prompt shows, which say how functions are named."""
    partial_credit: bool = False
    """Whether the reward is the part of the tests that the code passes."""
    stop: Several[str] = ()
    """Strings that end an answer, in addition to the model's own end token."""
    time_limit_s: Annotated[float, Field(ge=0.1)] = 5.0
    """Most seconds that the code and its tests may run."""
    sandbox: Sandbox = "auto"
    """Where the model's code runs: `auto` takes what works on this host. `none` is no sandbox: the code may do all that
    the current user may do, and is limited in time, memory and output only."""

    @property
    def name(self) -> str:
        """The dataset, with its subset."""
        return f"code problems of {self.dataset}" + (f" ({self.subset})" if self.subset else "")

    @property
    def call_time_limit_s(self) -> float:
        """See `rl.protocols.Env`. The sandbox ends the code at its own limit, and needs time besides."""
        return DEFAULT_TIME_LIMIT_S + self.time_limit_s

    def train_problems(self, seed: int, start: int, count: int) -> list["CodeProblem"]:
        """See `rl.protocols.Env`. Every epoch has every problem once, in an order of its own."""
        return stream(_load(self)[0], python_order, seed, start, count)

    def eval_problems(self, count: int) -> list["CodeProblem"]:
        """The first held-out problems.

        Raises ValueError if there are fewer, if the dataset cannot be loaded, lacks a column or has a row without
        tests, and if this host has no sandbox.
        """
        find_way(self.sandbox)
        problems = _load(self)[1]
        if count > len(problems):
            raise ValueError(f"num_eval is {count}, but {self.name} has only {len(problems)} held-out problems")
        return problems[:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeProblem:
    """A question with its tests."""

    id: str
    prompt: Prompt
    setup: str
    tests: tuple[str, ...]
    partial_credit: bool
    time_limit_s: float
    sandbox: Sandbox
    answer: str = ""
    """A right completion, if the dataset has one."""

    def start(self) -> "CodeProblem":
        """Returns itself: a single-turn problem has no state."""
        return self

    async def reply(self, completion: str) -> Done:
        """Runs the last block of Python of the answer with the tests, and ends the episode.

        Raises RuntimeError if the sandbox or the problem's setup does not get so far that the code runs.
        """
        code = python_of(Answer.read(completion).content)
        passed, mark = 0, secrets.token_hex(16)
        if code:
            program = f"{_process()}\nscore(*{(_process(), mark, self.setup, code, self.tests)!r})"
            result = await run_python(program, sandbox=self.sandbox, time_limit_s=self.time_limit_s)
            if not result.output.startswith(mark):
                raise RuntimeError(f"the setup of problem {self.id!r} did not run: {result.output:.200}")
            counted = re.fullmatch(rf"{mark}\n(\d+) {mark}", result.output)
            passed = int(counted[1]) if result.ok and counted is not None else 0
        part = passed / len(self.tests)
        metrics = {"code_found": float(bool(code)), "tests_passed": part}
        return Done(reward=part if self.partial_credit else float(passed == len(self.tests)), metrics=metrics)


def python_of(text: str) -> str:
    """The last block of a text that is called Python, or else the last without a name; empty if there is none.

    A block may be indented, as in a list. One that nothing closes ends where the next one begins, or with the text.
    Fences within a string in triple quotes are part of the code. The time is linear in the length.
    """
    lines, found, at = text.replace("\r\n", "\n").split("\n"), dict[bool, Sequence[str]](), 0
    while at < len(lines):
        opening = _opening(lines[at]) or _opening(lines[at][max(lines[at].rfind("```"), 0) :], _PYTHON)
        at += 1
        if opening is not None:
            code, at = _block(lines, at, opening[0], has_strings=opening[1] in ("", *_PYTHON))
            if opening[1] in ("", *_PYTHON):
                found[opening[1] in _PYTHON] = code
    return textwrap.dedent("".join(f"{line}\n" for line in found.get(True, found.get(False, []))))


@cache
def _process() -> str:
    return Path(__file__).with_name("code_process.py").read_text(encoding="utf-8")


def _opening(line: str, names: Sequence[str] = ()) -> tuple[str, str] | None:
    """The fence that begins the line and the language behind it, if it opens a block; of `names`, if there are any."""
    found = _OPENING.fullmatch(line)
    name = found[2].lower() if found is not None else ""
    return (found[1], name) if found is not None and (not names or name in names) else None


def _block(lines: Sequence[str], start: int, fence: str, *, has_strings: bool) -> tuple[Sequence[str], int]:
    """The lines of the block that begins at `start`, and where to look for the next."""
    quote, late = "", -1
    first: tuple[int, bool] | None = None  # the first fence in a string, and whether it opens a block
    waiting = first  # a fence in a string that waits for its pair
    for at in range(start, len(lines)):
        line = lines[at].strip()
        closes = len(line) >= len(fence) and not line.strip(fence[0])
        opens = not closes and bool((_opening(line) or ("", ""))[1])
        if not quote and (closes or opens):
            return _unclosed(lines, start, at, late, fence) if opens else (lines[start:at], at + 1)
        if not (closes or opens):
            late = at if late < 0 and not quote and line.endswith(fence) else late
        elif waiting is None:
            waiting = (at, opens)
            first = first or waiting
        elif opens and not waiting[1]:  # the string was none: its first fence was the end of the block
            return lines[start : waiting[0]], waiting[0] + 1
        else:
            waiting = (at, True) if opens else None
        quote = _quote_after(line, quote) if has_strings else ""
        waiting, first = (waiting, first) if quote else (None, None)
    if first is not None:  # nothing closes the string, so it was none
        return lines[start : first[0]], first[0] + (not first[1])
    return _unclosed(lines, start, len(lines), late, fence)


def _unclosed(lines: Sequence[str], start: int, end: int, late: int, fence: str) -> tuple[Sequence[str], int]:
    """A block without a line that closes it: it ends with its first line that ends with a fence, if one does."""
    return ([*lines[start:late], lines[late].rstrip().removesuffix(fence)] if late >= 0 else lines[start:end]), end


def _quote_after(line: str, quote: str) -> str:
    """The triple quotes that are open after a line of Python, before which `quote` was."""
    single = ""
    for found in _QUOTES.finditer(line):
        token = found[0]
        if quote or single:
            quote = "" if token == quote else quote
            single = "" if token[0] == single else single
        elif token == "#":
            break
        elif len(token) == 3:
            quote = token
        elif token[0] != "\\":
            single = token
    return quote


@lru_cache(maxsize=8)  # a loop asks for problems at every step
def _load(env: CodeProblems) -> tuple[list[CodeProblem], list[CodeProblem]]:
    """Training and held-out problems; no question is in both. Raises ValueError if either is empty."""
    train = _problems(env, env.train_split)
    if env.eval_split:
        held_out = _problems(env, env.eval_split)
        train = without_held_out(train, held_out, lambda problem: problem.id)
    else:
        train, held_out = split(train, lambda problem: problem.id)
    if not train or not held_out:
        raise ValueError(
            f"{env.name} has {len(train)} training and {len(held_out)} held-out problems; both splits need at least one"
        )
    return train, held_out


def _problems(env: CodeProblems, name: str) -> list[CodeProblem]:
    """The problems of a split, without duplicates."""
    field = "CodeProblems.dataset"
    named = {"question": env.question, "tests": env.tests, "setup": env.setup, "solution": env.solution}
    names = {each: column for each, column in named.items() if column or each in ("question", "tests")}
    columns = load_columns(
        env.dataset, columns=[*names.values()], split=name, subset=env.subset, revision=env.revision, field=field
    )
    distinct: dict[str, CodeProblem] = {}
    for number, values in enumerate(zip(*(columns[column] for column in names.values()), strict=True)):
        where = f"{field} {env.dataset!r}, split {name!r}, row {number}"
        problem = _problem(env, dict(zip(names, values, strict=True)), where)
        distinct.setdefault(problem.id, problem)
    return [*distinct.values()]


def _problem(env: CodeProblems, row: Mapping[str, object], where: str) -> CodeProblem:
    """Raises ValueError, beginning with `where`, for a row without a question or tests."""
    asked = row["question"]
    question = "" if asked is None else text_of(asked, f"{where}: column {env.question!r}").strip()
    tests, setup, solution = (
        _statements(row.get(name), f"{where}: column {column!r}")
        for name, column in (("tests", env.tests), ("setup", env.setup), ("solution", env.solution))
    )
    if not question or not tests:
        raise ValueError(f"{where}: the columns {env.question!r} and {env.tests!r} must hold a question and its tests")
    if (idle := next(filter(_is_literal, tests), None)) is not None:
        raise ValueError(f"{where}: column {env.tests!r} holds the test {idle!r:.80}, which fails for no code")
    asked = env.template.replace("{question}", question).replace("{tests}", "\n".join(tests[: env.num_shown]))
    return CodeProblem(
        id=content_id(spaced_alike(question)),
        prompt=[{"role": "user", "content": asked}],
        setup="\n".join(setup),
        tests=tests,
        partial_credit=env.partial_credit,
        time_limit_s=env.time_limit_s,
        sandbox=env.sandbox,
        answer="\n".join(("```python", *solution, "```")) if solution else "",
    )


def _statements(value: object, where: str) -> tuple[str, ...]:
    """The code of a column that holds one text, several, or nothing. Raises ValueError, beginning with `where`."""
    texts = [value] if isinstance(value, str) else [] if value is None else cast("Sequence[object]", value)
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where} is {value!r:.80}; text, or a list of texts, is needed")
    return tuple(text for text in cast("Sequence[str]", texts) if text.strip())


def _is_literal(test: str) -> bool:
    """Whether it is a value and no statement, such as a list that a CSV holds as text."""
    try:
        ast.literal_eval(test.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return True
