import os
import resource
import subprocess
import sys

import pytest

from rl.data.rows import is_eval
from rl.envs import reasoning
from rl.envs.procedural import TextProblem, eval_set, train_stream
from rl.envs.reasoning import ReasoningGym

ENV = ReasoningGym(
    task="spell_backward", params={"min_word_len": 3, "max_word_len": 4}, template="{question} ->", chat=False
)


def test_train_and_eval_never_overlap() -> None:
    eval_data = {p.id for p in ENV.eval_problems(200)}
    assert len(eval_data) == 200
    for seed in range(3):
        assert eval_data.isdisjoint(p.id for p in ENV.train_problems(seed, 0, 1000))


def test_a_template_may_have_braces_and_an_option_be_a_list() -> None:
    env = ReasoningGym(
        task="basic_arithmetic", params={"operators": ["+"]}, template="{question} Answer in \\boxed{}.", chat=False
    )
    for problem in (*env.train_problems(0, 0, 20), *env.eval_problems(3)):
        assert str(problem.prompt).endswith("Answer in \\boxed{}.")
        assert not set("*/") & set(problem.id)


def test_a_stream_is_a_function_of_seed_and_number() -> None:
    ids = [p.id for p in ENV.train_problems(5, 0, 40)]
    assert [p.id for p in ENV.train_problems(5, 30, 10)] == ids[30:]
    assert [p.id for p in ENV.train_problems(6, 0, 40)] != ids


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


@pytest.mark.stranger("D3")
@pytest.mark.parametrize("task", ["gsm_symbolic", "list_functions", "word_ladder"])
def test_a_task_that_lists_its_entries_takes_little_memory(task: str) -> None:
    assert len(ReasoningGym(task=task).train_problems(0, 0, 3)) == 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 << 20  # KiB; a list of 2^31 entries takes 16 GB


def test_reward_is_the_tasks_own() -> None:
    problem = ENV.train_problems(0, 0, 1)[0]
    word = problem.id.rsplit(" ", 1)[-1]
    assert problem.reply(f" {word[::-1]}\n").reward == 1.0
    assert problem.reply("").reward < 0.5
    assert str(problem.prompt).endswith(f"{word} ->")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "spell_backwrd"}, "did you mean 'spell_backward'"),
        ({"task": "spell_backward", "params": {"max_word_length": 4}}, "did you mean 'max_word_len'"),
        ({"task": "spell_backward", "template": "Go."}, "must contain {question}"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReasoningGym(**arguments)  # pyright: ignore[reportArgumentType]


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
