"""Rewards by a judge behind OpenAI's API. The server is real, and faulty; see test_serving.py for a real vLLM."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ownloop_tasks.guess_number import GuessNumber
from ownloop_tasks.judged import Judge, JudgedEnv, score_of
from plugins.tasks.tests.faulty_server import Behaviour, FaultyServer, faulty_server
from rl.protocols import Observation
from rl.rollouts.episodes import rollout_groups
from rl.tiny_tasks import EvenWords
from rl.types import Group, SamplingParams
from tests.rl.fakes import ScriptedGenerator, WordRenderer
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.seconds


def _groups(
    env: Any,
    answer: Callable[[Any, int, Any], str],
    count: int = 1,
    samples: int = 2,
    max_model_len: int | None = None,
) -> list[Group]:
    renderer: Any = WordRenderer(max_model_len)
    problems = env.train_problems(0, 0, count)
    rollouts = rollout_groups(
        ScriptedGenerator(answer), renderer, problems, SamplingParams(max_tokens=4), samples, time_limit_s=60
    )
    return asyncio.run(rollouts)


def _judged(behave: Callable[[str, int], Behaviour], **options: Any) -> tuple[Group, FaultyServer]:
    """Two rollouts, which answer "good" and "bad"."""
    with faulty_server(behave) as server:
        judge = Judge(base_url=server.url, model="m", template="{prompt} A: {answer}", **options)
        (group,) = _groups(JudgedEnv(env=EvenWords(), judge=judge), lambda prompt, i, seed: ["good", "bad"][i])
    return group, server


def test_the_scores_of_the_judge_are_the_rewards() -> None:
    group, server = _judged(lambda question, attempt: "Score: 8" if question.endswith("good") else "I say 2.5, no: 1")
    assert group.rewards.tolist() == [0.8, 0.1]
    costs = {"judge_prompt_tokens": 11, "judge_completion_tokens": 3, "judge_retries": 0, "judge_failures": 0}
    assert [dict(r.metrics) for r in group.rollouts] == [{"own_reward": 0, **costs}] * 2
    assert all(r["temperature"] == 0 and r["max_tokens"] == 16 and r["model"] == "m" for r in server.requests)


@pytest.mark.stranger("C8")
@pytest.mark.parametrize(
    "said",
    [
        "7/10",
        "Score: 7 / 10",
        "I rate it 7 out of 10.",
        "7.0/10.0",
        "Not 3: 7",
        "7",
        "7 on a scale from 0 to 10",
        "7.0 (0-10)",
        "7, between 0.0 and 10.0",
        "7 (0 is useless, 10 is excellent)",
        "7 where 10 = best",
        "<think>Part 2 deserves a 9.</think> 7",
    ],
)
def test_the_end_of_the_scale_is_not_the_score(said: str) -> None:
    group, _ = _judged(lambda question, attempt: said)
    assert group.rewards.tolist() == [0.7, 0.7]


@pytest.mark.stranger("2.D8")
@pytest.mark.parametrize(
    ("said", "score", "scale"),
    [
        ("7,5", 7.5, (0, 10)),
        ("7.5 / 10,0", 7.5, (0, 10)),
        ("7/10. The answer has 2 errors.", 7, (0, 10)),
        ("The answer has 2 errors, so 7 of 10 for all 3 parts.", 7, (0, 10)),
        ("**7** out of **10**, with 2 errors", 7, (0, 10)),
        ("Score: 7. The answer has 2 errors.", 7, (0, 10)),
        ("The rating is 7, for 2 errors.", 7, (0, 10)),
        ("7\n\nThe answer has 2 errors.", 7, (0, 10)),
        ("7. The answer has 2 errors.", 7, (0, 10)),
        ("2 errors and 3 omissions: 7", 7, (0, 10)),
        ("1. Facts: good.\n2. Style: fair, in all 7", 7, (0, 10)),
        ("\u22123", -3, (-10, 10)),
        ("Score: \u20133.5", -3.5, (-10, 10)),
        ("\uff0d3 of 10", -3, (-10, 10)),
        ("7 (good; 2 errors)", 7, (0, 10)),
        ("**7** because it has 2 errors", 7, (0, 10)),
        ("3/4 of the facts are right: 7", 7, (0, 10)),
        (".5", 0.5, (0, 10)),
        ("Score: .5", 0.5, (0, 1)),
        ("Let me see...7", 7, (0, 10)),
        ("-.5 of 1", -0.5, (-1, 1)),
        ("Score [0,10]: 7", 7, (0, 10)),
        ("0,1", 0.1, (0, 1)),
        ("1,250", 1250, (0, 2000)),
        ("1,25", 1.25, (0, 2000)),
    ],
)
def test_the_number_of_the_judge_is_read_as_it_is_meant(said: str, score: float, scale: tuple[float, float]) -> None:
    low, high = scale
    judge = Judge(base_url="http://127.0.0.1/v1", model="m", lowest=low, highest=high)
    assert score_of(judge, said) == pytest.approx((score - low) / (high - low))


@pytest.mark.stranger("2.D8")
@pytest.mark.parametrize("said", ["7,8,9", "v1.2.3", "no", "-7", "3/5", "Score: 3.5 / 5", "4 out of 5 facts"])
def test_what_is_no_score_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match=r"its (answer|score)"):
        score_of(Judge(base_url="http://127.0.0.1/v1", model="m"), said)


@pytest.mark.stranger("2.B8")
@pytest.mark.parametrize("reason", ["content_filter", "tool_calls", "abort", "error", "length"])
def test_half_a_sentence_of_a_judge_is_no_score(reason: str) -> None:
    group, _ = _judged(lambda question, attempt: (reason, "7 of the facts are") if question.endswith("bad") else "6")
    assert group.rewards.tolist() == [0.6]
    assert ("was cut off" if reason == "length" else repr(reason)) in group.failures[0]


@pytest.mark.stranger("C8")
def test_an_end_of_the_scale_may_be_the_score() -> None:
    group, _ = _judged(lambda question, attempt: "10 is my score" if question.endswith("good") else "0")
    assert group.rewards.tolist() == [1.0, 0.0]


def test_it_reads_the_whole_conversation() -> None:
    seen: list[str] = []

    def behave(question: str, attempt: int) -> str:
        seen.append(question)
        return "10"

    with faulty_server(behave) as server:
        judge = Judge(base_url=server.url, model="m", template="Q:{prompt} A:{answer} {lowest}-{highest}")
        env = JudgedEnv(env=GuessNumber(max_turns=2), judge=judge)
        (group,) = _groups(env, lambda prompt, i, seed: "{prompt}", samples=1)
    assert [len(r.turns) for r in group.rollouts] == [2]
    assert seen[0].endswith("A:{prompt}\nSay a number.\nGuess: \n{prompt} 0-10")
    assert group.rollouts[0].metrics["guesses"] == 2  # the environment's own


class Endless:
    """Asks for another turn for ever, and gives points on a scale of its own."""

    name, stop, id, prompt = "endless", (), "endless", "Go on."

    def train_problems(self, seed: int, start: int, count: int) -> list[Any]:
        return [self] * count

    def eval_problems(self, count: int) -> list[Any]:
        return [self] * count

    def start(self) -> "Endless":
        return self

    def reply(self, completion: str) -> Observation:
        return Observation(messages="And then?", reward=250.0)


@pytest.mark.parametrize(("failure_reward", "reward"), [(None, 0.0), (0.25, 0.25)])
def test_an_episode_out_of_context_is_on_the_judges_scale(failure_reward: float | None, reward: float) -> None:
    judge = Judge(base_url="http://127.0.0.1:1/v1", model="never asked", failure_reward=failure_reward)
    (group,) = _groups(JudgedEnv(env=Endless(), judge=judge), lambda prompt, i, seed: "on", max_model_len=12)
    assert [(rollout.out_of_context, rollout.reward) for rollout in group.rollouts] == [(True, reward)] * 2


@pytest.mark.parametrize("trouble", [429, 503])
def test_trouble_that_passes_costs_retries_only(trouble: int) -> None:
    group, server = _judged(lambda question, attempt: trouble if attempt == 1 else "7")
    assert group.rewards.tolist() == [0.7, 0.7]
    assert [r.metrics["judge_retries"] for r in group.rollouts] == [1, 1]
    assert set(server.attempts.values()) == {2}


def test_a_request_without_an_answer_is_made_again() -> None:
    group, _ = _judged(lambda question, attempt: -1.0 if attempt == 1 else "7", request_timeout_s=2.0)
    assert group.rewards.tolist() == [0.7, 0.7]
    assert all(r.metrics["judge_retries"] >= 1 for r in group.rollouts)  # more, if this machine pauses


def test_a_judge_that_is_silent_is_given_up() -> None:
    left_out, _ = _judged(lambda question, attempt: -1.0, time_limit_s=0.5)
    assert ["the judge 'm' failed: it took too long" in failure for failure in left_out.failures] == [True, True]
    chosen, _ = _judged(lambda question, attempt: -1.0, time_limit_s=0.5, failure_reward=0.25)
    assert chosen.rewards.tolist() == [0.25, 0.25]
    assert [r.metrics["judge_failures"] for r in chosen.rollouts] == [1, 1]


@pytest.mark.stranger("C8")
@pytest.mark.parametrize(
    ("behaviour", "options", "message"),
    [
        ("what a lovely day", {}, "its answer 'what a lovely day' holds no score"),
        ("The question has 3 parts; the answer to part 1...", {}, "was cut off; raise max_tokens in Judge.options"),
        ("11", {}, "its score 11 is not between 0 and 10"),
        ("7", {"score_pattern": r"Score: (\d)"}, "its answer '7' holds no score"),
        (429, {"max_retries": 2}, "429"),
        (404, {}, "404"),
    ],
)
def test_a_judge_that_fails_costs_the_rollout_or_has_its_reward(
    behaviour: str | int, options: dict[str, Any], message: str
) -> None:
    def behave(question: str, attempt: int) -> str | int:
        return behaviour if question.endswith("bad") else "Score: 6" if "score_pattern" in options else "6"

    left_out, server = _judged(behave, **options)
    assert left_out.rewards.tolist() == [0.6]
    assert len(left_out.failures) == 1
    assert "the judge 'm' failed: " in left_out.failures[0]
    assert message in left_out.failures[0]
    attempts = {question: count for question, count in server.attempts.items() if question.endswith("bad")}
    assert list(attempts.values()) == [1 + options.get("max_retries", 0)]

    chosen, _ = _judged(behave, failure_reward=0.25, **options)
    assert chosen.rewards.tolist() == [0.6, 0.25]
    assert [r.metrics["judge_failures"] for r in chosen.rollouts] == [0, 1]


def test_no_more_requests_than_allowed_run_at_a_time() -> None:
    three_run = threading.Barrier(3)

    def slowly(question: str, attempt: int) -> str:
        three_run.wait(LIMIT_S)
        return "5"

    with faulty_server(slowly) as server:
        judge = Judge(base_url=server.url, model="m", max_concurrent=3, time_limit_s=50)
        groups = _groups(JudgedEnv(env=EvenWords(), judge=judge), lambda prompt, i, seed: f"{i}", count=4, samples=6)
    assert all(group.rewards.tolist() == [0.5] * 6 for group in groups)
    assert server.most_running == 3


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_server(lambda question, attempt: "5") as server:
        judge = Judge(base_url=server.url, model="m", api_key_variable="JUDGE_KEY")
        env = JudgedEnv(env=EvenWords(), judge=judge)
        with pytest.raises(ValueError, match="api_key_variable is 'JUDGE_KEY', and no such environment variable"):
            env.eval_problems(1)
        monkeypatch.setenv("JUDGE_KEY", "secret")
        assert len(env.eval_problems(1)) == 1
        _groups(env, lambda prompt, i, seed: "1")
    assert server.authorization == "Bearer secret"
    assert "secret" not in repr(env)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "{prompt}"}, r"template is '\{prompt\}'"),
        ({"lowest": 10}, "Judge.highest is 10.0; it must be above Judge.lowest, 10"),
        ({"score_pattern": "("}, r"Judge.score_pattern is '\('"),
        ({"max_concurrent": 0}, "Judge.max_concurrent is 0"),
        ({"time_limit_s": 0}, "Judge.time_limit_s is 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Judge(base_url="http://127.0.0.1:1/v1", model="m", **options)
