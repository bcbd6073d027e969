import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest

from generator.config import GeneratorConfig
from rl.algorithms.actor_critic import PPOParams
from rl.lora import LoRAConfig
from rl.types import REASONING, AdamParams, Answer, Completion, Datum, MuonParams, SamplingParams, open_reasoning
from trainer.config import TrainerConfig


def test_a_completion_without_tokens_is_one() -> None:
    completion = Completion(tokens=(), logprobs=(), versions=(), text="", finish_reason="stop")
    assert not completion.truncated


@pytest.mark.parametrize(("logprobs", "versions"), [((-1.0,), (0, 0)), ((-1.0, -1.0), (0,)), ((), ())])
def test_every_token_has_a_log_prob_and_a_version(logprobs: tuple[float, ...], versions: tuple[int, ...]) -> None:
    message = f"2 tokens, {len(logprobs)} logprobs and {len(versions)} versions"
    with pytest.raises(ValueError, match=message):
        Completion(tokens=(1, 2), logprobs=logprobs, versions=versions, text="", finish_reason="length")


def test_weights_are_one_where_none_are_given() -> None:
    tokens = np.arange(3)
    bare = Datum(tokens=tokens, loss_inputs={"target_tokens": tokens})
    assert bare.weights.tolist() == [1, 1, 1]
    weighed = Datum(tokens=tokens, loss_inputs={"target_tokens": tokens, "weights": np.array([0, -1e-6, 2])})
    assert weighed.weights.tolist() == pytest.approx([0, -1e-6, 2])
    assert weighed.num_loss_tokens == 2
    assert weighed.scored.tolist() == [False, True, True]
    reported = {**weighed.loss_inputs, "reported_mask": np.array([True, True, False])}
    reported_too = Datum(tokens=tokens, loss_inputs=reported).weighted(0.5)
    assert reported_too.num_loss_tokens == 2
    assert reported_too.scored.all()


REQUIRED: dict[Any, dict[str, Any]] = {
    SamplingParams: {"max_tokens": 1},
    AdamParams: {"learning_rate": 1},
    MuonParams: {"learning_rate": 1},
}


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (SamplingParams, "max_tokens", 0),
        (SamplingParams, "temperature", -1),
        (SamplingParams, "temperature", float("nan")),
        (SamplingParams, "temperature", 0.001),
        (SamplingParams, "temperature", 2.5),
        (SamplingParams, "top_p", 0),
        (SamplingParams, "top_k", 0),
        (SamplingParams, "min_p", 1.5),
        (SamplingParams, "seed", 2**70),
        (SamplingParams, "seed", 0.5),
        (SamplingParams, "stop", "."),
        (SamplingParams, "stop", 5),
        (SamplingParams, "stop[0]", 7),
        (SamplingParams, "stop[0]", ""),
        (SamplingParams, "stop_token_ids", 2),
        (SamplingParams, "stop_token_ids[0]", "a"),
        (SamplingParams, "stop_token_ids[0]", -1),
        (AdamParams, "learning_rate", float("inf")),
        (AdamParams, "learning_rate", 1e300),
        (AdamParams, "weight_decay", -1),
        (AdamParams, "beta1", 1.0),
        (AdamParams, "eps", 0),
        (AdamParams, "eps", 1e-50),
        (AdamParams, "learning_rate_multipliers['*']", -1),
        (MuonParams, "learning_rate", -1),
        (MuonParams, "num_iterations", 0),
        (PPOParams, "kl_estimator", "k4"),
        (PPOParams, "kl_coef", -0.1),
        (PPOParams, "gamma", 1.5),
        (PPOParams, "gae_lambda", -1.0),
        (PPOParams, "num_epochs", 0),
        (PPOParams, "minibatches_per_epoch", 0),
        (LoRAConfig, "rank", 0),
        (LoRAConfig, "alpha", 0.0),
        (LoRAConfig, "alpha", 1e39),
        (TrainerConfig, "compute_dtype", "float16"),
        (TrainerConfig, "moments_dtype", "int8"),
        (TrainerConfig, "activation_checkpointing", "some"),
        (TrainerConfig, "data_parallel_shard", 0),
        (TrainerConfig, "context_parallel", 0),
        (TrainerConfig, "pipeline_parallel", 0),
        (TrainerConfig, "pipeline_schedule", "ZBV"),
        (TrainerConfig, "float8", "tensorwise"),
        (TrainerConfig, "expert_parallel", -1),
        (TrainerConfig, "max_tokens_per_microbatch", 0),
        (GeneratorConfig, "dtype", "int8"),
        (GeneratorConfig, "num_replicas", 0),
        (GeneratorConfig, "weight_transport", "rdma"),
        (GeneratorConfig, "on_failure", "resend"),
        (GeneratorConfig, "request_timeout_s", 0),
        (GeneratorConfig, "max_num_seqs", 0),
        (GeneratorConfig, "head_dtype", "bfloat16"),
        # Wrong types, which a comparison would take, or name in Python's words
        (AdamParams, "learning_rate", "1e-5"),
        (AdamParams, "learning_rate", None),
        (AdamParams, "learning_rate", True),
        (AdamParams, "learning_rate_multipliers", 2),
        (MuonParams, "num_iterations", 2.5),
        (SamplingParams, "max_tokens", 8.0),
        (SamplingParams, "top_k", "5"),
        (SamplingParams, "ignore_eos", "no"),
        (LoRAConfig, "rank", 8.0),
        (LoRAConfig, "seed", 10**25),
        (TrainerConfig, "frozen", "False"),
        (TrainerConfig, "model", 5),
        (TrainerConfig, "lora", 8),
        (TrainerConfig, "gpus", 0),
        (TrainerConfig, "seed", 10**25),
        (GeneratorConfig, "max_model_len", float("nan")),
        (GeneratorConfig, "request_timeout_s", "60"),
    ],
)
def test_a_wrong_value_is_named(make: Any, field: str, value: Any) -> None:
    name, _, place = field.partition("[")
    given = value if not place else {"*": value} if "*" in place else (value,)
    with pytest.raises(ValueError, match=rf"\b{re.escape(field)} is {re.escape(repr(value))}"):
        make(**{**REQUIRED.get(make, {}), name: given})


def test_numbers_of_numpy_are_numbers() -> None:
    numbers: tuple[Any, ...] = (np.float32(0.5), np.int64(3), [1])
    half, three, gpus = numbers
    assert AdamParams(learning_rate=half, weight_decay=1).learning_rate == 0.5
    assert SamplingParams(max_tokens=three, seed=three).max_tokens == 3
    assert TrainerConfig(gpus=gpus).gpus == (1,)


@pytest.mark.stranger("C2")
@pytest.mark.parametrize(("opens", "closes"), REASONING.items())
def test_every_spelling_of_reasoning_is_found(opens: str, closes: str) -> None:
    answer = Answer.read(f"{opens}why{closes}so")
    assert (answer.reasoning, answer.content, answer.is_cut_off) == ("why", "so", False)
    assert Answer.read(f"why{closes}so", opening=opens).content == "so"
    assert Answer.read("why", opening=opens).content == ""
    assert [open_reasoning(text) for text in (f"a{opens}b", f"{opens}a{closes}", "")] == [opens, "", ""]


@pytest.mark.stranger("C2")
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("", "", ""),
        ("so", "", "so"),
        ("why</think>so", "why", "so"),
        ("<think>why", "why", ""),
        ("<think>a<think>b</think>so", "a<think>b", "so"),
        ("<think>a</think>b</think>so", "ab", "so"),
        ("<think>a</thinking>b</think>so", "a</thinking>b", "so"),
        ("<think>a[THINK]b[/THINK]c</think>so", "a[THINK]b[/THINK]c", "so"),
        ("so <think>a</think>it<thinking>b</thinking> is", "ab", "so it is"),
        ("so<think>a", "a", "so"),
        ("<think></think>", "", ""),
    ],
)
def test_an_answer_is_what_follows_the_reasoning(text: str, reasoning: str, content: str) -> None:
    answer = Answer.read(text, is_cut_off=True)
    assert (answer, answer.reasoning, answer.content, answer.is_cut_off) == (text, reasoning, content, True)
    assert Answer.read(answer) is answer


def test_an_answer_is_a_text_that_nothing_changes() -> None:
    answer = Answer.read("<think>why</think>so", is_cut_off=True)
    assert (answer, hash(answer), answer.upper()) == (str(answer), hash(str(answer)), "<THINK>WHY</THINK>SO")
    for same in (pickle.loads(pickle.dumps(answer)), copy.deepcopy(answer)):
        assert (same, same.reasoning, same.content, same.is_cut_off) == (answer, "why", "so", True)
    with pytest.raises(AttributeError, match="content of an Answer cannot be set"):
        answer.content = "paid"
    with pytest.raises(AttributeError, match="reasoning of an Answer cannot be deleted"):
        del answer.reasoning
