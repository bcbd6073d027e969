"""Processes that are killed under clients of the SDK: `python -m pytest -m slow test_failures.py`."""

import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.kills.cell import process_of
from ownloop_server.child_server import Server, served, start, stop
from plugins.server.tests.tinker.conftest import FLOAT32, tiny_chat_model
from plugins.server.tests.tinker.recipes import (
    CHAT_FORMAT,
    begin_recipe,
    kill_recipe,
    metric,
    run_recipe,
    wait_for_checkpoints,
)
from plugins.server.tests.tinker.test_supervised_recipes import bundled_conversations
from rl.tiny_models import SERVABLE, tiny_llama
from tests.waiting import LIMIT_S, wait_until

tinker: Any = pytest.importorskip("tinker", reason="the package tinker, of the extra tinker, is not installed")
types: Any = tinker.types

from plugins.server.tests.sdk import TOKENS, sampled, sequence, trained  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LIMITS = ("--generator.max-model-len", "64", "--max-rank", "8")


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """A server of a tiny model."""
    folder = tmp_path_factory.mktemp("server")
    with served(tiny_llama(folder / "model", **SERVABLE), folder, *FLOAT32, *LIMITS) as running:
        yield running


def kill(server: Server, role: str) -> None:
    """Ends a process of the server's with SIGKILL."""
    process = process_of((server.folder / "logs" / f"{role}-0.log").absolute())
    assert process is not None
    os.kill(process, signal.SIGKILL)


def service(server: Server) -> Any:
    """A new client."""
    return tinker.ServiceClient(base_url=server.url, api_key="tml-local")


def new_client(server: Server) -> Any:
    """A training client whose adapter always begins with the same weights."""
    return service(server).create_lora_training_client(str(server.model), rank=4, seed=1).result(LIMIT_S)


def begin_step(client: Any) -> Any:
    """The future of an optimizer step."""
    client.forward_backward([sequence()], "cross_entropy")
    return client.optim_step(types.AdamParams(learning_rate=1e-2))


def test_clients_do_not_notice_that_the_trainer_was_killed(tiny_server: Server) -> None:
    unbroken, broken = new_client(tiny_server), new_client(tiny_server)
    steps = [begin_step(unbroken).result(LIMIT_S).metrics["policy_version"] for _ in range(6)]
    assert steps == [1, 2, 3, 4, 5, 6]
    expected, snapshot = trained(unbroken), unbroken.save_weights_and_get_sampling_client().result(LIMIT_S)
    before = sampled(snapshot)
    for number in range(1, 7):
        if number == 3:
            kill(tiny_server, "trainer")  # while it has nothing to do
        step = begin_step(broken)
        if number == 5:
            kill(tiny_server, "trainer")
        assert step.result(LIMIT_S).metrics["policy_version"] == number
    np.testing.assert_allclose(trained(broken), expected, atol=1e-5)
    np.testing.assert_allclose(trained(unbroken), expected, atol=1e-5)  # this one too was made again
    assert (sampled(snapshot) == before).all()
    new = broken.save_weights_and_get_sampling_client().result(LIMIT_S)
    np.testing.assert_allclose(sampled(new), trained(broken), atol=1e-4)
    assert "2 of at most 3 restarts" in tiny_server.said()


def test_clients_do_not_notice_that_the_generator_was_killed(tiny_server: Server) -> None:
    client = new_client(tiny_server)
    samplers = [service(tiny_server).create_sampling_client(base_model=str(tiny_server.model)).result(LIMIT_S)]
    for _ in range(2):
        begin_step(client).result(LIMIT_S)
        samplers.append(client.save_weights_and_get_sampling_client().result(LIMIT_S))
    before = [sampled(sampler) for sampler in samplers]
    params, prompt = types.SamplingParams(max_tokens=40, stop=[]), types.ModelInput.from_ints(TOKENS)
    futures = [sampler.sample(prompt, num_samples=4, sampling_params=params) for sampler in samplers * 4]
    kill(tiny_server, "generator")
    for future in futures:
        assert [len(sequence.tokens) for sequence in future.result(LIMIT_S).sequences] == [40] * 4
    for sampler, expected in zip(samplers, before, strict=True):
        np.testing.assert_allclose(sampled(sampler), expected, atol=1e-5)


def test_weights_lost_with_a_generator_are_an_error(tiny_server: Server) -> None:
    client = new_client(tiny_server)
    old: Any = None
    for number in range(4):  # the trainer keeps two versions
        begin_step(client).result(LIMIT_S)
        sampler = client.save_weights_and_get_sampling_client().result(LIMIT_S)
        old = sampler if number == 0 else old
    sampled(old)
    kill(tiny_server, "generator")
    with pytest.raises(tinker.RequestFailedError, match="make a new sampling client"):
        sampled(old)
    new = client.save_weights_and_get_sampling_client().result(LIMIT_S)
    np.testing.assert_allclose(sampled(new), trained(client), atol=1e-4)


def test_a_killed_server_leaves_nothing_running_and_resumes(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", **SERVABLE)
    server = start(model, tmp_path, *FLOAT32, *LIMITS)
    client = new_client(server)
    for _ in range(2):
        begin_step(client).result(LIMIT_S)
    path = client.save_state("two").result(LIMIT_S).path
    for _ in range(2):
        begin_step(client).result(LIMIT_S)
    expected = trained(client)
    logs = [(server.folder / "logs" / f"{role}-0.log").absolute() for role in ("trainer", "generator", "store")]
    server.kill()
    wait_until(lambda: not any(process_of(log) for log in logs), "the server's processes to end", every_s=0.1)
    again = start(model, tmp_path, *FLOAT32, *LIMITS, port=int(server.url.rpartition(":")[2]))
    try:
        resumed = service(again).create_training_client_from_state_with_optimizer(path).result(LIMIT_S)
        for number in (3, 4):
            assert begin_step(resumed).result(LIMIT_S).metrics["policy_version"] == number
        np.testing.assert_allclose(trained(resumed), expected, atol=1e-5)
        with pytest.raises(tinker.APIStatusError, match="ended"):  # the old client hears why
            client.forward([sequence()], "cross_entropy").result(LIMIT_S)
    finally:
        stop(again)


def test_chat_sl_resumes_after_the_server_was_killed(smollm2: Path, tmp_path: Path) -> None:
    model = tiny_chat_model(tmp_path / "model", smollm2)
    options: dict[str, Any] = {
        "model_name": model,
        "renderer_name": CHAT_FORMAT,
        "dataset": bundled_conversations(),
        "max_length": 128,
    }
    options |= {"batch_size": 8, "save_every": 2, "max_steps": 12}
    server = start(model, tmp_path, *FLOAT32, "--generator.max-model-len", "128")
    recipe = begin_recipe(server, "chat_sl.train", tmp_path / "recipe", **options)
    wait_for_checkpoints(recipe, tmp_path / "recipe", 2)
    server.kill()
    kill_recipe(recipe)
    done = len(metric(tmp_path / "recipe" / "log", "train_mean_nll"))
    with served(model, tmp_path, *FLOAT32, "--generator.max-model-len", "128") as again:
        log = run_recipe(again, "chat_sl.train", tmp_path / "recipe", behavior_if_log_dir_exists="resume", **options)
    assert done < 12
    assert metric(log, "step")[-1] >= 11
    assert len(metric(log, "train_mean_nll")) < done + 12  # it did not begin again
