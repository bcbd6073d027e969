"""Fields of environments with values of other types, as a recipe's file may have them.

Covers: rl/checks.py
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rl.checks import check_types
from rl.envs.code_problems import CodeProblems
from rl.envs.even_words import NumberWords
from rl.envs.guess_number import GuessNumber
from rl.envs.jsonl import JsonlReward
from rl.envs.judged import Judge, JudgedEnv
from rl.envs.largest_number import LargestNumber
from rl.envs.math_problems import MathProblems
from rl.envs.mcp_server import MCPServer
from rl.envs.mixture import Ramp
from rl.envs.python_arithmetic import PythonArithmetic
from rl.envs.reasoning import ReasoningGym
from rl.envs.reward_model import RewardModel
from rl.envs.tools import ToolEnv
from rl.types import SamplingParams
from rl.vision.colours import GuessColour
from rl.vision.image_rows import ImageRows

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
    ToolEnv: {"env": LargestNumber(), "tools": ("rl.envs.calculator:calculate",)},
}


@pytest.mark.parametrize(("kind", "field"), [(kind, each.name) for kind in _REQUIRED for each in fields(kind)], ids=str)
@pytest.mark.parametrize("value", [object(), b"x", 2.5j])
def test_a_field_of_another_type_is_named(kind: Any, field: str, value: object) -> None:
    with pytest.raises(
        ValueError, match=rf"{kind.__name__}\.{field} is |env is a {type(value).__name__}, and its name"
    ):
        kind(**{**_REQUIRED[kind], field: value})


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
