"""`ownloop drafts` counts, over a run's recorded rollouts, what a search by hand counts."""

from pathlib import Path

import pytest

from controller.commands.command_line import parse_command
from controller.runs.folder import RunFolder
from ownloop_speculation.history import History
from ownloop_speculation.replay import PrefixCache, Request, replay, requests_of
from ownloop_speculation.rule import DraftRule
from plugins.speculation.tests.drafting import Always
from rl.types import Completion, Group, Rollout, Turn


def turn(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Turn:
    logprobs, versions = (-1.0,) * len(tokens), (0,) * len(tokens)
    return Turn(
        prompt_tokens=prompt,
        completion=Completion(
            tokens=tokens, logprobs=logprobs, versions=versions, text="", finish_reason="stop", temperature=1.0
        ),
    )


def rollout(*turns: Turn) -> Rollout:
    return Rollout(turns=turns, reward=0.0)


def test_a_replay_counts_steps_and_drafts() -> None:
    # The second answer is the first one but for its last token: after 2 tokens, 8 drafts of which the last is wrong.
    first = tuple(range(10, 20))
    logprobs = (-0.1,) * 10
    requests = [Request((1, 2), first, 0, logprobs), Request((1, 2), (*first[:-1], 30), 0, logprobs)]
    found = replay(requests, History(max_tokens=100), Always(), PrefixCache(16), running=1, max_draft=8, min_chance=0.0)
    # The first token comes with the prompt; behind it, one look finds [start, 10] and drafts 11 to 18.
    assert (found.tokens, found.drafted, found.accepted, found.requests) == (20, 8, 8, 10 + 2)
    rule = DraftRule.with_costs([11.0, 12.0], prompt=0.5)
    timed = replay(requests, History(max_tokens=100), rule, PrefixCache(16), running=2, max_draft=0, min_chance=0.0)
    assert (timed.seconds, timed.prompt_tokens) == (10 * 12.0 + 2 * 0.5, 4)


def test_whole_blocks_of_prompts_are_cached_for_a_version() -> None:
    prefixes, prompt = PrefixCache(4), tuple(range(10))
    added = [
        (Request(prompt, (1, 2, 3), 0, ()), 10),
        (Request(prompt, (4,), 0, ()), 2),
        (Request(prompt[:8], (4,), 0, ()), 4),  # the last token is computed again, with its block
        (Request((*prompt[:5], 99, 98, 97, 96), (4,), 0, ()), 5),
        (Request((*prompt, 1, 2, 3, 7, 7), (4,), 0, ()), 3),  # a next turn: of the answer all but its last token
        (Request(prompt, (4,), 1, ()), 10),
    ]
    assert [prefixes.add(request) for request, _ in added] == [computed for _, computed in added]


def test_turns_are_requests_of_their_own() -> None:
    group = Group(problem_id="p", prompt="", rollouts=(rollout(turn((1, 2), (3,)), turn((4,), (5, 6))),))
    assert list(requests_of([group])) == [
        Request((1, 2), (3,), 0, (-1.0,)),
        Request((1, 2, 3, 4), (5, 6), 0, (-1.0,) * 2),
    ]


def test_a_run_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path / "run", {})
    with pytest.raises(ValueError, match="has recorded no rollouts"):
        parse_command(["drafts", str(tmp_path / "run")]).run()
    answer = tuple(range(10, 42))
    for step in range(3):
        folder.log_rollouts(step, [Group(problem_id="p", prompt="", rollouts=(rollout(turn((1, 2), answer)),))])
    folder.flush()
    capsys.readouterr()
    command = parse_command(["drafts", str(tmp_path / "run"), "--running", "1"])
    assert command.run() == 0
    without_costs = capsys.readouterr().out
    running, right, tokens_per_step, speed = without_costs.splitlines()[2].split()
    assert (running, right) == ("1", "1.00")
    assert 96 / (32 + 31 + 31) < float(tokens_per_step) <= 96 / (32 + 5 + 5)
    assert 1.3 < float(speed) < 2.3
    # What the run measured takes the place of the guess: the same ratios, and others.
    for curve, same in (((17.0, 18.0, 20.0), True), ((17.0, 34.0, 68.0), False)):
        none = {"engine_seconds_check": 0.0, "engine_seconds_look": 0.0}
        costs = {f"engine_seconds_rows_{1 << bend}": seconds for bend, seconds in enumerate(curve)}
        folder.log_metrics({"step": 3, **costs, "engine_seconds_prompt": 1.0, **none})
        folder.flush()
        assert command.run() == 0
        assert (capsys.readouterr().out.splitlines()[1:] == without_costs.splitlines()[1:]) == same
