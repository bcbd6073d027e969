import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from rl.data.sources import Example, eval_loss, examples_to_data, text_to_datum
from rl.rollouts.evaluation import Measurement, bootstrap
from rl.rollouts.rendering import Renderer
from rl.tiny_models import tiny_llama
from tests.trainer.engine_trainer import EngineTrainer
from trainer.engines.contract.reference import ReferencePolicy


def test_the_completion_is_scored_and_nothing_else() -> None:
    datum = text_to_datum([5, 6, 7], [8, 9], "completion")
    assert datum.tokens.tolist() == [5, 6, 7, 8]
    assert datum.loss_inputs["target_tokens"].tolist() == [6, 7, 8, 9]
    assert datum.weights.tolist() == [0, 0, 1, 1]
    assert text_to_datum([5, 6, 7], [8, 9], "all").weights.tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="prompt has no tokens"):
        text_to_datum([], [8, 9], "completion")


def test_a_given_answer_has_the_tokens_of_a_sampled_one(smollm2: Path) -> None:
    renderer, tokenizer = Renderer(smollm2), AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "Say hello."}]
    (datum,) = examples_to_data(
        renderer, [Example(id="", prompt=chat, completion="Hello there!")], train_on="completion", max_tokens=100
    )
    sequence = [*datum.tokens, datum.loss_inputs["target_tokens"][-1]]
    whole = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": "Hello there!"}], tokenize=False)
    assert tokenizer.decode(sequence) == whole.rstrip()  # the template adds a line break that is not sampled
    learned = datum.loss_inputs["target_tokens"][datum.weights != 0]
    assert tokenizer.decode(learned) == "Hello there!" + tokenizer.eos_token


def test_an_example_that_is_too_long_is_left_out_whole(tmp_path: Path) -> None:
    renderer = Renderer(tiny_llama(tmp_path / "model"))
    examples = [Example(id="", prompt="w3 w4", completion=" ".join(["w5"] * n)) for n in (1, 4, 7, 2)]
    batch = examples_to_data(renderer, examples, train_on="completion", max_tokens=7)  # 2 + 4 and the end token
    assert [datum.num_loss_tokens for datum in batch] == [2, 5, 3]
    assert batch[1].loss_inputs["target_tokens"].tolist() == [4, 5, 5, 5, 5, 2]
    with pytest.raises(ValueError, match=r"train_on is 'prompt', which is not known"):
        examples_to_data(renderer, examples, train_on="prompt", max_tokens=7)  # type: ignore[arg-type]


def test_held_out_loss_equals_that_of_transformers(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    texts = [([3, 4, 5], [6, 7, 8, 2]), ([9], [10, 2]), ([11, 12], [13] * 9)]
    batch = [text_to_datum(prompt, completion, "completion") for prompt, completion in texts]
    measured = asyncio.run(eval_loss(EngineTrainer(model, per_microbatch=2), batch))
    reference = ReferencePolicy(model).model
    losses: list[float] = []
    for prompt, completion in texts:
        labels = torch.tensor([[-100] * len(prompt) + completion])
        losses.append(reference(torch.tensor([prompt + completion]), labels=labels).loss.item())
    np.testing.assert_allclose(measured.values, losses, rtol=1e-5)
    assert measured.interval.mean == pytest.approx(np.average(losses, weights=[4, 2, 9]), rel=1e-5)
    assert measured.interval.low <= measured.interval.mean <= measured.interval.high


@pytest.mark.seconds
def test_a_weighted_interval_has_its_nominal_coverage() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        weights = rng.integers(1, 20, 100).astype(np.float64)
        interval = bootstrap(rng.normal(0.1 * weights, 1.0), weights)
        truth = 0.1 * np.mean(np.arange(1, 20) ** 2) / np.mean(np.arange(1, 20))  # E[w v] / E[w]
        covered += interval.low <= truth <= interval.high
    assert 0.88 <= covered / 200 <= 0.99


def test_a_change_is_paired_by_item() -> None:
    before = Measurement(values=np.array([1.0, 5.0, 9.0]), weights=np.array([1.0, 1.0, 2.0]))
    after = Measurement(values=before.values - 0.5, weights=before.weights)
    change = after.change_since(before)
    assert (change.mean, change.low, change.high) == (-0.5, -0.5, -0.5)
    with pytest.raises(ValueError, match="these have 3 and 1"):
        after.change_since(Measurement(values=np.array([1.0])))
