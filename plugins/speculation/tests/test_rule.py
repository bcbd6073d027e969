"""The rule finds the cost of a step, and drafts where a token's worth is above it."""

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
    assert rule.row == pytest.approx(0.001, rel=0.4)


@pytest.mark.parametrize("running", [1, 4, 32])
def test_a_token_pays_if_its_chance_is_above_the_least(running: int) -> None:
    rule = DraftRule()
    rule.step, rule.row = 0.05, 0.001
    least = rule.least_chance(running)
    assert least == pytest.approx(0.001 * running / (0.05 + 0.001 * running))
    # A token that is accepted with this chance costs, over many steps, as much time as it saves.
    for chance, pays in ((0.9 * least, False), (1.1 * least, True)):
        per_token = rule.seconds(running) / running
        with_drafts = rule.seconds(2 * running) / (running * (1 + chance))
        assert (with_drafts < per_token) == pays
        assert (rule.gain(running, running * chance, running) > 0) == pays


def test_looking_rests_where_it_does_not_pay() -> None:
    rule = DraftRule()
    assert not rule.is_worth_a_look(4), "no step was measured"
    rule.observe_step(4, 0.05, checks=False)
    for _ in range(100):
        rule.observe_look(4, saved=0.0, took=1e-4)
    assert sum(rule.is_worth_a_look(4) for _ in range(160)) == 10
    assert all(rule.is_worth_a_look(20) for _ in range(100)), "so many requests have a trial of their own"
    rule.observe_look(4, saved=0.05, took=1e-4)
    assert all(rule.is_worth_a_look(4) for _ in range(100))
