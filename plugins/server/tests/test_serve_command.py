"""`ownloop serve` as a user starts it, with processes: two models, full fine-tuning beside adapters, keys, the end."""

import re
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rl.tiny_models import SERVABLE, tiny_llama, tiny_qwen3
from tests.waiting import LIMIT_S, wait_for_ends

tinker: Any = pytest.importorskip("tinker", reason="the package tinker, of the extra tinker, is not installed")
types: Any = tinker.types

from plugins.server.tests.sdk import TOKENS, sampled, sequence, trained  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def ownloop(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A command of ours, in a folder."""
    command = [sys.executable, "-m", "controller.commands.cli", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[str, str]]:
    """Where a server of two models listens, and a key."""
    folder = tmp_path_factory.mktemp("serve")
    tiny_llama(folder / "llama", **SERVABLE)
    tiny_qwen3(folder / "qwen", **SERVABLE)
    key, _ = ownloop(folder, "key", "add", "ann").communicate(timeout=LIMIT_S)
    options = ["--trainer.compute-dtype", "float32", "--generator.dtype", "float32", "--generator.max-model-len", "64"]
    names = ["--model", "llama", "--model", "qwen", "--names", "one=llama", "two=qwen", "--full", "2", "--port", "0"]
    server = ownloop(folder, "serve", *names, "--max-rank", "8", *options)
    assert server.stdout is not None
    try:
        lines: list[str] = []
        for line in server.stdout:
            lines.append(line)
            if found := re.search(r"TINKER_BASE_URL=(\S+)", line):
                break
        else:
            raise AssertionError("".join(lines))
        yield found[1], key.strip()
        children = psutil.Process(server.pid).children(recursive=True)
        server.send_signal(signal.SIGTERM)
        assert server.wait(LIMIT_S) == 128 + signal.SIGTERM
        wait_for_ends(children, "the server's processes")
    finally:
        server.kill()


def test_two_models_with_adapters_and_all_weights_do_not_mix(url: tuple[str, str]) -> None:
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=url[0], api_key="tml-local").create_sampling_client(base_model="one").result(
            LIMIT_S
        )
    service = tinker.ServiceClient(base_url=url[0], api_key=url[1])
    base = {name: sampled(service.create_sampling_client(base_model=name).result(LIMIT_S)) for name in ("one", "two")}
    clients = {
        (name, rank): service.create_lora_training_client(name, rank=rank, seed=1).result(LIMIT_S)
        for name in ("one", "two")
        for rank in (4, 0)
    }
    snapshots: dict[Any, Any] = {}
    for round_ in range(2):
        for which, client in clients.items():
            np.testing.assert_allclose(trained(client), base[which[0]] if round_ == 0 else snapshots[which], atol=1e-4)
            client.forward_backward([sequence()], "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result(LIMIT_S)
            sampler = client.save_weights_and_get_sampling_client().result(LIMIT_S)
            snapshots[which] = sampled(sampler)
            np.testing.assert_allclose(snapshots[which], trained(client), atol=1e-4)
    seen = [*base.values(), *snapshots.values()]
    for index, one in enumerate(seen):
        assert not any(np.allclose(one, other, atol=1e-3) for other in seen[:index])
    for name in ("one", "two"):
        assert (sampled(service.create_sampling_client(base_model=name).result(LIMIT_S)) == base[name]).all()
    path = clients["two", 0].save_state("whole").result(LIMIT_S).path
    clients["two", 0].forward_backward([sequence()], "cross_entropy")  # what follows the checkpoint is not in it
    clients["two", 0].optim_step(types.AdamParams(learning_rate=1e-2)).result(LIMIT_S)
    service.close("success").result(LIMIT_S)
    again = tinker.ServiceClient(base_url=url[0], api_key=url[1])
    resumed = again.create_training_client_from_state_with_optimizer(path).result(LIMIT_S)
    np.testing.assert_allclose(trained(resumed), snapshots["two", 0], atol=1e-4)


def test_the_openai_client_streams_from_processes(url: tuple[str, str]) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url[0]}/oai/api/v1", api_key=url[1], max_retries=0)
    options: Any = {"model": "two", "prompt": TOKENS, "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**options, extra_body={"ignore_eos": True})
    chunks = list(client.completions.create(**options, stream=True, extra_body={"ignore_eos": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert len(chunks) >= 20
    with pytest.raises(openai.AuthenticationError, match="ownloop key add"):
        openai.OpenAI(base_url=f"{url[0]}/oai/api/v1", api_key="x", max_retries=0).models.list()
