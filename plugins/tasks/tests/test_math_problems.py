"""Math problems from files, and comparison of answers by math-verify in processes of their own."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import warnings
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("math_verify", reason="math-verify is not installed")

from ownloop_doctors.check_env import check_env
from ownloop_tasks.data_sets import read_columns
from ownloop_tasks.math_answers import Comparison, MathComparer, last_boxes, math_comparer, plain
from ownloop_tasks.math_problems import (
    AnswerForm,
    MathProblem,
    MathProblems,
    final_answer,
    word_problems_file,
    write_word_problems,
)
from rl.rollouts.guard import EnvironmentFailedError, call_environment
from rl.types import Answer
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


@pytest.mark.stranger("C5")
@pytest.mark.parametrize(
    ("answer", "completion", "right"),
    [
        ("5", "\\boxed 5", True),
        ("5", "So $\\boxed5$.", True),
        ("56", "\\boxed 56", True),
        ("5", "\\fbox{5}", True),
        ("5", "\\fbox{$5$}", True),
        ("5", "\\framebox{5}", True),
        ("5", "\\boxed {5}", True),
        ("5", "\\boxed{\\boxed{5}}", True),
        ("5", "\\boxed{5} is in \\boxed{}", True),
        ("5", "\\fbox{5} or rather \\boxed 6", False),
        ("5", "\\boxed{5} or \\boxed{6}", False),
        ("5", "\\boxes{5}", False),
        ("\\frac{1}{2}", "\\boxed\\frac{2}{4}", True),
        ("1,2", "\\boxed{1} and \\boxed{2}", True),
        ("1,2", "$x=\\boxed{2}$, $x = \\boxed{1}$", True),
        ("1,2", "\\[\\boxed{1}\\]\n\\[\\boxed{2}\\]", True),
        ("1,2", "\\boxed{1}, no: \\boxed{2}", False),
        ("1,2", "\\boxed{1} and \\boxed{3}", False),
        ("1, 2", "\\boxed{\\{1,2\\}}", True),
        ("\\{1\\}", "\\boxed{\\{1\\}}", True),
        ("1234", "\\boxed{1\\,234}", True),
        ("1{,}234", "\\boxed{1234}", True),
        ("0.00001", "\\boxed{1e-05}", True),
        ("1e-5", "\\boxed{0.00001}", True),
        ("5", "\\boxed{5.}", True),
        ("5.", "\\boxed{5}", True),
        ("12.5", "\\boxed{12.5 .}", True),
        ("\\text{yes}", "\\boxed{yes.}", True),
        ("1,2", "\\boxed{1,2,}", True),
        ("-3", "\\boxed{\u20133}", True),
    ],
)
def test_every_spelling_of_a_box_is_read(answer: str, completion: str, right: bool) -> None:
    assert _compare(answer, completion, boxed=True).right == right
    assert _compare(answer, completion).right == right or "boxes" in completion


@pytest.mark.stranger("C2")
@pytest.mark.parametrize(
    ("text", "is_cut_off", "boxed", "anywhere"),
    [
        ("<think>maybe \\boxed{4}, let me check", False, 0, 0),
        ("<think>maybe \\boxed{5}</think>So \\boxed{4}", False, 1, 1),
        ("<think>maybe \\boxed{4}</think>So \\boxed{5}", False, 0, 0),
        ("first \\boxed{4}, no: \\boxed{5", True, 0, 0),
        ("first \\boxed{4}, no: \\box", True, 0, 0),
        ("first \\boxed{4}, no: \\boxed", True, 0, 0),
        ("\\boxed 4", True, 0, 0),
        ("\\boxed 4.", True, 1, 1),
        ("\\boxed{4}, which I ch", True, 1, 1),
        ("It is 4", True, 0, 0),
        ("It is 4", False, 0, 1),
    ],
)
def test_only_an_answer_that_is_whole_is_paid(text: str, is_cut_off: bool, boxed: int, anywhere: int) -> None:
    forms: tuple[tuple[AnswerForm, int], ...] = (("boxed", boxed), ("anywhere", anywhere))
    for form, reward in forms:
        problem = MathProblem(id="p", prompt="2+2?", expected="4", answer="", answer_form=form, time_limit_s=5)
        assert problem.reply(Answer.read(text, is_cut_off=is_cut_off)).reward == reward


@pytest.mark.stranger("C3")
@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(["\\boxed", "\\fbox", "{", "}", "\\", "1", ",", " and ", "$", "\\frac", "e-05", "\n", "x ="])
    )
    | st.lists(st.characters(exclude_categories=())),
    st.booleans(),
)
@example(["#"] * 4, False)
@example(["\\boxed", "{", ",", "}"], False)
def test_any_text_has_boxes_or_none(parts: list[str], is_cut_off: bool) -> None:
    text = "".join(parts)
    for is_list in (False, True):
        found = last_boxes(text, is_cut_off=is_cut_off, is_list=is_list)
        assert found is None or found.strip()
        assert plain(found or "1").strip()
    after = text.rpartition("####")[2]
    assert final_answer(text, "####") == (last_boxes(after) or after).strip()


@pytest.mark.stranger("C7")
def test_waiting_for_a_process_is_not_the_answers_time() -> None:
    async def compared(limit_s: float) -> list[Comparison]:
        """A comparison that does not end, for the time being, and one behind it."""
        comparer, comparing = _suspended(waiting_factor=1000)
        compare = partial(comparer.compare, "4", "\\boxed{4}", boxed=True, time_limit_s=5)
        before = asyncio.create_task(call_environment(compare, time_limit_s=LIMIT_S))
        await asyncio.sleep(0.1)  # until it has the process
        behind = asyncio.create_task(call_environment(compare, time_limit_s=limit_s))
        await asyncio.sleep(2 * limit_s)
        comparing.resume()
        return [await before, await behind]

    for limit_s in (0.25, 4.0, 16.0):  # a busy host may need longer even for this comparison
        with contextlib.suppress(EnvironmentFailedError):
            assert asyncio.run(compared(limit_s)) == [Comparison(found=True, right=True)] * 2
            return
    pytest.fail("waiting counts")


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


@pytest.mark.stranger("2.B3")
def test_a_process_that_is_killed_while_it_compares_says_nothing_of_the_answer() -> None:
    comparer, comparing = _suspended(waiting_factor=1000)
    killing = threading.Timer(0.5, comparing.kill)
    killing.start()
    assert comparer.compare("4", "\\boxed{4}", boxed=True, time_limit_s=5) == Comparison(found=True, right=True)
    join(killing)


def test_a_busy_machine_does_not_make_a_right_answer_wrong() -> None:
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
    assert comparer.compare("72", "72", boxed=False, time_limit_s=LIMIT_S).right
    (comparing,) = set(psutil.Process().children()) - before
    comparing.suspend()
    return comparer, comparing


ENDLESS = """
import time
from ownloop_tasks import math_answers
comparer = math_answers.MathComparer(1)
comparer.compare("72", "72", boxed=False, time_limit_s=5)
math_answers._Process._answers_within = lambda *_: time.sleep(600)  # the process's own limit is what is tested
print("ready", flush=True)
input()
comparer.compare("72", "\\\\boxed{9^{9^{9^9}}}", boxed=True, time_limit_s=1)
"""


def test_a_comparison_outlives_its_controller_by_its_limit_only() -> None:
    pipe = subprocess.PIPE
    controller = subprocess.Popen([sys.executable, "-c", ENDLESS], stdin=pipe, stdout=pipe, text=True)
    assert wait_for_line(controller.stdout, "the comparison") == "ready"
    (comparing,) = psutil.Process(controller.pid).children()
    before = comparing.cpu_times().user
    print(file=controller.stdin, flush=True)
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
        ("So $x = \\boxed{1}$ or $x = \\boxed{2}$.", "1, 2"),
        ("\\boxed{1}, \\boxed{2}, and \\boxed{3}", "1, 2, 3"),
        ("\\fbox{7}", "7"),
        ("\\boxed 7$", "7"),
        ("#### \\boxed{7}", "7"),
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


def test_a_folder_has_splits_and_held_out_questions(tmp_path: Path) -> None:
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


@pytest.mark.stranger("2.D10")
def test_a_question_is_on_one_side_however_it_is_spaced(tmp_path: Path) -> None:
    rows = [{**row, "question": row["question"].replace(" ", gap)} for row in _sums(0, 40) for gap in (" ", "  ", "\n")]
    env = MathProblems(dataset=_jsonl(tmp_path / "sums.jsonl", rows), answer_form="anywhere")
    held_out, trained = env.eval_problems(2), env.train_problems(0, 0, 80)
    assert not {p.answer for p in held_out} & {p.answer for p in trained}
    _jsonl(tmp_path / "both" / "train.jsonl", rows)
    _jsonl(tmp_path / "both" / "test.jsonl", rows[: 3 * 20])
    env = MathProblems(dataset=str(tmp_path / "both"), eval_split="test")
    assert {p.answer for p in env.train_problems(0, 0, 80)} == {f"\\boxed{{{i + 1}}}" for i in range(20, 40)}


def test_answers_that_cannot_be_read_are_counted_and_named(tmp_path: Path) -> None:
    rows = [*_sums(0, 40), {"question": "?", "answer": "#### "}, {"question": "!", "answer": "#### \\frac{1}{"}]
    file = _jsonl(tmp_path / "sums.jsonl", rows)
    with pytest.raises(ValueError, match=r"cannot read 2 of 42 answers of .*, such as '', .*skip_unreadable"):
        MathProblems(dataset=file).eval_problems(1)
    with pytest.warns(UserWarning, match="cannot read 2 of 42 answers .*; these problems are left out"):
        problems = MathProblems(dataset=file, skip_unreadable=True).train_problems(0, 0, 100)
    assert len({p.id for p in problems}) < 40


@pytest.mark.stranger("C5")
def test_a_solution_of_several_boxes_is_a_list_or_refused(tmp_path: Path) -> None:
    both = {"question": "x?", "answer": "So $x = \\boxed{1}$ or $x = \\boxed{2}$."}
    file = _jsonl(tmp_path / "good.jsonl", [*_sums(0, 20), both, {"question": "5?", "answer": "\\boxed 5"}])
    problems = {p.id: p for p in MathProblems(dataset=file).train_problems(0, 0, 100)}.values()
    (problem,) = (p for p in problems if p.expected == "1, 2")
    rewards = {text: problem.reply(text).reward for text in (problem.answer, "\\boxed{2,1}", "\\boxed{2}")}
    assert list(rewards.values()) == [1, 1, 0]
    for text in ("\\boxed{3} sheep and \\boxed{4} goats", "So \\boxed{4, that is \\boxed{5}", "\\boxed{1"):
        file = _jsonl(tmp_path / "bad.jsonl", [*_sums(0, 20), {"question": "?", "answer": text}])
        with pytest.raises(ValueError, match=r"cannot read 1 of 21 answers of .*, such as '.*boxed"):
            MathProblems(dataset=file).eval_problems(1)


@pytest.mark.stranger("C6")
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (pa.scalar(0.00001), "0.00001"),
        (pa.scalar(1.5e20), "150000000000000000000.0"),
        (pa.scalar(5.0), "5.0"),
        (pa.scalar(0.1, pa.float32()), "0.1"),
        (pa.scalar(1e-7, pa.float32()), "0.0000001"),
        (pa.scalar(Decimal("0.0000010")), "0.0000010"),
        (pa.scalar(10**18), "1000000000000000000"),
        (pa.scalar(float("nan")), None),
        (pa.scalar(float("inf")), None),
        (pa.scalar(None, pa.float64()), None),
        (pa.scalar(True), None),
    ],
)
def test_numbers_of_a_column_are_the_text_that_they_say(tmp_path: Path, value: Any, text: str | None) -> None:
    file = str(tmp_path / "numbers [v1].parquet")  # the brackets are no pattern
    pyarrow.parquet.write_table(pa.table({"answer": pa.array([value.as_py()], value.type)}), file)
    read = partial(read_columns, file, columns=["answer"], split="train", subset=None, revision=None, field="dataset")
    if text is None:
        with pytest.raises(ValueError, match=r"column 'answer': row 0 is .*; text or a number is needed"):
            read()
    else:
        assert read() == [(text,)]
        assert _compare(text, f"\\boxed{{{text}}}", boxed=True).right


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answer": "solution"}, "has no column 'solution'; it has the columns 'question', 'answer'"),
        ({"train_split": "tran"}, "sums.jsonl', which cannot be loaded: Unknown split"),
        ({"dataset": "no.jsonl"}, "dataset is 'no.jsonl', which cannot be loaded: there is no such file"),
        ({"dataset": "nobody/nothing"}, "dataset is 'nobody/nothing', which cannot be loaded: .*nobody/nothing"),
        ({"template": "Solve this."}, r"template is 'Solve this.'"),
        ({"answer_form": "bxed"}, "answer_form is 'bxed'"),
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


def test_the_answer_in_a_box_is_what_counts() -> None:
    problem = MathProblem(id="", prompt="", expected="5", answer="", answer_form="anywhere", time_limit_s=1.0)
    said = ["So 2 + 3 = \\boxed{5}.", "It is 1,234 or $5", "\\boxed{1\\,234}", "none"]
    assert [problem.answer_of(each) for each in said] == ["5", "$5", "1234", ""]
