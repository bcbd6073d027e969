"""The rule finds the costs of steps, and chooses the drafts that are worth theirs."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from ownloop_speculation.rule import DraftRule


def observed(running: int, num_steps: int = 400) -> DraftRule:
    """A rule after steps of 50 ms, 1 ms a row and 2 ms of checking, measured to 2 %; one in 20 was disturbed."""
    rng, rule = np.random.default_rng(0), DraftRule()
    for number in range(num_steps):
        drafted = int(rng.integers(0, 8))
        seconds = 0.05 + 0.001 * (running + drafted) + 0.002 * (drafted > 0)
        seconds *= rng.normal(1, 0.02) * (10 if number % 20 == 15 else 1)
        rule.observe_step(running + drafted, seconds, checks=drafted > 0)
    return rule


def test_costs_are_found_among_noise() -> None:
    rule = observed(running=4)
    assert rule.seconds(4) == pytest.approx(0.054, rel=0.02)
    assert rule.seconds(9, checks=True) == pytest.approx(0.061, rel=0.02)


def test_costs_compare_although_the_load_changes_and_few_steps_have_no_drafts() -> None:
    rng, rule, load = np.random.default_rng(0), DraftRule(), 1.0
    for number in range(4000):
        drafted = 0 if number % 40 == 0 else int(rng.integers(1, 12))
        load = 1.3 + 0.3 * np.sin(number / 200)
        seconds = load * (0.05 + 0.001 * (4 + drafted) + 0.002 * (drafted > 0))
        rule.observe_step(4 + drafted, seconds * rng.normal(1, 0.02), checks=drafted > 0)
        if number > 500 and number % 100 == 0:
            assert rule.seconds(10, checks=True) / rule.seconds(4) == pytest.approx(0.062 / 0.054, rel=0.025)
            assert rule.seconds(10, checks=True) == pytest.approx(load * 0.062, rel=0.1)


def test_fewer_rows_than_before_are_not_taken_for_a_load() -> None:
    rng, rule = np.random.default_rng(0), DraftRule()
    for _ in range(300):
        rows = 32 + int(rng.integers(0, 3))
        rule.observe_step(rows, 0.013 + 0.001 * rows + 0.001 * (rows > 32), checks=rows > 32)
    before = rule.seconds(32)
    for _ in range(60):
        rule.observe_step(1, 0.017, checks=False)
    assert rule.seconds(1) == pytest.approx(0.017, rel=0.01)
    assert rule.seconds(32) == pytest.approx(before, rel=0.03)


def test_costs_that_bend_are_found() -> None:
    rng, rule = np.random.default_rng(0), DraftRule()
    for _ in range(2000):
        rows = int(rng.integers(1, 33))
        rule.observe_step(rows, 0.05 + 0.002 * max(0, rows - 8), checks=bool(rng.integers(2)))
    found = rule.costs()
    assert list(found) == ["rows_1", "rows_2", "rows_4", "rows_8", "rows_16", "rows_32", "check", "look", "prompt"]
    expected = {"rows_4": 0.05, "rows_8": 0.05, "rows_16": 0.066, "rows_32": 0.098}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=0.02)
    again = DraftRule.with_costs([found[f"rows_{1 << bend}"] for bend in range(6)])
    assert again.seconds(24) == pytest.approx(0.082, rel=0.02)
    assert again.seconds(100) == pytest.approx(0.05 + 0.002 * 92, rel=0.02), "it goes on as a line"


def test_costs_of_few_rows_are_found_after_a_wrong_guess() -> None:
    rule = DraftRule()
    for rows, seconds in ((32, 0.04), (40, 0.2)) * 20:  # the second were disturbed, so a line leads below zero
        rule.observe_step(rows, seconds, checks=rows > 32)
    assert rule.seconds(4) == 0
    for _ in range(50):
        rule.observe_step(4, 0.02, checks=False)
    assert rule.seconds(4) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_the_tokens_are_chosen_that_give_the_most_a_second_over_all_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    curve = (0.05 + rng.random(4).cumsum() * 0.02).tolist()
    rule = DraftRule.with_costs(curve, check=0.001)
    kinds = [
        [sorted(best * rng.random(int(rng.integers(0, 4))), reverse=True) for _ in range(2)] for best in (1.0, 0.5)
    ]  # good drafts and poor ones, in turn

    def rate(choices: Sequence[Sequence[int]]) -> float:
        each = [
            (sum(sum(c[:n]) for c, n in zip(*of, strict=True)), sum(of[1])) for of in zip(kinds, choices, strict=True)
        ]
        seconds = sum(rule.seconds(2 + drafted, checks=drafted > 0) for _, drafted in each)
        return sum(2 + expected for expected, _ in each) / seconds

    for number in range(2000):
        sizes = rule.choose(kinds[number % 2], most=99)
        expected = sum(sum(c[:n]) for c, n in zip(kinds[number % 2], sizes, strict=True))
        rule.observe_tokens(2, sum(sizes), 2 + expected)  # pyright: ignore[reportArgumentType]
    every = [list(itertools.product(*(range(len(each) + 1) for each in kind))) for kind in kinds]
    found = [rule.choose(kind, most=99) for kind in kinds]
    assert rate(found) == pytest.approx(max(map(rate, itertools.product(*every))), rel=1e-3)
    assert sum(rule.choose(kinds[0], most=1)) <= 1


def test_what_prompts_cost_is_found() -> None:
    rule, rng = DraftRule.with_costs([0.05, 0.051]), np.random.default_rng(0)
    for _ in range(500):
        num_tokens = int(rng.integers(1, 60))
        rule.observe_prompts(num_tokens, 0.0004 * num_tokens * rng.normal(1, 0.1))
    assert rule.costs()["prompt"] == pytest.approx(0.0004, rel=0.02)


@pytest.mark.parametrize("running", [1, 4, 32])
def test_a_token_pays_if_its_chance_is_above_the_least(running: int) -> None:
    rule = DraftRule.with_costs([0.051, 0.052])
    least = rule.least_chance(running)
    assert least == pytest.approx(0.001 * running / (0.05 + 0.001 * running))
    # A token that is accepted with this chance costs, over many steps, as much time as it saves.
    for chance, pays in ((0.9 * least, False), (1.1 * least, True)):
        assert (rule.gain(running, running * chance, running) > 0) == pays
        assert (rule.choose([[chance]] * running, most=running) == [1] * running) == pays


def test_looking_rests_where_it_does_not_pay() -> None:
    rule = DraftRule()
    assert not rule.is_worth_a_look(4), "no step was measured"
    rule.observe_step(4, 0.05, checks=False)
    for _ in range(100):
        rule.observe_look(4, saved=0.0, took=1e-4)
    assert sum(rule.is_worth_a_look(4) for _ in range(640)) == 10
    assert all(rule.is_worth_a_look(20) for _ in range(100)), "so many requests have a trial of their own"
    rule.observe_look(4, saved=0.05, took=1e-4)
    assert all(rule.is_worth_a_look(4) for _ in range(100))
    for _ in range(100):
        rule.observe_look(4, saved=-0.5, took=1e-4)
    assert sum(rule.is_worth_a_look(4) for _ in range(640)) == 10
    rule.observe_look(4, saved=0.004, took=1e-4)
    assert all(rule.is_worth_a_look(4) for _ in range(100)), "steps that cost too much before costs were known"
