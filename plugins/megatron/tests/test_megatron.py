"""The megatron engine: what it refuses before any process starts, and its table of names.

That it computes what the others do is tested with them, in test_engine_contract.py and test_sharded_engine.py.
"""

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ownloop_doctors.one_rank import MICROBATCHES, MODEL_CHECKS, PARAMS, Subject, check_gradients
from ownloop_megatron.mcore.names import Piece, pieces_of
from rl.data.packing import Document
from rl.losses import get_loss
from rl.system.hf_config import read_decoder_config
from rl.tiny_models import random_batch, tiny_dense, tiny_llama, tiny_qwen3, tiny_qwen3_moe
from tests.trainer.engine_params import INSTALLED
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine
from trainer.engines.contract.plain_ranks import relative_error
from trainer.engines.contract.reference import ReferencePolicy, gradients
from trainer.engines.model_check import check_model

needs_megatron = pytest.mark.skipif("megatron" not in INSTALLED, reason="the package 'megatron' is not installed")


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            tiny_llama,
            {"data_parallel_shard": 2, "data_parallel_replicate": 3},
            "data_parallel_shard is 2 and data_parallel_replicate 3; with engine 'megatron' one of them must be 1",
        ),
        (tiny_llama, {"tensor_parallel": 4}, r"num_kv_heads 2; its sizes allow \[1, 2\]"),
        (tiny_llama, {"pipeline_parallel": 2}, "output projection is its embedding .* so it must be 1"),
        (tiny_llama, {"expert_parallel": 2}, "this model has no experts, so it must be 1"),
        (tiny_llama, {"activation_checkpointing": "selective"}, "with engine 'megatron' it must be 'none' or 'full'"),
        (tiny_llama, {"compile": True}, "it must be False. The engine 'torchtitan' has it"),
        (
            tiny_qwen3_moe,
            {"tensor_parallel": 2, "sequence_parallel": False},
            "sequence_parallel is False and tensor_parallel is 2; .* must be True",
        ),
        (tiny_qwen3_moe, {"expert_parallel": 2}, r"tensor_parallel, which is 1, and the model's 4 experts: \[1\]"),
        (
            tiny_qwen3_moe,
            {"data_parallel_replicate": 3, "context_parallel": 2, "tensor_parallel": 2, "expert_parallel": 3},
            r"context_parallel x tensor_parallel, which is 12, and the model's 4 experts: \[1, 2, 4\]",
        ),
        (lambda path: tiny_qwen3_moe(path, num_experts_per_tok=1), {}, "num_experts_per_tok is 1 and .* 'torchtitan'"),
    ],
)
def test_what_megatron_cannot_do_is_refused(make: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        check_model(TrainerConfig(model=make(tmp_path / "model"), engine="megatron", **options))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"tensor_model_parallel_size": 2}, "set TrainerConfig.tensor_parallel instead"),
        ({"num_layers": 3}, "follows from the model or the engine and cannot be chosen"),
        ({"layernorm_zero_centered_gamma": True}, "follows from the model or the engine and cannot be chosen"),
        ({"model_provider": "mine"}, "is 'mine'; it must be 'module:function'"),
    ],
)
def test_options_that_cannot_be_chosen_are_refused(args: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        check_model(TrainerConfig(model=tiny_llama(tmp_path / "model"), engine="megatron", engine_args=args))


def test_engines_without_options_refuse_them(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"engine 'torchtitan' takes none\. The engines that do are 'megatron', 'megatron_fsdp'"
    ):
        check_model(TrainerConfig(model=tiny_llama(tmp_path / "model"), engine_args={"softmax_scale": 0.1}))


@needs_megatron
def test_an_option_that_megatron_does_not_have_is_refused(tmp_path: Path) -> None:
    config = TrainerConfig(model=tiny_llama(tmp_path / "model"), engine="megatron", engine_args={"softmax_scales": 1.0})
    with pytest.raises(ValueError, match="TransformerConfig has no such option; did you mean 'softmax_scale'"):
        check_model(config)


def double_provider(**arguments: Any) -> Any:
    """A fork's model: its last norm doubles."""
    from ownloop_megatron.mcore.core_api import GPTModel

    model = GPTModel(**arguments)
    if model.post_process:
        model.decoder.final_layernorm.register_forward_hook(lambda *args: 2 * args[-1])
    return model


def interleaved_provider(**arguments: Any) -> Any:
    """A model whose fused projection has other rows than the table says."""
    from ownloop_megatron.mcore.core_api import GPTModel, SelfAttention

    for layer in arguments["transformer_layer_spec"].layer_specs:
        layer.submodules.self_attention.module = SelfAttention
    return GPTModel(**arguments)


@needs_megatron
def test_options_and_a_provider_change_what_is_computed(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    batch = random_batch((9, 17))

    def logprobs(**engine_args: Any) -> Any:
        config = TrainerConfig(model=model, engine="megatron", compute_dtype="float32", engine_args=engine_args)
        return load_engine(config).forward([batch]).logprobs[1]

    plain, doubled = logprobs(), logprobs(model_provider=f"{__name__}:double_provider")
    assert not np.allclose(logprobs(softmax_scale=0.1), plain, atol=1e-3)
    reference = ReferencePolicy(model)
    with torch.no_grad():
        expected = torch.log_softmax(2 * reference.logits(batch[1]), -1)
    targets = torch.from_numpy(batch[1].loss_inputs["target_tokens"])
    expected = expected.gather(1, targets[:, None])[:, 0].numpy() * (batch[1].weights != 0)
    np.testing.assert_allclose(doubled, expected, atol=1e-5)
    with pytest.raises(ValueError, match="made a layer with SelfAttention; attention must be a subclass of"):
        logprobs(model_provider=f"{__name__}:interleaved_provider")


@needs_megatron
@pytest.mark.parametrize(
    ("make", "name"),
    [(make, name) for make in (tiny_qwen3_moe, partial(tiny_dense, "qwen2")) for name in MODEL_CHECKS],
)
def test_models_that_only_some_engines_have_keep_the_contract(name: str, make: Any, tmp_path: Path) -> None:
    model = make(tmp_path / "model")
    config = TrainerConfig(model=model, engine="megatron", compute_dtype="float32")
    print(MODEL_CHECKS[name](Subject(lambda: load_engine(config), model, tmp_path)))


@needs_megatron
def test_scores_of_unnormalized_experts_equal_transformers(tmp_path: Path) -> None:
    model = tiny_qwen3_moe(tmp_path / "model", norm_topk_prob=False)
    config = TrainerConfig(model=model, engine="megatron", compute_dtype="float32")
    check_gradients(Subject(lambda: load_engine(config), model, tmp_path))


@needs_megatron
def test_llama3_rope_scaling_equals_transformers(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = tiny_llama(tmp_path / "model", rope_parameters=rope)
    config = TrainerConfig(model=model, engine="megatron", compute_dtype="float32")
    check_gradients(Subject(lambda: load_engine(config), model, tmp_path))


@needs_megatron
def test_bfloat16_computes_with_copies_and_trains_float32(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", tied=False)

    def gradient(engine: Engine) -> torch.Tensor:
        engine.forward_backward(MICROBATCHES, get_loss("importance_sampling"))
        return torch.cat([grad.flatten() for _, grad in sorted(gradients(engine).items())])

    exact = gradient(load_engine(TrainerConfig(model=model, compute_dtype="float32")))
    engine, other = (load_engine(TrainerConfig(model=model, engine=name)) for name in ("megatron", "torchtitan"))
    # Rounding moves torchtitan's gradient by 4 % here, and this one by 3 %.
    assert 0 < relative_error(gradient(engine), exact) < 1.25 * relative_error(gradient(other), exact)
    engine.optim_step(PARAMS, 0.1)
    assert {parameter.dtype for _, parameter in engine.hf_parameters()} == {torch.float32}
    fresh = load_engine(TrainerConfig(model=model, engine="megatron"))
    engine.save_checkpoint(tmp_path / "checkpoint")
    fresh.load_checkpoint(tmp_path / "checkpoint")
    before, after = (each.forward(MICROBATCHES).logprobs for each in (fresh, engine))
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    plain = load_engine(TrainerConfig(model=model, engine="megatron")).forward(MICROBATCHES).logprobs
    assert not np.array_equal(plain[1], after[1]), "the copies are those of the new parameters"


@needs_megatron
def test_attention_on_a_gpu_is_that_on_a_cpu() -> None:
    from ownloop_megatron.mcore.layers import RowAttention, attend_by_kernel, plan_documents

    documents = (Document(5), Document(1), Document(9))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(15, 1, heads, 8, generator=generator) for heads in (4, 2, 2))
    expected = RowAttention(softmax_scale=0.5)(query, key, value, plan_documents(documents, torch.device("cpu")))
    lengths = plan_documents(documents, torch.device("cuda"))
    torch.testing.assert_close(attend_by_kernel(query, key, value, lengths, 0.5), expected)


def test_stages_have_equally_many_layers(tmp_path: Path) -> None:
    model = tiny_qwen3(tmp_path / "model", tied=False, num_hidden_layers=6)
    with pytest.raises(ValueError, match=r"4 stages; Megatron-core wants equally many .* 6 layers in each: \[1, 3\]"):
        check_model(
            TrainerConfig(model=model, engine="megatron", pipeline_parallel=2, pipeline_schedule="Interleaved1F1B")
        )


def test_a_package_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainerConfig(model=tiny_llama(tmp_path / "model"), engine="megatron")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="'megatron', which is not installed: `pip install ownloop-megatron`"):
        check_model(config)


def test_pieces_of_fused_parameters_cover_them_in_order(tmp_path: Path) -> None:
    decoder = read_decoder_config(tiny_qwen3_moe(tmp_path / "model"))
    fused = pieces_of("decoder.layers.1.self_attention.linear_qkv.weight", 2, 0, decoder, "lm", splits_tokens=True)
    names = [f"model.layers.3.self_attn.{letter}_proj.weight" for letter in "qkv"]
    assert [piece.name for piece in fused] == names
    assert [(piece.start, piece.stop, piece.parts) for piece in fused] == [(0, 4, 8), (4, 6, 8), (6, 8, 8)]
    expert = pieces_of(
        "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight", 0, 2, decoder, "lm", splits_tokens=True
    )
    assert expert == [Piece("model.layers.0.mlp.experts.3.down_proj.weight", is_expert=True)]
    with pytest.raises(
        ValueError, match=r"parameter 'decoder\.layers\.0\.mine\.weight', for which there is no Hugging Face"
    ):
        pieces_of("decoder.layers.0.mine.weight", 0, 0, decoder, "lm", splits_tokens=True)
