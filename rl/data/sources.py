"""Supervised examples and preference pairs: where they come from, the datums made of them, and the held-out loss.

A source is a JSONL file, or an environment that knows its answers. It has training and held-out items. The training
items are an endless stream for each seed; see `rl.data.rows`.
"""

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, get_args

import numpy as np

from rl.advantages import gather_scored
from rl.checks import check_known, prompt_fault, text_fault
from rl.configuration import AnyPath, configuration
from rl.data.rows import content_id, numpy_order, read_rows, spaced_alike, split, stream, without_held_out
from rl.images import images_of
from rl.protocols import Env, Problem, ProblemOptions, Prompt, Trainer, given
from rl.rollouts.evaluation import Measurement
from rl.rollouts.guard import Environment
from rl.rollouts.rendering import Renderer, prompt_text
from rl.system.timeline import report_progress
from rl.types import Datum

TrainOn = Literal["completion", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt and the completion that the model should learn."""

    id: str
    """The prompt's text. It decides whether the item is held out."""
    prompt: Prompt
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A prompt with a better and a worse answer."""

    id: str
    """The prompt's text. It decides whether the item is held out."""
    prompt: Prompt
    chosen: str
    rejected: str


Item = TypeVar("Item", Example, Preference)


class Examples(Protocol):
    """A source of supervised examples."""

    def train_examples(self, seed: int, start: int, count: int) -> Sequence[Example]:
        """Examples start to start + count - 1 of the endless training stream of this seed."""
        ...

    def eval_examples(self, count: int) -> Sequence[Example]:
        """The first `count` held-out examples, always the same. Fewer if there are fewer, but at least one."""
        ...


class Preferences(Protocol):
    """A source of preference pairs."""

    def train_preferences(self, seed: int, start: int, count: int) -> Sequence[Preference]:
        """Pairs start to start + count - 1 of the endless training stream of this seed."""
        ...

    def eval_preferences(self, count: int) -> Sequence[Preference]:
        """The first `count` held-out pairs, always the same. Fewer if there are fewer, but at least one."""
        ...


@configuration
class _OfEnv:
    env: Environment


@configuration
class _OfFile:
    path: AnyPath
    """The training items, shuffled again for every epoch."""
    eval_path: AnyPath | None = None
    """The held-out items, whose prompts are left out of training. None holds out a tenth of `path`: always the same
    lines, and all lines of a prompt."""


@configuration
class EnvExamples(_OfEnv):
    """An environment's problems with their right answers. Its methods raise ValueError for a problem without one."""

    def train_examples(self, seed: int, start: int, count: int) -> list[Example]:
        """See `Examples`."""
        return [self._example(problem) for problem in self.env.train_problems(seed, start, count)]

    def eval_examples(self, count: int) -> list[Example]:
        """See `Examples`."""
        return [self._example(problem) for problem in self.env.eval_problems(count)]

    def _example(self, problem: Problem) -> Example:
        return Example(id=problem.id, prompt=problem.prompt, completion=_answers(self.env, problem)[0])


@configuration
class EnvPreferences(_OfEnv):
    """An environment's problems, each with its right answer and one of its wrong answers.

    Its methods raise ValueError for a problem without both.
    """

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
                f"environment {self.env.name!r} knows no wrong answer to problem {problem.id!r}; preference pairs need "
                "problems with `wrong_answers`, or a JSONL file"
            )
        # Seeded by the id: a problem is always paired with the same wrong answer.
        rejected = random.Random(f"rejected/{problem.id}").choice(wrong)
        return Preference(id=problem.id, prompt=problem.prompt, chosen=answer, rejected=rejected)


@configuration
class JsonlExamples(_OfFile):
    """A file with one object per line: {"prompt": text or messages, "completion": text}. Other fields are ignored.

    The file is read at the first call. Its methods raise ValueError, naming file and line, for a line of another form
    and for an empty text.
    """

    def train_examples(self, seed: int, start: int, count: int) -> list[Example]:
        """See `Examples`."""
        return stream(_split(Example, self.path, self.eval_path)[0], numpy_order, seed, start, count)

    def eval_examples(self, count: int) -> list[Example]:
        """See `Examples`."""
        return _held_out(Example, self.path, self.eval_path)[:count]


@configuration
class JsonlPreferences(_OfFile):
    """A file of objects {"prompt": text or messages, "chosen": text, "rejected": text}; see `JsonlExamples`."""

    def train_preferences(self, seed: int, start: int, count: int) -> list[Preference]:
        """See `Preferences`."""
        return stream(_split(Preference, self.path, self.eval_path)[0], numpy_order, seed, start, count)

    def eval_preferences(self, count: int) -> list[Preference]:
        """See `Preferences`."""
        return _held_out(Preference, self.path, self.eval_path)[:count]


def text_to_datum(prompt_tokens: Sequence[int], completion_tokens: Sequence[int], train_on: TrainOn) -> Datum:
    """The sequence prompt + completion, shifted by one, with weight 1 on the positions to learn and 0 elsewhere.

    Legend: P prompt tokens, N completion tokens, T = P + N - 1. `train_on` "completion" scores the last N positions,
    "all" scores all. Raises ValueError for an empty prompt: nothing would predict the first token of the completion.
    """
    if len(prompt_tokens) == 0:
        raise ValueError("the prompt has no tokens; a first token has nothing to be predicted from")
    sequence = np.array([*prompt_tokens, *completion_tokens], dtype=np.int64)
    num_tokens = len(sequence) - 1
    scored = np.arange(num_tokens) >= (len(prompt_tokens) - 1 if train_on == "completion" else 0)
    return Datum(
        tokens=sequence[:-1],
        loss_inputs={"target_tokens": sequence[1:], "weights": scored.astype(np.float32)},
        images=images_of(prompt_tokens),
    )


def examples_to_data(
    renderer: Renderer, examples: Sequence[Example], *, train_on: TrainOn, max_tokens: int
) -> list[Datum]:
    """One datum per example, in order. Examples of more than `max_tokens` tokens are left out, not truncated.

    Raises ValueError for an unknown `train_on`.
    """
    check_known("train_on", train_on, get_args(TrainOn))
    encoded = [
        (renderer.encode(example.prompt), renderer.encode_completion(example.prompt, example.completion))
        for example in examples
    ]
    return [
        text_to_datum(prompt, completion, train_on)
        for prompt, completion in encoded
        if len(prompt) + len(completion) <= max_tokens
    ]


async def eval_loss(trainer: Trainer, batch: Sequence[Datum]) -> Measurement:
    """Cross-entropy per token of each datum, weighted by its number of tokens that count, each as 1."""
    report_progress("evaluating", 0, len(batch))
    output = await trainer.forward(batch)
    report_progress("evaluating", len(batch), len(batch))
    num_tokens = np.array([datum.num_loss_tokens for datum in batch], dtype=np.float64)
    sums = [float(logprobs.sum(dtype=np.float64)) for logprobs in gather_scored(batch, output.logprobs)]
    return Measurement(values=-np.array(sums) / num_tokens, weights=num_tokens)


@functools.lru_cache(maxsize=16)  # a loop asks for items at every step
def _read(kind: type[Any], path: Path) -> list[Any]:
    texts = [field.name for field in fields(kind) if field.name not in ("id", "prompt")]
    faults, same = {"prompt": prompt_fault, **dict.fromkeys(texts, text_fault)}, "'chosen' and 'rejected' are the same"
    rows = read_rows(path, faults, lambda row: same if len({row[name] for name in texts}) < len(texts) else "")
    return [kind(id=_id(row["prompt"]), **row) for row in rows]


def _id(prompt: Prompt) -> str:
    """The prompt's text; with images or calls, beside which many prompts may have the same text, also a hash."""
    text = prompt_text(prompt)
    if isinstance(prompt, str) or ("[image]" not in text and all(m.get("content") is not None for m in prompt)):
        return text
    return f"{text} {content_id(spaced_alike(prompt))}"


def _held_out(kind: type[Item], path: Path, eval_path: Path | None) -> list[Item]:
    return _split(kind, path, None)[1] if eval_path is None else _read(kind, eval_path)


def _split(kind: type[Item], path: Path, eval_path: Path | None) -> tuple[Sequence[Item], list[Item]]:
    """Training and held-out items. Raises ValueError if either is empty."""
    items = _read(kind, path)
    if eval_path is not None:
        held_out = _read(kind, eval_path)
        train_items = without_held_out(items, held_out, lambda item: item.id)
        if not train_items:
            raise ValueError(f"{path} has no prompt to train on that is not held out in eval_path {eval_path}")
        return train_items, held_out
    train_items, eval_items = split(items, lambda item: item.id)
    if not train_items or not eval_items:
        raise ValueError(
            f"{path} has too few prompts to hold out a tenth of them: {len(train_items)} lines would be left for "
            f"training and {len(eval_items)} would be held out; give held-out data in a file of its own (eval_path)"
        )
    return train_items, eval_items


def _answers(env: Env, problem: Problem) -> tuple[str, Sequence[str]]:
    """The right answer and the wrong ones."""
    own = given(ProblemOptions, problem)
    if own.answer is None:
        raise ValueError(
            f"environment {env.name!r} knows no answer to problem {problem.id!r}; supervised data need problems with "
            "an `answer`, or a JSONL file"
        )
    if own.tools:
        said = f"problem {problem.id!r} of environment {env.name!r} has tools, which supervised data do not show"
        raise ValueError(f"{said}; give the environment without them, or ToolEnv.show_tools='system'")
    return own.answer, own.wrong_answers
