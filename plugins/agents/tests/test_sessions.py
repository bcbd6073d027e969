"""Sessions as training data: every sampled token once, for the price of the tree."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.runs.folder import RunFolder
from ownloop_agents.sessions import (
    ModelCall,
    Session,
    SessionGroup,
    branches,
    kept_calls,
    last_branch,
    record_sessions,
    session_metrics,
    session_to_data,
    sessions_to_data,
)
from ownloop_report.samples import session_trees
from plugins.agents.tests.made_sessions import branched, call, session
from rl.advantages import group_mean_std
from rl.data.packing import group_by_prefix
from rl.losses import get_loss
from rl.rollouts.columns import read_groups
from rl.tiny_models import tiny_llama
from rl.types import Datum
from trainer.config import TrainerConfig
from trainer.engines import load_engine


def test_every_sampled_token_is_trained_once() -> None:
    made = branched()
    assert branches(made) == [(0, 2), (0, 4), (0, 1, 5), (3, 6), (7,)]
    data = session_to_data(made, 0.5)
    assert sum(datum.num_loss_tokens for datum in data) == made.num_sampled_tokens == 44
    scored = sorted(
        (int(datum.loss_inputs["target_tokens"][i]), round(float(datum.loss_inputs["logprobs"][i]), 5))
        for datum in data
        for i in np.flatnonzero(datum.weights)
    )
    sampled = sorted(
        (token, round(logprob, 5))
        for each in made.calls
        for token, logprob in zip(each.turn.completion.tokens, each.turn.completion.logprobs, strict=True)
    )
    assert scored == sampled
    assert {float(a) for datum in data for a in datum.loss_inputs["advantages"][datum.counted]} == {0.5}


def test_a_tree_computes_every_prefix_once() -> None:
    data = session_to_data(branched(), 1.0)
    lengths = [len(datum.tokens) for datum in data]
    computed = sum(group.num_tokens(lengths) for group in group_by_prefix(data))
    rows = data[:3]  # of one root; the others share no scored prefix with it
    distinct = {datum.tokens[: i + 1].tobytes() for datum in rows for i in range(len(datum.tokens))}
    (group,) = group_by_prefix(rows)
    assert group.num_tokens([len(datum.tokens) for datum in rows]) == len(distinct)
    assert computed < sum(lengths)


def _gradient(model: Path, rows: list[list[Datum]]) -> tuple[float, float, dict[str, np.ndarray]]:
    engine = load_engine(TrainerConfig(model=model, compute_dtype="float32"))
    output = engine.forward_backward(rows, get_loss("importance_sampling", {}))
    found = {name: p.grad.numpy().astype(np.float64) for name, p in engine.hf_parameters() if p.grad is not None}
    return output.metrics["loss"], output.metrics["num_loss_tokens"], found


def test_the_gradient_of_a_tree_is_that_of_separate_rows(tmp_path: Path) -> None:
    model, data = tiny_llama(tmp_path / "model"), session_to_data(branched(), 0.7)
    loss, num_tokens, tree = _gradient(model, [data])
    loss_of_rows, num_of_rows, rows = _gradient(model, [[datum] for datum in data])
    assert num_tokens == num_of_rows == 44
    assert loss == pytest.approx(loss_of_rows, rel=1e-6)
    whole = np.concatenate([value.ravel() for value in rows.values()])
    difference = np.concatenate([(tree[name] - value).ravel() for name, value in rows.items()])
    assert np.linalg.norm(difference) / np.linalg.norm(whole) < 1e-6


def test_the_log_probs_of_a_session_are_those_of_its_branches(tmp_path: Path) -> None:
    # Every branch alone, with all its tokens scored, against the tree with each token in its first branch.
    made = branched()
    engine = load_engine(TrainerConfig(model=tiny_llama(tmp_path / "model"), compute_dtype="float32"))
    found = engine.forward([session_to_data(made, 1.0)], entropy=False).logprobs
    alone = [
        engine.forward([[datum]], entropy=False).logprobs[0]
        for path in branches(made)
        for datum in session_to_data(session(*_line(made, path)), 1.0)
    ]
    for ours, whole in zip(found, alone, strict=True):
        np.testing.assert_allclose(ours[ours != 0], whole[ours != 0], atol=2e-6)


def _line(made: Session, path: tuple[int, ...]) -> list[ModelCall]:
    return [replace(made.calls[index], parent=place - 1 if place else None) for place, index in enumerate(path)]


def test_answers_that_no_one_read_are_left_out() -> None:
    made = session(
        call(None, [5, 6], [7, 8], delivered=False),  # the SDK asked again
        call(None, [5, 6], [7, 9]),
        call(1, [10], [11], delivered=False),  # cut off, and still continued by the program
        call(2, [12], [13]),
        call(1, [10], [14], delivered=False),
    )
    assert kept_calls(made) == [1, 2, 3]
    (datum,) = session_to_data(made, 1.0)
    assert datum.loss_inputs["target_tokens"][datum.counted].tolist() == [7, 9, 11, 13]


def test_forced_forms_are_read_and_not_trained() -> None:
    made = session(call(None, [5], [6, 7], constrained=True), call(0, [8], [9, 10]))
    (datum,) = session_to_data(made, 1.0)
    assert datum.tokens.tolist() == [5, 6, 7, 8, 9]
    assert datum.loss_inputs["target_tokens"][datum.counted].tolist() == [9, 10]
    assert session_to_data(session(call(None, [5], [6], constrained=True)), 1.0) == []


def test_credit_says_which_branches_have_the_advantage() -> None:
    made = branched()
    (last,) = session_to_data(made, 1.0, credit="last")
    assert last.num_loss_tokens == 5
    per_branch = session_to_data(made, 1.0, credit="per_branch")
    assert {float(a) for datum in per_branch for a in datum.loss_inputs["advantages"][datum.counted]} == {
        np.float32(0.2)
    }
    with pytest.raises(ValueError, match="credit is 'every'"):
        session_to_data(made, 1.0, credit="every")  # pyright: ignore[reportArgumentType]


def test_a_group_of_sessions_has_its_advantages() -> None:
    sessions = tuple(replace(branched(seed), reward=float(seed)) for seed in (0, 1))
    group = SessionGroup(task_id="t", prompt="do", sessions=sessions)
    data = sessions_to_data(group, group_mean_std)
    assert [np.sign(d.loss_inputs["advantages"][d.counted][0]) for d in data] == [-1] * 5 + [1] * 5
    assert sessions_to_data(replace(group, sessions=sessions[:1], failures=("it failed",)), group_mean_std) == []
    assert sessions_to_data(replace(group, sessions=(sessions[0],) * 2), group_mean_std) == []
    rollouts = group.as_group().rollouts
    assert [(rollout.reward, rollout.num_sampled_tokens) for rollout in rollouts] == [(0.0, 5), (1.0, 5)]
    metrics = session_metrics([group])
    assert (metrics["session_calls"], metrics["session_branches"], metrics["calls_root"]) == (8, 5, 3)


def test_sessions_are_recorded_and_shown_as_trees(tmp_path: Path) -> None:
    limited = replace(branched(1), reward=0.0, ended_by="call_limit", exit_code=3, output="late")
    line = session(call(None, [5], [6], constrained=True), reward=0.5, name="line")
    group = SessionGroup(task_id="t", prompt="do", sessions=(branched(), limited, line), failures=("it failed",))
    folder = RunFolder(tmp_path / "run", {})
    assert session_trees(folder.path) == []
    record_sessions(folder, 3, [group])
    folder.flush()
    (read,) = read_groups(folder.path / "sessions" / "step-00003.parquet")
    assert [rollout.turns for rollout in read.rollouts] == [
        tuple(replace(each.turn, completion=_single(each)) for each in made.calls) for made in group.sessions
    ]
    assert (read.failures, [rollout.truncated for rollout in read.rollouts]) == (("it failed",), [False, True, False])
    best, worst = session_trees(folder.path)
    assert (best["reward"], worst["reward"], worst["ended_by"], worst["output"]) == (1.0, 0.0, "call_limit", "late")
    assert [each["parent"] for each in best["calls"]] == [each.parent for each in branched().calls]
    shown = {"parent": None, "how": "root", "label": "sub-agent", "trained": True, "read": "said", "said": ""}
    assert best["calls"][3] == {**shown, "num_read": 9, "num_said": 3}


def _single(made: ModelCall) -> Any:
    """The completion with log-probs as they are recorded, of single precision."""
    logprobs = np.array(made.turn.completion.logprobs, np.float32)
    return replace(made.turn.completion, logprobs=tuple(logprobs.tolist()))


def test_a_session_without_a_call_has_no_rollout() -> None:
    with pytest.raises(ValueError, match="no finished call"):
        last_branch(session())
    assert session_to_data(session(), 1.0) == []
