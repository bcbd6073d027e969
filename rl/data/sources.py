"""Where supervised examples and preference pairs come from: a JSONL file, or an environment that knows its answers.

A source has a training and a held-out split. Training is an endless stream that `seed` names: item i of it is a pure
function of (seed, i), so that a run can go on in the middle.
"""

import functools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rl.envs.procedural import is_eval
from rl.protocols import Env, Problem, Prompt
from rl.rollouts.rendering import prompt_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt and what the model should say."""

    id: str
    """The prompt's text; what is held out is decided by it."""
    prompt: Prompt
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A prompt and two answers, of which one is better."""

    id: str
    """The prompt's text; what is held out is decided by it."""
    prompt: Prompt
    chosen: str
    rejected: str


class Examples(Protocol):
    """A source of supervised examples."""

    def train_examples(self, seed: int, start: int, count: int) -> Sequence[Example]:
        """Examples number start to start + count - 1 of the endless training stream that `seed` names."""
        ...

    def eval_examples(self, count: int) -> Sequence[Example]:
        """The first `count` held-out examples, always the same; all where there are fewer, and at least one."""
        ...


class Preferences(Protocol):
    """A source of preference pairs."""

    def train_preferences(self, seed: int, start: int, count: int) -> Sequence[Preference]:
        """Pairs number start to start + count - 1 of the endless training stream that `seed` names."""
        ...

    def eval_preferences(self, count: int) -> Sequence[Preference]:
        """The first `count` held-out pairs, always the same; all where there are fewer, and at least one."""
        ...


@runtime_checkable
class AnsweredProblem(Problem, Protocol):
    """A problem of an environment that knows the answer."""

    @property
    def answer(self) -> str | None:
        """A completion that is right; None where none is known."""
        ...

    @property
    def wrong_answers(self) -> Sequence[str]:
        """Completions that are wrong but not far off; empty where none are known."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvExamples:
    """An environment's problems with their right answers. They raise ValueError for a problem that knows none."""

    env: Env

    def train_examples(self, seed: int, start: int, count: int) -> list[Example]:
        """See `Examples`."""
        return [self._example(problem) for problem in self.env.train_problems(seed, start, count)]

    def eval_examples(self, count: int) -> list[Example]:
        """See `Examples`."""
        return [self._example(problem) for problem in self.env.eval_problems(count)]

    def _example(self, problem: Problem) -> Example:
        return Example(id=problem.id, prompt=problem.prompt, completion=_answers(self.env, problem)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvPreferences:
    """An environment's problems, each with its right answer and one of the wrong ones that it names.

    They raise ValueError for a problem that does not know both.
    """

    env: Env

    def train_preferences(self, seed: int, start: int, count: int) -> list[Preference]:
        """See `Preferences`."""
        return [self._preference(problem) for problem in self.env.train_problems(seed, start, count)]

    def eval_preferences(self, count: int) -> list[Preference]:
        """See `Preferences`."""
        return [self._preference(problem) for problem in self.env.eval_problems(count)]

    def _preference(self, problem: Problem) -> Preference:
        answer, wrong = _answers(self.env, problem)
        if not wrong:
            raise ValueError(
                f"environment {self.env.name!r} knows no wrong answer to problem {problem.id!r}, so that nothing can "
                "be rejected; its problems need `wrong_answers`"
            )
        rejected = random.Random(problem.id).choice(wrong)
        return Preference(id=problem.id, prompt=problem.prompt, chosen=answer, rejected=rejected)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlExamples:
    """A file of lines {"prompt": text or messages, "completion": text}; other fields are ignored.

    The file is read when it is first needed. What is no such line, or has no tokens to learn, raises ValueError naming
    file and line.
    """

    path: Path
    """The training examples, shuffled anew by every pass over them."""
    eval_path: Path | None = None
    """The held-out examples. None holds a tenth of `path` out: always the same, all lines of a prompt together."""

    def train_examples(self, seed: int, start: int, count: int) -> list[Example]:
        """See `Examples`."""
        return _from_stream(_split(_read_examples, self.path, self.eval_path)[0], seed, start, count)

    def eval_examples(self, count: int) -> list[Example]:
        """See `Examples`."""
        return _split(_read_examples, self.path, self.eval_path)[1][:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlPreferences:
    """A file of lines {"prompt": text or messages, "chosen": text, "rejected": text}; see `JsonlExamples`."""

    path: Path
    """The training pairs, shuffled anew by every pass over them."""
    eval_path: Path | None = None
    """The held-out pairs. None holds a tenth of `path` out: always the same, all lines of a prompt together."""

    def train_preferences(self, seed: int, start: int, count: int) -> list[Preference]:
        """See `Preferences`."""
        return _from_stream(_split(_read_preferences, self.path, self.eval_path)[0], seed, start, count)

    def eval_preferences(self, count: int) -> list[Preference]:
        """See `Preferences`."""
        return _split(_read_preferences, self.path, self.eval_path)[1][:count]


Item = TypeVar("Item", Example, Preference)


def _no_problem(_row: Mapping[str, Any]) -> str:
    """Nothing is wrong with any row."""
    return ""


def read_rows(
    path: Path,
    fields: Mapping[str, Callable[[Any], str]],
    row_problem: Callable[[Mapping[str, Any]], str] = _no_problem,
) -> list[dict[str, Any]]:
    """The objects of a JSONL file. `fields` are those that each must have, with what says what is wrong with a value.

    `row_problem` says so of a whole row. Empty lines are skipped. Raises ValueError naming the file and the first line
    that is not as it must be.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}; it should hold one JSON object per line with {_names(fields)}")
    rows: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows.append(row := _checked_row(line, f"{path}:{number}", fields))
                if problem := row_problem(row):
                    raise ValueError(f"{path}:{number}: {problem}")
    if not rows:
        raise ValueError(f"{path} holds no line; it should hold one JSON object per line with {_names(fields)}")
    return rows


def _checked_row(line: str, where: str, fields: Mapping[str, Callable[[Any], str]]) -> dict[str, Any]:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is a {type(row).__name__}; a JSON object with {_names(fields)} is needed")
    checked = cast("dict[str, Any]", row)
    for name, problem_of in fields.items():
        if name not in checked:
            raise ValueError(f"{where} lacks {name!r}; it has {', '.join(map(repr, checked)) or 'no field'}")
        if problem := problem_of(checked[name]):
            raise ValueError(f"{where}: {name!r} {problem}")
    return checked


def text_problem(value: Any) -> str:
    """What keeps a value from being a text to learn; empty when nothing does."""
    if not isinstance(value, str):
        return f"is a {type(value).__name__}; text is needed"
    return "" if value else "is empty; text is needed"


def prompt_problem(value: Any) -> str:
    """What keeps a value from being a prompt; empty when nothing does."""
    if isinstance(value, str):
        return text_problem(value)
    if not isinstance(value, list) or not value:
        return f"is {value!r:.80}; text, or messages with 'role' and 'content', are needed"
    for message in cast("list[Any]", value):
        fields = cast("dict[str, Any]", message) if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            return f"holds {message!r:.80}; each message needs 'role' and 'content', both text"
    return ""


@functools.lru_cache(maxsize=8)
def _read_examples(path: Path) -> list[Example]:
    rows = read_rows(path, {"prompt": prompt_problem, "completion": text_problem})
    return [Example(id=prompt_text(row["prompt"]), prompt=row["prompt"], completion=row["completion"]) for row in rows]


@functools.lru_cache(maxsize=8)
def _read_preferences(path: Path) -> list[Preference]:
    fields = {"prompt": prompt_problem, "chosen": text_problem, "rejected": text_problem}

    def row_problem(row: Mapping[str, Any]) -> str:
        return "'chosen' and 'rejected' are the same" if row["chosen"] == row["rejected"] else ""

    rows = read_rows(path, fields, row_problem)
    return [
        Preference(id=prompt_text(row["prompt"]), prompt=row["prompt"], chosen=row["chosen"], rejected=row["rejected"])
        for row in rows
    ]


def _split(read: Callable[[Path], list[Item]], path: Path, eval_path: Path | None) -> tuple[Sequence[Item], list[Item]]:
    """Training and held-out items. Raises ValueError when one of them is empty."""
    items = read(path)
    if eval_path is not None:
        return items, read(eval_path)
    train = [item for item in items if not is_eval(item.id)]
    eval_data = [item for item in items if is_eval(item.id)]
    if not train or not eval_data:
        raise ValueError(
            f"{path} has too few prompts to hold a tenth of them out: {len(train)} lines would be left to train on and "
            f"{len(eval_data)} held out; name a file of its own as eval_path"
        )
    return train, eval_data


def _from_stream(items: Sequence[Item], seed: int, start: int, count: int) -> list[Item]:
    """Items start to start + count - 1 of pass after pass, each in an order of its own."""
    return [items[_order(len(items), seed, i // len(items))[i % len(items)]] for i in range(start, start + count)]


@functools.lru_cache(maxsize=4)
def _order(num_items: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_items)


def _answers(env: Env, problem: Problem) -> tuple[str, Sequence[str]]:
    """The right answer and the wrong ones."""
    if not isinstance(problem, AnsweredProblem) or problem.answer is None:
        raise ValueError(
            f"environment {env.name!r} knows no answer to problem {problem.id!r}; supervised data need problems with "
            "an `answer`, or a JSONL file"
        )
    return problem.answer, problem.wrong_answers


def _names(fields: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, fields))
