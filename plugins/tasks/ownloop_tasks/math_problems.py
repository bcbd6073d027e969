"""Mathematical problems from a dataset with a column of questions and one of answers, such as GSM8K or MATH.

    MathProblems(dataset="openai/gsm8k", subset="main", eval_split="test")
    MathProblems(dataset="problems.jsonl")                 JSON lines, Parquet or CSV, or a folder of such files

The package `datasets` loads them, from the Hugging Face Hub or from disk; `math_answers.py` compares answers, so
that 1/2, 0.5 and \\frac{1}{2} are the same.
"""

import json
import os
import random
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ownloop_tasks.data_sets import read_columns
from ownloop_tasks.math_answers import WAITING_FACTOR, is_one_answer, last_boxes, math_comparer, plain
from rl.configuration import Several, configuration, holds
from rl.data.rows import content_id, python_order, spaced_alike, split, stream, without_held_out
from rl.protocols import Done, Prompt
from rl.rollouts.guard import DEFAULT_TIME_LIMIT_S
from rl.system.disk import cache_directory
from rl.types import Answer, PathOrName

AnswerForm = Literal["anywhere", "boxed"]
_NUMBER = re.compile(r"[-+]?\$?\d[\d,]*(\.\d+)?")
_NUM_NAMED = 3  # unreadable answers that a message quotes
_NAMES = "Ada Ben Chen Dana Eli Fay Gus Hana Ivan Jo Kim Leo Mia Nora Omar Pia".split()
_THINGS = "apples books coins pens stamps shells cards beads".split()


@configuration
class MathProblems:
    """A dataset's problems. Reward 1 for the right answer, 0 for anything else."""

    dataset: PathOrName
    """`ORG/NAME` of the Hugging Face Hub, a local folder, or a file: .jsonl, .json, .parquet or .csv."""
    subset: str | None = None
    """The dataset's configuration, if it has several: "main" for GSM8K."""
    revision: str | None = None
    """A branch, tag or commit of the Hub's repository. None: its main branch."""
    train_split: str = "train"
    """The split to train on. A single file has the split "train" alone."""
    eval_split: str | None = None
    """The split to evaluate on; its questions are left out of training. None holds out a tenth of `train_split`."""
    question: str = "question"
    """Name of the column of questions."""
    answer: str = "answer"
    """Name of the column of answers. Of a worked solution, the part after `answer_marker` or the last `\\boxed{...}`
    is the answer, or several boxes between which is only a comma, "and" or "or". A solution with other boxes that hold
    something else counts as unreadable."""
    answer_marker: str = "####"
    """What stands before the answer in the answer column, as in GSM8K. Answers without it are taken whole."""
    template: Annotated[str, holds("{question}")] = (
        "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    """The prompt; `{question}` stands for the problem. The default is what Qwen2.5-Math was taught to follow."""
    chat: bool = True
    """Whether the prompt is a user's message in a chat. Otherwise the model continues the text as it is."""
    answer_form: AnswerForm = "boxed"
    """Where the model's answer is looked for: "boxed" accepts the last `\\boxed{...}` only; "anywhere" also accepts
    what looks most like a final answer, such as the last number."""
    stop: Several[str] = ()
    """Strings that end an answer, in addition to the model's own end token."""
    comparison_time_limit_s: Annotated[float, Field(ge=0.1)] = 5.0
    """Most seconds of CPU time for comparing one answer. An answer that takes longer is wrong and counts in
    `comparisons_timed_out`."""
    skip_unreadable: bool = False
    """Whether problems are left out whose answer math-verify cannot read. Otherwise they are refused, by name."""

    @property
    def name(self) -> str:
        """The dataset, with its subset."""
        return f"math problems of {self.dataset}" + (f" ({self.subset})" if self.subset else "")

    @property
    def call_time_limit_s(self) -> float:
        """See `rl.protocols.Env`. A comparison on a busy machine takes longer than its CPU time."""
        return DEFAULT_TIME_LIMIT_S + WAITING_FACTOR * self.comparison_time_limit_s

    def train_problems(self, seed: int, start: int, count: int) -> list["MathProblem"]:
        """See `rl.protocols.Env`. Every epoch has every problem once, in an order of its own."""
        return stream(_load(self)[0], python_order, seed, start, count)

    def eval_problems(self, count: int) -> list["MathProblem"]:
        """The first held-out problems.

        Raises ValueError if there are fewer, if the dataset cannot be loaded or lacks a column, and for answers that
        cannot be read.
        """
        problems = _load(self)[1]
        if count > len(problems):
            raise ValueError(f"num_eval is {count}, but {self.name} has only {len(problems)} held-out problems")
        return problems[:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class MathProblem:
    """A question with its answer."""

    id: str
    prompt: Prompt
    expected: str
    """The answer alone."""
    answer: str
    """A right completion: the answer column's text, where that has the form that is looked for."""
    answer_form: AnswerForm
    time_limit_s: float
    wrong_answers: tuple[str, ...] = ()

    def start(self) -> "MathProblem":
        """Returns itself: a single-turn problem has no state."""
        return self

    def reply(self, completion: str) -> Done:
        """Compares the answer, without its reasoning, and ends the episode. Of a cut-off text, only a box counts."""
        said = Answer.read(completion)
        result = math_comparer().compare(
            self.expected,
            said.content,
            boxed=self.answer_form == "boxed" or said.is_cut_off,
            time_limit_s=self.time_limit_s,
            is_cut_off=said.is_cut_off,
        )
        return Done(
            reward=float(result.right),
            metrics={"answers_found": float(result.found), "comparisons_timed_out": float(result.timed_out)},
        )

    def answer_of(self, completion: str) -> str:
        """What the last box holds; without one, if the answer may be "anywhere", the last number; else nothing."""
        content = Answer.read(completion).content
        numbers = [found[0] for found in _NUMBER.finditer(content)] if self.answer_form == "anywhere" else []
        return plain(last_boxes(content) or (numbers[-1] if numbers else ""))


def final_answer(text: str, marker: str) -> str:
    """The answer in a text of the answer column: after the last marker, in the last box, or all of it."""
    text = _after(text, marker)
    return (last_boxes(text) or text).strip()


def _after(text: str, marker: str) -> str:
    return text.rpartition(marker)[2] if marker else text


@lru_cache(maxsize=8)  # a loop asks for problems at every step
def _load(env: MathProblems) -> tuple[list[MathProblem], list[MathProblem]]:
    """Training and held-out problems; no question is in both. Raises ValueError if either is empty."""
    read = partial(read_columns, env.dataset, subset=env.subset, revision=env.revision, field="MathProblems.dataset")
    columns = (env.question, env.answer)
    train_rows = read(split=env.train_split, columns=columns)
    eval_rows = read(split=env.eval_split, columns=columns) if env.eval_split else []
    train, held_out = _problems(env, train_rows), _problems(env, eval_rows)
    if env.eval_split:
        train = without_held_out(train, held_out, lambda problem: problem.id)
    else:
        train, held_out = split(train, lambda problem: problem.id)
    if not train or not held_out:
        raise ValueError(
            f"{env.name} has {len(train)} training and {len(held_out)} held-out problems; both splits need at least one"
        )
    return train, held_out


def _problems(env: MathProblems, rows: Sequence[tuple[str, ...]]) -> list[MathProblem]:
    """The readable problems, without duplicates. Raises ValueError for others, unless they are to be skipped."""
    distinct, unclear = dict[str, MathProblem](), dict[str, str]()
    for question, text in rows:
        asked = env.template.replace("{question}", question.strip())
        expected = final_answer(text, env.answer_marker)
        has_form = env.answer_form == "anywhere" or last_boxes(text) == expected
        problem = MathProblem(
            id=content_id(spaced_alike(question)),
            prompt=[{"role": "user", "content": asked}] if env.chat else asked,
            expected=expected,
            answer=text if has_form else f"\\boxed{{{expected}}}",
            answer_form=env.answer_form,
            time_limit_s=env.comparison_time_limit_s,
        )
        if distinct.setdefault(problem.id, problem) is problem and not is_one_answer(_after(text, env.answer_marker)):
            unclear[problem.id] = text
    problems = list(distinct.values())
    with ThreadPoolExecutor(8) as threads:  # each waits for one of the comparer's processes
        readable = list(threads.map(lambda problem: problem.id not in unclear and _is_readable(problem), problems))
    unreadable = [unclear.get(p.id, p.expected) for p, good in zip(problems, readable, strict=True) if not good]
    if unreadable:
        quoted = ", ".join(f"{answer!r:.80}" for answer in unreadable[:_NUM_NAMED])
        found = f"math-verify cannot read {len(unreadable)} of {len(problems)} answers of {env.name}, such as {quoted}"
        if not env.skip_unreadable:
            raise ValueError(f"{found}; MathProblems.skip_unreadable leaves them out")
        warnings.warn(f"{found}; these problems are left out", stacklevel=2)
    return [problem for problem, good in zip(problems, readable, strict=True) if good]


def _is_readable(problem: MathProblem) -> bool:
    """Whether the answer, given back as it is, would be right."""
    if _NUMBER.fullmatch(problem.expected):  # no need to ask, and most answers are numbers
        return True
    given = f"\\boxed{{{problem.expected}}}"
    comparer = math_comparer()
    return comparer.compare(problem.expected, given, boxed=True, time_limit_s=problem.time_limit_s).right


def word_problems_file(num_problems: int = 4000, *, max_steps: int = 2) -> Path:
    """The dataset in ownloop's cache, written there if it is not there yet. The same on every machine.

    `max_steps` is the most calculations that a problem needs, 1 or 2.
    """
    rows = _rows(num_problems, 0, max_steps)
    file = cache_directory() / f"word-problems-{content_id(rows)}.jsonl"  # another version writes another file
    if not file.exists():
        _write(file, rows)
    return file


def write_word_problems(file: Path, num_problems: int, seed: int = 0) -> None:
    """Writes different problems as JSON lines. `file` appears only when it is complete."""
    _write(file, _rows(num_problems, seed, max_steps=2))


def _rows(num_problems: int, seed: int, max_steps: int) -> dict[str, str]:
    """Question -> worked solution. Raises ValueError for another `max_steps` than 1 and 2."""
    if max_steps not in (1, 2):
        raise ValueError(f"max_steps is {max_steps}; it must be 1 or 2")
    rng, rows = random.Random(seed), dict[str, str]()
    while len(rows) < num_problems:
        question, answer = _problem(rng, max_steps)
        rows.setdefault(question, answer)
    return rows


def _write(file: Path, rows: Mapping[str, str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8") as part:
        part.writelines(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows.items())
    os.replace(part.name, file)  # noqa: PTH105 - another process may write the same file at the same time


def _problem(rng: random.Random, max_steps: int) -> tuple[str, str]:
    """A question and its worked solution."""
    (name, other), thing = rng.sample(_NAMES, 2), rng.choice(_THINGS)
    a, b, c = rng.randint(3, 12), rng.randint(2, 9), rng.randint(2, 9)
    match rng.randrange(3 if max_steps == 1 else 5):
        case 0:
            start = f"{name} has {a} {thing}. {other} gives {name} {b} more."
            return f"{start} {_now(name, thing)}", _solved((a, "+", b))
        case 1:
            return f"{name} has {a + b} {thing}. {name} loses {b}. {_now(name, thing)}", _solved((a + b, "-", b))
        case 2:
            question = f"{name} has {c} boxes with {b} {thing} each. How many {thing} does {name} have?"
            return question, _solved((c, "*", b))
        case 3:
            start = f"{name} has {a + b} {thing}. {name} loses {b} and then finds {c}."
            return f"{start} {_now(name, thing)}", _solved((a + b, "-", b), (a, "+", c))
        case _:
            start = f"{name} has {c} boxes with {b} {thing} each, and finds {a} more."
            return f"{start} {_now(name, thing)}", _solved((c, "*", b), (c * b, "+", a))


def _now(name: str, thing: str) -> str:
    return f"How many {thing} does {name} have now?"


def _solved(*steps: tuple[int, str, int]) -> str:
    """A line for each step, and the last result after GSM8K's marker."""
    results = {"+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y}
    lines = [f"{x} {sign} {y} = {results[sign](x, y)}" for x, sign, y in steps]
    return "\n".join([*lines, f"#### {lines[-1].rpartition(' ')[2]}"])
