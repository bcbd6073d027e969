"""Fields of environments with values of other types, as a recipe's file may have them."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ownloop_tasks.code_problems import CodeProblems
from ownloop_tasks.guess_number import GuessNumber
from ownloop_tasks.judged import Judge, JudgedEnv
from ownloop_tasks.math_problems import MathProblems
from ownloop_tasks.mcp_server import MCPServer
from ownloop_tasks.mixture import Ramp
from ownloop_tasks.python_arithmetic import PythonArithmetic
from ownloop_tasks.reward_model import RewardModel
from ownloop_tasks.tools import ToolEnv
from ownloop_vision.colours import GuessColour
from ownloop_vision.image_rows import ImageRows
from rl.checks import check_types
from rl.data.sources import EnvExamples, EnvPreferences, JsonlExamples, JsonlPreferences
from rl.envs.jsonl import JsonlReward
from rl.envs.largest_number import LargestNumber
from rl.envs.reasoning import ReasoningGym
from rl.tiny_tasks import NumberWords
from rl.types import AdamParams, SamplingParams

_REQUIRED: dict[type, dict[str, Any]] = {
    CodeProblems: {"dataset": "x.jsonl"},
    NumberWords: {},
    GuessNumber: {},
    GuessColour: {},
    ImageRows: {"dataset": "x.jsonl", "answer_column": "answer", "question": "What?"},
    JsonlReward: {"file": Path("x.jsonl"), "reward": "rl.envs.jsonl:no_reward"},
    Judge: {"base_url": "http://127.0.0.1:1/v1", "model": "m"},
    JudgedEnv: {"env": LargestNumber(), "judge": Judge(base_url="http://127.0.0.1:1/v1", model="m")},
    LargestNumber: {},
    MathProblems: {"dataset": "x.jsonl"},
    MCPServer: {"command": ("true",)},
    PythonArithmetic: {},
    Ramp: {"points": ((0, 1.0),)},
    ReasoningGym: {"task": "chain_sum"},
    RewardModel: {"model": "m"},
    ToolEnv: {"env": LargestNumber(), "tools": ("ownloop_tasks.calculator:calculate",)},
}


@pytest.mark.parametrize(("kind", "field"), [(kind, each.name) for kind in _REQUIRED for each in fields(kind)], ids=str)
@pytest.mark.parametrize("value", [object(), b"x", 2.5j])
def test_a_field_of_another_type_is_named(kind: Any, field: str, value: object) -> None:
    with pytest.raises(
        ValueError, match=rf"{kind.__name__}\.{field} is |env is a {type(value).__name__}, and its name"
    ):
        kind(**{**_REQUIRED[kind], field: value})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: NumberWords(num_digits=x), r"NumberWords.num_digits\[1\] is 'a'; it must be a whole number"),
        (lambda x: SamplingParams(max_tokens=1, stop_token_ids=x), r"SamplingParams.stop_token_ids\[1\] is 'a'"),
        (lambda x: MCPServer(command=("true", *x)), r"MCPServer.command\[1\] is 3; it must be a str"),
        (lambda x: Ramp(points=((0, 1.0), x)), r"Ramp.points\[1\]\[1\] is 'a'; it must be a number"),
        (lambda x: ReasoningGym(task="chain_sum", stop=x), r"ReasoningGym.stop\[0\] is 3; it must be a str"),
        (lambda x: ToolEnv(env=LargestNumber(), tools=x), r"ToolEnv.tools\[0\] is 3; it must be a str or a MCPServer"),
        (lambda x: ReasoningGym(task="chain_sum", params={x[0]: 1}), r"a name in ReasoningGym.params is 3; it must be"),
        (
            lambda x: AdamParams(learning_rate=1e-3, learning_rate_multipliers={"*": x[1]}),
            r"AdamParams.learning_rate_multipliers\['\*'\] is 'a'; it must be a number",
        ),
    ],
)
@pytest.mark.parametrize("container", [tuple, list])
def test_an_item_of_another_type_is_named(make: Any, message: str, container: Any) -> None:
    with pytest.raises(ValueError, match=message):
        make(container([3, "a"]))


@pytest.mark.parametrize("kind", [JsonlExamples, JsonlPreferences])
def test_files_of_examples_are_named_by_paths_or_texts(kind: Any) -> None:
    assert kind(path="rows.jsonl", eval_path="others.jsonl") == kind(
        path=Path("rows.jsonl"), eval_path=Path("others.jsonl")
    )
    for options, field in (({"path": None}, "path is None"), ({"path": Path("x"), "eval_path": 5}, "eval_path is 5")):
        with pytest.raises(ValueError, match=rf"{kind.__name__}\.{field}; it must be a Path"):
            kind(**options)


@pytest.mark.parametrize("kind", [EnvExamples, EnvPreferences])
def test_examples_need_an_environment(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"env is a NoneType, and its name is None"):
        kind(env=None)


def test_lists_and_names_of_files_may_stand_for_tuples_and_paths(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p{i}", "answer": str(i)}) + "\n" for i in range(60)))
    options: Any = {"file": str(file), "fields": ["answer"], "stop": ["\n"]}
    env = JsonlReward(reward="rl.envs.jsonl:no_reward", **options)
    assert (env.file, env.fields, env.stop) == (file, ("answer",), ("\n",))
    assert len(env.train_problems(seed=0, start=0, count=2)) == 2
    assert SamplingParams(max_tokens=1, stop=options["stop"]).stop == ("\n",)


def test_a_check_says_whose_field_it_is() -> None:
    params = SamplingParams(max_tokens=1)
    object.__setattr__(params, "seed", "1")
    with pytest.raises(ValueError, match=r"batch\[3\]\.seed is '1'; it must be a whole number or None"):
        check_types(params, "batch[3]")


@pytest.mark.parametrize(
    ("module", "content", "said"),
    [
        ("mine_cut", "def f(:\n", r"mine_cut.py, line 1: invalid syntax"),
        ("mine_over", "\nraise SystemExit(0)", r"SystemExit: 0 \(.*mine_over.py, line 2\)"),
        ("mine_wrong", "f = undefined", r"NameError: name 'undefined' is not defined \(.*mine_wrong.py, line 1\)"),
        ("mine_apart", "import no_such_module", r"No module named 'no_such_module'"),
        ("mine_strict", "raise ValueError('of mine')", "of mine"),
        ("mine_five", "f = 5", r"a int; it must be a function"),
        ("mine_other", "g = print", r"has no attribute 'f'"),
    ],
)
def test_a_module_of_the_users_that_fails_is_named(
    module: str, content: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{module}.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    for make in (
        lambda: JsonlReward(file=tmp_path / "rows.jsonl", reward=f"{module}:f"),
        lambda: ImageRows(dataset="rows.jsonl", answer_column="a", question="?", reward=f"{module}:f"),
        lambda: ToolEnv(env=LargestNumber(), tools=(f"{module}:f",)),
    ):
        with pytest.raises(ValueError, match=rf"(reward is|tools holds) '{module}:f'.*{said}"):
            make()
