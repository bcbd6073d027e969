"""What an adapter adapts, what its tensors are called, and which mistakes are refused."""

from typing import Any

import pytest

from rl.lora import LoRAConfig, adapted_modules, check_adapter_name, module_name, tensor_name

QUERY, GATE, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate_proj", "lm_head"
TOWERS = ("vision_tower.vision_model.encoder.layers.0.self_attn.out_proj", "model.visual.blocks.0.attn.qkv")


@pytest.mark.parametrize(
    ("options", "adapted"),
    [
        ({}, [QUERY, GATE, HEAD]),
        ({"train_attn": False}, [GATE, HEAD]),
        ({"train_mlp": False, "train_unembed": False}, [QUERY]),
    ],
)
def test_modules_are_chosen_by_kind(options: dict[str, Any], adapted: list[str]) -> None:
    config = LoRAConfig(**options)
    others = ["model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.0.mlp.experts.3"]
    assert all(map(config.adapts, TOWERS))
    assert [module for module in (QUERY, GATE, HEAD, *others) if config.adapts(module)] == adapted


def test_names_go_there_and_back() -> None:
    names = [tensor_name(module, which) for module in (QUERY, HEAD) for which in ("A", "B")]
    assert names[0] == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert [module_name(name) for name in names] == [QUERY, QUERY, HEAD, HEAD]
    assert adapted_modules(names) == (QUERY, HEAD)


def test_the_scale_is_that_of_peft() -> None:
    assert LoRAConfig(rank=8, alpha=16).scale == 2.0


@pytest.mark.parametrize("name", ["", "a b", "a/b", "ä", "a\n", "a" * 65, ".", "..", ".hidden"])
def test_other_names_of_adapters_are_refused(name: str) -> None:
    check_adapter_name("User-7.v_2.")
    with pytest.raises(ValueError, match="1 to 64 letters, digits, dots, underscores or hyphens"):
        check_adapter_name(name)
