"""A plain Python function as the reward, over prompts in a JSONL file.

    {"prompt": "What is 6 * 7?", "answer": "42"}          one row per line

    def exact(prompt, completion, answer) -> float:       a module's function, "module:function"
        return float(completion.strip() == answer)

    JsonlReward(file="train.jsonl", reward="rewards:exact", fields=("answer",))

A tenth of the prompts is held out, chosen by their text: a prompt is on the same side in every file, run and process.
"""

import functools
import importlib
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rl.envs.procedural import is_eval
from rl.envs.rows import content_id, epochs
from rl.protocols import Done, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlReward:
    """Prompts from a file, rewards from a function `(prompt, completion) -> float`, which may be `async`."""

    file: Path
    """One JSON object per line."""
    reward: str
    """`"module:function"`, called with the prompt, the completion and the row's `fields` by name."""
    prompt_field: str = "prompt"
    """The row's prompt: text, or messages with role and content."""
    fields: tuple[str, ...] = ()
    """Further fields of the row that the function takes."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer."""

    def __post_init__(self) -> None:
        """Reads the file. Raises ValueError naming file and line of a bad row, and for a function that is not there."""
        self._reward_function()
        _read.cache_clear()  # the file may have changed since another environment read it
        train, eval_data = self._split()
        if not train or not eval_data:
            raise ValueError(
                f"JsonlReward.file {self.file} has {len(train)} training and {len(eval_data)} held-out prompts; both "
                "splits need at least one (about a tenth is held out)"
            )

    @property
    def name(self) -> str:
        """The file's name."""
        return Path(self.file).stem

    def train_problems(self, seed: int, start: int, count: int) -> list["JsonlProblem"]:
        """Every row once in an order that seed and epoch decide, then all of them in the next order."""
        rows, _ = self._split()
        return [self._problem(row) for row in epochs(rows, seed, start, count)]

    def eval_problems(self, count: int) -> list["JsonlProblem"]:
        """The first rows of the held-out side. Raises ValueError when there are fewer."""
        _, rows = self._split()
        if count > len(rows):
            raise ValueError(f"num_eval is {count}, but {self.file} has only {len(rows)} held-out prompts")
        return [self._problem(row) for row in rows[:count]]

    def _problem(self, row: Mapping[str, Any]) -> "JsonlProblem":
        arguments = {name: row[name] for name in self.fields}
        prompt = row[self.prompt_field]
        return JsonlProblem(
            id=content_id([prompt, arguments]), prompt=prompt, score=self._reward_function(), row=arguments
        )

    def _reward_function(self) -> Callable[..., Any]:
        module, _, function = self.reward.partition(":")
        try:
            found = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"JsonlReward.reward is {self.reward!r}, which cannot be imported ({error}); it must be "
                '"module:function"'
            ) from error
        if not callable(found):
            raise ValueError(f"JsonlReward.reward is {self.reward!r}, a {type(found).__name__}; it must be a function")
        return found

    def _split(self) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
        return _read(Path(self.file), self.prompt_field, self.fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlProblem:
    """A row with the function that rewards answers to it."""

    id: str
    prompt: Prompt
    score: Callable[..., Any]
    row: Mapping[str, Any]

    def start(self) -> "JsonlProblem":
        """There is nothing to keep track of."""
        return self

    def reply(self, completion: str) -> Done | Awaitable[Done]:
        """The first answer is the last."""
        reward = self.score(self.prompt, completion, **self.row)
        return _awaited(reward) if inspect.isawaitable(reward) else Done(reward=reward)


async def _awaited(reward: Awaitable[float]) -> Done:
    return Done(reward=await reward)


@functools.lru_cache(maxsize=8)
def _read(
    file: Path, prompt_field: str, fields: tuple[str, ...]
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Training and held-out rows, no row twice."""
    splits: tuple[dict[str, Mapping[str, Any]], dict[str, Mapping[str, Any]]] = ({}, {})
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"JsonlReward.file {file} cannot be read: {error}") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            row = _row(f"{file}, line {number}", line, prompt_field, fields)
            key = content_id([row[prompt_field], {name: row[name] for name in fields}])
            splits[is_eval(content_id(row[prompt_field]))].setdefault(key, row)
    return list(splits[0].values()), list(splits[1].values())


def _row(where: str, line: str, prompt_field: str, fields: tuple[str, ...]) -> Mapping[str, Any]:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a {type(row).__name__}; an object is needed")
    row = cast("dict[str, Any]", row)
    for name in (prompt_field, *fields):
        if name not in row:
            raise ValueError(f"{where}: lacks the field {name!r}; it has {', '.join(row)}")
    prompt: Any = row[prompt_field]
    messages = cast("list[Any]", prompt) if isinstance(prompt, list) else []
    is_chat = bool(messages) and all(isinstance(m, dict) and {"role", "content"} <= {*m} for m in messages)
    if not is_chat and not (isinstance(prompt, str) and prompt):
        raise ValueError(f"{where}: its {prompt_field!r} is {prompt!r:.80}; text, or messages with role and content")
    return row
