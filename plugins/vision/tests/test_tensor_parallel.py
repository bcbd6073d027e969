"""Ranks that share the language model of a vision-language model compute what one rank does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plugins.vision.tests.vision import UNSEEN, WITH_IMAGES, WORDS, errors, image_batch
from rl.lora import LoRAConfig
from rl.losses import get_loss
from rl.system.model_files import stored_shapes
from rl.types import AdamParams
from tests.trainer.adapters import load_engine_or_adapter
from trainer.config import TrainerConfig
from trainer.engines.contract.plain_ranks import plan, relative_error, spawn, whole
from trainer.engines.contract.reference import published
from trainer.engines.model_check import check_model

QWEN3, QWEN2_5, GEMMA3 = WITH_IMAGES
LANGUAGE = LoRAConfig(rank=4, alpha=2.0)
NO_LANGUAGE = replace(LANGUAGE, train_attn=False, train_mlp=False, train_unembed=False)
LOSS = get_loss("importance_sampling")
STEP = AdamParams(learning_rate=1e-2, eps=1e-2)  # with a smaller eps, rounding errors would become whole steps
WHOLE: dict[str, Any] = {"train_vision": True}


def config_of(model: Path, tensor_parallel: int = 2, **options: Any) -> TrainerConfig:
    shared: dict[str, Any] = {"engine": "fsdp2", "compute_dtype": "float32", "sequence_parallel": False}
    return TrainerConfig(model=model, tensor_parallel=tensor_parallel, **{**shared, **options})


def run_rank(rank: int, model: Path, options: dict[str, Any], folder: Path) -> None:
    """Two steps, the second of which is also taken after a restart."""
    config, batch = config_of(model, **options), image_batch(model)
    mine = plan(config, batch).split(batch)[config.data_parallel_rank(rank)]
    engine, resumed = load_engine_or_adapter(config), load_engine_or_adapter(config)
    logprobs = engine.forward_backward(mine, LOSS).logprobs
    found: dict[str, Any] = {"logprobs": logprobs, "gradients": whole(engine, gradients=True)}
    found["norm"] = engine.optim_step(STEP).grad_norm
    found["pushed"] = published(1, engine.hf_parameters())
    engine.save_checkpoint(folder / "checkpoint")
    resumed.load_checkpoint(folder / "checkpoint")
    for each in (engine, resumed):
        each.forward_backward(mine, LOSS)
        each.optim_step(STEP)
    found["second"], found["resumed"] = whole(engine), whole(resumed)
    if rank == 0:
        torch.save(found, folder / "found")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "options"),
    [
        (QWEN3, WHOLE),
        *(
            pytest.param(name, options, marks=pytest.mark.slow)
            for name, options in (
                (QWEN2_5, WHOLE),
                (GEMMA3, WHOLE),
                (QWEN3, {}),
                *((name, {"lora": LANGUAGE}) for name in WITH_IMAGES),
                (QWEN3, {**WHOLE, "data_parallel_shard": 2, "activation_checkpointing": "full"}),
                (GEMMA3, {**WHOLE, "data_parallel_replicate": 2}),
                (QWEN2_5, {"lora": LANGUAGE, "data_parallel_shard": 2}),
                *((name, {"lora": LANGUAGE, **WHOLE}) for name in WITH_IMAGES),
                (GEMMA3, {"lora": NO_LANGUAGE, **WHOLE, "data_parallel_shard": 2}),
            )
        ),
    ],
)
def test_ranks_compute_what_one_does(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = WITH_IMAGES[name](tmp_path / "model", WORDS, num_key_value_heads=2)
    config, batch = config_of(model, **options), image_batch(model)
    spawn(config.num_ranks, run_rank, model, options, tmp_path)
    found = torch.load(tmp_path / "found", weights_only=False)
    one = load_engine_or_adapter(config_of(model, 1, lora=config.lora, train_vision=config.train_vision))
    expected = one.forward_backward([batch], LOSS).logprobs
    mine = [index for row in plan(config, batch).microbatches[0] for index in row]
    for index, logprobs in zip(mine, found["logprobs"], strict=True):
        assert logprobs == pytest.approx(expected[index], rel=1e-5)
    assert max(errors(found["gradients"], whole(one, gradients=True)).values()) < 1e-5
    assert found["norm"] == pytest.approx(one.optim_step(STEP).grad_norm, rel=1e-5)
    weights, pushed = whole(one), found["pushed"]
    assert pushed.keys() == (weights.keys() if config.lora else stored_shapes(model).keys())
    assert max(relative_error(pushed[key], weights[key]) for key in weights if key not in UNSEEN) < 1e-4
    one.load_checkpoint(tmp_path / "checkpoint")
    assert all(torch.equal(weight, pushed[key]) for key, weight in whole(one).items())
    assert all(torch.equal(weight, found["resumed"][key]) for key, weight in found["second"].items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel": 4}, "tensor_parallel is 4, which does not divide the model's num_attention_heads 2; it"),
        ({"sequence_parallel": True}, "sequence_parallel is True and tensor_parallel is 2; for a model that reads im"),
        ({"head": "value"}, "head is 'value' and tensor_parallel is 2; for a model that reads images head must be 'lm"),
        (
            {"context_parallel": 2},
            "context_parallel is 2; engine 'fsdp2' only shards data, .* no engine divides",
        ),
    ],
)
def test_what_is_not_proven_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    model = WITH_IMAGES[QWEN3](tmp_path / "model", WORDS, num_key_value_heads=2)
    check_model(config_of(model))
    with pytest.raises(ValueError, match=said):
        check_model(config_of(model, **options))
