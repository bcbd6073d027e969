"""Each rule warns when its documentation says so, and not otherwise."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from controller.runs.folder import RunFolder
from ownloop_report.warnings_in_words import RULES, warnings_of
from plugins.report.tests.reported_runs import group
from tests.docs.pages import ROOT

Rows = list[Mapping[str, float]]


def _evaluations(*rewards: float) -> Rows:
    return [
        {"step": 10.0 * i, "eval_reward": r, "eval_reward_low": r - 0.05, "eval_reward_high": r + 0.05}
        for i, r in enumerate(rewards)
    ]


def _steps(name: str, *values: float) -> Rows:
    return [{"step": 1.0 + i, "seconds_step": 1.0, "skipped": 0.0, name: value} for i, value in enumerate(values)]


NO_SIGNAL: Rows = [{"step": float(i), "seconds_step": 1.0} for i in range(1, 21)]
WARNED: dict[str, tuple[Rows, str, Rows]] = {
    "not-finite": (_steps("loss", 1.0, math.nan, 1.0), "the first is step 2", _steps("loss", 1.0)),
    "reward-fell": (
        _evaluations(0.2, 0.8, 0.6),
        "fell from 0.800 at step 10 to 0.600 at step 20",
        _evaluations(0.2, 0.8, 0.75),
    ),
    "nothing-learned": (_evaluations(0.5, 0.6, 0.52), "at step 20, 0.520, cannot be told", _evaluations(0.5, 0.5, 0.6)),
    "mismatch": (
        _steps("logprob_mismatch_mean", *[0.06] * 10),
        "differ by 0.060",
        _steps("logprob_mismatch_mean", 0.05),
    ),
    "no-signal": (NO_SIGNAL, "20 of the last 20 steps", NO_SIGNAL[:9]),
    "entropy": (_steps("entropy", 2.0, 0.3, 0.1, 0.15), "first at step 3", _steps("entropy", 2.0, 0.1, 0.2)),
    "truncated": (_steps("truncated_fraction", *[0.4] * 10), "40% of the rollouts", _steps("truncated_fraction", 0.3)),
    "env-failures": (
        _steps("env_failures", 0, 2, 1),
        "3 rollouts in 2 steps, first in step 2",
        _steps("env_failures", 0),
    ),
}


@pytest.mark.parametrize("rule", WARNED)
def test_a_rule_warns_and_does_not(rule: str, tmp_path: Path) -> None:
    bad, said, good = WARNED[rule]
    (warned,) = [warned for warned in warnings_of(bad, tmp_path) if warned.rule == rule]
    assert said in warned.text
    assert [warned for warned in warnings_of(good, tmp_path) if warned.rule == rule] == []


def test_the_step_after_which_a_policy_collapsed_is_found(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", {})
    for step in range(1, 31):
        answers = [f"{i}" if step <= 14 else "always" for i in range(5)]
        folder.log_rollouts(step, [group(f"p{i}", answer) for i, answer in enumerate(answers)])
    folder.flush()
    (warned,) = warnings_of([], folder.rollouts)
    assert warned.text == "the policy collapsed to one answer after step 14: 'always' for different prompts"
    assert warned.rule == "collapse"


def test_one_prompt_with_one_answer_is_no_collapse(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", {})
    for step in (1, 2):
        folder.log_rollouts(step, [group("p", "yes", "yes", "yes", "yes")])
    folder.flush()
    assert warnings_of([], folder.rollouts) == []


@pytest.mark.parametrize(("sandbox", "weak"), [("none", True), ("local", True), ("auto", False), ("namespaces", False)])
def test_a_run_without_a_box_says_so(sandbox: str, weak: bool, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", {"env": {"tasks": [{"sandbox": sandbox}]}, "note": "none"})
    assert [warned.rule for warned in warnings_of([], folder.rollouts)] == ["unboxed"] * weak


def test_every_rule_is_tested_and_documented() -> None:
    assert {rule.name for rule in RULES} == {*WARNED, "collapse", "unboxed"}
    page = (ROOT / "plugins" / "report" / "README.md").read_text().partition("## Warnings")[2].partition("\n## ")[0]
    assert dict(re.findall(r"^\| `([a-z-]+)` \| (.+) \|$", page, re.MULTILINE)) == {r.name: r.when for r in RULES}
