import copy
import pickle
from typing import Any

import numpy as np
import pytest

from generator.config import GeneratorConfig
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


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (SamplingParams, {"max_tokens": 0}, r"max_tokens is 0"),
        (SamplingParams, {"max_tokens": 1, "temperature": -1}, r"temperature is -1"),
        (SamplingParams, {"max_tokens": 1, "temperature": float("nan")}, r"temperature is nan"),
        (
            SamplingParams,
            {"max_tokens": 1, "temperature": 0.001},
            r"temperature is 0.001",
        ),
        (SamplingParams, {"max_tokens": 1, "temperature": 2.5}, r"temperature is 2.5"),
        (SamplingParams, {"max_tokens": 1, "top_p": 0}, r"top_p is 0"),
        (SamplingParams, {"max_tokens": 1, "top_k": 0}, r"top_k is 0"),
        (SamplingParams, {"max_tokens": 1, "min_p": 1.5}, r"min_p is 1.5"),
        (SamplingParams, {"max_tokens": 1, "seed": 2**70}, r"seed is 1180591620717411303424"),
        (SamplingParams, {"max_tokens": 1, "seed": 0.5}, r"seed is 0.5"),
        (SamplingParams, {"max_tokens": 1, "stop": "."}, r"stop is '.'"),
        (SamplingParams, {"max_tokens": 1, "stop": 5}, r"stop is 5"),
        (SamplingParams, {"max_tokens": 1, "stop": (7,)}, r"SamplingParams.stop\[0\] is 7"),
        (SamplingParams, {"max_tokens": 1, "stop_token_ids": 2}, r"stop_token_ids is 2"),
        (
            SamplingParams,
            {"max_tokens": 1, "stop_token_ids": ("a",)},
            r"stop_token_ids\[0\] is 'a'",
        ),
        (SamplingParams, {"max_tokens": 1, "stop": ("",)}, r"stop\[0\] is ''"),
        (AdamParams, {"learning_rate": float("inf")}, r"learning_rate is inf"),
        (AdamParams, {"learning_rate": 1, "weight_decay": -1}, r"weight_decay is -1"),
        (AdamParams, {"learning_rate": 1, "beta1": 1.0}, r"beta1 is 1.0"),
        (AdamParams, {"learning_rate": 1, "eps": 0}, r"eps is 0"),
        (AdamParams, {"learning_rate": 1, "eps": 1e-50}, r"eps is 1e-50"),
        (
            AdamParams,
            {"learning_rate": 1e300},
            r"learning_rate is 1e\+300",
        ),
        (AdamParams, {"learning_rate": 1, "learning_rate_multipliers": {"*": -1}}, r"multipliers\['\*'\] is -1"),
        # Wrong types, which a comparison would take, or name in Python's words
        (AdamParams, {"learning_rate": "1e-5"}, r"AdamParams.learning_rate is '1e-5'"),
        (AdamParams, {"learning_rate": None}, r"learning_rate is None"),
        (AdamParams, {"learning_rate": True}, r"learning_rate is True"),
        (AdamParams, {"learning_rate": 1, "learning_rate_multipliers": 2}, r"multipliers is 2"),
        (MuonParams, {"learning_rate": 1, "num_iterations": 2.5}, r"num_iterations is 2.5"),
        (SamplingParams, {"max_tokens": 8.0}, r"SamplingParams.max_tokens is 8.0"),
        (SamplingParams, {"max_tokens": 1, "top_k": "5"}, r"top_k is '5'"),
        (SamplingParams, {"max_tokens": 1, "ignore_eos": "no"}, r"ignore_eos is 'no'"),
        (LoRAConfig, {"rank": 8.0}, r"LoRAConfig.rank is 8.0"),
        (LoRAConfig, {"seed": 10**25}, r"LoRAConfig.seed is 1\d{25}"),
        (TrainerConfig, {"frozen": "False"}, r"TrainerConfig.frozen is 'False'"),
        (
            SamplingParams,
            {"max_tokens": 1, "stop_token_ids": (-1,)},
            r"stop_token_ids\[0\] is -1",
        ),
        (TrainerConfig, {"model": 5}, r"TrainerConfig.model is 5"),
        (TrainerConfig, {"lora": 8}, r"TrainerConfig.lora is 8"),
        (TrainerConfig, {"gpus": 0}, r"TrainerConfig.gpus is 0"),
        (
            TrainerConfig,
            {"seed": 10**25},
            r"TrainerConfig.seed is 1\d{25}",
        ),
        (GeneratorConfig, {"max_model_len": float("nan")}, r"max_model_len is nan"),
        (GeneratorConfig, {"request_timeout_s": "60"}, r"request_timeout_s is '60'"),
    ],
)
def test_mistakes_are_named(make: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**arguments)


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
