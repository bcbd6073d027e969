"""`ownloop show RUN`: rollouts as text."""

from pathlib import Path

import pytest

from controller.commands.show import Runs, Show
from controller.runs.folder import RunFolder
from rl.types import Group
from tests.rl.fakes import completion, single_turn


def _show(name: str, runs: Path, capfd: pytest.CaptureFixture[str], *overrides: str) -> str:
    assert Show(recipe=name, runs=runs, fields=overrides).run() == 0
    return capfd.readouterr().out


def _group(name: str, *answers: str) -> Group:
    rollouts = tuple(single_turn((1, 2), completion(text), reward=len(text) / 4) for text in answers)
    return Group(problem_id=name, prompt=f"the prompt of {name}", rollouts=rollouts)


def test_the_last_evaluation_and_the_last_step_are_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path / "runs" / "mine", {})
    folder.log_rollouts(0, [_group("held out", "so")], split="eval")
    folder.log_rollouts(1, [_group("earlier", "x")])
    folder.log_rollouts(2, [_group("a", "yes", "no"), *(_group(f"b{i}", f"answer {i}") for i in range(5))])
    folder.close()
    text = _show("mine", tmp_path / "runs", capfd)
    assert "eval 0: 1 rollouts of 1 problems, mean reward 0.500" in text
    assert "step 2: 7 rollouts of 6 problems" in text
    for shown in ("the prompt of held out", "so", "the prompt of a", "yes", "answer 0", "answer 1", "reward 0.75"):
        assert shown in text
    assert "earlier" not in text
    assert "answer 2" not in text
    assert _show(str(folder.path), Path("elsewhere"), capfd) == text
    with pytest.raises(ValueError, match="--num-steps is given for mine"):
        _show("mine", tmp_path / "runs", capfd, "--num-steps", "3")


def test_a_run_without_rollouts_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    RunFolder(tmp_path / "mine", {})
    with pytest.raises(ValueError, match="mine has recorded no rollouts"):
        _show("mine", tmp_path, capfd)


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text('{"num_steps": 3}')
    (tmp_path / "b" / "metrics.jsonl").mkdir()  # cannot be opened, like a file of another user's
    assert Runs(runs=tmp_path).run() == 0
    lines = {line.split()[0]: line for line in capfd.readouterr().out.splitlines()[1:]}
    assert "0/3" in lines["a"]
    assert "metrics.jsonl" in lines["b"]


def test_a_models_directory_is_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    with pytest.raises(ValueError, match=r"no config\.json"):
        _show(str(model), tmp_path, capfd)
    (model / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=f"no run {model}: .* only a model"):
        _show(str(model), tmp_path, capfd)


def test_a_recipe_goes_before_a_run_of_its_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    RunFolder(tmp_path / "grpo_smollm2_cpu", {})
    assert '"group_size"' in _show("grpo_smollm2_cpu", tmp_path, capfd)
