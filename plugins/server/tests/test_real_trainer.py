"""Losses, groups and optimizer parameters through the official SDK and a real trainer of a tiny model."""

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

tinker: Any = pytest.importorskip("tinker", reason="the package tinker, of the extra tinker, is not installed")
types: Any = tinker.types

from plugins.server.tests.real_trainer_server import real_trainer_server  # noqa: E402
from plugins.server.tests.running_server import RunningServer  # noqa: E402
from plugins.server.tests.sdk import datum, scores  # noqa: E402
from plugins.server.tests.test_training_client import ADVANTAGES, Q, reference  # noqa: E402
from rl.data.packing import PackedRow, pack_row  # noqa: E402
from rl.tiny_models import tiny_llama  # noqa: E402, needs the packages of the extra
from trainer.engines.pytorch import engine as pytorch_engine  # noqa: E402

TOKENS = [5, 9, 2, 7, 11, 3, 8, 20]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    """A server whose adapters are those of a real trainer; it cannot sample from them."""
    folder = tmp_path_factory.mktemp("server")
    with real_trainer_server(folder, tiny_llama(folder / "model")) as running:
        yield running


def new_client(server: RunningServer, **options: Any) -> Any:
    """A training client of a new adapter."""
    return server.client().create_lora_training_client("toy", rank=4, **options).result()


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_losses_are_those_of_numpy(server: RunningServer, name: Any) -> None:
    client = new_client(server)
    weights = [-1.0, 1e-6, 0.0, 0.25]
    policy: Any = {"logprobs": Q, "advantages": ADVANTAGES}
    inputs = {"weights": weights} if name == "cross_entropy" else policy
    inputs |= {"sequence_ratio_mask": [0.0, 1.0, 1.0, 0.0]} if name == "gspo" else {}
    clips = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    config = {"dro": {"beta": 0.2}, "gspo": clips}.get(name, {})
    data = [datum(TOKENS[:4], TOKENS[1:5], **inputs)]
    output = client.forward_backward(data, name, config).result()
    p = np.array(output.loss_fn_outputs[0]["logprobs"].data)
    assert (p < 0).all()  # where the weight is 0, too
    expected = -(np.array(weights) * p).sum() if name == "cross_entropy" else reference(name, p, config)
    assert output.metrics["loss:sum"] == pytest.approx(expected, abs=1e-4)
    assert client.forward(data, name, config).result().metrics["loss:sum"] == pytest.approx(expected, abs=1e-4)


def test_groups_share_their_prompt_and_get_every_log_prob(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = new_client(server)
    prompt, ends = TOKENS[:4], [[11, 3], [8, 20, 5], [11, 3]]
    group = [
        datum(
            [*prompt, *end][:-1],
            [*prompt, *end][1:],
            logprobs=[0.0] * 3 + [-4.0] * len(end),
            advantages=[0.0] * 3 + [1.0] * len(end),
        )
        for end in ends
    ]
    num_computed: list[int] = []

    def watched(*args: Any, **options: Any) -> PackedRow:
        row = pack_row(*args, **options)
        num_computed.append(len(row.tokens))
        return row

    monkeypatch.setattr(pytorch_engine, "pack_row", watched)
    output = client.forward_backward(group, "importance_sampling").result()
    assert num_computed == [4 + 2 + 1], "the prompt once, and once what follows it twice"
    assert output.metrics["num_loss_tokens:sum"] == sum(map(len, ends))
    for one, together in zip(group, output.loss_fn_outputs, strict=True):
        (alone,) = client.forward([one], "importance_sampling").result().loss_fn_outputs
        np.testing.assert_allclose(together["logprobs"].data, alone["logprobs"].data, atol=1e-5)


def test_a_step_without_a_gradient_is_refused(server: RunningServer) -> None:
    client = new_client(server, seed=1)
    before = scores(client)
    for _ in range(2):
        with pytest.raises(tinker.RequestFailedError, match="without a gradient; call forward_backward first"):
            client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    assert scores(client) == before
    client.forward_backward([datum(TOKENS[:-1], TOKENS[1:])], "cross_entropy")
    assert client.optim_step(types.AdamParams(learning_rate=0.1)).result().metrics["policy_version"] == 1
    assert scores(client) != before
