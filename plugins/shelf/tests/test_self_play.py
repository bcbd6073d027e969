"""Matches: each role has a rollout of its own tokens, and a failure costs one match."""

import asyncio
import math
from dataclasses import replace
from typing import cast

import pytest

from ownloop_shelf.published_advantages import RoleBaselines
from ownloop_shelf.self_play import Move, Player, Result, matches_to_data, play_matches
from plugins.shelf.examples.self_play import Nim
from rl.rollouts.rendering import Renderer
from rl.types import Rollout, SamplingParams
from tests.rl.fakes import ScriptedGenerator, WordRenderer


def _players(first: str, second: str, *, context: int | None = None) -> dict[str, Player]:
    """Players who always say the same."""
    renderer = cast(Renderer, WordRenderer(context))
    return {
        role: Player(
            generator=ScriptedGenerator(lambda prompt, i, seed, said=said: said),
            renderer=renderer,
            sampling=SamplingParams(max_tokens=1, seed=seed),
        )
        for role, said, seed in (("first", first, 0), ("second", second, 100))
    }


def _play(*matches: object, first: str = "1", second: str = "2", context: int | None = None) -> list[object]:
    players = _players(first, second, context=context)
    return [*asyncio.run(play_matches(cast("list[Nim]", matches), players))]


def test_every_role_has_its_own_side_of_the_match() -> None:
    (played,) = asyncio.run(play_matches([Nim(7)], _players("1", "2")))
    assert isinstance(played, dict)
    first, second = played["first"], played["second"]
    # 7 stones: 1, 2, 1, 2 leave 1, which the first player takes.
    assert [len(rollout.turns) for rollout in (first, second)] == [3, 2]
    assert [rollout.reward for rollout in (first, second)] == [1.0, -1.0]
    assert "There are 6 stones" in second.turns[0].prompt
    assert "We take" in second.turns[0].prompt, "the second player's prompt is its first move's"
    assert "There are 4 stones" in first.turns[1].prompt
    assert "We take" not in first.turns[1].prompt
    assert {turn.completion.text for turn in first.turns} == {"1"}


def test_matches_have_seeds_of_their_own() -> None:
    players = _players("1", "2")
    asyncio.run(play_matches([Nim(5), Nim(5)], players))
    generator = cast(ScriptedGenerator, players["second"].generator)
    assert len({sampling.seed for _, sampling, _ in generator.calls}) == len(generator.calls)


def test_advantages_are_those_of_the_roles() -> None:
    played = asyncio.run(play_matches([Nim(7), Nim(7)], _players("1", "2")))
    data = matches_to_data([*played, "match 2: failed"], RoleBaselines(decay=0.5))
    # The means of the first role are 0.5 and 0.75, those of the second -0.5 and -0.75.
    advantages = {
        role: [datum.loss_inputs["advantages"][datum.counted] for datum in batch] for role, batch in data.items()
    }
    found = {role: [{*each.tolist()} for each in arrays] for role, arrays in advantages.items()}
    assert found == {"first": [{0.5}, {0.25}], "second": [{-0.5}, {-0.25}]}


class Broken(Nim):
    """Raises at the second move."""

    def reply(self, answer: str) -> Move | Result:
        if self.left < 7:
            raise RuntimeError("the board fell down")
        return Nim.reply(self, answer)


class Crowded(Nim):
    """Has a third player."""

    def start(self) -> Move:
        return Move(role="third", messages="hello")


def test_a_failure_costs_its_own_match_alone() -> None:
    broken, good, crowded = _play(Broken(7), Nim(7), Crowded(7))
    assert broken == "match 0: RuntimeError: the board fell down"
    assert isinstance(good, dict)
    assert crowded == "match 2: it names the role 'third'; there are players for first, second"


class Ends(Nim):
    """Ends with what it was given."""

    def __init__(self, end: object) -> None:
        Nim.__init__(self, 7)
        self.end = end

    def reply(self, answer: str) -> Move | Result:
        del answer
        return cast(Result, self.end)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (None, "match 0: it ended with None; a Result with a reward of 'first' is expected"),
        (Result(rewards={"second": 1.0}), "a Result with a reward of 'first' is expected"),
        (
            Result(rewards={"first": math.nan}),
            "match 0: problem '0/first': its reward is nan; it must be a finite number",
        ),
    ],
)
def test_an_end_without_rewards_is_a_failure(end: object, message: str) -> None:
    (failed,) = _play(Ends(end))
    assert message in cast(str, failed)


def test_an_error_of_a_generator_is_raised_as_it_is() -> None:
    def answer(prompt: object, sample: int, seed: int | None) -> str:
        raise ArithmeticError("the second player's generator died")

    players = _players("1", "2")
    players["second"] = replace(players["second"], generator=ScriptedGenerator(answer))
    with pytest.raises(ArithmeticError, match="died"):
        asyncio.run(play_matches([Nim(7), Nim(7)], players))


def test_a_match_that_outgrows_the_context_is_void() -> None:
    (void,) = _play(Nim(50), context=40)
    assert void == "match 0: first has no room in its context"


@pytest.mark.parametrize(("said", "reward"), [("0", -1.0), ("4", -1.0), ("none", -1.0), ("3", 1.0)])
def test_an_illegal_move_loses(said: str, reward: float) -> None:
    (played,) = _play(Nim(3), first=said)
    assert isinstance(played, dict)
    assert cast("dict[str, Rollout]", played)["first"].reward == reward
