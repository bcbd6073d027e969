import inspect
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rl.data.rows import is_eval
from rl.envs import reasoning
from rl.envs.procedural import TextProblem, eval_set, train_stream
from rl.envs.reasoning import ReasoningGym
from tests.waiting import children


@pytest.fixture(scope="module")
def env() -> ReasoningGym:
    """Importing its tasks takes a second."""
    params = {"min_word_len": 3, "max_word_len": 4}
    return ReasoningGym(task="spell_backward", params=params, template="{question} ->", chat=False)


def test_train_and_eval_never_overlap(env: ReasoningGym) -> None:
    eval_data = {p.id for p in env.eval_problems(200)}
    assert len(eval_data) == 200
    for seed in range(3):
        assert eval_data.isdisjoint(p.id for p in env.train_problems(seed, 0, 1000))


def test_a_template_may_have_braces_and_an_option_be_a_list() -> None:
    env = ReasoningGym(
        task="basic_arithmetic", params={"operators": ["+"]}, template="{question} Answer in \\boxed{}.", chat=False
    )
    for problem in (*env.train_problems(0, 0, 20), *env.eval_problems(3)):
        assert str(problem.prompt).endswith("Answer in \\boxed{}.")
        assert not set("*/") & set(problem.id)


def test_every_task_can_be_made() -> None:
    for task in reasoning._tasks().keys() - {"composite"}:  # pyright: ignore[reportPrivateUsage]
        assert ReasoningGym(task=task).name == task


def test_a_stream_is_a_function_of_seed_and_number(env: ReasoningGym) -> None:
    ids = [p.id for p in env.train_problems(5, 0, 40)]
    assert [p.id for p in env.train_problems(5, 30, 10)] == ids[30:]
    assert [p.id for p in env.train_problems(6, 0, 40)] != ids


@pytest.mark.stranger("D3")
@pytest.mark.slow  # two interpreters that import all tasks
def test_problems_do_not_depend_on_the_order_of_sets() -> None:
    code = (
        "from rl.envs.reasoning import ReasoningGym\n"
        "for task in ('polynomial_multiplication', 'ransom_note'):\n"
        "    for p in ReasoningGym(task=task).train_problems(0, 0, 3): print(p.id, p.answer)"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("0", "1")
    ]
    assert found[0].count(b"polynomial_multiplication: ") == 3
    assert found[0] == found[1]


@pytest.mark.stranger("2.B3")
def test_a_process_of_entries_that_is_killed_is_started_again() -> None:
    env = ReasoningGym(task="ransom_note")
    first = env.train_problems(0, 0, 2)
    (process,) = children("serve_entries")
    process.kill()
    assert [p.id for p in env.train_problems(0, 0, 2)] == [p.id for p in first]


@pytest.mark.stranger("D3")
@pytest.mark.parametrize("task", ["gsm_symbolic", "list_functions", "word_ladder"])
def test_a_task_that_lists_its_entries_takes_little_memory(task: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of all tests that this process has run
    assert len(ReasoningGym(task=task).train_problems(0, 0, 3)) == 3
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 3 << 20  # KiB; a list of 2^31 entries takes 16 GB


def test_reward_is_the_tasks_own(env: ReasoningGym) -> None:
    problem = env.train_problems(0, 0, 1)[0]
    word = problem.id.rsplit(" ", 1)[-1]
    assert problem.reply(f" {word[::-1]}\n").reward == 1.0
    assert problem.reply("").reward < 0.5
    assert str(problem.prompt).endswith(f"{word} ->")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "spell_backwrd"}, "did you mean 'spell_backward'"),
        ({"task": "spell_backward", "params": {"max_word_length": 4}}, "did you mean 'max_word_len'"),
        ({"task": "spell_backward", "template": "Go."}, "should contain {question}"),
        ({"task": "spell_backward", "params": {"size": 9}}, "has 'size', which every run sets itself"),
        ({"task": "spell_backward", "params": {"seed": 9}}, "has 'seed', which every run sets itself"),
        ({"task": "spell_backward", "params": {"min_word_len": 9, "max_word_len": 3}}, "spell_backward refuses it: "),
        ({"task": "composite"}, "composite refuses it: Must specify at least one dataset"),
        ({"task": "composite", "params": {"datasets": [{"name": "spell_bckward"}]}}, "did you mean 'spell_backward'"),
        ({"task": "composite", "params": {"datasets": ["spell_backward"]}}, "composite refuses it: "),
        ({"task": "composite", "params": {"datasets": [{"name": "composite"}]}}, "composite refuses it: "),
        (
            {"task": "composite", "params": {"datasets": [{"name": "chain_sum", "config": {"min_term": 3}}]}},
            "composite refuses it: .*min_term",
        ),
    ],
)
@pytest.mark.stranger("2.D10")
def test_mistakes_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReasoningGym(**arguments)  # pyright: ignore[reportArgumentType]


@pytest.mark.stranger("2.D10")
def test_a_composite_task_has_all_its_parts() -> None:
    parts = [{"name": "list_functions"}, {"name": "countdown", "weight": 2.0, "config": {"max_value": 9}}]
    problems = ReasoningGym(task="composite", params={"datasets": parts}).train_problems(0, 0, 60)
    counted = [problem for problem in problems if "countdown" not in problem.id and "target" in problem.id]
    assert 20 < len(counted) < 60
    assert all(problem.reply(problem.answer or "").reward == 1 for problem in problems[:10])


OWNS = "__import__('pathlib').Path('owned').touch()"
HOSTILE = (
    OWNS,
    f'"{OWNS}"',
    f"[{OWNS}]",
    f"[str({OWNS})]",
    f"1 + len([{OWNS}])",
    "9**9**9**9",
    "((9**99)**99)**99",
    "(" * 9000,
)


@pytest.mark.stranger("2.A1")
@pytest.mark.parametrize("task", sorted({*reasoning._LITERALS, *reasoning._FORMULAS}))  # pyright: ignore[reportPrivateUsage]
def test_an_answer_is_not_executed(task: str, here: Path) -> None:
    for problem in ReasoningGym(task=task).train_problems(0, 0, 2):
        assert problem.reply(problem.answer or "").reward == 1
        assert all(problem.reply(answer).reward < 0.5 for answer in HOSTILE)
    assert not [*here.iterdir()]


@pytest.mark.stranger("2.A1")
def test_every_verifier_that_evaluates_is_known() -> None:
    found = {
        name
        for name, (made, _) in reasoning._tasks().items()  # pyright: ignore[reportPrivateUsage]
        if re.search(r"eval\(answer|parse_expr\(answer|eval\(.*answer\b(?!\"\])", inspect.getsource(made))
    }
    assert found == {*reasoning._LITERALS, *reasoning._FORMULAS}  # pyright: ignore[reportPrivateUsage]


def test_too_few_distinct_problems_are_refused() -> None:
    def coin(number: int) -> TextProblem:
        return TextProblem(id=f"coin {number % 40}", prompt="?", score=lambda a: 0.0)

    assert all(not is_eval(p.id) for p in train_stream(coin, 0, 0, 50))
    with pytest.raises(ValueError, match="num_eval is 200, but the environment has only about"):
        eval_set(coin, 200)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    reasoning._tasks.cache_clear()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.delitem(sys.modules, "reasoning_gym.factory", raising=False)
    with pytest.raises(ValueError, match=r"ownloop\[reasoning\]"):
        ReasoningGym(task="spell_backward")
