"""Transformers models whose attention takes a row document by document, as on GPUs, against transformers' own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rl.losses import get_loss
from rl.tiny_models import random_batch
from tests.trainer.engines.test_transformers_policy import SHAPE, save
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.plain_ranks import relative_error
from trainer.engines.hf import document_kernel
from trainer.engines.hf.fsdp2 import Fsdp2Engine

CPU = torch.device("cpu")
BATCH = random_batch((1, 17, 5, 40))
DENSE: dict[str, Any] = {**SHAPE, "num_key_value_heads": 2, "intermediate_size": 48}


def gradients(engine: Fsdp2Engine) -> dict[str, torch.Tensor]:
    engine.zero_grad()
    engine.forward_backward([BATCH], get_loss("importance_sampling"))
    return {name: p.grad for name, p in engine.hf_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (LlamaForCausalLM, LlamaConfig(**DENSE)),
        (Qwen2ForCausalLM, Qwen2Config(**DENSE, use_sliding_window=True, sliding_window=4, max_window_layers=1)),
        (GPT2LMHeadModel, GPT2Config(vocab_size=64, n_embd=32, n_head=4, n_layer=2, initializer_range=0.2)),
    ],
)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_gpu_logic_rows_need_no_mask(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    checkpointing: Any,
) -> None:
    assert_rows_need_no_mask(monkeypatch, save(model_class, config, tmp_path / "model"), checkpointing)


def assert_rows_need_no_mask(monkeypatch: pytest.MonkeyPatch, model: Path, checkpointing: Any) -> None:
    """Gradients by documents equal those with transformers' mask."""
    rows: list[tuple[int, list[int]]] = []
    attend = document_kernel.varlen_on_cpu

    def seen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, *args: Any, **more: Any) -> Any:
        rows.append((len(q), ends.tolist()))
        return attend(q, k, v, ends, *args, **more)

    monkeypatch.setattr(document_kernel, "varlen_on_cpu", seen)
    engine = load_engine(
        TrainerConfig(
            model=model,
            engine="fsdp2",
            compute_dtype="float32",
            activation_checkpointing=checkpointing,
        )
    )
    assert isinstance(engine, Fsdp2Engine)
    expected = gradients(engine)
    assert not rows, "on the CPU, attention is transformers' own"
    assert engine._policy.attend_by_documents(CPU) == ""  # pyright: ignore[reportPrivateUsage]
    actual = gradients(engine)
    assert rows[-1] == (63, [0, 1, 18, 23, 63])
    assert max(relative_error(actual[name], expected[name]) for name in expected) < 1e-5
    engine._policy.check(CPU)  # pyright: ignore[reportPrivateUsage] - the assumptions hold for it too


def test_gpu_logic_attention_without_a_kernel_is_transformers(tmp_path: Path) -> None:
    config = Gemma2Config(**DENSE, head_dim=16, final_logit_softcapping=None, attn_logit_softcapping=5.0)
    model = save(Gemma2ForCausalLM, config, tmp_path / "model")
    engine = load_engine(TrainerConfig(model=model, engine="fsdp2", compute_dtype="float32"))
    assert isinstance(engine, Fsdp2Engine)
    expected = gradients(engine)
    why = engine._policy.attend_by_documents(CPU)  # pyright: ignore[reportPrivateUsage]
    assert why == "its attention has softcap"
    actual = gradients(engine)
    assert max(relative_error(actual[name], expected[name]) for name in expected) == 0


@pytest.mark.gpu
def test_on_a_gpu_the_flash_kernel_computes_what_the_mask_does(tmp_path: Path) -> None:
    wide: dict[str, Any] = {**DENSE, "hidden_size": 128}
    config = Qwen2Config(**wide, use_sliding_window=True, sliding_window=4)
    engine = load_engine(
        TrainerConfig(model=save(Qwen2ForCausalLM, config, tmp_path / "model"), engine="fsdp2")  # in bfloat16
    )
    assert isinstance(engine, Fsdp2Engine)
    policy = engine._policy  # pyright: ignore[reportPrivateUsage]
    assert policy._by_documents  # pyright: ignore[reportPrivateUsage]
    actual = gradients(engine)
    policy._by_documents = False  # pyright: ignore[reportPrivateUsage]
    policy.model.set_attn_implementation("sdpa")
    expected = gradients(engine)
    assert max(relative_error(actual[name], expected[name]) for name in expected) < 5e-2
