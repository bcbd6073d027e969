"""Programming problems from a dataset: the model writes Python, and tests score it in a sandbox.

    CodeProblems(dataset="google-research-datasets/mbpp", subset="full", eval_split="test")
    CodeProblems(dataset="problems.jsonl")                 JSON lines, Parquet or CSV, or a folder of such files

The tests run in the process of the code that they test, as in the published benchmarks: code that makes any comparison
true passes them. Output and an early exit earn nothing.
"""

import re
import secrets
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args

from ownloop_sandbox import Sandbox, find_way, run_python
from rl.checks import check_at_least, check_known, check_types
from rl.data.rows import content_id, load_columns, python_order, split, stream, without_held_out
from rl.protocols import Done, Prompt
from rl.rollouts.guard import DEFAULT_TIME_LIMIT_S
from rl.types import Answer

_BLOCK = re.compile(r"(```+|~~~+)[ \t]*([\w+#.-]*)[^\n`]*\n(.*?)\1", re.DOTALL)
_PYTHON = ("python", "python3", "py", "py3")
# Fails as a whole if the code does. Its names are local, so that the code replaces none. The count stands between two
# marks, so that no other output is taken for it; code that searched the interpreter's stack could find the mark, as it
# could find the tests.
_PROGRAM = """\
import io, sys
def score(code, tests, mark, run=exec, words=str, failure=BaseException):
    out, sys.stdout, space, passed = sys.stdout, io.StringIO(), {{"__name__": "answer"}}, 0
    run(code, space)
    for test in tests:
        try:
            run(test, space)
        except failure:
            continue
        passed += 1
    out.write(mark + words(passed) + mark)
    out.flush()
score(*{parts!r})
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeProblems:
    """A dataset's problems. Reward 1 if the code passes all tests of its problem, 0 otherwise."""

    dataset: str
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
    template: str = "{question}\nYour code must pass these tests:\n{tests}\nWrite it in one block of ```python."
    """The prompt; `{question}` stands for the problem, and `{tests}` for its first `num_shown` tests."""
    num_shown: int = 3
    """How many tests a prompt shows, which say how functions are named."""
    partial_credit: bool = False
    """Whether the reward is the part of the tests that the code passes."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, in addition to the model's own end token."""
    time_limit_s: float = 5.0
    """Most seconds that the code and its tests may run."""
    sandbox: Sandbox = "auto"
    """Where the model's code runs: `auto` takes what works on this host. `none` is no sandbox: the code may do all that
    the current user may do, and is limited in time, memory and output only."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted. The dataset is loaded later."""
        check_known("CodeProblems.sandbox", self.sandbox, get_args(Sandbox))
        check_types(self)
        if "{question}" not in self.template:
            raise ValueError(f"CodeProblems.template is {self.template!r}; it must contain {{question}}")
        check_at_least(0, **{"CodeProblems.num_shown": self.num_shown})
        check_at_least(0.1, **{"CodeProblems.time_limit_s": self.time_limit_s})

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
        """Runs the last block of Python of the answer with the tests, and ends the episode."""
        code = python_of(Answer.read(completion).content)
        passed, mark = 0, secrets.token_hex(16)
        if code:
            parts = (f"{self.setup}\n{code}", self.tests, mark)
            result = await run_python(
                _PROGRAM.format(parts=parts), sandbox=self.sandbox, time_limit_s=self.time_limit_s
            )
            _, *counts = result.output.split(mark)
            passed = int(counts[0]) if result.ok and len(counts) == 2 else 0
        part = passed / len(self.tests)
        metrics = {"code_found": float(bool(code)), "tests_passed": part}
        return Done(reward=part if self.partial_credit else float(passed == len(self.tests)), metrics=metrics)


def python_of(text: str) -> str:
    """The last block of a text that is called Python, or else the last without a name; empty if there is none.

    A block may be indented, as in a list.
    """
    blocks = [(name.lower(), code) for _, name, code in _BLOCK.findall(text.replace("\r\n", "\n"))]
    found = [code for name, code in blocks if name in _PYTHON] or [code for name, code in blocks if not name]
    return textwrap.dedent(found[-1]) if found else ""


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


def _problem(env: CodeProblems, row: Mapping[str, Any], where: str) -> CodeProblem:
    """Raises ValueError, beginning with `where`, for a row without a question or tests."""
    question, tests = str(row["question"] or "").strip(), _statements(row["tests"])
    if not question or not tests:
        raise ValueError(f"{where}: the columns {env.question!r} and {env.tests!r} must hold a question and its tests")
    asked = env.template.replace("{question}", question).replace("{tests}", "\n".join(tests[: env.num_shown]))
    return CodeProblem(
        id=content_id(question),
        prompt=[{"role": "user", "content": asked}],
        setup="\n".join(_statements(row.get("setup"))),
        tests=tests,
        partial_credit=env.partial_credit,
        time_limit_s=env.time_limit_s,
        sandbox=env.sandbox,
        answer=f"```python\n{row['solution']}\n```" if row.get("solution") else "",
    )


def _statements(value: Any) -> tuple[str, ...]:
    """The code of a column that holds one text, several, or nothing."""
    texts: Sequence[Any] = (value,) if isinstance(value, str) else value or ()
    return tuple(str(text) for text in texts if str(text).strip())
