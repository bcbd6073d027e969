"""Matches between policies: several roles move in turns, each played by a policy of its own or all by one.

    match.start() --> Move(role, messages) --> that role's generator answers --> match.reply(answer) --> Move or Result
                            ^                                                                            |
                            +----------------------------------------------------------------------------+

Each role sees the match as an episode of its own: its moves are its completions, and the moves of others come as
messages. So a match gives one rollout for each role, of exactly the tokens that its policy read and sampled.
`plugins/shelf/examples/self_play.py` trains two adapters with it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ownloop_shelf.published_advantages import RoleBaselines
from rl.protocols import Done, Generator, Observation, Prompt, Reply
from rl.rollouts.episodes import all_results, rollout_group, rollout_to_datum
from rl.rollouts.guard import DEFAULT_TIME_LIMIT_S, EnvironmentFailedError, call_environment
from rl.rollouts.rendering import Renderer
from rl.types import Datum, Group, Rollout, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A role that has to move, and the messages that it reads first."""

    role: str
    messages: Prompt
    """At its first move the whole prompt, later the new messages: what happened since its last move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The end of a match."""

    rewards: Mapping[str, float]
    """Of every role that has moved. They must be finite."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further numbers to report, the same for all roles."""


class Match(Protocol):
    """One match. Its calls run in a thread, or on the event loop if they are coroutines, as `Episode.reply` does."""

    def start(self) -> Move:
        """Who moves first."""
        ...

    def reply(self, answer: str) -> Move | Result:
        """What follows from the answer of the role that had to move. The match judges moves against its rules."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """A policy that plays a role: a generator, or an adapter's (`controller.handles.adapters.BoundGenerator`)."""

    generator: Generator
    renderer: Renderer
    sampling: SamplingParams
    """Of each move. Its seed is the first of the matches' seeds; two players need different ones."""


async def play_matches(
    matches: Sequence[Match], players: Mapping[str, Player], *, time_limit_s: float = 3600.0
) -> list[dict[str, Rollout] | str]:
    """Plays all matches at the same time. Returns the rollouts of each by role, or a sentence that says why it failed.

    A match fails if it raises, names a role that has no player, ends without a finite reward for each role, leaves a
    role no room in the context, or lets one wait for more than `time_limit_s` seconds. An exception of a generator is
    raised, and ends all matches.
    """
    return await all_results([_play(i, match, players, time_limit_s) for i, match in enumerate(matches)])


def matches_to_data(played: Sequence[Mapping[str, Rollout] | str], baselines: RoleBaselines) -> dict[str, list[Datum]]:
    """The data of each role, in the order of the matches; the advantage is the reward less the role's moving mean.

    Failed matches, and rollouts whose advantage is 0, have none. `baselines` move with every reward.
    """
    data: dict[str, list[Datum]] = {}
    for rollouts in played:
        for role, rollout in rollouts.items() if not isinstance(rollouts, str) else ():
            advantage = baselines.advantage(role, rollout.reward)
            if advantage and rollout.num_sampled_tokens:
                data.setdefault(role, []).append(rollout_to_datum(rollout, advantage))
    return data


class _Side:
    """A match as one role sees it: a problem and its only episode."""

    def __init__(self, match: str, move: Move) -> None:
        self.id, self.prompt = f"{match}/{move.role}", move.messages
        self._said: asyncio.Queue[str | None] = asyncio.Queue()
        self._replies: asyncio.Queue[Reply] = asyncio.Queue()

    def start(self) -> "_Side":
        return self

    async def reply(self, completion: str) -> Reply:
        """Hands the move over, and waits until the role moves again or the match is over."""
        self._said.put_nowait(completion)
        return await self._replies.get()

    def tell(self, reply: Reply) -> None:
        self._replies.put_nowait(reply)

    async def move(self) -> str | None:
        """The role's next move; None if its rollout has ended without one."""
        return await self._said.get()

    def ended(self, _: object) -> None:
        self._said.put_nowait(None)


async def _play(
    index: int, match: Match, players: Mapping[str, Player], time_limit_s: float
) -> dict[str, Rollout] | str:
    sides: dict[str, _Side] = {}
    running: dict[str, asyncio.Task[Group]] = {}
    try:
        move = await call_environment(match.start, time_limit_s=DEFAULT_TIME_LIMIT_S)
        while isinstance(move, Move):
            if move.role not in players:
                return f"match {index}: it names the role {move.role!r}; there are players for {', '.join(players)}"
            if (side := sides.get(move.role)) is None:  # its first move: only now its prompt is known
                side = sides[move.role] = _Side(str(index), move)
                playing = _rollout(side, players[move.role], index, time_limit_s)
                running[move.role] = asyncio.create_task(playing)
                running[move.role].add_done_callback(side.ended)
            else:
                side.tell(Observation(messages=move.messages))
            if (answer := await side.move()) is None:
                group = await running[move.role]  # raises what its generator has raised
                return f"match {index}: {(*group.failures, f'{move.role} has no room in its context')[0]}"
            move = await call_environment(match.reply, answer, time_limit_s=DEFAULT_TIME_LIMIT_S)
        rewards = move.rewards if isinstance(move, Result) else {}
        if missing := [role for role in sides if role not in rewards]:
            return f"match {index}: it ended with {move!r}; a Result with a reward of {missing[0]!r} is expected"
        for role, side in sides.items():
            side.tell(Done(reward=rewards[role], metrics=move.metrics))
        groups = {role: await task for role, task in running.items()}
    except EnvironmentFailedError as error:
        return f"match {index}: {error}"
    finally:
        for task in running.values():  # a role that waits for the others would wait on
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)
    if failures := [failure for group in groups.values() for failure in group.failures]:
        return f"match {index}: {failures[0]}"
    return {role: group.rollouts[0] for role, group in groups.items()}


async def _rollout(side: _Side, player: Player, index: int, time_limit_s: float) -> Group:
    """One rollout of a role. Its calls wait for the other roles, so each may take as long as the match."""
    seed = None if player.sampling.seed is None else player.sampling.seed + index
    sampling = replace(player.sampling, seed=seed)
    return await rollout_group(player.generator, player.renderer, side, sampling, 1, time_limit_s=time_limit_s)
