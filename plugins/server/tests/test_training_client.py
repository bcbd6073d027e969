"""The official SDK trains through the gateway; what comes back is compared with NumPy."""

from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from plugins.server.tests.running_server import RunningServer
from plugins.server.tests.sdk import datum, new_client, scores, train
from plugins.server.tests.toy_model import VOCAB
from rl.types import AdamParams, MuonParams

tinker: Any = pytest.importorskip("tinker")
types: Any = tinker.types

TOKENS, TARGETS = [2, 3, 4, 7], [3, 4, 7, 1]
Q = [-2.5, -3.0, -2.0, -2.9]
ADVANTAGES = [1.0, -2.0, 0.5, 0.0]
PROMPT = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [2]}]}, "sampling_params": {"max_tokens": 1}}


def reference(name: str, p: np.ndarray[Any, Any], config: dict[str, float]) -> float:
    """Tinker's published definitions."""
    q, a = np.array(Q), np.array(ADVANTAGES)
    r = np.exp(p - q)
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    if name == "importance_sampling":
        return float(-(r * a).sum())
    if name == "ppo":
        return float(-np.minimum(r * a, r.clip(low, high) * a).sum())
    if name == "cispo":
        return float(
            -(r.clip(config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0)) * p * a).sum()
        )
    if name == "dro":
        return float(-(p * a - 0.5 * config["beta"] * (p - q) ** 2).sum())
    assert name == "gspo"
    s = np.exp((p - q)[1:3].mean())
    return float(-np.minimum(s * a, np.clip(s, low, high) * a).sum())


def test_weights_of_gspo_say_which_tokens_its_ratio_is_over(server: RunningServer) -> None:
    client, weights = new_client(server), {"weights": [0.0, 1.0, 1.0, 0.0]}
    train(client)
    given = {"logprobs": Q, "advantages": [1.0, 0.5, -2.0, 1.0], **weights}
    loss, of_mask = (
        client.forward([datum(TOKENS, TARGETS, **given, **mask)], "gspo").result().metrics["loss:sum"]
        for mask in ({}, {"sequence_ratio_mask": weights["weights"]})
    )
    assert loss == pytest.approx(of_mask, abs=1e-7)


def test_cross_entropy_honours_negative_tiny_and_zero_weights(server: RunningServer) -> None:
    client = new_client(server)
    output = client.forward_backward(
        [datum(TOKENS, TARGETS, weights=[-1.0, 1e-6, 0.0, 0.25])], "cross_entropy"
    ).result()
    p = np.array(output.loss_fn_outputs[0]["logprobs"].data)
    np.testing.assert_allclose(p, -np.log(VOCAB), rtol=1e-6)  # also where the weight is 0
    assert output.metrics["loss:sum"] == pytest.approx(-(-1.0 + 1e-6 + 0.25) * p[0], rel=1e-6)


def test_a_datum_is_scored_at_the_clients_temperature(server: RunningServer) -> None:
    client = new_client(server)
    train(client, 3)

    def gap(**inputs: list[float]) -> float:
        """Between two words, in units of the logits: what an inverse temperature multiplies."""
        data = [datum([2], [target], **inputs) for target in (3, 4)]
        first, second = (o["logprobs"].data[0] for o in client.forward(data, "cross_entropy").result().loss_fn_outputs)
        return float(first) - float(second)

    assert gap(temperature=[0.5]) == pytest.approx(2 * gap(), rel=1e-5)
    for given in ([0.5, 0.6], [0.0, 0.0]):
        wrong = datum([2, 3], [3, 4], temperature=given)
        with pytest.raises(tinker.RequestFailedError, match=r"'temperature'. must be one finite number above 0"):
            client.forward([wrong], "cross_entropy").result()


def test_a_datum_is_scored_among_the_words_that_the_client_names(server: RunningServer) -> None:
    client = new_client(server)

    def scored(*rows: list[int]) -> Any:
        data = [word for row in rows for word in row]
        kept = types.TensorData(data=data, dtype="int64", shape=[len(rows), len(rows[0])])
        inputs = {"target_tokens": types.TensorData(data=[3, 4], dtype="int64", shape=[2]), "kept": kept}
        return types.Datum(model_input=types.ModelInput.from_ints([2, 3]), loss_fn_inputs=inputs)

    output = client.forward([scored([7, 3, -1], [-1, -1, -1])], "cross_entropy").result()
    np.testing.assert_allclose(output.loss_fn_outputs[0]["logprobs"].data, [-np.log(2), -np.log(VOCAB)], rtol=1e-6)
    with pytest.raises(tinker.RequestFailedError, match="has a set, at 1, without the token 4"):
        client.forward([scored([3, 7], [5, -1])], "cross_entropy").result()
    with pytest.raises(
        tinker.RequestFailedError, match=r"'kept'. is float32 of shape \[1\]; it must be int64 \[N, W\]"
    ):
        client.forward([datum([2], [3], kept=[1.0])], "cross_entropy").result()


def test_targets_of_n_by_k_have_the_gradient_of_k_datums(server: RunningServer) -> None:
    wide, narrow = new_client(server), new_client(server)
    targets = types.TensorData(data=[3, 5, 4, 6], dtype="int64", shape=[2, 2])
    weights = types.TensorData(data=[1.0, 0.5, 0.0, 2.0], dtype="float32", shape=[2, 2])
    both = types.Datum(
        model_input=types.ModelInput.from_ints([2, 3]), loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )
    output = wide.forward_backward([both], "cross_entropy").result()
    assert output.loss_fn_outputs[0]["logprobs"].shape == [2, 2]
    parts = [datum([2, 3], [3, 4], weights=[1.0, 0.0]), datum([2, 3], [5, 6], weights=[0.5, 2.0])]
    narrow.forward_backward(parts, "cross_entropy").result()
    for client in (wide, narrow):
        client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    np.testing.assert_allclose(scores(wide), scores(narrow), rtol=1e-6)


def test_every_field_of_adam_params_counts_at_every_step(server: RunningServer) -> None:
    client = new_client(server)
    params: dict[str, Any] = {
        "learning_rate": 0.3,
        "beta1": 0.7,
        "beta2": 0.8,
        "eps": 1e-5,
        "weight_decay": 0.1,
        "grad_clip_norm": 0.5,
    }
    server.host.steps.clear()
    client.forward_backward([datum(TOKENS, TARGETS)], "cross_entropy")
    metrics = client.optim_step(types.AdamParams(**params)).result().metrics or {}
    client.optim_step(types.AdamParams()).result()
    assert server.host.steps == [AdamParams(**params), AdamParams(learning_rate=1e-4, eps=1e-12)]
    assert metrics["grad_norm"] > 0.5


def test_a_dimuon_client_takes_steps_of_muon(server: RunningServer) -> None:
    create: Any = server.client().create_lora_training_client
    client = create(base_model="toy", rank=4, optimizer=types.DimuonOptimizerConfig()).result()
    server.host.steps.clear()
    for clip in (0.5, -1.0):
        client.optim_step(types.DimuonParams(learning_rate=0.2, beta1=0.8, grad_clip_norm=clip)).result()
    expected = MuonParams(learning_rate=0.2, beta1=0.8, grad_clip_norm=0.5)
    assert server.host.steps == [expected, replace(expected, grad_clip_norm=0.0)]


def test_calls_without_await_run_in_the_order_of_the_script(server: RunningServer) -> None:
    client = new_client(server)
    server.host.calls.clear()
    futures: list[Any] = []
    for _ in range(5):
        futures.append(client.forward_backward([datum(TOKENS, TARGETS)], "cross_entropy"))
        futures.append(client.optim_step(types.AdamParams(learning_rate=0.1)))
    for future in futures:
        future.result()
    assert [verb for _, verb in server.host.calls] == ["forward_backward", "optim_step"] * 5


@pytest.mark.seconds
def test_a_batch_cut_into_requests_has_the_gradient_of_one(server: RunningServer) -> None:
    whole, parts = new_client(server), new_client(server)
    random = np.random.default_rng(0)
    batch = [datum(random.integers(0, VOCAB, 3).tolist(), random.integers(0, VOCAB, 3).tolist()) for _ in range(2500)]
    server.host.calls.clear()
    output = whole.forward_backward(batch, "cross_entropy").result()
    assert len(server.host.calls) == 3
    assert len(output.loss_fn_outputs) == 2500
    assert output.metrics["loss:sum"] == pytest.approx(7500 * np.log(VOCAB), rel=1e-6)
    for start in range(0, 2500, 500):
        parts.forward_backward(batch[start : start + 500], "cross_entropy")
    for client in (whole, parts):
        client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    np.testing.assert_allclose(scores(whole), scores(parts), rtol=1e-6)


def test_a_loss_has_one_gradient_in_client_and_server(server: RunningServer) -> None:
    custom, known = new_client(server), new_client(server)
    q, a = torch.tensor(Q), torch.tensor(ADVANTAGES)

    def loss(data: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -((logprobs[0] - q).exp() * a).sum(), {"seen": float(len(data))}

    output = custom.forward_backward_custom([datum(TOKENS, TARGETS)], loss).result()
    assert output.metrics["seen"] == 1
    known.forward_backward([datum(TOKENS, TARGETS, logprobs=Q, advantages=ADVANTAGES)], "importance_sampling").result()
    for client in (custom, known):
        client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    np.testing.assert_allclose(scores(custom), scores(known), rtol=1e-5)


def test_get_info_names_model_tokenizer_and_rank(server: RunningServer) -> None:
    info = new_client(server, rank=7).get_info()
    assert (info.model_data.model_name, info.model_data.tokenizer_id) == ("toy", "toy")
    assert (info.is_lora, info.lora_rank) == (True, 7)


@pytest.mark.stranger("2.E1")
def test_two_writers_of_one_client_never_get_each_others_results(server: RunningServer) -> None:
    """Each counts for itself. One of the two hears of it, whoever comes first."""
    first = new_client(server)
    second: Any = tinker.TrainingClient(server.client().holder, 0, first.model_id, info=first.get_info())
    one, two = [datum([2, 3], [3, 4])], [datum([2, 3], [3, 4]), datum([5, 6], [6, 7])]
    for _ in range(2):
        assert len(first.forward_backward(one, "cross_entropy").result().loss_fn_outputs) == 1
    with pytest.raises(Exception, match="one client alone"):
        second.forward_backward(two, "cross_entropy").result()
    with pytest.raises(Exception, match="one client alone"):
        second.save_state("mine").result()
    assert second.forward_backward(two, "cross_entropy").result().loss_fn_outputs  # a number that nobody has used
    with pytest.raises(Exception, match="one client alone"):
        first.save_weights_and_get_sampling_client().result()


@pytest.mark.stranger("2.E1")
@pytest.mark.parametrize(
    ("path", "body", "other"),
    [
        ("create_model", {"model_seq_id": 4, "base_model": "toy"}, {"lora_config": {"rank": 2}}),
        ("create_sampling_session", {"sampling_session_seq_id": 4, "base_model": "toy"}, {"base_model": "tinker://x"}),
        ("asample", {"seq_id": 4, **PROMPT}, {"num_samples": 2}),
        ("asample", {"seq_id": 5, **PROMPT}, {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [3]}]}}),
    ],
)
def test_a_number_means_one_request(server: RunningServer, path: str, body: Any, other: Any) -> None:
    session: Any = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}

    def post(path: str, body: Any) -> httpx.Response:
        return httpx.post(f"{server.url}/api/v1/{path}", json=body)

    session_id = post("create_session", session).json()["session_id"]
    made = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "toy"}
    sampler_id = post("create_sampling_session", made).json()["sampling_session_id"]
    body = {**body, **({"sampling_session_id": sampler_id} if path == "asample" else {"session_id": session_id})}
    first = post(path, body)
    assert (first.status_code, post(path, body).json()) == (200, first.json())
    assert post(path, {**body, **other}).status_code == 422
