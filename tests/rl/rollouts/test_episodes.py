import asyncio
import inspect
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.runs.folder import RunFolder
from rl.advantages import ADVANTAGES, group_mean
from rl.data.batching import validate_batch
from rl.data.packing import pack_row
from rl.envs.jsonl import JsonlReward
from rl.envs.procedural import TextProblem
from rl.protocols import Problem
from rl.rollouts.episodes import (
    group_to_data,
    rollout_group,
    rollout_groups,
    rollout_to_datum,
    with_inputs,
    with_tokens,
)
from rl.rollouts.rendering import Renderer
from rl.sampling import KeptSets, Routes
from rl.types import Group, Rollout, SamplingParams, Turn
from tests.rl.fakes import ScriptedGenerator, WordRenderer, completion, single_turn
from tests.rl.recordings import recorded_rows

RENDERER = cast(Renderer, WordRenderer())


def _problem(text: str, right: str = "yes") -> TextProblem:
    return TextProblem(id=text, prompt=text, score=lambda answer: float(answer == right))


def _group(*rewards: float) -> Group:
    rollouts = tuple(single_turn((7, 8, 9), completion("ab"), reward=r) for r in rewards)
    return Group(problem_id="p", prompt="p", rollouts=rollouts)


def _roll_out(problem: Problem, answer: str, num_samples: int = 1, **options: Any) -> Group:
    generator = ScriptedGenerator(lambda prompt, i, seed: answer)
    return asyncio.run(
        rollout_group(generator, RENDERER, problem, SamplingParams(max_tokens=4), num_samples, **options)
    )


def test_groups_keep_the_order_of_the_problems() -> None:
    generator = ScriptedGenerator(lambda prompt, i, seed: f"{prompt[0]}-{i}-{seed}")
    problems = [_problem("x" * n) for n in range(1, 9)]
    groups = asyncio.run(rollout_groups(generator, RENDERER, problems, SamplingParams(max_tokens=4, seed=100), 3))
    assert [group.problem_id for group in groups] == [p.id for p in problems]
    assert [[rollout.text for rollout in group.rollouts] for group in groups[:2]] == [
        ["1-0-100", "1-1-100", "1-2-100"],
        ["2-0-103", "2-1-103", "2-2-103"],
    ]


def test_a_failing_generator_fails_the_step_with_its_own_error() -> None:
    def answer(prompt: tuple[int, ...], i: int, seed: int | None) -> str:
        if prompt[0] == 3:
            raise RuntimeError("lost the mesh")
        return "yes"

    problems = [_problem("x" * n) for n in range(1, 9)]
    with pytest.raises(RuntimeError, match="lost the mesh"):
        asyncio.run(rollout_groups(ScriptedGenerator(answer), RENDERER, problems, SamplingParams(max_tokens=4), 1))


def test_rewards_are_the_problems_own() -> None:
    generator = ScriptedGenerator(lambda prompt, i, seed: "yes" if i == 1 else "no")
    group = asyncio.run(rollout_group(generator, RENDERER, _problem("q"), SamplingParams(max_tokens=4), 3))
    assert group.rewards.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("reward", "shown"),
    [
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (1e39, r"1e\+39"),  # infinite as soon as it is an advantage, which is float32
        (10**400, "10+"),
        (None, "None"),
        ("1.0", "'1.0'"),
        (np.array([1.0, 2.0]), "array"),
    ],
)
def test_a_reward_that_is_no_number_costs_the_rollout(reward: Any, shown: str) -> None:
    group = _roll_out(TextProblem(id="broken", prompt="q", score=lambda answer: reward), "a", 2)
    assert group.rollouts == ()
    assert len(group.failures) == 2
    assert re.search(f"'broken': its reward is {shown}", group.failures[0])


def broken_reward(answer: str) -> float:
    raise RuntimeError(f"cannot score {answer!r}")


async def broken_later(answer: str) -> float:
    return broken_reward(answer)


def ends_the_program(answer: str) -> float:
    sys.exit(f"cannot score {answer!r}")


@pytest.mark.stranger("2.F1")
@pytest.mark.parametrize(
    ("score", "functions"),
    [
        (broken_reward, ["broken_reward"]),
        (broken_later, ["broken_later", "broken_reward"]),
        (ends_the_program, ["ends_the_program"]),
    ],
)
def test_a_failure_says_where_the_users_code_raised(score: Any, functions: list[str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(f'{{"prompt": "q{i}"}}' for i in range(40)))
    env = JsonlReward(file=rows, reward="rl.envs.jsonl:no_reward")
    problem = replace(env.train_problems(0, 0, 1)[0], score=lambda prompt, answer: score(answer))
    (failure,) = _roll_out(problem, "a", 1).failures
    sentence, *frames = failure.split("\n")
    assert sentence.endswith("cannot score 'a'")
    assert [frame.rpartition(" in ")[2] for frame in frames][-len(functions) :] == functions
    line = inspect.getsourcelines(globals()[functions[-1]])[1] + 1
    assert f"{__file__}, line {line}, in" in frames[-1]
    assert "guard.py" not in failure


@pytest.mark.parametrize("reward", [-3, True, np.float32(0.5), np.bool_(True), 1e30])
def test_any_finite_number_is_a_reward(reward: Any) -> None:
    group = _roll_out(TextProblem(id="p", prompt="q", score=lambda answer: reward), "a")
    assert group.rewards.tolist() == [float(reward)]
    assert type(group.rollouts[0].reward) is float


def test_any_sampled_text_is_scored_and_recorded(tmp_path: Path) -> None:
    texts = ["", "naïve ☃", "\u2028", "a\ud800b", "\x00", "x" * 10_000]
    seen: list[str] = []
    problem = TextProblem(id="p", prompt="q", score=lambda answer: seen.append(answer) or float(len(answer)))
    generator = ScriptedGenerator(lambda prompt, i, seed: texts[i])
    group = asyncio.run(rollout_group(generator, RENDERER, problem, SamplingParams(max_tokens=4), len(texts)))
    assert sorted(seen) == sorted(texts)
    folder = RunFolder(tmp_path / "run", {})
    folder.log_rollouts(1, [group])
    folder.flush()
    readable = [text.replace("\ud800", "\\ud800") for text in texts]  # UTF-8 has no half of a surrogate pair
    assert [row["turns"][0]["text"] for row in recorded_rows(folder.path)] == readable


def test_a_prompt_without_room_in_the_context_costs_its_group() -> None:
    renderer = cast(Renderer, WordRenderer(max_model_len=6))
    generator = ScriptedGenerator(lambda prompt, i, seed: "yes")
    problems = [_problem("two words"), _problem("three of them")]
    first, second = asyncio.run(rollout_groups(generator, renderer, problems, SamplingParams(max_tokens=4), 2))
    assert first.rewards.tolist() == [1, 1]
    assert "prompt of 3 tokens leaves no room for max_tokens 4 in a context of 6" in second.failures[1]


def test_a_datum_scores_a_token_where_it_is_predicted() -> None:
    rollout = single_turn((7, 8, 9), completion("ab"), reward=1.0)
    datum = rollout_to_datum(rollout, advantage=-0.5)
    assert datum.tokens.tolist() == [7, 8, 9, ord("a")]
    inputs: Any = {name: array.tolist() for name, array in datum.loss_inputs.items()}
    assert inputs == {
        "target_tokens": [8, 9, ord("a"), ord("b")],
        "weights": [0, 0, 1, 1],
        "logprobs": [0, 0, -1, -1],
        "advantages": [0, 0, -0.5, -0.5],
    }
    assert datum.num_loss_tokens == 2


@pytest.mark.stranger("B4")
@pytest.mark.parametrize("changed", [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}])
def test_rollouts_of_another_distribution_are_not_trained_on(changed: dict[str, Any]) -> None:
    def sampled(**fields: Any) -> Group:
        generator = ScriptedGenerator(lambda prompt, i, seed: "yes" if i else "no")
        problem = TextProblem(id="q", prompt="q", score=lambda answer: float(answer == "yes"))
        return asyncio.run(rollout_group(generator, RENDERER, problem, SamplingParams(max_tokens=4, **fields), 2))

    assert len(group_to_data(sampled(), group_mean)) == 2
    message = "training rollouts need at least" if "temperature" in changed else "the completions have no `kept` tokens"
    with pytest.raises(ValueError, match=message):
        group_to_data(sampled(**changed), group_mean)


def test_an_advantage_may_ask_for_the_lengths() -> None:
    data = group_to_data(_group(1.0, 0.0), lambda rewards, lengths: rewards - lengths / 10)
    lengths = [rollout.num_sampled_tokens for rollout in _group(1.0, 0.0).rollouts]
    found = [datum.loss_inputs["advantages"][datum.counted][0] for datum in data]
    assert found == pytest.approx([1 - lengths[0] / 10, -lengths[1] / 10])


def test_a_datum_has_the_temperature_of_its_rollout() -> None:
    first, second = (Turn(prompt_tokens=(7,), completion=replace(completion("a"), temperature=t)) for t in (0.6, 0.8))
    assert rollout_to_datum(Rollout(turns=(first, first), reward=1.0), 1.0).temperature == 0.6
    with pytest.raises(ValueError, match=r"turns were sampled at temperatures \[0.6, 0.8\]; a datum has one"):
        rollout_to_datum(Rollout(turns=(first, second), reward=1.0), 1.0)


def test_a_datum_has_the_kept_words_of_every_sampled_token() -> None:
    sampled, more = replace(completion("ab"), kept=KeptSets.of([[90, 97], [98]])), completion("c")
    turns = [Turn(prompt_tokens=(7, 8), completion=sampled), Turn(prompt_tokens=(9,), completion=more)]
    datum = rollout_to_datum(Rollout(turns=tuple(turns), reward=1.0), 1.0)
    assert datum.kept == KeptSets.of([[], [90, 97], [98], [], []])
    validate_batch([datum], vocab_size=128, max_seq_len=16)


def test_a_datum_has_the_experts_of_every_token_but_the_last() -> None:
    """A later turn's call computes the last token of the turn before, and has the experts of all tokens before."""
    experts = np.arange(6, dtype=np.uint8).reshape(6, 1, 1)
    first = replace(completion("ab"), routes=Routes(experts[:2], experts[2:3]))
    second = replace(completion("cd"), routes=Routes(experts[[9 % 6, 8 % 6, 1, 3, 4]], experts[5:]))
    turns = Turn(prompt_tokens=(7, 8), completion=first), Turn(prompt_tokens=(9,), completion=second)
    datum = rollout_to_datum(Rollout(turns=turns, reward=1.0), 1.0)
    assert datum.routes is not None
    assert datum.routes[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    validate_batch([datum], vocab_size=128, max_seq_len=16, experts=(1, 1, 6))
    without = rollout_to_datum(
        Rollout(turns=(turns[0], replace(turns[1], completion=completion("cd"))), reward=1.0), 1.0
    )
    assert without.routes is None


def test_a_group_without_signal_trains_nothing() -> None:
    assert group_to_data(_group(0.3, 0.3), group_mean) == []
    data = group_to_data(_group(1.0, 0.0), group_mean)
    assert [float(np.max(d.loss_inputs["advantages"])) for d in data] == [0.5, 0.0]


@given(st.integers(1, 5), st.integers(0, 5), st.floats(-1e30, 1e30))
@settings(deadline=None)
def test_a_datum_of_any_rollout_is_valid(prompt: int, num_tokens: int, advantage: float) -> None:
    tokens = tuple(range(10, 10 + prompt))
    rollout = single_turn(tokens, completion("abcde"[:num_tokens]), reward=1.0)
    datum = rollout_to_datum(rollout, advantage)
    validate_batch([datum], required_inputs=("logprobs", "advantages"), vocab_size=128, max_seq_len=16)
    assert datum.num_loss_tokens == num_tokens
    assert (
        datum.tokens.tolist() == [*tokens, *rollout.turns[0].completion.tokens][: max(prompt + num_tokens - 1, prompt)]
    )
    scored = datum.weights != 0
    assert datum.loss_inputs["target_tokens"][scored].tolist() == list(rollout.turns[0].completion.tokens)
    assert datum.loss_inputs["advantages"][scored].tolist() == [np.float32(advantage)] * num_tokens
    assert not datum.loss_inputs["advantages"][~scored].any()
    row = pack_row([datum, datum], share_prefixes=True)
    assert (len(row.tokens), len(row.scored), len(row.pair_index)) == (len(datum.tokens), num_tokens, 2 * num_tokens)


def test_advantages_may_differ_from_token_to_token() -> None:
    rollout = single_turn((7, 8), completion("abc"), reward=1.0)
    datum = rollout_to_datum(rollout, np.array([0.5, -1.0, 2.0]))
    assert datum.loss_inputs["advantages"].tolist() == [0, 0.5, -1, 2]
    for wrong in (np.array([0.5, -1.0]), np.array([0.5])):
        with pytest.raises(ValueError, match=r"advantage has shape .*rollout's 3 sampled tokens"):
            rollout_to_datum(rollout, wrong)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt has no tokens"):
        rollout_to_datum(single_turn((), completion("a"), reward=1.0), 1.0)


def test_rollouts_that_are_left_out_count_in_the_baseline() -> None:
    texts_and_rewards = [("", 0.0), ("a", 1.0), ("bc", 5.0)]
    rollouts = [single_turn((7,), completion(t), reward=r) for t, r in texts_and_rewards]
    group = Group(problem_id="p", prompt="p", rollouts=tuple(rollouts))
    assert [d.loss_inputs["advantages"].tolist() for d in group_to_data(group, group_mean)] == [[-1], [3, 3]]
    assert with_tokens([group, Group(problem_id="q", prompt="q", rollouts=(), failures=("late",))]) == rollouts[1:]
    kept = group_to_data(group, group_mean, keep=lambda rollout: rollout.reward < 2)
    assert [d.loss_inputs["advantages"].tolist() for d in kept] == [[-1]]


@pytest.mark.parametrize("name", ADVANTAGES)
@given(st.floats(-1e30, 1e30), st.integers(2, 9))
@settings(deadline=None)
def test_equal_rewards_of_any_size_train_nothing(name: str, reward: float, size: int) -> None:
    assert group_to_data(_group(*[reward] * size), ADVANTAGES[name]) == []


def test_loss_inputs_are_added_by_datum() -> None:
    batch = group_to_data(_group(1.0, 0.0), group_mean)
    arrays = [np.full(4, i, dtype=np.float32) for i in range(2)]
    more = with_inputs(batch, reference_logprobs=arrays, old_logprobs=arrays)
    assert [d.loss_inputs["reference_logprobs"][0] for d in more] == [0, 1]
    assert more[0].loss_inputs.keys() - batch[0].loss_inputs.keys() == {"reference_logprobs", "old_logprobs"}
    with pytest.raises(ValueError, match="values has 1 arrays; the batch has 2"):
        with_inputs(batch, values=arrays[:1])


@pytest.mark.parametrize(
    ("advantage", "said"),
    [
        (lambda rewards: rewards.mean(), r"shape \(\): 0.5"),
        (lambda rewards: rewards[:1], r"shape \(1,\): \[1.\]"),
        (lambda rewards: 1 / rewards, r"shape \(2,\): \[ 1. inf\]"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_an_advantage_is_one_finite_number_per_reward(advantage: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"advantage returned {said}; one finite number for each of 2 rewards"):
        group_to_data(_group(1.0, 0.0), advantage)
    data = group_to_data(_group(1.0, 0.0), lambda rewards: cast("Any", (rewards - 0.25).tolist()))
    assert [set(datum.loss_inputs["advantages"][datum.counted]) for datum in data] == [{0.75}, {-0.25}]
