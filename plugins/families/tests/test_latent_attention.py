"""Latent attention of DeepSeek-V3 by documents, in the engine fsdp2."""

from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from tests.trainer.engines.test_document_kernel import DENSE, assert_rows_need_no_mask
from tests.trainer.engines.test_transformers_policy import save

LATENT: dict[str, Any] = {
    **DENSE,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_gpu_logic_rows_need_no_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: Any) -> None:
    model = save(DeepseekV3ForCausalLM, DeepseekV3Config(**LATENT), tmp_path / "model")
    assert_rows_need_no_mask(monkeypatch, model, checkpointing)
