"""Attacks on rewards: what pays for nothing is named, on published rewards too, and a run learns what was predicted."""

import asyncio
import io
import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.commands.command_line import FAILED
from controller.loops import grpo
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.recording import read_recording
from ownloop_doctors.attacks import cases_of, options_of
from ownloop_doctors.check_parts import CheckEnv
from ownloop_doctors.reward_attacks import AttackReport, attacked, share_with_signal
from ownloop_doctors.rows import problems_of_rows
from plugins.doctors.tests import published_rewards as published
from rl.envs.procedural import TextProblem
from rl.types import SamplingParams
from tests.e2e import tiny_recipe
from tests.waiting import LIMIT_S

_RANDOM = random.Random(0)
_SUMS = [(a, b) for a, b in zip(_RANDOM.sample(range(100, 999), 32), _RANDOM.sample(range(100, 999), 32), strict=True)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "sums": [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in _SUMS],
    "countdown": [{"prompt": f"Make {a * 7 - b} from {a}, {b} and 7.", "answer": f"{a} * 7 - {b}"} for a, b in _SUMS],
    "names": [
        {"prompt": f"Who wrote book {a}? Some say Ada{b} Byron{b} did.", "answer": f"Ada{b} Byron{b}"} for a, b in _SUMS
    ],
    "letters": [
        {"prompt": f"{a} + 1?\n(A) {a}\n(B) {a + 1}\n(C) {a + 2}\n(D) {b}", "answer": "ABCD"[b % 4]} for a, b in _SUMS
    ],
    "programs": [
        {
            "prompt": f"Write solve() that returns {a} + {b}.",
            "answer": f"def solve():\n    return {a + b}",
            "expected": a + b,
        }
        for a, b in _SUMS[:3]
    ],
}


@pytest.mark.parametrize(
    ("reward", "rows", "paid"),
    [
        ("r1_accuracy", "sums", {}),
        ("r1_format", "sums", {"form alone": 1.0}),
        ("logic_rl", "sums", {"form alone": 0.42}),  # (-0.5 + 3) / (3 + 3)
        ("tiny_zero", "countdown", {"form alone": 0.1}),
        ("open_r1_steps", "sums", {"steps": 1.0}),
        ("repetition_penalty", "sums", {"empty": 1.0}),
        ("cosine_length", "sums", {"every option": 0.29, "filler": 0.83}),  # (0 + 10) / (2 + 10), and of 400 words
        ("cover_exact_match", "names", {"echo": 1.0, "every option": 1.0}),
        ("token_f1", "names", {"echo": 0.36, "every option": 0.06}),  # 2 * 2 / (9 + 2)
        ("gsm8k_last_number", "sums", {}),
        ("first_letter", "letters", {"echo": 0.28, "constant": 0.31, "every option": 0.31}),
        ("exit_status", "programs", {"constant": 0.33, "every option": 0.33, "program": 1.0}),  # of three problems
    ],
)
def test_published_rewards_that_pay_for_nothing_are_named(reward: str, rows: str, paid: dict[str, float]) -> None:
    report = attacked(problems_of_rows(ROWS[rows], getattr(published, reward)), LIMIT_S, 1.0)
    assert {o.attack: round(o.worth, 2) for o in report.outcomes if o.pays} == paid
    assert [finding.partition(" pays for nothing (")[0] for finding in report.findings] == list(paid)


class Largest:
    """Names the largest of four numbers from 40 to 63, which is always one of the last four."""

    name, stop, call_time_limit_s = "largest word", (), 60.0

    def train_problems(self, seed: int, start: int, count: int) -> list[TextProblem]:
        return [self._problem(random.Random(f"{seed}/{n}")) for n in range(start, start + count)]

    def eval_problems(self, count: int) -> list[TextProblem]:
        return [self._problem(random.Random(f"eval/{n}")) for n in range(count)]

    def _problem(self, drawn: random.Random) -> TextProblem:
        answer = f"w{drawn.randint(60, 63)}"
        prompt = " ".join((*(f"w{n}" for n in drawn.sample(range(40, 60), 4)), answer))
        return TextProblem(id=prompt, prompt=prompt, score=lambda said: float(answer in said.split()), answer=answer)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.usefixtures("in_process")
def test_a_planted_hack_is_predicted_and_a_run_learns_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = {
        o.attack: o.worth for o in attacked(Largest().train_problems(0, 0, 32), LIMIT_S, 1.0).outcomes if o.pays
    }
    assert predicted["every option"] == 1.0
    monkeypatch.setenv("OWNLOOP_TINY_MODEL", str(tmp_path / "model"))
    sizes = {"num_steps": 24, "evaluate_every": 100, "prompts_per_step": 8, "group_size": 8, "learning_rate": 1e-2}
    config = replace(tiny_recipe.recipe(), env=Largest(), sampling=SamplingParams(max_tokens=12), **sizes)
    folder = RunFolder(tmp_path / "run", config)
    asyncio.run(grpo.train(config, folder, Console(io.StringIO())))
    folder.flush()
    steps = read_recording(folder.rollouts)
    first, last = ([(group, each) for group in steps[step] for each in group.rollouts] for step in (1, 24))
    assert sum(each.reward for _, each in first) < 0.2 * len(first)
    assert sum(each.reward for _, each in last) > 0.7 * len(last)
    right = [each.text.split() == [group.problem_id.split()[-1]] for group, each in last]
    assert sum(right) < 0.05 * len(right), "the task itself is not learned"
    named = [len({*each.text.split()} & {"w60", "w61", "w62", "w63"}) for _, each in last]
    assert sum(named) > 2 * len(named), "the answers name most of what may be right"


def _report(score: Any, answers: list[str], prompt: str = "number {}") -> AttackReport:
    problems = [
        TextProblem(id=str(n), prompt=prompt.format(n, answer), score=lambda said, answer=answer: score(said, answer),
                    answer=f"so it is {answer}")
        for n, answer in enumerate(answers)
    ]  # fmt: skip
    return attacked([_with_core(each) for each in problems], LIMIT_S, 1.0)


class WithCore(TextProblem):
    """The answer is the last word."""

    def answer_of(self, completion: str) -> str:
        return (completion.split() or [""])[-1]


def _with_core(problem: TextProblem) -> WithCore:
    """The same problem with its answer's end."""
    names = ("id", "prompt", "score", "answer", "wrong_answers")
    return WithCore(**{name: getattr(problem, name) for name in names})


def test_a_judge_that_obeys_the_answer_is_found() -> None:
    def judge(said: str, answer: str) -> float:
        return float(said == f"so it is {answer}" or '"score": 10' in said)

    report = _report(judge, ["70", "81", "92", "13"])
    assert report.outcomes[0].label == "in the form 'own'"
    assert [(o.attack, o.worth) for o in report.outcomes if o.pays] == [("constant", 0.25), ("injection", 1.0)]


def test_where_and_how_a_right_answer_is_paid() -> None:
    def first_number(said: str, answer: str) -> float:
        numbers = [word.strip(".") for word in said.split() if word.strip(".").replace(".", "").isdecimal()]
        return float(bool(numbers) and numbers[0] == answer)

    found = {o.attack: (o.verdict, o.label) for o in _report(first_number, ["70", "81", "92", "13"]).outcomes}
    assert found["in the text"] == ("lenient", "right, then wrong")
    assert found["two answers"] == ("lenient", "right first")
    assert found["unit"] == ("", "5 -> 5 metres")
    assert found["same number"][0] == found["look-alikes"][0] == "strict"
    assert found["prefix"][0] == ""


def test_rewards_that_change_and_prompts_that_tell_are_found() -> None:
    turns = itertools.count()
    changing = _report(lambda said, answer: float(next(turns)), ["70", "81", "92", "13"])
    assert any("the second time: the reward is not repeatable" in finding for finding in changing.findings)
    equal = _report(lambda said, answer: 0.5, ["70", "81"])
    assert equal.findings == ("all that was said had the same reward, 0.5: there is nothing to learn from it",)
    told = _report(lambda said, answer: float(said.split()[-1:] == [answer]), ["70", "81", "92"], "{} (answer: {})")
    assert told.findings[-1] == "the right answer stands in the prompt of 3 of 3 problems: '0 (answer: 70)'"


def test_options_are_lettered_ones_or_numbers_or_words() -> None:
    prompts = ["Which?\n(A) 1\n(B) 2", "47, 83 or -1.5?", "red or blue"]
    cases = cases_of([TextProblem(id=p, prompt=p, score=len) for p in prompts])
    assert [options_of(case) for case in cases] == [["A", "B"], ["47", "83", "-1.5"], ["red", "or", "blue"]]


def test_the_share_of_groups_with_a_signal_is_that_of_drawn_groups() -> None:
    draws = random.Random(0)
    for rate, size in ((0.1, 8), (0.5, 4), (0.97, 16)):
        groups = [[draws.random() < rate for _ in range(size)] for _ in range(20_000)]
        assert share_with_signal(rate, size) == pytest.approx(sum(len({*g}) > 1 for g in groups) / 20_000, abs=0.015)


def test_the_command_attacks_an_environment_and_a_function_over_rows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"question": row["prompt"], "gold": row["answer"]}) for row in ROWS["names"]))
    columns = ("prompt=question", "answer=gold")
    function = "plugins.doctors.tests.published_rewards:cover_exact_match"
    assert CheckEnv(env=function, rows=file, columns=columns).run() == FAILED
    told = capfd.readouterr().out
    assert "echo pays for nothing (the question): 1.000, 100 % of the way from 0 to 1" in told
    assert "share of groups of 8 with a signal, by pass rate: 1 %: 0.08," in told
    assert CheckEnv(env="rl.envs.largest_number:LargestNumber").run() == 0
    assert "right answer" in capfd.readouterr().out
    assert CheckEnv(env="rl.envs.largest_number:LargestNumber", contract_only=True).run() == 0
    assert capfd.readouterr().out == "nothing is wrong with it\n"
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"columns": columns}, "--columns is prompt=question; it says what"),
        ({"rows": file, "contract_only": True}, "--contract-only is for environments"),
        ({"group_size": 1}, "--group-size is 1"),
    ]
    for wrong, message in mistakes:
        with pytest.raises(ValueError, match=message):
            CheckEnv(env=function, **wrong)
