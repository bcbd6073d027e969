"""Prompts from a JSONL file, with a plain Python function as the reward.

    {"prompt": "What is 6 * 7?", "answer": "42"}          one line of train.jsonl

    def exact(prompt, completion, answer) -> float:       a function of the module rewards
        return float(completion.strip() == answer)

    JsonlReward(file="train.jsonl", reward="rewards:exact", fields=("answer",))

A tenth of the prompts is held out, chosen by their text (`rl.data.rows`).
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rl.checks import named_function, prompt_fault
from rl.configuration import AnyPath, Several, configuration
from rl.data.rows import content_id, no_fault, python_order, read_rows, spaced_alike, split, stream
from rl.protocols import Done, Prompt


@configuration
class JsonlReward:
    """Prompts from a file, rewards from a function `(prompt, completion, **fields) -> float`, which may be async."""

    file: AnyPath
    """One JSON object per line."""
    reward: str
    """`"module:function"`. It is called with the prompt, the completion and the row's `fields` as keyword arguments."""
    prompt_field: str = "prompt"
    """Name of the field with the prompt: text, or messages with role and content."""
    fields: Several[str] = ()
    """Names of the row's other fields that the function takes."""
    stop: Several[str] = ()
    """Strings that end an answer."""

    def __post_init__(self) -> None:
        """Reads the file. Raises ValueError for a bad row, naming file and line, and if the function is not found."""
        self._reward_function()
        _forget_if_changed(self.file)
        train_rows, eval_rows = self._split()
        if not train_rows or not eval_rows:
            raise ValueError(
                f"JsonlReward.file {self.file} has {len(train_rows)} training and {len(eval_rows)} held-out prompts; "
                "both splits need at least one (about a tenth is held out)"
            )

    @property
    def name(self) -> str:
        """The file's name without its extension."""
        return self.file.stem

    def train_problems(self, seed: int, start: int, count: int) -> list["JsonlProblem"]:
        """See `rl.protocols.Env`. Every epoch has every row once, in an order of its own."""
        rows, _ = self._split()
        return [self._problem(row) for row in stream(rows, python_order, seed, start, count)]

    def eval_problems(self, count: int) -> list["JsonlProblem"]:
        """The first held-out rows. Raises ValueError if there are fewer."""
        _, rows = self._split()
        if count > len(rows):
            raise ValueError(f"num_eval is {count}, but {self.file} has only {len(rows)} held-out prompts")
        return [self._problem(row) for row in rows[:count]]

    def _problem(self, row: Mapping[str, object]) -> "JsonlProblem":
        arguments = {name: row[name] for name in self.fields}
        prompt = cast("Prompt", row[self.prompt_field])
        return JsonlProblem(
            id=content_id([prompt, arguments]), prompt=prompt, score=self._reward_function(), row=arguments
        )

    def _reward_function(self) -> Callable[..., float | Awaitable[float]]:
        return named_function("JsonlReward.reward", self.reward)

    def _split(self) -> tuple[list[Mapping[str, object]], list[Mapping[str, object]]]:
        return _read(self.file, self.prompt_field, self.fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlProblem:
    """A row, with the function that scores answers to it."""

    id: str
    prompt: Prompt
    score: Callable[..., float | Awaitable[float]]
    row: Mapping[str, object]

    def start(self) -> "JsonlProblem":
        """Returns itself: a single-turn problem has no state."""
        return self

    def reply(self, completion: str) -> Done | Awaitable[Done]:
        """Scores the answer and ends the episode."""
        reward = self.score(self.prompt, completion, **self.row)
        return _awaited(reward) if inspect.isawaitable(reward) else Done(reward=reward)


async def _awaited(reward: Awaitable[float]) -> Done:
    return Done(reward=await reward)


def no_reward(prompt: Prompt, completion: str, **fields: object) -> float:
    """0 for any answer: the reward of an environment that a judge scores (`ownloop_tasks.judged`)."""
    del prompt, completion, fields
    return 0.0


_stamps: dict[Path, tuple[int, int] | None] = {}
"""Time of change in nanoseconds and size in bytes of each file when it was read."""


def _forget_if_changed(file: Path) -> None:
    """Has a changed file read anew; another configuration over the same file takes what was read."""
    stamp = (file.stat().st_mtime_ns, file.stat().st_size) if file.is_file() else None
    if _stamps.get(file) != stamp:
        _read.cache_clear()
    _stamps[file] = stamp


@functools.lru_cache(maxsize=8)  # a loop asks for problems at every step
def _read(
    file: Path, prompt_field: str, fields: tuple[str, ...]
) -> tuple[list[Mapping[str, object]], list[Mapping[str, object]]]:
    """Training and held-out rows without duplicates. Prompts that differ in white space only are on the same side."""
    rows = read_rows(file, {prompt_field: prompt_fault, **{name: no_fault for name in fields if name != prompt_field}})
    distinct: dict[str, Mapping[str, object]] = {}
    for row in rows:
        distinct.setdefault(content_id([row[prompt_field], {name: row[name] for name in fields}]), row)
    return split(distinct.values(), lambda row: content_id(spaced_alike(row[prompt_field])))
