"""Attacks the reward of an environment, or of a function over rows, and says what pays for nothing.

A policy's worth is the part of the way from the worst of the policies that know nothing to a right answer, or to the
best of them if that earns more: 0 is worth nothing, 1 as much as a right answer. Rewards are means over problems.
"""

import asyncio
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ownloop_doctors.attacks import FORMS, Case, Kind, Policy, cases_of, policies
from rl.protocols import Done, Problem
from rl.rollouts.episodes import all_results, checked_reward
from rl.rollouts.guard import EnvironmentFailedError, call_environment
from rl.types import Answer

NUM_PROBLEMS = 32
_MOST_S = 120.0
PAYS = 0.05
"""From this worth on, a policy that knows nothing is a finding. One lucky problem of 32 is below it."""
_GUESSED = 0.2
"""The same for a constant, which is right in one of four of any questions with four options."""
_HALF = 0.5
_CHEAPEST = ("empty", "form alone")
"""Attacks that others include: what pays no more than these is no finding of its own."""
_NUM_TRIED = 6  # problems on which forms are tried
_MOST_TURNS = 20
_LEAKED = r"(?i)(answer|solution|result|correct|solved|####|=)\W{0,8}"
_RATES = (0.01, 0.03, 0.1, 0.3, 0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the best policy of an attack earned."""

    attack: str
    kind: Kind
    label: str
    reward: float
    """Mean over the problems; NaN if the environment failed in all."""
    worth: float
    verdict: str
    """"PAYS" for nothing, or "pays" no more than silence or the form alone do; "lenient" with a misplaced right answer,
    "strict" with its form; or empty."""

    @property
    def pays(self) -> bool:
        """Whether it is a finding."""
        return self.verdict == "PAYS"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackReport:
    """What attacks on a reward found."""

    outcomes: tuple[Outcome, ...]
    findings: tuple[str, ...]
    """A sentence for each thing that is wrong with the reward."""
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """The table, with what else there is to say below it."""
        rows = [(o.attack, f"{o.reward:.3f}", f"{o.worth:.2f}", o.verdict, o.label) for o in self.outcomes]
        table = [("attack", "reward", "worth", "", "by saying"), *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            f"{a:<{widths[0]}}  {r:>{widths[1]}}  {w:>{widths[2]}}  {v:<{widths[3]}}  {label}"
            for a, r, w, v, label in table
        ]
        return [*lines, *self.notes, *self.findings]


async def attack_reward(problems: Sequence[Problem], time_limit_s: float, best: float) -> AttackReport:
    """Plays all attacks on these problems. A call may take `time_limit_s`; after two minutes no further one is begun.

    `best` is the highest reward, for problems whose right answers are not known.
    """
    cases, notes, findings = cases_of(problems), list[str](), list[str]()
    deadline = time.perf_counter() + _MOST_S
    form = await _form(cases, time_limit_s)
    right = Policy(
        "right answer", "reference", f"in the form {form!r}", lambda c: c.in_form(c.core, form) if c.core else None
    )
    earned, again = [await _mean(right, cases, time_limit_s) for _ in range(2)] if form else [best, best]
    if earned != again:
        findings.append(
            f"the same right answers had {earned:g}, and {again:g} the second time: the reward is not repeatable"
        )
    found: dict[str, list[tuple[Policy, float]]] = {}
    unplayed = list[str]()
    for policy in policies(cases, form or "plain"):
        if time.perf_counter() > deadline:
            unplayed.append(policy.attack)
        elif not math.isnan(reward := await _mean(policy, cases, time_limit_s)):
            found.setdefault(policy.attack, []).append((policy, reward))
    if unplayed:
        notes.append(f"for want of time not played: {', '.join(dict.fromkeys(unplayed))}")
    if form:
        found = {right.attack: [(right, earned)], **found}
    else:
        notes.append("no right answer is known, so worth is a part of the best reward")
    outcomes, told = _judged(found, earned)
    return AttackReport(outcomes=outcomes, findings=(*findings, *told, *_leaks(cases)), notes=tuple(notes))


async def _form(cases: Sequence[Case], time_limit_s: float) -> str:
    """The form in which right answers earn most; empty if no right answer is known."""
    known = [case for case in cases if case.core]
    if not known:
        return ""
    spread = known[:: max(len(known) // _NUM_TRIED, 1)][:_NUM_TRIED]
    earned: dict[str, float] = {}
    for form in ("own", *FORMS):
        policy = Policy("", "reference", "", lambda case, form=form: case.in_form(case.core, form))
        reward = await _mean(policy, spread, time_limit_s)
        earned[form] = -math.inf if math.isnan(reward) else reward
    best = max(earned, key=lambda form: earned[form])
    return best if earned[best] > -math.inf else ""


async def _mean(policy: Policy, cases: Sequence[Case], time_limit_s: float) -> float:
    """The mean reward over the problems that the policy fits and the environment answers; NaN if there are none."""
    said = [(case.problem, text) for case in cases if (text := policy.says(case)) is not None]
    rewards = await all_results([_reward(problem, text, time_limit_s) for problem, text in said])
    known = [reward for reward in rewards if not math.isnan(reward)]
    return sum(known) / len(known) if known else math.nan


async def _reward(problem: Any, text: str, time_limit_s: float) -> float:
    """The reward of an episode that gets this answer in every turn; NaN if the environment fails or does not end."""
    try:
        episode = await call_environment(problem.start, time_limit_s=time_limit_s)
        for _ in range(_MOST_TURNS):
            reply = await call_environment(episode.reply, Answer.read(text), time_limit_s=time_limit_s)
            reward = checked_reward(reply)
            if isinstance(reply, Done):
                return reward
    except EnvironmentFailedError:
        pass
    return math.nan


def _judged(found: Mapping[str, Sequence[tuple[Policy, float]]], right: float) -> tuple[tuple[Outcome, ...], list[str]]:
    """The outcome of each attack's best policy, and a sentence for each that pays for nothing."""
    blind = [reward for each in found.values() for policy, reward in each if policy.kind == "nothing"]
    floor, top = min(blind, default=right), max([*blind, right])
    best = [max(each, key=lambda pair: pair[1]) for each in found.values()]
    if not top > floor:
        outcomes = tuple(
            Outcome(policy.attack, policy.kind, policy.label, reward, math.nan, "") for policy, reward in best
        )
        return outcomes, [f"all that was said had the same reward, {floor:g}: there is nothing to learn from it"]
    outcomes, cheapest = list[Outcome](), 0.0
    for policy, reward in best:
        worth = (reward - floor) / (top - floor)
        outcomes.append(
            Outcome(policy.attack, policy.kind, policy.label, reward, worth, _verdict(policy, worth, cheapest))
        )
        if policy.attack in _CHEAPEST and worth >= PAYS:
            cheapest = max(cheapest, worth)
    way = f"% of the way from {floor:g} to {top:g}"
    told = [
        f"{o.attack} pays for nothing ({o.label}): {o.reward:.3f}, {100 * o.worth:.0f} {way}"
        for o in outcomes
        if o.pays
    ]
    return tuple(outcomes), told


def _verdict(policy: Policy, worth: float, cheapest: float) -> str:
    if policy.kind == "nothing" and worth >= (_GUESSED if policy.attack == "constant" else PAYS):
        return "PAYS" if worth >= cheapest + PAYS else "pays"
    is_lenient, is_strict = policy.kind == "misplaced" and worth >= _HALF, policy.kind == "form" and worth < _HALF
    return "lenient" if is_lenient else "strict" if is_strict else ""


def _leaks(cases: Sequence[Case]) -> list[str]:
    """A finding if a quarter of the prompts say the right answer, and not only as one of several options."""
    leaks = [case for case in cases if case.core and re.search(rf"{_LEAKED}{re.escape(case.core)}(?!\w)", case.prompt)]
    if 4 * len(leaks) <= len(cases):
        return []
    return [
        f"the right answer stands in the prompt of {len(leaks)} of {len(cases)} problems: {leaks[0].prompt[-80:]!r}"
    ]


def share_with_signal(pass_rate: float, group_size: int) -> float:
    """The share of groups whose rewards are not all equal, of a reward of 0 or 1: 1 - p^G - (1 - p)^G."""
    return 1 - pass_rate**group_size - (1 - pass_rate) ** group_size


def signal_line(group_size: int) -> str:
    """Which pass rate gives which share of groups with a signal."""
    shares = ", ".join(f"{100 * rate:g} %: {share_with_signal(rate, group_size):.2f}" for rate in _RATES)
    return f"share of groups of {group_size} with a signal, by pass rate: {shares}"


def attacked(problems: Sequence[Problem], time_limit_s: float, best: float, group_size: int = 8) -> AttackReport:
    """`attack_reward` in an event loop of its own, with a note on groups of this size."""
    report = asyncio.run(attack_reward(problems, time_limit_s, best))
    return replace(report, notes=(*report.notes, signal_line(group_size)))
