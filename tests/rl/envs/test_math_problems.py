"""Math problems from files, and comparison of answers by math-verify in processes of their own."""

import json
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

pytest.importorskip("math_verify", reason="math-verify is not installed")

from rl.envs.check import check_env
from rl.envs.math_answers import Comparison, MathComparer, math_comparer
from rl.envs.math_problems import MathProblems, final_answer
from rl.envs.word_problems import word_problems_file, write_word_problems
from tests.waiting import LIMIT_S, join, wait_for_ends, wait_for_line, wait_until

pytestmark = pytest.mark.seconds


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("OWNLOOP_CACHE", str(tmp_path / "ownloop"))


def _sums(start: int, count: int) -> list[dict[str, Any]]:
    """Rows in GSM8K's format."""
    return [
        {"question": f"{i} + 1?", "answer": f"<<{i}+1={i + 1}>>\n#### {i + 1}"} for i in range(start, start + count)
    ]


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _compare(answer: str, completion: str, *, boxed: bool = False) -> Comparison:
    return math_comparer().compare(answer, completion, boxed=boxed, time_limit_s=5)


@pytest.mark.parametrize(
    ("answer", "completion", "boxed", "found", "right"),
    [
        ("72", "48 + 24 = 72. The answer is 72.", False, True, True),
        ("72", "48 + 24 = 71. The answer is 71.", False, True, False),
        ("\\frac{1}{2}", "It is $0.5$", False, True, True),
        ("1,234", "\\boxed{1234}", True, True, True),
        ("x^2 + 2x + 1", "\\boxed{(x+1)^2}", True, True, True),
        ("\\frac{1}{2}", "\\boxed{3}, no, \\boxed{\\frac{2}{4}}", True, True, True),
        ("3", "\\boxed{3}, no, \\boxed{\\frac{2}{4}}", True, True, False),
        ("72", "The answer is 72.", True, False, False),
        ("72", "\\boxed{72", True, False, False),
        ("4", "first \\boxed{4}, no: \\boxed{5", True, False, False),
        ("72", "", False, False, False),
    ],
)
def test_answers_are_compared_as_mathematics(
    answer: str, completion: str, boxed: bool, found: bool, right: bool
) -> None:
    assert _compare(answer, completion, boxed=boxed) == Comparison(found=found, right=right)


def test_a_comparison_that_does_not_end_is_cut_off_in_any_thread() -> None:
    comparer, results = MathComparer(1), list[Comparison]()
    assert comparer.compare("72", "72", boxed=False, time_limit_s=5).right  # the process runs by now

    def endless() -> None:
        # One multiplication of huge numbers after another, in C: no signal would arrive in between.
        results.append(comparer.compare("72", "\\boxed{9^{9^{9^9}}}", boxed=True, time_limit_s=0.3))

    thread = threading.Thread(target=endless, name="the comparison")
    thread.start()
    join(thread)  # it would compute for hours
    assert results == [Comparison(timed_out=True)]
    assert comparer.compare("72", "72", boxed=False, time_limit_s=5).right  # by a new process


def test_a_process_that_is_killed_while_it_is_idle_is_replaced() -> None:
    comparer, before = MathComparer(1), set(psutil.Process().children())
    assert comparer.compare("72", "72", boxed=False, time_limit_s=5).right
    (comparing,) = set(psutil.Process().children()) - before
    comparing.kill()
    wait_until(lambda: comparing.status() == psutil.STATUS_ZOMBIE, "the process to end")
    assert comparer.compare("72", "72", boxed=False, time_limit_s=5).right


def test_a_machine_without_time_does_not_make_a_right_answer_wrong() -> None:
    comparer, comparing = _suspended(waiting_factor=1000)
    going_on = threading.Timer(0.5, comparing.resume)
    going_on.start()
    assert comparer.compare("72", "72", boxed=False, time_limit_s=0.2) == Comparison(found=True, right=True)
    join(going_on)


def test_a_comparison_that_gets_no_time_at_all_is_given_up() -> None:
    comparer, _ = _suspended(waiting_factor=2)
    assert comparer.compare("72", "72", boxed=False, time_limit_s=0.05) == Comparison(timed_out=True)


def _suspended(waiting_factor: float) -> tuple[MathComparer, psutil.Process]:
    """A comparer whose only process has been stopped."""
    comparer, before = MathComparer(1, waiting_factor), set(psutil.Process().children())
    assert comparer.compare("72", "72", boxed=False, time_limit_s=5).right
    (comparing,) = set(psutil.Process().children()) - before
    comparing.suspend()
    return comparer, comparing


ENDLESS = """
from rl.envs.math_answers import MathComparer
comparer = MathComparer(1)
comparer.compare("72", "72", boxed=False, time_limit_s=5)
print("begins", flush=True)
comparer.compare("72", "\\\\boxed{9^{9^{9^9}}}", boxed=True, time_limit_s=1)
"""


def test_a_comparison_outlives_a_killed_controller_by_its_time_limit_only() -> None:
    controller = subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, text=True)
    assert wait_for_line(controller.stdout, "the comparison") == "begins"
    (comparing,) = psutil.Process(controller.pid).children()
    before = comparing.cpu_times().user
    wait_until(lambda: comparing.cpu_times().user >= before + 0.2, "the process to compute")
    controller.kill()
    controller.wait(LIMIT_S)
    wait_for_ends([comparing], "the comparison")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("He sold 48/2 = 24.\n#### 24", "24"),
        ("So $\\boxed{\\frac{1}{2}}$ it is.", "\\frac{1}{2}"),
        ("First \\boxed{1}, then \\boxed{2}.", "2"),
        (" 3/4 ", "3/4"),
        ("\\boxed{1", "\\boxed{1"),
    ],
)
def test_the_answer_is_taken_from_a_worked_solution(text: str, answer: str) -> None:
    assert final_answer(text, "####") == answer


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_every_kind_of_file_gives_the_same_problems(tmp_path: Path, suffix: str) -> None:
    rows, file = _sums(0, 60), tmp_path / f"sums.{suffix}"
    table = pa.Table.from_pylist(rows)
    if suffix == "jsonl":
        _jsonl(file, rows)
    elif suffix == "parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        pyarrow.csv.write_csv(table, file)
    env = MathProblems(dataset=str(file), answer_form="anywhere")
    problems = env.train_problems(0, 0, 50)
    held_out = {p.id for p in env.eval_problems(4)}
    assert not held_out & {p.id for p in problems}
    assert all(p.reply(p.answer).reward == 1 for p in problems[:3])
    assert problems[0].reply("-1").reward == 0


def test_a_folder_has_splits_and_held_out_questions_are_not_trained_on(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    _jsonl(folder / "train.jsonl", _sums(0, 30))
    _jsonl(folder / "test.jsonl", _sums(20, 20))
    env = MathProblems(dataset=str(folder), eval_split="test", template="Q: {question}", chat=False)
    assert [p.prompt for p in env.eval_problems(20)] == [f"Q: {i} + 1?" for i in range(20, 40)]
    assert {p.prompt for p in env.train_problems(0, 0, 20)} == {f"Q: {i} + 1?" for i in range(20)}
    (problem,) = env.eval_problems(1)
    assert problem.answer == "\\boxed{21}"  # a boxed answer is looked for, so the solution of the file would not do
    assert problem.reply(problem.answer).metrics == {"answers_found": 1, "comparisons_timed_out": 0}
    with pytest.raises(ValueError, match=r"num_eval is 21, but .* has only 20 held-out"):
        env.eval_problems(21)


def test_answers_that_cannot_be_read_are_counted_and_named(tmp_path: Path) -> None:
    rows = [*_sums(0, 40), {"question": "?", "answer": "#### "}, {"question": "!", "answer": "#### \\frac{1}{"}]
    file = _jsonl(tmp_path / "sums.jsonl", rows)
    with pytest.raises(ValueError, match=r"cannot read 2 of 42 answers of .*, such as '', .*skip_unreadable"):
        MathProblems(dataset=file).eval_problems(1)
    with pytest.warns(UserWarning, match="cannot read 2 of 42 answers .*; these problems are left out"):
        problems = MathProblems(dataset=file, skip_unreadable=True).train_problems(0, 0, 100)
    assert len({p.id for p in problems}) < 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answer": "solution"}, "has no column 'solution'; it has the columns 'question', 'answer'"),
        ({"train_split": "tran"}, "sums.jsonl', which cannot be loaded: Unknown split"),
        ({"dataset": "no.jsonl"}, "dataset is 'no.jsonl', which cannot be loaded: there is no such file"),
        ({"dataset": "nobody/nothing"}, "dataset is 'nobody/nothing', which cannot be loaded: .*nobody/nothing"),
        ({"template": "Solve this."}, r"template is 'Solve this.'; it must contain \{question\}"),
        ({"answer_form": "bxed"}, "answer_form is 'bxed', which is not known; did you mean 'boxed'"),
        ({"question": "number"}, "column 'number': row 0 is None; text or a number is needed"),
    ],
)
def test_mistakes_are_told_by_name(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    rows = [{**row, "number": None} for row in _sums(0, 40)] if "number" in options.values() else _sums(0, 40)
    given: dict[str, Any] = {"dataset": _jsonl(tmp_path / "sums.jsonl", rows), **options}
    with pytest.raises(ValueError, match=message):
        MathProblems(**given).eval_problems(1)


def test_word_problems_are_a_dataset_whose_answers_are_right(tmp_path: Path) -> None:
    file = word_problems_file(300)
    write_word_problems(tmp_path / "again.jsonl", 300)
    assert file.read_text() == (tmp_path / "again.jsonl").read_text()
    env = MathProblems(dataset=str(file), answer_form="anywhere")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_env(env) == []
    assert all(p.reply(p.answer).reward == 1 for p in env.train_problems(0, 0, 50))
    assert not any(" and " in line for line in word_problems_file(300, max_steps=1).read_text().splitlines())
    with pytest.raises(ValueError, match="max_steps is 3; it must be 1 or 2"):
        word_problems_file(300, max_steps=3)
