"""Arithmetic that is too hard for a small model alone, with Python as a tool: an environment of several turns.

In each turn the model writes one line: either code to run or its answer. The prompt begins with a solved question,
because a small model continues a pattern better than it follows an instruction.
"""

import random
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, PositiveInt

from ownloop_sandbox import Sandbox, find_way, run_python
from rl.configuration import configuration
from rl.envs.procedural import eval_set, train_stream
from rl.protocols import Done, Observation, Reply
from rl.rollouts.guard import DEFAULT_TIME_LIMIT_S
from rl.types import Answer

_EXAMPLE = "Question: What is 27 times 45, minus 8?\nPython: print(27 * 45 - 8)\nOutput: 1207\nAnswer: 1207\n\n"


@configuration
class PythonArithmetic:
    """Compute a times b, plus or minus c. Reward 1 for the right answer, 0 for anything else."""

    num_digits: Annotated[int, Field(ge=1, le=9)] = 3
    """Digits of every number, between 1 and 9."""
    max_turns: PositiveInt = 3
    """Most lines that the model may write, at least 1."""
    time_limit_s: Annotated[float, Field(ge=0.1)] = 2.0
    """Most seconds that a line of code may run."""
    sandbox: Sandbox = "auto"
    """Where the model's code runs: `auto` takes what works on this host. `none` is no sandbox: the code may do all that
    the current user may do, and is limited in time, memory and output only."""

    @property
    def name(self) -> str:
        """See `rl.protocols.Env`."""
        return "arithmetic with Python"

    @property
    def stop(self) -> tuple[str, ...]:
        """A turn of the model is one line."""
        return ("\n",)

    @property
    def call_time_limit_s(self) -> float:
        """See `rl.protocols.Env`. The sandbox ends the code at its own limit, and needs time besides."""
        return DEFAULT_TIME_LIMIT_S + self.time_limit_s

    def train_problems(self, seed: int, start: int, count: int) -> list["Question"]:
        """See `rl.protocols.Env`. Raises ValueError if this host has no sandbox."""
        find_way(self.sandbox)
        return train_stream(self._problem, seed, start, count)

    def eval_problems(self, count: int) -> list["Question"]:
        """See `rl.protocols.Env`. Raises ValueError, before a run starts any process, if this host has no sandbox."""
        find_way(self.sandbox)
        return eval_set(self._problem, count)

    def _problem(self, number: int) -> "Question":
        rng = random.Random(number)
        low, high = 10 ** (self.num_digits - 1), 10**self.num_digits - 1
        a, b, c = (rng.randint(low, high) for _ in range(3))
        sign, word = rng.choice(((1, "plus"), (-1, "minus")))
        text = f"What is {a} times {b}, {word} {c}?"
        return Question(
            text=text,
            answer=a * b + sign * c,
            max_turns=self.max_turns,
            time_limit_s=self.time_limit_s,
            sandbox=self.sandbox,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question with its answer."""

    text: str
    answer: int
    max_turns: int
    time_limit_s: float
    sandbox: Sandbox

    @property
    def id(self) -> str:
        """The text of the question."""
        return self.text

    @property
    def prompt(self) -> str:
        """A solved question, then this question."""
        return f"{_EXAMPLE}Question: {self.text}\n"

    def start(self) -> "Attempt":
        """See `rl.protocols.Problem`."""
        return Attempt(self)


class Attempt:
    """One attempt at a question."""

    def __init__(self, question: Question) -> None:
        """Starts without a line."""
        self._question = question
        self._num_lines = 0
        self._num_runs = 0

    async def reply(self, completion: str) -> Reply:
        """Runs the code, scores the answer, or asks the model for a line of code. A line that is cut off is neither."""
        self._num_lines += 1
        answer = Answer.read(completion)
        kind, _, rest = ("", "", "") if answer.is_cut_off else answer.content.strip().partition(":")
        if kind == "Answer":
            return self._done(float(rest.strip().rstrip(".") == str(self._question.answer)))
        if self._num_lines == self._question.max_turns:
            return self._done(0.0)
        if kind != "Python":
            return Observation(messages="Write a line that begins with Python: or Answer:\n")
        self._num_runs += 1
        result = await run_python(
            rest.strip(),
            sandbox=self._question.sandbox,
            time_limit_s=self._question.time_limit_s,
            max_output_bytes=200,
        )
        return Observation(messages=f"Output: {result.output}\n")

    def _done(self, reward: float) -> Done:
        return Done(reward=reward, metrics={"lines": float(self._num_lines), "python_runs": float(self._num_runs)})
