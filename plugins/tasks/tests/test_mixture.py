"""Mixtures: which task each problem comes from, metrics, tools and turns that pass through, and mistakes."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from configs import mixture_grpo_smollm2_cpu
from ownloop_doctors.check_env import check_env
from ownloop_tasks.guess_number import GuessNumber
from ownloop_tasks.judged import Judge, JudgedEnv
from ownloop_tasks.mixture import Mixture, Progress, Ramp, Task, WhileUnsolved
from rl.data.sources import EnvExamples, EnvPreferences
from rl.envs.largest_number import LargestNumber
from rl.envs.procedural import TextProblem
from rl.protocols import Done, Episode, Observation, Problem
from rl.rollouts.evaluation import Evaluation, evaluate
from rl.tiny_tasks import EvenWords
from rl.types import Completion, Group, Rollout, SamplingParams, Turn
from tests.rl.fakes import ScriptedGenerator, WordRenderer

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


@pytest.mark.stranger("2.C5")
def test_a_mixture_in_a_mixture_draws_by_its_own_numbers() -> None:
    inner = Mixture(p=Task(TWO), q=Task(Mixture(p=Task(FOUR), q=Task(EvenWords()))))
    problems = Mixture(p=Task(inner), q=Task(TWO)).train_problems(0, 0, 4000)
    counts = Counter("".join(word for word in problem.id.split(": ") if word in "pq") for problem in problems)
    shares = {name: count / 4000 for name, count in counts.items()}
    assert shares == pytest.approx({"q": 1 / 2, "pp": 1 / 4, "pqp": 1 / 8, "pqq": 1 / 8}, abs=0.03)


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


async def test_asynchronous_episodes_tools_and_limits_pass_through() -> None:
    mixture = Mixture(talks=Task(_Talks()), two=Task(TWO))
    assert (mixture.best_reward, mixture.call_time_limit_s) == (2.0, 99.0)
    problem: Any = mixture.eval_problems(1)[0]
    assert problem.tools == ({"name": "look"},)

    episode = await problem.start()
    first, last = await episode.reply("no"), await episode.reply("yes")
    assert first == Observation(messages="again")
    assert last == Done(reward=2.0, metrics={"own": 1.0, "reward_talks": 2.0})


def test_a_mixture_is_an_environment_without_faults() -> None:
    assert check_env(Mixture(two=Task(TWO), words=Task(EvenWords()))) == []
    assert check_env(mixture_grpo_smollm2_cpu.recipe().env) == []


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="a Mixture has 1 tasks; it needs at least 2"):
        Mixture(two=Task(TWO))
    with pytest.raises(ValueError, match=r"Task.weight is -1"):
        Task(FOUR, weight=-1)
    with pytest.raises(ValueError, match=r"Mixture.four is LargestNumber.*; it must be a Task"):
        Mixture(two=Task(TWO), four=FOUR)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"has a task 'high'; reward_high is another metric of the run"):
        Mixture(two=Task(TWO), high=Task(FOUR))
    with pytest.raises(ValueError, match=r"has a task 'two_low'; reward_two_low is another metric of the run"):
        Mixture(two=Task(TWO), two_low=Task(FOUR))
    assert Mixture(two_low=Task(TWO), two_high=Task(FOUR)).eval_problems(2)
    penalised = type("Penalised", (LargestNumber,), {"best_reward": 0.0})()
    with pytest.raises(ValueError, match=r"Mixture.penalised: best_reward of .* is 0.0; it must be above 0"):
        Mixture(two=Task(TWO), penalised=Task(penalised))
    with pytest.raises(ValueError, match="the weights of a Mixture are all 0; one must be above 0"):
        Mixture(two=Task(TWO, weight=0), four=Task(FOUR, weight=0.0))
    for weight in (0.0, float("nan"), float("inf")):
        varying = Mixture(two=Task(TWO, weight=lambda _, weight=weight: weight), four=Task(FOUR, weight=0))
        with pytest.raises(ValueError, match=rf"problem 3 are \{{'two': {weight}, .* one must be above 0, none below"):
            varying.train_problems(0, 3, 1)
    with pytest.raises(ValueError, match=r"Ramp.points is \(\(5, 1.0\), \(5, 2.0\)\); it needs .* rising numbers"):
        Ramp(((5, 1.0), (5, 2.0)))
    with pytest.raises(ValueError, match=r"end answers at .* must be the same for all"):
        Mixture(two=Task(TWO), guess=Task(GuessNumber()))
    assert "LargestNumber(count=2" in repr(mixture_grpo_smollm2_cpu.recipe().env)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Task(TWO, weight=float("nan")), r"Task.weight is nan"),
        (lambda: Task(TWO, weight=float("inf")), r"Task.weight is inf"),
        (lambda: Task(TWO, weight=cast("Any", "1")), r"Task.weight is '1'"),
        (lambda: Task(cast("Any", None)), r"env is a NoneType"),
        (lambda: Ramp(((0, 1.0), (5, -0.1))), r"Ramp.points\[1\]\[1\] is -0.1"),
        (lambda: Ramp(((0, float("nan")),)), r"Ramp.points\[0\]\[1\] is nan"),
        (lambda: WhileUnsolved(0.5, afterwards=-1), r"WhileUnsolved.afterwards is -1"),
        (lambda: WhileUnsolved(float("nan")), r"WhileUnsolved.pass_rate is nan"),
    ],
)
def test_a_weight_that_cannot_be_is_refused_at_once(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


class _Few:
    """Has few held-out problems, each with an answer after "=" and a reward of 10 for it."""

    name, stop, best_reward = "few", (), 10.0

    def __init__(self, size: int, *, says_so: bool = True) -> None:
        self._size, self._says_so = size, says_so

    def train_problems(self, seed: int, start: int, count: int) -> list[Problem]:
        return [self._problem(start + i) for i in range(count)]

    def eval_problems(self, count: int) -> list[Problem]:
        if count > self._size and self._says_so:
            raise ValueError(f"num_eval is {count}, and there are {self._size}")
        return [self._problem(i) for i in range(min(count, self._size))]

    def _problem(self, number: int) -> Problem:
        score = lambda text: 10.0 * (text.rpartition("=")[2] == "7")  # noqa: E731
        return _Last(id=str(number), prompt="3 + 4", score=score, answer="7", wrong_answers=("8",))


class _Last(TextProblem):
    def answer_of(self, completion: str) -> str:
        return completion.rpartition("=")[2]


def test_no_task_is_asked_for_more_held_out_problems_than_count() -> None:
    mixture = Mixture(first=Task(TWO), few=Task(_Few(2)))
    assert _tasks(mixture.eval_problems(5)) == {"first": 3, "few": 2}
    assert [each.id for each in mixture.eval_problems(3)] == [each.id for each in mixture.eval_problems(5)[:3]]
    assert mixture.eval_problems(0) == []
    with pytest.raises(ValueError, match=r"Mixture.few, of which 3 of 6 held-out problems are: num_eval is 3"):
        mixture.eval_problems(6)
    with pytest.raises(ValueError, match=r"Mixture.few has 2 held-out problems; it needs 3 of 6"):
        Mixture(first=Task(TWO), few=Task(_Few(2, says_so=False))).eval_problems(6)


def test_each_problem_is_solved_by_its_own_tasks_best_reward() -> None:
    mixture = Mixture(few=Task(_Few(9)), two=Task(TWO))
    problems: list[Any] = [*mixture.eval_problems(2)]
    renderer: Any = WordRenderer()
    few = renderer.encode_problem(problems[0])

    def said(prompt: tuple[int, ...], sample: int, _: int | None) -> str:
        return ["x=7", "y=8", "z=7", "7=9"][sample] if prompt == few else problems[1].answer

    sampling, best = SamplingParams(max_tokens=9), mixture.best_reward
    found = asyncio.run(evaluate(ScriptedGenerator(said), renderer, problems, sampling, 4, best_reward=best))
    assert (best, found.rewards.tolist()) == (10.0, [5.0, 1.0])
    assert found.pass_at(1).mean == pytest.approx((0.5 + 1) / 2)  # 2 of 4 and 4 of 4 are right
    assert found.majorities == (10.0, 1.0)  # 7 was said twice, in different words


def test_answers_are_known_through_environments_around_others() -> None:
    mixture = Mixture(few=Task(_Few(9)), more=Task(_Few(9)))
    judged = JudgedEnv(env=mixture, judge=Judge(base_url="http://127.0.0.1:1/v1", model="m"))
    (problem,) = judged.train_problems(0, 0, 1)
    assert (problem.answer, problem.wrong_answers, problem.answer_of("so x=3")) == ("7", ("8",), "3")
    assert EnvExamples(env=mixture).eval_examples(1)[0].completion == "7"
    assert EnvPreferences(env=judged).train_preferences(0, 0, 1)[0].rejected == "8"
    (unknown,) = Mixture(talks=Task(_Talks()), words=Task(EvenWords())).eval_problems(1)
    assert (unknown.answer, unknown.wrong_answers, unknown.answer_of(" a ")) == (None, (), "a")  # pyright: ignore[reportAttributeAccessIssue]
