"""Fields of environments with values of other types, as a recipe's file may have them."""

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
from rl.envs.largest_number import LargestNumber
from tests.rl.envs.wrong_types import FAILING_MODULES, OTHER_VALUES, assert_field_is_named, fields_of

_REQUIRED: dict[type, dict[str, Any]] = {
    CodeProblems: {"dataset": "x.jsonl"},
    GuessNumber: {},
    Judge: {"base_url": "http://127.0.0.1:1/v1", "model": "m"},
    JudgedEnv: {"env": LargestNumber(), "judge": Judge(base_url="http://127.0.0.1:1/v1", model="m")},
    MathProblems: {"dataset": "x.jsonl"},
    MCPServer: {"command": ("true",)},
    PythonArithmetic: {},
    Ramp: {"points": ((0, 1.0),)},
    RewardModel: {"model": "m"},
    ToolEnv: {"env": LargestNumber(), "tools": ("ownloop_tasks.calculator:calculate",)},
}


@pytest.mark.parametrize(("kind", "field"), fields_of(_REQUIRED), ids=str)
@pytest.mark.parametrize("value", OTHER_VALUES)
def test_a_field_of_another_type_is_named(kind: Any, field: str, value: object) -> None:
    assert_field_is_named(kind, _REQUIRED[kind], field, value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: MCPServer(command=("true", *x)), r"MCPServer.command\[1\] is 3"),
        (lambda x: Ramp(points=((0, 1.0), x)), r"Ramp.points\[1\]\[1\] is 'a'"),
        (lambda x: ToolEnv(env=LargestNumber(), tools=x), r"ToolEnv.tools\[0\] is 3"),
    ],
)
@pytest.mark.parametrize("container", [tuple, list])
def test_an_item_of_another_type_is_named(make: Any, message: str, container: Any) -> None:
    with pytest.raises(ValueError, match=message):
        make(container([3, "a"]))


@pytest.mark.parametrize(("module", "content", "said"), FAILING_MODULES)
def test_a_module_of_the_users_that_fails_is_named(
    module: str, content: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{module}.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=rf"tools holds '{module}:f'.*{said}"):
        ToolEnv(env=LargestNumber(), tools=(f"{module}:f",))
