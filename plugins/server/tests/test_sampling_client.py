"""The official SDK samples through the gateway: frozen snapshots, stop tokens, seeds, log-probs."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ownloop_server import sampling_clients
from plugins.server.tests.running_server import RunningServer, running_server
from plugins.server.tests.sdk import new_client, scores, train
from plugins.server.tests.toy_model import CONTEXT, END, VOCAB
from rl.tiny_models import tiny_llama

tinker: Any = pytest.importorskip("tinker")
types: Any = tinker.types
PROMPT = types.ModelInput.from_ints([2, 3])


def test_a_sampling_client_keeps_its_weights_during_training(server: RunningServer) -> None:
    training = new_client(server)
    base = server.client().create_sampling_client(base_model="toy").result()
    train(training)
    old = training.save_weights_and_get_sampling_client().result()
    live = training.save_weights_and_get_sampling_client(kind="inflight").result()
    before, of_base = scores(old), scores(base)
    np.testing.assert_allclose(before, scores(training), rtol=1e-6)
    train(training, 4)
    new = training.save_weights_and_get_sampling_client().result()
    assert scores(old) == before  # exactly
    assert scores(base) == of_base == pytest.approx([-np.log(VOCAB)] * 4)
    assert scores(new) != before
    assert scores(live) == before  # until the trainer pushes again
    training.save_weights_and_get_sampling_client(kind="inflight").result()
    assert scores(live) == scores(new)


@pytest.mark.stranger("2.E1")
def test_a_client_that_follows_goes_along_with_a_loaded_state(server: RunningServer) -> None:
    training: Any = new_client(server)
    saved = training.save_state("before").result().path
    live, frozen = (
        training.save_weights_and_get_sampling_client(kind=kind).result() for kind in ("inflight", "snapshot")
    )
    before = scores(frozen)
    train(training, 2)
    for _ in range(2):  # each state that is loaded is another adapter of the trainer
        training.load_state(saved).result()
        train(training)
        newest = training.save_weights_and_get_sampling_client(kind="inflight").result()
        assert scores(live) == scores(newest) == scores(training) != before
    assert scores(frozen) == before


def test_weights_that_made_room_are_an_error_and_no_others(tmp_path: Path) -> None:
    with running_server(tmp_path, max_snapshots=2) as server:
        training = new_client(server)
        clients: list[Any] = []
        for _ in range(3):
            train(training)
            clients.append(training.save_weights_and_get_sampling_client().result())
        with pytest.raises(tinker.RequestFailedError, match=r"holds 2 versions.*make a new sampling client"):
            scores(clients[0])
        assert scores(clients[1]) != scores(clients[2])
        assert len(server.host.generator.tables) == 1 + 2


def test_of_a_sessions_clients_those_without_weights_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_clients, "MAX_PER_SESSION", 4)
    with running_server(tmp_path, max_snapshots=2) as server, server.client() as service:
        base = service.create_sampling_client(base_model="toy").result()
        training = service.create_lora_training_client("toy", rank=4).result()
        clients: list[Any] = []
        for _ in range(6):
            train(training)
            clients.append(training.save_weights_and_get_sampling_client().result())
        assert len(server.gateway.samplers) == 4
        for client in (base, *clients[-2:]):
            assert scores(client)
        with pytest.raises(tinker.APIStatusError, match="a session keeps its newest 4"):
            scores(clients[0])


def test_a_client_of_a_saved_path_samples_from_those_weights(server: RunningServer) -> None:
    training = new_client(server)
    train(training)
    saved = scores(training)
    path = training.save_weights_for_sampler("step-1").result().path
    train(training)
    sampling: Any = server.client().create_sampling_client(model_path=path).result()
    np.testing.assert_allclose(scores(sampling), saved, rtol=1e-6)
    assert sampling.get_base_model() == "toy"


@pytest.mark.stranger("E3")
@pytest.mark.parametrize("num_slashes", [2, 3])
def test_the_tokenizer_is_that_of_the_served_model(tmp_path: Path, num_slashes: int) -> None:
    alias = "Qwen/Qwen3-8B-Base"
    with tempfile.TemporaryDirectory(dir="/tmp" if num_slashes == 2 else tmp_path) as folder:
        model = tiny_llama(Path(folder))
        served: dict[str, Any] = {"names": (str(model), "toy", alias), "tokenizer": str(model)}
        with running_server(tmp_path / "server", **served) as server:
            service = server.client()
            training = service.create_lora_training_client(alias, rank=4).result()
            path = training.save_weights_for_sampler("one").result().path
            by_name = service.create_sampling_client(base_model=f"{model}/").result()
            samplers: list[Any] = [training.save_weights_and_get_sampling_client().result(), by_name]
            samplers += [service.create_sampling_client(model_path=path).result(), training]
            for client in samplers:
                assert client.get_tokenizer().encode("w3 w4 w5") == [3, 4, 5]
            assert training.get_info().model_name == alias
            again = service.create_lora_training_client(samplers[0].get_base_model(), rank=4).result()
            assert scores(again) == scores(by_name)


def test_samples_keep_the_stop_token_and_have_log_probs(server: RunningServer) -> None:
    sampling: Any = server.client().create_sampling_client(base_model="toy").result()
    params = types.SamplingParams(max_tokens=60, seed=1)
    output = sampling.sample(PROMPT, num_samples=8, sampling_params=params).result()
    stopped = [sequence for sequence in output.sequences if sequence.stop_reason == "stop"]
    assert stopped
    assert all(sequence.tokens[-1] == END and END not in sequence.tokens[:-1] for sequence in stopped)
    for sequence in output.sequences:
        np.testing.assert_allclose(sequence.logprobs, -np.log(VOCAB), rtol=1e-6)
    again = sampling.sample(PROMPT, num_samples=8, sampling_params=params).result()
    assert [list(s.tokens) for s in again.sequences] == [list(s.tokens) for s in output.sequences]
    assert len({sequence.sequence_id for sequence in output.sequences}) == 8


def test_stop_tokens_of_the_request_end_a_sample(server: RunningServer) -> None:
    sampling: Any = server.client().create_sampling_client(base_model="toy").result()

    def sample(**params: Any) -> Any:
        return (
            sampling.sample(PROMPT, num_samples=1, sampling_params=types.SamplingParams(**params)).result().sequences[0]
        )

    assert sample(max_tokens=60, seed=3, stop=list(range(VOCAB))).stop_reason == "stop"
    endless = sample(max_tokens=60, seed=3, stop=[])
    assert (endless.stop_reason, len(endless.tokens)) == ("length", 60)
    assert END in endless.tokens  # or the test shows nothing
    assert len(sample(seed=3, stop=[]).tokens) == CONTEXT - 2  # all that fits


def test_prompt_log_probs_may_be_asked_of_the_last_tokens_only(server: RunningServer) -> None:
    sampling: Any = server.client().create_sampling_client(base_model="toy").result()
    params = types.SamplingParams(max_tokens=1)
    prompt = types.ModelInput.from_ints([2, 3, 4, 5])
    output = sampling.sample(prompt, 1, params, include_prompt_logprobs=True, prompt_logprobs_last_n=2).result()
    assert output.prompt_logprobs[:2] == [None, None]
    assert output.prompt_logprobs[2:] == pytest.approx([-np.log(VOCAB)] * 2)


def test_the_likeliest_tokens_of_a_prompt_have_log_probs(server: RunningServer) -> None:
    training = new_client(server)
    train(training)
    sampling: Any = training.save_weights_and_get_sampling_client().result()
    kept: Any = server.host.generator.tables
    (table,) = (kept[policy] for policy in kept if policy and policy[0].startswith(training.model_id[:16]))
    expected, params = table.log_softmax(-1).topk(3), types.SamplingParams(max_tokens=1)
    prompt = [2, 3, 4, 5]
    for last_n in (None, 2):
        options = {} if last_n is None else {"include_prompt_logprobs": True, "prompt_logprobs_last_n": last_n}
        output = sampling.sample(
            types.ModelInput.from_ints(prompt), 1, params, topk_prompt_logprobs=3, **options
        ).result()
        num_scored = last_n or 3
        rows = output.topk_prompt_logprobs
        assert rows[:-num_scored] == [None] * (4 - num_scored)
        for token, row in zip(prompt[-1 - num_scored : -1], rows[-num_scored:], strict=True):
            assert [t for t, _ in row] == expected.indices[token].tolist()
            assert [p for _, p in row] == pytest.approx(expected.values[token].tolist())
        assert (output.prompt_logprobs is None) == (last_n is None)  # only if they are asked for


def _targets(ids: Any, sparse: bool = False) -> Any:
    tensor = torch.tensor(ids)
    return types.TensorData.from_torch_sparse(tensor, pad_value=-1) if sparse else types.TensorData.from_torch(tensor)


@pytest.mark.stranger("E4")
def test_chosen_ids_at_chosen_positions_are_scored(server: RunningServer) -> None:
    training = new_client(server)
    train(training)
    sampling: Any = training.save_weights_and_get_sampling_client().result()
    kept: Any = server.host.generator.tables
    (table,) = (kept[policy] for policy in kept if policy and policy[0].startswith(training.model_id[:16]))
    expected, params = table.log_softmax(-1), types.SamplingParams(max_tokens=1)
    prompt = [2, 3, 4, 5] * (CONTEXT // 4)
    ids = [[-1] * 3 for _ in prompt[1:]]
    ids[5], ids[-1] = [prompt[6], -1, 9], [7, 8, 7]
    for sparse, sizes in ((False, {}), (True, {"include_prompt_logprobs": True})):
        asked, whole = _targets(ids, sparse), types.ModelInput.from_ints(prompt)
        output = sampling.sample(whole, 1, params, target_prompt_logprobs=asked, **sizes).result()
        found = output.target_prompt_logprobs
        assert (found.dtype, list(found.shape)) == ("float32", [CONTEXT - 1, 3])
        assert (asked.sparse_crow_indices is not None, found.sparse_crow_indices is not None) == (sparse, sparse)
        of_cells = [
            0.0 if t < 0 else float(expected[p, t]) for p, row in zip(prompt[:-1], ids, strict=True) for t in row
        ]
        assert found.to_torch().flatten().tolist() == pytest.approx(of_cells, abs=1e-6)
        assert (output.prompt_logprobs is None) == (not sparse)


@pytest.mark.stranger("E4")
@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([[3]], r"int64 of shape \[1, 1\]; it must be int64 of shape \[3, K\]"),
        ([[3], [4], [16]], "has 16; token ids are from 0 to 15, and -1 asks for nothing"),
        ([[3], [4], [-2]], "has -2"),
    ],
)
def test_ids_that_cannot_be_scored_are_the_users_mistake(server: RunningServer, ids: Any, text: str) -> None:
    sampling: Any = server.client().create_sampling_client(base_model="toy").result()
    prompt, params = types.ModelInput.from_ints([2, 3, 4, 5]), types.SamplingParams(max_tokens=1)
    with pytest.raises(tinker.RequestFailedError, match=f"target_prompt_logprobs .*{text}") as error:
        sampling.sample(prompt, 1, params, target_prompt_logprobs=_targets(ids)).result()
    assert error.value.category == "user"
    assert scores(sampling)


def test_scoring_ids_has_a_limit(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_clients, "MAX_TARGET_TOKENS", 12)
    sampling: Any = server.client().create_sampling_client(base_model="toy").result()
    prompt, params = types.ModelInput.from_ints([2, 3, 4, 5]), types.SamplingParams(max_tokens=1)
    for ids, fits in (([[6, 6], [6, 7], [-1, 5]], True), ([[-1, 6], [6, 7], [6, 7]], False)):
        asked = sampling.sample(prompt, 1, params, target_prompt_logprobs=_targets(ids))
        if fits:
            assert asked.result().target_prompt_logprobs.to_torch()[0].tolist() == pytest.approx([-np.log(VOCAB)] * 2)
        else:
            with pytest.raises(tinker.RequestFailedError, match="at most 12 tokens in all: ask for fewer"):
                asked.result()


@pytest.mark.parametrize(
    ("tokens", "options", "text"),
    [
        ([2, VOCAB, 3], {}, "the prompt has the token 16; token ids are from 0 to 15"),
        ([2, -1, 3], {}, "the prompt has the token -1; token ids are from 0 to 15"),
        ([2, 3], {"topk_prompt_logprobs": 21}, "topk_prompt_logprobs is 21: .* 20"),
        ([2, 3], {"topk_prompt_logprobs": -1}, "topk_prompt_logprobs is -1; it must be from 0 to 20"),
    ],
)
def test_a_prompt_that_makes_no_sense_is_the_users_mistake(
    server: RunningServer, tokens: list[int], options: dict[str, int], text: str
) -> None:
    sampling: Any = server.client().create_sampling_client(base_model="toy").result()
    with pytest.raises(tinker.RequestFailedError, match=text) as error:
        sampling.sample(types.ModelInput.from_ints(tokens), 1, types.SamplingParams(max_tokens=1), **options).result()
    assert error.value.category == "user"
    assert scores(sampling)


@pytest.mark.parametrize("option", [{"topk_sample_logprobs": 3}, {"prompt_alt_tokens_k": 2}])
def test_what_is_not_supported_is_refused_by_name(server: RunningServer, option: dict[str, int]) -> None:
    sampling: Any = server.client().create_sampling_client(base_model="toy").result()
    params = types.SamplingParams(max_tokens=1)
    with pytest.raises(tinker.RequestFailedError, match=f"{next(iter(option))} is not supported"):
        sampling.sample(PROMPT, 1, params, include_prompt_logprobs=True, **option).result()


@pytest.mark.parametrize(("num_samples", "max_tokens"), [(2**40, 1), (0, 1), (-1, 1), (1, 2**40)])
def test_a_request_without_end_is_refused(server: RunningServer, num_samples: int, max_tokens: int) -> None:
    sampling: Any = server.client().create_sampling_client(base_model="toy").result()
    with pytest.raises(tinker.RequestFailedError, match=r"num_samples is|the context holds 64"):
        sampling.sample(PROMPT, num_samples, types.SamplingParams(max_tokens=max_tokens)).result()
    assert scores(sampling)
