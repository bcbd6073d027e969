"""Mixtures: which task each problem comes from, what its metrics say, tools and turns that pass through, and mistakes.

Covers: rl/envs/mixture.py, configs/mixture_smollm2_cpu.py
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from configs import mixture_smollm2_cpu
from rl.envs.check import check_env
from rl.envs.even_words import EvenWords
from rl.envs.guess_number import GuessNumber
from rl.envs.largest_number import LargestNumber
from rl.envs.mixture import Mixture, Progress, Ramp, Task, WhileUnsolved
from rl.protocols import Done, Episode, Observation, Problem
from rl.rollouts.evaluation import Evaluation
from rl.types import Completion, Group, Rollout, Turn

TWO, FOUR = LargestNumber(count=2), LargestNumber(count=4)


def _tasks(problems: Sequence[Problem]) -> Counter[str]:
    return Counter(problem.id.partition(":")[0] for problem in problems)


def _reward(problem: Problem, answer: str) -> Done:
    episode: Any = problem.start()
    reply = episode.reply(answer)
    assert isinstance(reply, Done)
    return reply


def test_tasks_come_by_their_weights() -> None:
    mixture = Mixture(two=Task(TWO, weight=3.0), four=Task(FOUR), never=Task(EvenWords(), weight=0.0))
    counts = _tasks(mixture.train_problems(0, 0, 4000))
    assert counts["never"] == 0
    assert counts["two"] / 4000 == pytest.approx(0.75, abs=0.03)


def test_a_stream_can_be_read_from_anywhere() -> None:
    mixture = Mixture(two=Task(TWO), four=Task(FOUR, weight=Ramp(((0, 0.0), (50, 2.0)))))
    whole = [problem.id for problem in mixture.train_problems(7, 0, 60)]
    assert [problem.id for problem in mixture.train_problems(7, 40, 20)] == whole[40:]
    assert [problem.id for problem in mixture.train_problems(8, 0, 60)] != whole
    assert len(set(whole)) > 50
    assert _tasks(mixture.train_problems(7, 0, 1)) == {"two": 1}


def test_a_ramp_is_straight_between_its_points() -> None:
    ramp = Ramp(((10, 1.0), (20, 3.0), (30, 0.0)))
    assert [ramp(Progress(n, 0.0)) for n in (0, 10, 15, 20, 25, 99)] == [1.0, 1.0, 2.0, 3.0, 1.5, 0.0]


def test_a_solved_task_becomes_rare() -> None:
    mixture = Mixture(two=Task(TWO, weight=WhileUnsolved(0.5, afterwards=0.0)), four=Task(FOUR, weight=1e-9))
    for problem in mixture.train_problems(0, 0, 60):
        assert problem.id.startswith("two")
        assert _reward(problem, str(max(int(word.strip(",?")) for word in problem.id.split()[-2:]))).reward == 1
    assert _tasks(mixture.train_problems(0, 60, 20)) == {"four": 20}
    unchanged = Mixture(two=Task(TWO, weight=WhileUnsolved(0.5)), four=Task(FOUR))
    for problem in unchanged.eval_problems(40):
        _reward(problem, "0")
    assert {*unchanged.pass_rates.values()} == {0.0}, "held-out answers do not count"


def test_metrics_say_which_task_a_reward_is_of() -> None:
    mixture = Mixture(two=Task(TWO), four=Task(FOUR))
    problems = mixture.eval_problems(5)
    assert _tasks(problems) == {"two": 3, "four": 2}
    assert _reward(problems[0], "no").metrics == {"reward_two": 0.0}
    assert _reward(problems[1], "no").metrics == {"reward_four": 0.0}


def test_an_evaluation_has_the_reward_of_each_task() -> None:
    completion = Completion(tokens=(1,), logprobs=(0.0,), versions=(0,), text="", finish_reason="stop")

    def group(name: str, *rewards: float) -> Group:
        turn = Turn(prompt_tokens=(1,), completion=completion)
        rollouts = tuple(Rollout(turns=(turn,), reward=each, metrics={f"reward_{name}": each}) for each in rewards)
        return Group(problem_id=name, prompt="", rollouts=rollouts)

    found = Evaluation(groups=(group("a", 1.0, 0.0), group("a", 1.0, 1.0), group("b", 0.0, 0.25))).intervals
    means = {name: interval.mean for name, interval in found.items()}
    assert (means["reward_a"], means["reward_b"]) == (0.75, 0.125)
    assert means["reward"] == pytest.approx((0.5 + 1 + 0.125) / 3)


class _Talks:
    """Several turns, asynchronous, with a tool."""

    name, stop, best_reward, call_time_limit_s = "talks", (), 2.0, 99.0
    id, prompt, tools = "talk", "say yes", ({"name": "look"},)

    def train_problems(self, seed: int, start: int, count: int) -> list[Problem]:
        return [self] * count

    def eval_problems(self, count: int) -> list[Problem]:
        return [self] * count

    async def start(self) -> Episode:
        return self

    async def reply(self, completion: str) -> Done | Observation:
        return Done(reward=2.0, metrics={"own": 1.0}) if completion == "yes" else Observation(messages="again")


def test_asynchronous_episodes_tools_and_limits_pass_through() -> None:
    mixture = Mixture(talks=Task(_Talks()), two=Task(TWO))
    assert (mixture.best_reward, mixture.call_time_limit_s) == (2.0, 99.0)
    problem: Any = mixture.eval_problems(1)[0]
    assert problem.tools == ({"name": "look"},)

    async def played() -> tuple[Any, Any]:
        episode = await problem.start()
        return await episode.reply("no"), await episode.reply("yes")

    first, last = asyncio.run(played())
    assert first == Observation(messages="again")
    assert last == Done(reward=2.0, metrics={"own": 1.0, "reward_talks": 2.0})


def test_a_mixture_is_an_environment_without_faults() -> None:
    assert check_env(Mixture(two=Task(TWO), words=Task(EvenWords()))) == []
    assert check_env(mixture_smollm2_cpu.recipe().env) == []


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="a Mixture has 1 tasks; it needs at least 2"):
        Mixture(two=Task(TWO))
    with pytest.raises(ValueError, match=r"Mixture.four.weight is -1; it must be at least 0"):
        Mixture(two=Task(TWO), four=Task(FOUR, weight=-1))
    penalised = type("Penalised", (LargestNumber,), {"best_reward": 0.0})()
    with pytest.raises(ValueError, match=r"Mixture.penalised: best_reward of .* is 0.0; it must be above 0"):
        Mixture(two=Task(TWO), penalised=Task(penalised))
    with pytest.raises(ValueError, match=r"problem 3 are \{'two': 0, 'four': 0\}; one must be above 0"):
        Mixture(two=Task(TWO, weight=0), four=Task(FOUR, weight=0)).train_problems(0, 3, 1)
    with pytest.raises(ValueError, match=r"problem 0 are \{'two': nan"):
        Mixture(two=Task(TWO, weight=float("nan")), four=Task(FOUR)).train_problems(0, 0, 1)
    with pytest.raises(ValueError, match=r"problem 0 are \{'two': inf.* and their sum finite"):
        Mixture(two=Task(TWO, weight=float("inf")), four=Task(FOUR)).train_problems(0, 0, 1)
    with pytest.raises(ValueError, match=r"Ramp.points is \(\(5, 1.0\), \(5, 2.0\)\); it needs .* rising numbers"):
        Ramp(((5, 1.0), (5, 2.0)))
    with pytest.raises(ValueError, match=r"end answers at .* must be the same for all"):
        Mixture(two=Task(TWO), guess=Task(GuessNumber()))
    assert "LargestNumber(count=2" in repr(mixture_smollm2_cpu.recipe().env)
