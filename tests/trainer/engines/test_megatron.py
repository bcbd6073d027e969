"""The megatron engine: what it refuses before any process starts, and its table of names.

That it computes what the others do is tested with them, in test_engine_contract.py and test_sharded_engine.py.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from rl.tiny_models import tiny_llama, tiny_qwen3, tiny_qwen3_moe
from trainer.config import TrainerConfig
from trainer.engines.decoder_config import read_decoder_config
from trainer.engines.mcore.names import Piece, pieces_of
from trainer.engines.model_check import check_model

TP2: dict[str, Any] = {"tensor_parallel": 2, "sequence_parallel": False}


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            tiny_llama,
            {"data_parallel_shard": 2},
            "engine 'megatron' keeps whole replicas, so it must be 1, and data_par",
        ),
        (tiny_llama, {"context_parallel": 2}, "needs TransformerEngine for it, .* so it must be 1"),
        (tiny_llama, {"tensor_parallel": 2}, "sequence_parallel is True and tensor_parallel is 2; .* must be False"),
        (tiny_llama, {**TP2, "tensor_parallel": 4}, r"num_kv_heads 2; its sizes allow \[1, 2\]"),
        (tiny_llama, {"pipeline_parallel": 2}, "output projection is its embedding .* so it must be 1"),
        (tiny_llama, {"expert_parallel": 2}, "this model has no experts, so it must be 1"),
        (tiny_llama, {"activation_checkpointing": "selective"}, "with engine 'megatron' it must be 'none' or 'full'"),
        (tiny_llama, {"compile": True}, "it must be False. The engine 'torchtitan' has it"),
        (tiny_qwen3_moe, TP2, "does not split experts, .* expert_parallel and pipeline_parallel work with it"),
        (tiny_qwen3_moe, {"expert_parallel": 2}, r"does not divide the 1 data_parallel_replicate; they allow \[1\]"),
        (
            tiny_qwen3_moe,
            {"data_parallel_replicate": 3, "expert_parallel": 3},
            r"does not divide the 4 experts; they allow \[1, 2, 4\]",
        ),
    ],
)
def test_what_megatron_cannot_do_is_refused(make: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        check_model(TrainerConfig(model=make(tmp_path / "model"), engine="megatron", **options))


def test_stages_have_equally_many_layers(tmp_path: Path) -> None:
    model = tiny_qwen3(tmp_path / "model", tied=False, num_hidden_layers=6)
    with pytest.raises(ValueError, match=r"4 stages; Megatron-core wants equally many .* 6 layers in each: \[1, 3\]"):
        check_model(
            TrainerConfig(model=model, engine="megatron", pipeline_parallel=2, pipeline_schedule="Interleaved1F1B")
        )


def test_a_package_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainerConfig(model=tiny_llama(tmp_path / "model"), engine="megatron")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs a package that is not installed: pip install 'ownloop\[megatron\]'"):
        check_model(config)


def test_pieces_of_fused_parameters_cover_them_in_order(tmp_path: Path) -> None:
    decoder = read_decoder_config(tiny_qwen3_moe(tmp_path / "model"))
    fused = pieces_of("decoder.layers.1.self_attention.linear_qkv.weight", 2, 0, decoder, "lm")
    names = [f"model.layers.3.self_attn.{letter}_proj.weight" for letter in "qkv"]
    assert [piece.name for piece in fused] == names
    assert [(piece.start, piece.stop, piece.parts) for piece in fused] == [(0, 4, 8), (4, 6, 8), (6, 8, 8)]
    expert = pieces_of("decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight", 0, 2, decoder, "lm")
    assert expert == [Piece("model.layers.0.mlp.experts.3.down_proj.weight", is_expert=True)]
    with pytest.raises(
        ValueError, match=r"parameter 'decoder\.layers\.0\.mine\.weight', for which there is no Hugging Face"
    ):
        pieces_of("decoder.layers.0.mine.weight", 0, 0, decoder, "lm")
