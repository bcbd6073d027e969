from pathlib import Path

import pytest

from controller.runs.folder import RunFolder
from controller.runs.recording import RecordedEnv, read_recording
from rl.algorithms.shaping import shape_rewards
from rl.types import Group
from tests.rl.fakes import completion, single_turn


def _group(name: str, *rewards: float) -> Group:
    rollouts = tuple(single_turn((1, 2), completion("ab", version=3), reward=reward) for reward in rewards)
    return Group(problem_id=name, prompt=name, rollouts=rollouts)


def _recording(path: Path) -> Path:
    folder = RunFolder(path, {})
    folder.log_rollouts(0, [_group("held out", 1.0)], split="eval")
    folder.log_rollouts(1, [_group("a", 1.0, 0.5), _group("b", 0.0, 1.0)])
    folder.log_rollouts(2, [_group("a", 0.25, 0.5)])  # the environment failed the other group
    folder.log_rollouts(4, [_group("c", 0.25, 0.75), _group("a", 0.25, 0.5)])
    folder.flush()
    return folder.rollouts


def test_every_step_gets_the_groups_that_it_had(tmp_path: Path) -> None:
    env = RecordedEnv(_recording(tmp_path / "run"), groups_per_step=2)

    def step(number: int) -> list[Group]:
        return env.train_groups(number, 0, 2)

    lost = Group(problem_id="", prompt="", rollouts=(), failures=("not recorded",))

    assert step(1) == [_group("a", 1.0, 0.5), _group("b", 0.0, 1.0)]
    assert step(2) == [_group("a", 0.25, 0.5), lost]
    assert step(3) == [lost, lost]
    assert step(4) == [_group("c", 0.25, 0.75), _group("a", 0.25, 0.5)]
    assert [group.problem_id for n in (0, 1) for group in env.train_groups(1, n, 1)] == ["a", "b"]
    assert env.eval_problems(5) == []
    with pytest.raises(ValueError, match="ends with step 4; step 5 is not there"):
        step(5)
    with pytest.raises(ValueError, match="has no problems to attempt"):
        env.train_problems(0, 0, 2)


def test_a_replay_has_the_environments_rewards(tmp_path: Path) -> None:
    played, folder = _group("a", 1.0, 0.5), RunFolder(tmp_path / "run", {})
    folder.log_rollouts(1, [shape_rewards(played, lambda rollout: -0.1 * rollout.num_sampled_tokens)])
    folder.flush()
    (recorded,) = read_recording(folder.rollouts)[1]
    assert recorded.rewards.tolist() == pytest.approx([0.8, 0.3])
    assert RecordedEnv(folder.rollouts, groups_per_step=1).train_groups(1, 0, 1) == [played]


def test_a_recording_of_larger_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"step 1 of the recording .* has 2 groups; prompts_per_step is 1"):
        RecordedEnv(_recording(tmp_path / "run"), groups_per_step=1)


def test_groups_recorded_in_several_calls_keep_their_order(tmp_path: Path) -> None:
    folder, names = RunFolder(tmp_path / "run", {}), [f"p{number}" for number in range(12)]
    for name in names:
        folder.log_rollouts(1, [_group(name, 1.0)])
        folder.flush()
    assert [group.problem_id for group in read_recording(folder.rollouts)[1]] == names


def test_one_step_of_a_recording_can_be_named(tmp_path: Path) -> None:
    steps = read_recording(_recording(tmp_path / "run") / "step-00002.parquet")
    assert dict(steps) == {2: [_group("a", 0.25, 0.5)]}


def test_a_path_that_is_not_a_recording_is_refused(tmp_path: Path) -> None:
    rollouts = _recording(tmp_path / "run")
    with pytest.raises(ValueError, match=r"missing\.parquet cannot be read: No such file"):
        read_recording(tmp_path / "missing.parquet")
    with pytest.raises(ValueError, match=r"eval-00000\.parquet holds no training rollouts"):
        read_recording(rollouts / "eval-00000.parquet")
    with pytest.raises(ValueError, match="holds no training rollouts"):
        read_recording(tmp_path)
    (rollouts / "step-00002.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"step-00002\.parquet is not a recording of rollouts"):
        RecordedEnv(rollouts, groups_per_step=2)
