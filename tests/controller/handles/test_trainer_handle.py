"""The handle's work around its ranks, with ranks that answer from a table: no processes, no model."""

import asyncio
import pickle
import threading
from collections import UserDict
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from controller.handles.trainer_handle import TrainerHandle
from rl.losses import get_loss
from rl.tiny_models import tiny_llama
from rl.types import AdamParams, Datum, ForwardBackwardOutput
from tests.controller.handles.fake_ranks import FakeMesh, handle_of, make, random_batch
from trainer.config import TrainerConfig
from trainer.engines.base import RankFailureError
from trainer.engines.contract.reference import routed

LENGTHS = (3, 17, 5, 12, 9, 1)


def test_each_rank_has_its_local_batch_and_results_keep_order(tmp_path: Path) -> None:
    handle, mesh = make(tmp_path, data_parallel_shard=2)
    batch = random_batch(LENGTHS)
    output = asyncio.run(handle.forward(batch, entropy=True))
    assert output.entropy is not None
    for datum, logprobs, entropy in zip(batch, output.logprobs, output.entropy, strict=True):
        assert logprobs.tolist() == entropy.tolist() == datum.tokens.tolist()
    assert output.metrics == {"loss": float(sum(LENGTHS)), "ratio_max": 1.0}
    sent = [sum(len(d.tokens) for m in rank.microbatches[0] for d in m) for rank in mesh.ranks]
    assert sum(sent) == sum(LENGTHS)
    assert max(sent) <= 0.6 * sum(LENGTHS)
    assert len({len(rank.microbatches[0]) for rank in mesh.ranks}) == 1


def test_tensor_parallel_ranks_have_one_batch_and_count_once(tmp_path: Path) -> None:
    handle, mesh = make(tmp_path, data_parallel_shard=2, tensor_parallel=2)
    batch = random_batch(LENGTHS)
    output = asyncio.run(handle.forward_backward(batch, "ppo"))
    local_batches = [[id(d) for microbatch in rank.microbatches[0] for d in microbatch] for rank in mesh.ranks]
    assert local_batches[0] == local_batches[1]
    assert local_batches[2] == local_batches[3]
    assert sorted(local_batches[0] + local_batches[2]) == sorted(id(d) for d in batch)
    assert output.metrics["loss"] == sum(LENGTHS)


def test_routes_of_a_model_without_experts_are_refused(tmp_path: Path) -> None:
    dense, _ = make(tmp_path / "dense")
    with pytest.raises(ValueError, match=r"batch\[0\]\.routes is given, and the layers of this trainer's model have"):
        asyncio.run(dense.forward(routed(random_batch(LENGTHS), (2, 2, 4))))
    with pytest.raises(ValueError, match=r"TrainerConfig.compile is True, which replays no routes"):
        TrainerConfig(compile=True).check_routes()


def test_pipeline_stages_get_the_same_local_batch_and_count_once(tmp_path: Path) -> None:
    config = TrainerConfig(
        model=tiny_llama(tmp_path / "model", tied=False),
        max_tokens_per_microbatch=20,
        pipeline_parallel=2,
        data_parallel_shard=2,
    )
    mesh, batch = FakeMesh(config.num_ranks), random_batch(LENGTHS)
    handle = handle_of(mesh, config)
    output = asyncio.run(handle.forward(batch))
    local_batches = [[id(d) for microbatch in rank.microbatches[0] for d in microbatch] for rank in mesh.ranks]
    assert local_batches[:2] == local_batches[2:]
    assert sorted(local_batches[0] + local_batches[1]) == sorted(id(d) for d in batch)
    assert [logprobs.tolist() for logprobs in output.logprobs] == [d.tokens.tolist() for d in batch]
    assert output.metrics["loss"] == sum(LENGTHS)


def test_what_no_generator_could_pull_is_not_pushed(tmp_path: Path) -> None:
    alone, mesh = make(tmp_path)
    critic = handle_of(mesh, replace(alone.config, head="value"))
    for handle, message in ((replace(alone, pushes=False), "without a generator"), (critic, "head='value'")):
        with pytest.raises(ValueError, match=message):
            asyncio.run(handle.push_model_state_dict())
    assert mesh.num_calls == 0


async def test_calls_in_flight_reach_the_ranks_in_order_of_issue(tmp_path: Path) -> None:
    handle, mesh = make(tmp_path, data_parallel_shard=2)

    first = asyncio.create_task(handle.forward_backward(random_batch(LENGTHS), "ppo"))
    second = asyncio.create_task(handle.optim_step(AdamParams(learning_rate=0.5)))
    third = asyncio.create_task(handle.forward(random_batch((2,))))
    _, step, _ = await asyncio.gather(first, second, third)
    assert step.learning_rate == 0.5
    for rank in mesh.ranks:
        assert rank.calls == ["forward_backward", "optim_step", "forward"]


class Held(UserDict[str, Any]):
    """Loss inputs that can be read once `released` is set."""

    def __init__(self, inputs: Any) -> None:
        super().__init__(inputs)
        self.asked, self.released = threading.Event(), threading.Event()

    def keys(self) -> Any:
        self.asked.set()
        assert self.released.wait(60), "the event loop, which sets it, waits too"
        return super().keys()


async def test_a_large_batch_keeps_its_place_and_the_loop_runs(tmp_path: Path) -> None:
    handle, mesh = make(tmp_path, data_parallel_shard=2)
    (datum,) = random_batch((5,))
    inputs = Held(datum.loss_inputs)

    calls: list[asyncio.Task[Any]] = [
        asyncio.create_task(handle.forward_backward([replace(datum, loss_inputs=inputs)], "ppo")),
        asyncio.create_task(handle.optim_step(AdamParams(learning_rate=0.5))),
        asyncio.create_task(handle.forward(random_batch((2,)))),
        asyncio.create_task(handle.zero_grad()),
    ]
    while not inputs.asked.is_set():
        await asyncio.sleep(0)
    assert mesh.num_calls == 0
    inputs.released.set()
    await asyncio.gather(*calls)
    for rank in mesh.ranks:
        assert rank.calls == ["forward_backward", "optim_step", "forward", "zero_grad"]


async def test_a_call_that_is_cancelled_or_refused_is_not_sent(tmp_path: Path) -> None:
    handle, mesh = make(tmp_path)
    (datum,) = random_batch((5,))
    inputs = Held(datum.loss_inputs)

    cancelled = asyncio.create_task(handle.forward_backward([replace(datum, loss_inputs=inputs)], "ppo"))
    refused = asyncio.create_task(handle.forward([]))
    later = asyncio.create_task(handle.forward([datum]))
    while not inputs.asked.is_set():
        await asyncio.sleep(0)
    cancelled.cancel()
    inputs.released.set()
    outcomes = await asyncio.gather(cancelled, refused, later, return_exceptions=True)
    assert [type(each) for each in outcomes] == [asyncio.CancelledError, ValueError, ForwardBackwardOutput]
    assert mesh.ranks[0].calls == ["forward"]


def assert_invalid_batches_are_refused(loss: str, folder: Path) -> None:
    """Before any rank is called."""
    handle, mesh = make(folder, data_parallel_shard=2)
    batch = random_batch((3, 2))
    shorter = Datum(tokens=batch[1].tokens, loss_inputs=batch[0].loss_inputs)
    without = Datum(tokens=batch[1].tokens, loss_inputs={"target_tokens": batch[1].tokens})

    def second_with(name: str, values: list[Any], dtype: str) -> list[Datum]:
        return [batch[0], replace(batch[1], loss_inputs={**batch[1].loss_inputs, name: np.array(values, dtype)})]

    second = r"batch\[1\].loss_inputs"
    for data, message in (
        ([], "batch is empty"),
        ([batch[0], shorter], second + r"\['.*'\] has length 3; batch\[1\].tokens has length 2"),
        ([without], r"batch\[0\].loss_inputs lacks 'logprobs'"),
        (second_with("advantages", [0, np.nan], "float32"), second + r"\['advantages'\]\[1\] is nan"),
        (second_with("logprobs", [-np.inf, 0], "float32"), second + r"\['logprobs'\]\[0\] is -inf"),
        (second_with("target_tokens", [1, 2], "int32"), second + r"\['target_tokens'\] has dtype int32"),
        (second_with("advantages", ["a", "b"], "str"), second + r"\['advantages'\] has dtype <U1"),
        (random_batch((129,)), "between 1 and 128 tokens"),
        (batch[0], "batch is a Datum; it must be a sequence of Datums"),
        ([batch[0], None], r"batch\[1\] is a NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            asyncio.run(handle.forward_backward(cast("Any", data), loss))
    assert mesh.num_calls == 0


def test_an_invalid_batch_is_refused_before_any_rank_is_called(tmp_path: Path) -> None:
    assert_invalid_batches_are_refused("ppo", tmp_path)


def test_invalid_parameters_are_refused_before_any_rank_is_called(tmp_path: Path) -> None:
    handle, mesh = make(tmp_path, data_parallel_shard=2)
    for params, scale, message in (
        (None, 1.0, "optim_step was given None; it takes AdamParams"),
        (AdamParams(learning_rate=1.0), "1", "grad_scale is '1'; it must be a number"),
    ):
        with pytest.raises(ValueError, match=message):
            asyncio.run(handle.optim_step(cast("Any", params), cast("Any", scale)))
    assert mesh.num_calls == 0


@pytest.mark.stranger("B3")
def test_ranks_are_sent_no_types_of_the_users(tmp_path: Path) -> None:
    class OwnDatum(Datum):
        """A type that only the script knows."""

    class OwnArray(np.ndarray):
        """Another."""

    handle, mesh = make(tmp_path, data_parallel_shard=2)
    plain = random_batch((3, 2))
    inputs = UserDict({name: array.view(OwnArray) for name, array in plain[1].loss_inputs.items()})
    own = OwnDatum(tokens=plain[1].tokens, loss_inputs=inputs, temperature=0.5)
    asyncio.run(handle.forward_backward([plain[0], own], "ppo"))
    sent = [datum for rank in mesh.ranks for microbatch in rank.microbatches[0] for datum in microbatch]
    assert {type(datum) for datum in sent} == {Datum}
    assert {type(array) for datum in sent for array in datum.loss_inputs.values()} == {np.ndarray}
    assert any(datum is plain[0] for datum in sent)
    assert sorted(datum.temperature for datum in sent) == [0.5, 1.0]


def test_an_invalid_loss_is_refused_before_any_rank_is_called(tmp_path: Path) -> None:
    handle, mesh = make(tmp_path, data_parallel_shard=2)
    batch = random_batch((3, 2))
    for loss, config, message in (
        ("pppo", {}, "did you mean 'ppo'"),
        ("ppo", {"clip_hihg_threshold": 2.0}, "clip_high_threshold"),
        ("ppo", {"kl_coef": 0.1}, r"batch\[0\].loss_inputs lacks 'reference_logprobs'"),
        ("value", {}, "loss is 'value', which needs a trainer with head='value'; this trainer has head='lm'"),
    ):
        with pytest.raises(ValueError, match=message):
            asyncio.run(handle.forward_backward(batch, loss, config))
    critic = TrainerConfig(model=handle.config.model, head="value")
    with pytest.raises(ValueError, match="loss is 'ppo', which needs a trainer with head='lm'"):
        asyncio.run(handle_of(mesh, critic).forward_backward(batch, "ppo"))
    with pytest.raises(ValueError, match="entropy was asked for"):
        asyncio.run(handle_of(mesh, critic).forward(batch, entropy=True))
    assert mesh.num_calls == 0
    assert len(asyncio.run(handle.forward_backward(batch, "ppo")).logprobs) == 2


def test_ranks_are_sent_the_checked_loss_with_its_options(tmp_path: Path) -> None:
    handle, mesh = make(tmp_path)
    for loss in ("ppo", "math:prod"):
        options = {"clip_high_threshold": 1.3} if loss == "ppo" else {}
        asyncio.run(handle.forward_backward(random_batch((3, 2)), loss, options))
        (sent,) = pickle.loads(pickle.dumps(mesh.ranks[0].arguments))
        assert sent == get_loss(loss, options)


def test_the_error_that_caused_a_failure_is_raised(tmp_path: Path) -> None:
    handle, mesh = make(tmp_path, data_parallel_shard=2)
    mesh.ranks[0].error, mesh.ranks[1].error = RankFailureError("another rank"), ArithmeticError("my own mistake")
    with pytest.raises(ArithmeticError, match="my own mistake"):
        asyncio.run(handle.forward_backward(random_batch(LENGTHS), "ppo"))


def test_an_untrainable_model_or_layout_starts_no_process(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    for config, message in (
        (TrainerConfig(model=tmp_path / "nowhere"), "config.json"),
        (TrainerConfig(model=model, tensor_parallel=3), "tensor_parallel is 3, which does not divide"),
    ):
        with pytest.raises(ValueError, match=message):
            asyncio.run(TrainerHandle.launch(config, "float32", tmp_path / "logs"))
    assert not (tmp_path / "logs").exists()
