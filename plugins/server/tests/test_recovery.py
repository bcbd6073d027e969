"""A trainer that dies at any moment: its clients notice nothing, and nothing is counted twice or lost."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tinker", reason="the package tinker, of the extra tinker, is not installed")

from controller.processes.errors import MeshError
from ownloop_server import recovery
from ownloop_server.recovery import AdapterLostError, RecoveringAdapter
from plugins.server.tests.running_server import running_server
from plugins.server.tests.sdk import new_client, scores, train
from plugins.server.tests.toy_model import ToyHost
from rl.lora import LoRAConfig
from rl.types import AdamParams, Datum

tinker: Any = pytest.importorskip("tinker")
ADAM = AdamParams(learning_rate=0.1)


def datum(*tokens: int) -> Datum:
    """One training sequence."""
    inputs = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)}
    return Datum(tokens=np.array(tokens[:-1]), loss_inputs=inputs)


def run(folder: Path, host: ToyHost, max_restarts: int = 100) -> np.ndarray[Any, Any]:
    """A script of most calls. Returns the log-probs at its end."""

    async def main() -> np.ndarray[Any, Any]:
        adapter = await RecoveringAdapter.make(
            host.restarting(max_restarts), "adapter", LoRAConfig(rank=4), folder / "recovery"
        )
        for step in range(3):
            await adapter.forward_backward([datum(2, 3, 4)], "cross_entropy")
            await adapter.forward_backward([datum(3, step, 5)], "cross_entropy")
            await adapter.optim_step(ADAM)
            if step == 1:
                await adapter.save_checkpoint(folder / "one")
                shutil.rmtree(folder / "one")  # the user's to delete
        assert await adapter.push_model_state_dict() == 3
        await adapter.forward_backward([datum(6, 7)], "cross_entropy")
        await adapter.save_checkpoint(folder / "two")  # with a gradient, which a checkpoint has not
        await adapter.optim_step(ADAM)
        (logprobs,) = (await adapter.forward([datum(2, 3, 4, 5, 6, 7)])).logprobs
        await adapter.load_checkpoint(folder / "two", weights_only=True)
        await adapter.forward_backward([datum(2, 8)], "cross_entropy")
        await adapter.optim_step(ADAM)
        (reset,) = (await adapter.forward([datum(2, 8, 4, 5, 6, 7)])).logprobs
        await adapter.drop()
        assert not (folder / "recovery").exists()
        return np.concatenate([logprobs, reset])

    return asyncio.run(main())


@pytest.mark.parametrize("repeat_s", [60.0, 0.0])
def test_a_trainer_may_die_at_any_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeat_s: float) -> None:
    monkeypatch.setattr(recovery, "REPEAT_S", repeat_s)  # with 0, every step writes a recovery point
    unbroken, counting = ToyHost(), 1000
    unbroken.dies_in = [counting]
    expected = run(tmp_path / "unbroken", unbroken)
    num_calls = counting - unbroken.dies_in[0]
    assert num_calls > 15
    for dies_at in range(num_calls):
        host = ToyHost()
        host.dies_in = [dies_at]
        np.testing.assert_array_equal(run(tmp_path / str(dies_at), host), expected)
        assert host.life == 2 or dies_at == num_calls - 1  # nothing is left to do for a trainer that dies as it ends


@pytest.mark.parametrize(("bound", "value"), [("REPEAT_BYTES", 100), ("REPEAT_CALLS", 6)])
def test_what_is_repeated_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int) -> None:
    monkeypatch.setattr(recovery, bound, value)

    async def main() -> list[str]:
        host = ToyHost()
        adapter = await RecoveringAdapter.make(host.restarting(), "adapter", LoRAConfig(rank=4), tmp_path / "recovery")
        for _ in range(10):
            await adapter.forward_backward([datum(2, 3, 4)], "cross_entropy")  # 40 bytes
            await adapter.optim_step(ADAM)
        host.life = -host.life
        host.calls.clear()
        assert await adapter.policy_version() == 10
        assert len(list((tmp_path / "recovery").iterdir())) == 1
        return [verb for _, verb in host.calls]

    assert asyncio.run(main()) == ["forward_backward", "optim_step"]


def test_a_call_that_kills_the_trainer_twice_is_not_repeated(tmp_path: Path) -> None:
    async def main() -> None:
        host = ToyHost()
        adapter = await RecoveringAdapter.make(host.restarting(), "adapter", LoRAConfig(rank=4), tmp_path / "recovery")
        await adapter.forward_backward([datum(2, 3)], "cross_entropy")
        await adapter.optim_step(ADAM)
        host.dies_in = [0, 3]
        with pytest.raises(MeshError, match="rank 0 died"):
            await adapter.forward_backward([datum(4, 5)], "cross_entropy")
        host.calls.clear()
        assert await adapter.policy_version() == 1
        assert [verb for _, verb in host.calls] == ["forward_backward", "optim_step"]

    asyncio.run(main())


def test_a_trainer_that_dies_too_often_is_not_started_again(tmp_path: Path) -> None:
    host = ToyHost()
    host.dies_in = [3, 5]
    with pytest.raises(MeshError, match="rank 0 died"):
        run(tmp_path, host, max_restarts=1)
    assert host.life == -2


def test_an_adapter_that_cannot_be_restored_says_what_to_do(tmp_path: Path) -> None:
    async def main() -> None:
        host = ToyHost()
        adapter = await RecoveringAdapter.make(host.restarting(), "adapter", LoRAConfig(rank=4), tmp_path / "recovery")
        await adapter.save_checkpoint(tmp_path / "saved")
        (tmp_path / "recovery" / "1" / "state.json").write_text("{")
        host.life = -host.life
        for _ in range(2):
            with pytest.raises(AdapterLostError, match="newest checkpoint that you saved"):
                await adapter.policy_version()

    asyncio.run(main())


def test_clients_of_the_sdk_notice_nothing(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        clients = [new_client(server) for _ in range(3)]
        for client in clients:
            train(client, 2)
        before = scores(clients[0])
        snapshot = clients[0].save_weights_and_get_sampling_client().result()
        server.host.dies_in = [1]
        for client in clients:
            train(client)
        assert server.host.life == 2
        assert scores(clients[0]) == scores(clients[1]) == scores(clients[2]) != before
        assert scores(snapshot) == pytest.approx(before, rel=1e-6)
        after = clients[0].save_weights_and_get_sampling_client().result()
        assert scores(after) == pytest.approx(scores(clients[0]), rel=1e-6)
        assert scores(snapshot) == pytest.approx(before, rel=1e-6)
        path = clients[1].save_weights_for_sampler("saved").result().path
        server.host.dies_in = [1]  # while a sampling client is made of a path
        loaded = server.client().create_sampling_client(model_path=path).result()
        assert scores(loaded) == pytest.approx(scores(clients[1]), rel=1e-6)
        assert server.host.life == 3


def test_a_step_whose_recovery_point_cannot_be_written_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recovery, "REPEAT_S", 0.0)
    full = True

    async def save_checkpoint(path: Path) -> None:
        if full:
            raise OSError(28, "No space left on device")
        await saved(path)

    async def main() -> None:
        nonlocal full, saved
        host = ToyHost()
        adapter = await RecoveringAdapter.make(host.restarting(), "adapter", LoRAConfig(rank=4), tmp_path / "recovery")
        saved = host.adapters["adapter"].save_checkpoint
        host.adapters["adapter"].save_checkpoint = save_checkpoint  # pyright: ignore[reportAttributeAccessIssue]
        for step in (1, 2):
            await adapter.forward_backward([datum(2, 3)], "cross_entropy")
            assert (await adapter.optim_step(ADAM)).policy_version == step
        assert "No space left on device" in capfd.readouterr().err
        full = False
        await adapter.forward_backward([datum(2, 3)], "cross_entropy")
        await adapter.optim_step(ADAM)  # tries again
        host.life = -host.life
        host.calls.clear()
        assert await adapter.policy_version() == 3
        assert host.calls == []

    saved: Any = None
    asyncio.run(main())


def test_a_checkpoint_without_a_recovery_point_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    async def main() -> None:
        host = ToyHost()
        adapter = await RecoveringAdapter.make(host.restarting(), "adapter", LoRAConfig(rank=4), tmp_path / "recovery")
        await adapter.forward_backward([datum(2, 3)], "cross_entropy")
        await adapter.optim_step(ADAM)
        monkeypatch.setattr(shutil, "copytree", fail)
        await adapter.save_checkpoint(tmp_path / "one")
        await adapter.forward_backward([datum(4, 5)], "cross_entropy")
        await adapter.optim_step(ADAM)
        (before,) = (await adapter.forward([datum(2, 3, 4, 5)])).logprobs
        assert await adapter.load_checkpoint(tmp_path / "one") == 1
        (loaded,) = (await adapter.forward([datum(2, 3, 4, 5)])).logprobs
        assert not np.array_equal(before, loaded)
        host.life = -host.life
        assert await adapter.policy_version() == 1
        (again,) = (await adapter.forward([datum(2, 3, 4, 5)])).logprobs
        np.testing.assert_array_equal(again, loaded)

    asyncio.run(main())
