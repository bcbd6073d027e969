"""`ownloop serve` with a real trainer and a real generator: the official SDK trains and samples a tiny model."""

import asyncio
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from controller.commands import cli, processes
from controller.launching.launcher import Launcher
from rl.lora import LoRAConfig
from rl.types import AdamParams, Datum
from trainer.config import TrainerConfig

tinker: Any = pytest.importorskip("tinker", reason="the package tinker, of the extra tinker, is not installed")
types: Any = tinker.types

from plugins.server.tests.sdk import TOKENS, sampled, sequence, trained  # noqa: E402
from plugins.server.tests.tiny_server import (  # noqa: E402, needs the packages of the extra
    TOOL_CALL,
    Served,
    serving_tiny_model,
)

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process")]
CHAT = [5, 9, 7, 11, 3, 8]
"""Without w2, the end token of the tokenizer, which finds it in w20 too."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, in_process: None) -> Generator[Served]:
    with serving_tiny_model(tmp_path_factory.mktemp("serving")) as running:
        yield running


@pytest.fixture(scope="module")
def url(served: Served) -> str:
    return served.url


def step(client: Any, data: Any = None, learning_rate: float = 1e-2) -> None:
    """Trains on one sequence."""
    client.forward_backward([data or sequence()], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=learning_rate, eps=1e-8)).result()


def test_trainer_and_sampling_clients_agree_and_snapshots_stay(url: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    training = service.create_lora_training_client("tiny", rank=4, seed=1).result()
    other = service.create_lora_training_client("tiny", rank=8).result()
    base = service.create_sampling_client(base_model="tiny").result()
    untrained = sampled(base)
    np.testing.assert_allclose(trained(training), untrained, atol=1e-5)
    losses: list[float] = []
    snapshots: list[Any] = []
    for _ in range(5):
        step = training.forward_backward([sequence()], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        losses.append(step.result().metrics["loss:sum"])
        if len(snapshots) < 2:
            snapshots.append((training.save_weights_and_get_sampling_client().result(), trained(training)))
    assert losses[-1] < losses[0] - 1
    for snapshot, as_trained in snapshots:
        first = sampled(snapshot)
        np.testing.assert_allclose(first, as_trained, atol=1e-4)
        assert (sampled(snapshot) == first).all()
    assert not np.allclose(sampled(snapshots[0][0]), sampled(snapshots[1][0]), atol=1e-3)
    assert (sampled(base) == untrained).all()
    np.testing.assert_allclose(trained(other), untrained, atol=1e-5)


def test_what_fills_the_context_is_sampled_scored_and_trained_on(url: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    training = service.create_lora_training_client("tiny", rank=4, seed=1).result()
    client = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(TOKENS)
    (sample,) = client.sample(prompt, 1, types.SamplingParams(seed=1, stop=[])).result().sequences
    tokens = [*TOKENS, *sample.tokens]
    assert len(tokens) == 64
    whole, one = types.ModelInput.from_ints(tokens), types.SamplingParams(max_tokens=1)
    scored = client.compute_logprobs(whole).result()
    assert len(scored) == 64
    targets = types.TensorData(data=tokens[1:], dtype="int64", shape=[63])
    pairs = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": targets})
    of_trainer = training.forward([pairs], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    np.testing.assert_allclose(scored[1:], of_trainer, atol=1e-4)
    np.testing.assert_allclose(scored[len(TOKENS) :], sample.logprobs, atol=1e-4)
    output = client.sample(whole, 2, one, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    np.testing.assert_allclose(output.prompt_logprobs[1:], scored[1:], atol=1e-5)
    assert len(output.topk_prompt_logprobs) == 64
    question: Any = [{"role": "user", "content": "w3 w4"}]
    chat = openai_client(url).chat.completions.create(model="tiny", messages=question, extra_body={"ignore_eos": True})
    assert chat.usage.total_tokens == 64
    echoed = openai_client(url).completions.create(model="tiny", prompt=tokens, max_tokens=0, echo=True, logprobs=0)
    assert len(echoed.choices[0].logprobs.token_logprobs) == 64
    for extra in ({}, {"include_prompt_logprobs": True}):
        with pytest.raises(
            tinker.RequestFailedError, match="the prompt has 64 tokens and max_tokens is 2; the context"
        ):
            client.sample(whole, 1, types.SamplingParams(max_tokens=2), **extra).result()
    with pytest.raises(tinker.RequestFailedError, match="the prompt has 65 tokens; the context holds 64"):
        client.compute_logprobs(types.ModelInput.from_ints([*tokens, 3])).result()


def test_the_sampled_log_probs_are_those_of_training(url: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    training = service.create_lora_training_client("tiny", rank=4).result()
    sampling = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(TOKENS[:4])
    params = types.SamplingParams(max_tokens=6, stop=[], seed=0)
    output = sampling.sample(prompt, num_samples=2, sampling_params=params).result()
    tokens = [*TOKENS[:4], *output.sequences[0].tokens]
    assert len(tokens) == 10
    q = [0.0] * 3 + list(output.sequences[0].logprobs)
    advantages = [0.0] * 3 + [1.0] * 6

    def array(values: list[Any], dtype: str) -> Any:
        return types.TensorData(data=values, dtype=dtype, shape=[len(values)])

    inputs = {
        "target_tokens": array(tokens[1:], "int64"),
        "logprobs": array(q, "float32"),
        "advantages": array(advantages, "float32"),
    }
    rollout = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    found = training.forward_backward([rollout], "importance_sampling").result()
    np.testing.assert_allclose(found.loss_fn_outputs[0]["logprobs"].data[3:], q[3:], atol=1e-5)
    assert found.metrics["loss:sum"] == pytest.approx(-6, abs=1e-4)  # all ratios are 1


@pytest.mark.stranger("2.E2")
def test_greedy_log_probs_are_those_at_temperature_1(url: str) -> None:
    sampling = (
        tinker.ServiceClient(base_url=url, api_key="tml-local").create_sampling_client(base_model="tiny").result()
    )
    prompt = types.ModelInput.from_ints(TOKENS[:4])
    params = types.SamplingParams(max_tokens=6, stop=[], temperature=0)
    (greedy,) = sampling.sample(prompt, 1, params).result().sequences
    scored = sampling.compute_logprobs(types.ModelInput.from_ints([*TOKENS[:4], *greedy.tokens])).result()
    np.testing.assert_allclose(greedy.logprobs, scored[4:], atol=1e-5)
    assert max(greedy.logprobs) < -0.01  # of the distribution that only holds these tokens they would be 0
    for temperature in (0.009, 2.01, -1.0):
        with pytest.raises(Exception, match=r"temperature is .*: .* 0, or from 0\.01 to 2"):
            sampling.sample(prompt, 1, types.SamplingParams(max_tokens=1, temperature=temperature)).result()


def openai_client(url: str) -> Any:
    """The official client of OpenAI."""
    import openai

    return openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key="tml-local", max_retries=0)


def text_of(tokens: list[int]) -> str:
    """These tokens of the tiny model as text."""
    return " ".join(TOOL_CALL.get(token, f"w{token}") for token in tokens)


def test_what_was_trained_answers_at_openais_endpoints(url: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    training = service.create_lora_training_client("tiny", rank=4).result()
    for _ in range(3):
        step(training)
    snapshot = training.save_weights_and_get_sampling_client().result()
    path = training.save_weights_for_sampler("three").result().path
    before = {"base": sampled(service.create_sampling_client(base_model="tiny").result()), "now": sampled(snapshot)}
    client = openai_client(url)
    assert {"tiny", training.model_id, path} <= {model.id for model in client.models.list().data}

    def scored(model: str) -> Any:
        """The log-probs of the tokens, by /completions."""
        answer = client.completions.create(
            model=model, prompt=TOKENS, max_tokens=1, echo=True, logprobs=0, extra_body={"prompt_logprobs": 0}
        )
        assert answer.model == model
        return np.array(answer.choices[0].logprobs.token_logprobs[1 : len(TOKENS)])

    np.testing.assert_allclose(scored("tiny"), before["base"], atol=1e-5)
    for model in (training.model_id, path):
        np.testing.assert_allclose(scored(model), before["now"], atol=1e-4)
    assert not np.allclose(before["base"], before["now"], atol=1e-2)
    step(training)
    np.testing.assert_allclose(scored(path), before["now"], atol=1e-4)
    assert not np.allclose(scored(training.model_id), before["now"], atol=1e-3)


def test_chats_and_streams_at_openais_endpoints(url: str) -> None:
    import openai

    client = openai_client(url)
    options: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": text_of(CHAT)}],
        "max_tokens": 8,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**options)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(CHAT), 8)
    assert whole.choices[0].finish_reason == "length"
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert len(chunks) > 4, "they come one by one"
    assert chunks[-1].usage.completion_tokens == 8
    sample = tinker.ServiceClient(base_url=url, api_key="tml-local").create_sampling_client(base_model="tiny").result()
    params = types.SamplingParams(max_tokens=8, stop=[], temperature=0)
    tokens = sample.sample(types.ModelInput.from_ints(CHAT), 1, params).result().sequences[0].tokens
    assert whole.choices[0].message.content.split() == text_of(tokens).split()
    two = client.completions.create(model="tiny", prompt=[TOKENS, TOKENS[:3]], max_tokens=2, n=2, seed=0)
    assert len(two.choices) == 4
    with client.completions.create(model="tiny", prompt=TOKENS, max_tokens=40, stream=True) as endless:
        next(iter(endless))  # and no more: the request ends when the client goes away
    for change, text in (
        ({"model": "nobody"}, "this server serves"),
        ({"max_tokens": 500}, "500"),
        ({"n": 5000}, "from 1 to 1024"),
        ({"model": "tinker://x:train:0/weights/y"}, "there is no checkpoint"),
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search is not supported"),
    ):
        with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=text):
            client.chat.completions.create(**{**options, **change})
    assert client.chat.completions.create(**options).choices[0].message.content == whole.choices[0].message.content


def test_a_trained_tool_call_is_found_whole_and_in_a_stream(url: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    training = service.create_lora_training_client("tiny", rank=8, seed=1).result()
    tokens = [7, *CHAT, *TOOL_CALL, 2]  # the template begins with the names of tools
    targets = types.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1])
    call = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": targets})
    for _ in range(20):
        step(training, call, 5e-3)
    tool = {"type": "function", "function": {"name": "w7", "parameters": {"type": "object", "properties": {}}}}
    options: Any = {
        "model": training.model_id,
        "messages": [{"role": "user", "content": text_of(CHAT)}],
        "max_tokens": 8,
        "temperature": 0,
        "tools": [tool],
    }
    client = openai_client(url)
    choice = client.chat.completions.create(**options).choices[0]
    (found,) = choice.message.tool_calls
    assert (choice.finish_reason, found.function.name) == ("tool_calls", "w7")
    assert json.loads(found.function.arguments) == {"a": 1, "b": 2}
    chunks = [chunk.choices[0].delta for chunk in client.chat.completions.create(**options, stream=True)]
    pieces = [call.function for chunk in chunks for call in chunk.tool_calls or []]
    assert len(pieces) > 2, "it comes in pieces"
    assert "".join(piece.name or "" for piece in pieces) == "w7"
    assert json.loads("".join(piece.arguments or "" for piece in pieces)) == {"a": 1, "b": 2}
    assert not "".join(chunk.content or "" for chunk in chunks).strip()
    reply = {"role": "tool", "tool_call_id": found.id, "content": "w3"}
    options["messages"] += [choice.message.model_dump(exclude_none=True), reply]
    assert client.chat.completions.create(**options).usage.prompt_tokens == len([7, *CHAT, 3])
    plain = client.chat.completions.create(**{**options, "tool_choice": "none"}).choices[0].message
    assert not plain.tool_calls


def test_an_adapter_moves_to_a_script_and_back_and_is_exported(
    served: Served, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "adopt_orphans", lambda: None)
    monkeypatch.setattr(processes, "end_descendants", lambda **_: None)  # those of other tests
    service = tinker.ServiceClient(base_url=served.url, api_key="tml-local")
    training = service.create_lora_training_client("tiny", rank=4, seed=3, train_unembed=False).result()

    step(training)
    path = training.save_state("one").result().path
    step(training)
    unbroken = trained(training)
    folder = served.folder / "checkpoints" / training.model_id.replace(":", "-") / "weights"

    async def native() -> None:
        lora = LoRAConfig(rank=4, train_unembed=False)
        async with Launcher(tmp_path / "logs") as launcher:
            trainer = await launcher.trainer(served.model, TrainerConfig(compute_dtype="float32", lora=lora))
            assert await trainer.load_checkpoint(folder / "one") == 1
            tokens = np.array(TOKENS)
            batch = [Datum(tokens=tokens[:-1], loss_inputs={"target_tokens": tokens[1:]})]
            await trainer.forward_backward(batch, "cross_entropy")
            await trainer.optim_step(AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8))
            await trainer.save_checkpoint(folder / "native")

    asyncio.run(native())
    back = service.create_training_client_from_state_with_optimizer(path.replace("/one", "/native")).result()
    np.testing.assert_allclose(trained(back), unbroken, atol=1e-6)

    def exported(name: str, *options: str) -> Path:
        command = ["export", path.replace("/one", "/native"), "--folder", str(served.folder)]
        with pytest.raises(SystemExit) as stop:
            cli.main([*command, "--to", str(tmp_path / name), *options])
        assert stop.value.code == 0, capfd.readouterr().err
        return tmp_path / name

    def scored(model: Any) -> Any:
        with torch.no_grad():
            logprobs = model(torch.tensor([TOKENS[:-1]])).logits[0].log_softmax(-1)
        return logprobs[range(len(TOKENS) - 1), TOKENS[1:]].numpy()

    merged = AutoModelForCausalLM.from_pretrained(exported("merged"))
    np.testing.assert_allclose(scored(merged), unbroken, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(served.model)
    adapted = peft.PeftModel.from_pretrained(base, exported("adapter", "--adapter"))
    np.testing.assert_allclose(scored(adapted), unbroken, atol=1e-5)
