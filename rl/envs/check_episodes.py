"""Plays episodes of an environment and looks for failures, for shared state and for replies that block.

Every problem is played with every answer three times: alone, alone again, and turn by turn beside an episode that is
given another answer. The first two must go the same way, or no run could be repeated; a third that differs shows that
episodes share state.
"""

import asyncio
import inspect
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rl.envs.findings import Findings, message_fault
from rl.protocols import Done, Observation, Prompt
from rl.rollouts.episodes import checked_reward
from rl.rollouts.guard import EnvironmentFailedError, call_environment

# Every environment gets such answers from a model sooner or later: nothing, an attempt, garbage, endless repetition.
_ANSWERS = ("", " \n", "42", "☃ \x00 ~{[<&%$", "no " * 2000)
_MAX_TURNS = 100
_NUM_LIMITS = 6  # the whole check may take this many times the limit of one call
_STALL_S = 0.2  # a coroutine that blocks the event loop for longer is counted
_Transcript = list[tuple[Any, ...]]


async def check_episodes(findings: Findings, problems: Sequence[Any], time_limit_s: float) -> None:
    """Plays episodes of these problems and adds what went wrong. `time_limit_s` is the limit of one call.

    An environment with slow replies is checked for six times that limit and no longer.
    """
    player = _Player(findings, time_limit_s)
    deadline = time.perf_counter() + _NUM_LIMITS * time_limit_s
    for problem in problems:
        alone: dict[str, _Transcript] = {}
        for answer in _ANSWERS:
            if player.given_up or time.perf_counter() > deadline:
                return
            where = _where(problem, answer)
            try:
                (first,) = await player.play(where, problem, answer)
                (second,) = await player.play(where, problem, answer)
            except EnvironmentFailedError as error:
                findings.add(f"{where} failed: {error}", str(error).partition(":")[0])
                continue
            if first == second:
                alone[answer] = first
            else:
                findings.add(
                    f"{where} went differently the second time, {_difference(second, first)}: start() must return a "
                    "new episode, whose replies depend on the completions alone; otherwise no run could be repeated",
                    "repeated",
                )
        for answer, other in pairwise([*alone, *alone]):
            where = _where(problem, answer)
            try:
                beside, _ = await player.play(where, problem, answer, other)
            except EnvironmentFailedError as error:
                difference = f"where it failed: {error}"
            else:
                difference = _difference(beside, alone[answer]) if beside != alone[answer] else ""
            if difference:
                findings.add(
                    f"{where} went differently beside another episode, {difference}: episodes share state; start() "
                    "must return an independent episode each time",
                    "shared",
                )


def _where(problem: Any, answer: str) -> str:
    return f"problem {problem.id!r}, answered {answer[:20]!r}{'...' * (len(answer) > 20)} each time,"


def _difference(got: _Transcript, expected: _Transcript) -> str:
    """Describes the first turn in which two transcripts differ."""
    turn = next((i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), None)
    if turn is None:
        return f"with {len(got)} turns instead of {len(expected)}"
    return f"in turn {turn + 1} with {got[turn]!r:.80} instead of {expected[turn]!r:.80}"


class _Player:
    """Plays episodes that get the same answer in every turn; adds a finding for endless or blocking ones."""

    def __init__(self, findings: Findings, time_limit_s: float) -> None:
        self._findings = findings
        self._time_limit_s = time_limit_s
        self._num_replies = self._num_stalls = 0
        self.given_up = False
        """Whether an episode was so slow that further ones would only waste time."""

    async def play(self, where: str, problem: Any, *answers: str) -> list[_Transcript]:
        """Plays one episode per answer, the first turn of each before the second. Raises `EnvironmentFailedError`."""
        episodes = [await call_environment(problem.start, time_limit_s=self._time_limit_s) for _ in answers]
        transcripts: list[_Transcript] = [[] for _ in answers]
        for episode in episodes:
            if not callable(getattr(episode, "reply", None)):
                raise EnvironmentFailedError(
                    f"start() returned a {type(episode).__name__} without a method reply(completion)"
                )
        running = list(zip(episodes, answers, transcripts, strict=True))
        for _ in range(_MAX_TURNS):
            for episode, answer, transcript in running:
                transcript.append(await self._turn(where, problem, episode, answer))
            running = [(e, a, transcript) for e, a, transcript in running if transcript[-1][0] != "done"]
            if not running:
                return transcripts
        self._findings.add(
            f"{where} did not end within {_MAX_TURNS} turns; only a full context would end such an episode", "endless"
        )
        self.given_up = True
        return transcripts

    async def _turn(self, where: str, problem: Any, episode: Any, answer: str) -> tuple[Any, ...]:
        """Plays a turn. Returns the reply as a tuple that can be compared. Raises `EnvironmentFailedError`."""
        start = time.perf_counter()
        ticker = _Ticker()
        try:
            reply = await call_environment(episode.reply, answer, time_limit_s=self._time_limit_s)
        finally:
            stalled = ticker.stop()
        self._num_replies += 1
        self._num_stalls += stalled > _STALL_S and inspect.iscoroutinefunction(episode.reply)
        # A busy machine stalls the event loop now and then, so a few stalls are no finding.
        if self._num_stalls > max(self._num_replies / 2, 3):
            self._findings.add(
                f"{where} blocked the event loop for {stalled:.1f} of {time.perf_counter() - start:.1f} s, and with it "
                "all other rollouts; an async reply must await everything that takes time",
                "blocked",
            )
            self.given_up = True
        reward = checked_reward(reply)
        if isinstance(reply, Done):
            return ("done", reward)
        assert isinstance(reply, Observation)
        _check_observation(problem.prompt, reply.messages)
        return ("observation", reply.messages, reward)


def _check_observation(prompt: Prompt, messages: Prompt) -> None:
    fault = message_fault(messages)
    if fault:
        raise EnvironmentFailedError(f"the observation {fault}")
    if isinstance(prompt, str) != isinstance(messages, str):
        forms = ("messages", "text")
        raise EnvironmentFailedError(
            f"the prompt is {forms[isinstance(prompt, str)]}, the observation {forms[isinstance(messages, str)]}"
        )


class _Ticker:
    """Measures the longest time for which the event loop was blocked."""

    def __init__(self) -> None:
        self._longest, self._last = 0.0, time.perf_counter()
        self._task = asyncio.create_task(self._tick())

    def stop(self) -> float:
        """Stops and returns that time in seconds."""
        self._task.cancel()
        return max(self._longest, time.perf_counter() - self._last)

    async def _tick(self) -> None:
        while True:
            now = time.perf_counter()
            self._longest, self._last = max(self._longest, now - self._last), now
            await asyncio.sleep(0.01)
