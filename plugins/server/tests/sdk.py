"""What tests that use the official SDK share."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tinker", reason="the package tinker, of the extra tinker, is not installed")

import tinker
from tinker import types

from plugins.server.tests.running_server import RunningServer
from tests.waiting import LIMIT_S

TOKENS = [5, 9, 2, 7, 11, 3, 8, 20]


def datum(tokens: Sequence[int], targets: Sequence[int], **inputs: Sequence[float]) -> types.Datum:
    """A datum with float inputs of these names."""
    arrays = {name: types.TensorData(data=list(v), dtype="float32", shape=[len(v)]) for name, v in inputs.items()}
    target = types.TensorData(data=list(targets), dtype="int64", shape=[len(targets)])
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs={"target_tokens": target, **arrays}
    )


def new_client(server: RunningServer, rank: int = 4) -> tinker.TrainingClient:
    """A training client of a new adapter."""
    return server.client().create_lora_training_client("toy", rank=rank).result()


def train(client: tinker.TrainingClient, num_steps: int = 1) -> None:
    """Makes the client's adapter another one."""
    for _ in range(num_steps):
        client.forward_backward([datum([2, 3, 4], [3, 4, 5])], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.1)).result()


def scores(client: tinker.SamplingClient | tinker.TrainingClient) -> list[float]:
    """Log-probs of a few tokens after others, which show which weights a client has."""
    tokens = [2, 3, 4, 5, 6]
    if isinstance(client, tinker.TrainingClient):
        output = client.forward([datum(tokens[:-1], tokens[1:])], "cross_entropy").result()
        return [float(value) for value in output.loss_fn_outputs[0]["logprobs"].data]
    logprobs = client.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert logprobs[0] is None
    return [float(value) for value in logprobs[1:] if value is not None]


def sequence() -> types.Datum:
    """`TOKENS` to train on, for real models."""
    return datum(TOKENS[:-1], TOKENS[1:])


def trained(client: Any) -> Any:
    """The trainer's log-probs of `TOKENS`."""
    return np.array(client.forward([sequence()], "cross_entropy").result(LIMIT_S).loss_fn_outputs[0]["logprobs"].data)


def sampled(client: Any) -> Any:
    """The generator's log-probs of `TOKENS`."""
    return np.array(client.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result(LIMIT_S)[1:])
