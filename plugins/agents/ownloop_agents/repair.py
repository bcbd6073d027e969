"""Small repairs for a coding assistant: a file with a function that has one mistake, and calls that it does not see.

Any program that edits files can play them. Functions of held-out tasks are not in the training data.
"""

from ast import literal_eval
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from ownloop_agents.programs import AgentTask, Attempt, Calls, Program
from ownloop_sandbox.sandboxes import Work

_MISTAKES = (
    (" + ", " - "),
    (" < ", " > "),
    (" >= ", " > "),
    ("min(", "max("),
    ("[::-1]", "[1:]"),
    ("range(1, ", "range("),
)
# What the function should do, its text, and arguments that tell the right one from every wrong one, as Python's text.
_TRAINING = (
    ("the sum of two numbers", "def total(a, b):\n    return a + b\n", "(2, 3), (7, 1)"),
    ("the smaller of two numbers", "def smaller(a, b):\n    return a if a < b else b\n", "(2, 3), (7, 1)"),
    ("the text backwards", "def backwards(text):\n    return text[::-1]\n", "('abc',), ('no',)"),
    ("whether someone of this age may vote, from 18 on", "def may_vote(age):\n    return age >= 18\n", "(17,), (18,)"),
    ("the number, but at most 10", "def at_most_ten(n):\n    return min(n, 10)\n", "(3,), (30,)"),
    ("the product of the numbers from 1 to n", "def product(n):\n    result = 1\n    for i in range(1, n + 1):\n"
     "        result *= i\n    return result\n", "(3,), (5,)"),
)  # fmt: skip
_HELD_OUT = (
    ("the last word first, and so on", "def turned(words):\n    return words[::-1]\n", "([1, 2, 3],), ([4, 5],)"),
    ("the perimeter of a rectangle", "def perimeter(a, b):\n    return a + b + a + b\n", "(2, 3), (7, 1)"),
    ("whether a comes before b", "def before(a, b):\n    return a < b\n", "(2, 3), (7, 1)"),
    (
        "the price, but never above the limit",
        "def price(value, limit):\n    return min(value, limit)\n",
        "(3, 5), (9, 5)",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """The tasks, for a program. The reward is 1 if the function then returns what it should."""

    program: Program
    """The assistant. `{prompt}` in its arguments says what to do; its folder holds `work.py`."""
    name: str = "repair"
    stop: tuple[str, ...] = ()

    def train_problems(self, seed: int, start: int, count: int) -> list[AgentTask]:
        """See `AgentEnv`."""
        return [_task(_TRAINING, Random(f"repair/{seed}/{index}"), index) for index in range(start, start + count)]

    def eval_problems(self, count: int) -> list[AgentTask]:
        """See `AgentEnv`."""
        return [_task(_HELD_OUT, Random(f"repair/eval/{index}"), index) for index in range(count)]

    async def reward(self, task: AgentTask, work: Work, attempt: Attempt) -> float:
        """1 if the function returns what the right one does."""
        return await Calls("work.py", *task.answer)(task, work, attempt)


def _task(functions: Sequence[tuple[str, str, str]], random: Random, index: int) -> AgentTask:
    says, source, arguments = random.choice(functions)
    # a mistake that this function can have
    right, wrong = random.choice([pair for pair in _MISTAKES if pair[0] in source])
    name = source[len("def ") : source.index("(")]  # from its first line
    space: dict[str, Any] = {}
    exec(source, space)  # the right one, of this file
    cases = [(list(given), space[name](*given)) for given in literal_eval(f"[{arguments}]")]
    return AgentTask(
        id=f"{name}-{index}",
        prompt=f"work.py has a function {name} with a mistake. It should return {says}. Repair it.",
        files={"work.py": source.replace(right, wrong, 1)},  # one place, the first
        answer=(name, cases),
    )
