import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rl.envs.jsonl import JsonlReward
from rl.rollouts.episodes import rollout_groups
from rl.types import SamplingParams
from tests.rl.fakes import ScriptedGenerator, WordRenderer


def _env(folder: Path, rows: list[Any], **options: Any) -> JsonlReward:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    arguments: dict[str, Any] = {"file": file, "reward": "tests.rl.rewards:exact", "fields": ("answer",), **options}
    return JsonlReward(**arguments)


def _rows(count: int) -> list[Any]:
    return [{"prompt": f"Say {i}.", "answer": str(i), "source": "made up"} for i in range(count)]


def test_an_epoch_holds_every_training_row_once(tmp_path: Path) -> None:
    env = _env(tmp_path, _rows(200))
    eval_ids = {p.id for p in env.eval_problems(10)}
    size = 200 - len(env.eval_problems(len(_all_eval_ids(env))))
    first, second = (env.train_problems(3, epoch * size, size) for epoch in range(2))
    assert Counter(p.id for p in first) == Counter(p.id for p in second)
    assert len({p.id for p in first}) == size
    assert [p.id for p in first] != [p.id for p in second]
    assert eval_ids.isdisjoint(p.id for p in first)


def _all_eval_ids(env: JsonlReward) -> list[str]:
    """The ids of all held-out problems."""
    count = 1
    while True:
        try:
            ids = [p.id for p in env.eval_problems(count)]
        except ValueError:
            return [p.id for p in env.eval_problems(count - 1)]
        assert len(set(ids)) == count
        count += 1


def test_the_split_depends_on_the_prompt_alone(tmp_path: Path) -> None:
    few, many = (tmp_path / name for name in ("few", "many"))
    few.mkdir()
    many.mkdir()
    first = _env(few, _rows(50))
    rows = [{**row, "answer": "changed", "prompt": row["prompt"]} for row in _rows(300)]
    second = _env(many, rows)
    prompts = {p.prompt for p in first.eval_problems(len(_all_eval_ids(first)))}
    assert prompts < {p.prompt for p in second.eval_problems(len(_all_eval_ids(second)))}


@pytest.mark.parametrize(
    ("reward", "fields", "expected"), [("exact", ("answer",), [1.0, 0.0]), ("length", (), None)], ids=["plain", "async"]
)
def test_the_function_rewards(tmp_path: Path, reward: str, fields: tuple[str, ...], expected: Any) -> None:
    env = _env(tmp_path, _rows(100), reward=f"tests.rl.rewards:{reward}", fields=fields)
    problems = env.train_problems(0, 0, 1)
    right = str(problems[0].prompt).removeprefix("Say ").removesuffix(".")
    generator = ScriptedGenerator(lambda prompt, i, seed: [right, "something else"][i])
    renderer: Any = WordRenderer()
    (group,) = asyncio.run(rollout_groups(generator, renderer, problems, SamplingParams(max_tokens=4), 2))
    assert group.rewards.tolist() == (expected or [len(right), 14])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "?"}, "rows.jsonl:3 lacks 'answer'; it has 'prompt'"),
        ({"answer": "?"}, "rows.jsonl:3 lacks 'prompt'; it has 'answer'"),
        ('{"prompt": "?"', "rows.jsonl:3 is not JSON"),
        ([1], "rows.jsonl:3 is a list; a JSON object is needed"),
        ({"prompt": 7, "answer": ""}, "rows.jsonl:3: 'prompt' is 7; text, or messages"),
        ({"prompt": [{"role": "user"}], "answer": ""}, "rows.jsonl:3: 'prompt' holds"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _env(tmp_path, [*_rows(1), "", row, *_rows(100)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": "tests.rl.rewards:exakt"}, "cannot be imported .*exakt"),
        ({"reward": "tests.rl.no_such:exact"}, "cannot be imported .*no_such"),
        ({"reward": "exact"}, "cannot be imported"),
        ({"reward": "tests.rl.rewards:NOT_A_FUNCTION"}, "an? int; it must be a function"),
        ({"file": Path("no/such.jsonl")}, "there is no file no/such.jsonl"),
    ],
)
def test_a_missing_file_or_function_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _env(tmp_path, _rows(100), **options)


def test_a_file_too_small_to_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="both splits need at least one"):
        _env(tmp_path, _rows(1))
    with pytest.raises(ValueError, match="num_eval is 1000, but"):
        _env(tmp_path, _rows(200)).eval_problems(1000)
