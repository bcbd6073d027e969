"""Which models of transformers can be packed and scored, found out by trying."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PhiConfig,
    PhiForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rl.losses import get_loss
from rl.tiny_models import random_batch
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.plain_ranks import relative_error
from trainer.engines.contract.reference import ReferencePolicy, importance_sampling
from trainer.engines.hf.transformers_policy import TransformersPolicy

pytestmark = pytest.mark.filterwarnings("ignore:no test covers")

SHAPE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def save(model_class: type[PreTrainedModel], config: PretrainedConfig, path: Path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model_class(config).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (GPT2LMHeadModel, GPT2Config(vocab_size=64, n_embd=32, n_head=4, n_layer=2, initializer_range=0.2)),
        (
            Qwen2ForCausalLM,
            Qwen2Config(
                **SHAPE, num_key_value_heads=2, intermediate_size=48, use_sliding_window=True, sliding_window=4
            ),
        ),
    ],
)
def test_families_that_only_transformers_knows(
    tmp_path: Path, model_class: type[PreTrainedModel], config: PretrainedConfig
) -> None:
    model = save(model_class, config, tmp_path / "model")
    batch = random_batch((1, 17, 5, 40))
    engine = load_engine(TrainerConfig(model=model, engine="fsdp2", compute_dtype="float32"))
    engine.forward_backward([batch[:3], batch[3:]], get_loss("importance_sampling"))
    reference = ReferencePolicy(model)
    reference.model.eval()
    reference.backward(batch, importance_sampling)
    expected = reference.gradients()
    actual = {name: p.grad for name, p in engine.hf_parameters() if p.grad is not None}
    assert actual.keys() == expected.keys()
    assert max(relative_error(actual[name], expected[name]) for name in expected) < 1e-5


@pytest.mark.parametrize(
    ("model_class", "config", "message"),
    [
        (PhiForCausalLM, PhiConfig(**SHAPE, intermediate_size=48), "without a bias is needed"),
        (BloomForCausalLM, BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), "takes no positions"),
    ],
)
def test_models_that_would_be_scored_wrongly_are_refused(
    tmp_path: Path, model_class: type[PreTrainedModel], config: PretrainedConfig, message: str
) -> None:
    model = save(model_class, config, tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        load_engine(TrainerConfig(model=model, engine="fsdp2"))


def test_a_change_of_logits_that_is_not_known_is_refused(tmp_path: Path) -> None:
    config = Gemma2Config(**SHAPE, num_key_value_heads=2, intermediate_size=48, head_dim=16)
    model = save(Gemma2ForCausalLM, config, tmp_path / "model")
    policy = TransformersPolicy(model, "lm", torch.float32)
    policy.load(model, torch.device("cpu"))
    policy.check(torch.device("cpu"))
    policy._logit_cap = None  # pyright: ignore[reportPrivateUsage] - as of a model with a cap of another name
    with pytest.raises(ValueError, match="changes its logits after the output projection"):
        policy.check(torch.device("cpu"))
