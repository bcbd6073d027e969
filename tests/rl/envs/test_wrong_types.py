"""Fields of environments with values of other types, as a recipe's file may have them."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl.data.sources import EnvExamples, EnvPreferences, JsonlExamples, JsonlPreferences
from rl.envs.jsonl import JsonlReward
from rl.envs.largest_number import LargestNumber
from rl.envs.reasoning import ReasoningGym
from rl.types import AdamParams, SamplingParams
from tests.rl.envs.wrong_types import FAILING_MODULES, OTHER_VALUES, assert_field_is_named, fields_of

_REQUIRED: dict[type, dict[str, Any]] = {
    JsonlReward: {"file": Path("x.jsonl"), "reward": "rl.envs.jsonl:no_reward"},
    LargestNumber: {},
    ReasoningGym: {"task": "chain_sum"},
}


@pytest.mark.parametrize(("kind", "field"), fields_of(_REQUIRED), ids=str)
@pytest.mark.parametrize("value", OTHER_VALUES)
def test_a_field_of_another_type_is_named(kind: Any, field: str, value: object) -> None:
    assert_field_is_named(kind, _REQUIRED[kind], field, value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: SamplingParams(max_tokens=1, stop_token_ids=x), r"SamplingParams.stop_token_ids\[1\] is 'a'"),
        (lambda x: ReasoningGym(task="chain_sum", stop=x), r"ReasoningGym.stop\[0\] is 3"),
        (lambda x: ReasoningGym(task="chain_sum", params={x[0]: 1}), r"ReasoningGym.params\[3\] is 3"),
        (
            lambda x: AdamParams(learning_rate=1e-3, learning_rate_multipliers={"*": x[1]}),
            r"AdamParams.learning_rate_multipliers\['\*'\] is 'a'",
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
        with pytest.raises(ValueError, match=rf"{kind.__name__}\.{field}"):
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


@pytest.mark.parametrize(("module", "content", "said"), FAILING_MODULES)
def test_a_module_of_the_users_that_fails_is_named(
    module: str, content: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{module}.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=rf"reward is '{module}:f'.*{said}"):
        JsonlReward(file=tmp_path / "rows.jsonl", reward=f"{module}:f")
