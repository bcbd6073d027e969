"""The first operation that differs is the one in which a bit was changed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ownloop_bitwise.engine import BitwiseEngine
from ownloop_bitwise.trace import Differing, compare_sides
from rl.tiny_models import SERVABLE, tiny_dense
from tests.generator.engines import EngineFactory
from trainer.config import TrainerConfig

pytestmark = pytest.mark.vllm
PROMPTS = [[5, 6, 7], [*range(3, 40)]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_bit_of_a_tensor_and_one_of_an_operation_are_found(
    family: str, dtype: Any, tmp_path: Path, build_engine: EngineFactory
) -> None:
    model = tiny_dense(family, tmp_path / "model", **SERVABLE)
    options = {"numerics": "bitwise", "dtype": dtype, "engine_args": {"enable_prefix_caching": False}}
    generator = build_engine(model, **options)
    trainer = BitwiseEngine(TrainerConfig(model=model, engine="bitwise", compute_dtype=dtype))

    def found() -> str:
        differing = compare_sides(trainer, generator, PROMPTS)
        return differing.operation if isinstance(differing, Differing) else ""

    assert found() == ""
    runner: Any = generator.llm.model_executor.driver_worker.model_runner  # pyright: ignore[reportAttributeAccessIssue]
    layer = runner.model.model.layers[1]

    rotate = layer.self_attn.rotary_emb.forward

    def rotated(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        query, key = rotate(*inputs)
        return query, one_bit(key)

    layer.self_attn.rotary_emb.forward = rotated
    assert found() == "the key rotation of layer 1"
    layer.self_attn.rotary_emb.forward = rotate
    layer.post_attention_layernorm.weight.data.copy_(one_bit(layer.post_attention_layernorm.weight.data))
    assert found() == "the feed-forward's norm of layer 1"
    runner.model.model.embed_tokens.weight.data[5] = one_bit(runner.model.model.embed_tokens.weight.data[5])
    assert found() == "the embedding"


def one_bit(values: Tensor) -> Tensor:
    """The values with the lowest bit of the first one changed."""
    changed = values.clone().contiguous()
    changed.view(-1).view(torch.int16 if values.element_size() == 2 else torch.int32)[0] ^= 1
    return changed


@pytest.mark.parametrize("family", ["ernie4_5", "exaone4", "gemma2", "gemma3", "mistral"])
def test_nothing_differs_in_other_families_and_their_norms_are_named(
    family: str, tmp_path: Path, build_engine: EngineFactory
) -> None:
    model = tiny_dense(family, tmp_path / "model", **SERVABLE)
    generator = build_engine(model, "bfloat16", numerics="bitwise", engine_args={"enable_prefix_caching": False})
    trainer = BitwiseEngine(TrainerConfig(model=model, engine="bitwise", compute_dtype="bfloat16"))
    assert compare_sides(trainer, generator, PROMPTS) is None
    runner: Any = generator.llm.model_executor.driver_worker.model_runner  # pyright: ignore[reportAttributeAccessIssue]
    weight = runner.model.model.layers[1].post_attention_layernorm.weight.data
    weight.copy_(one_bit(weight))
    found = compare_sides(trainer, generator, PROMPTS)
    names = {"exaone4": "the attention's norm of layer 1", "gemma2": "the norm after attention of layer 1"}
    names["gemma3"] = names["gemma2"]
    assert isinstance(found, Differing)
    assert found.operation == names.get(family, "the feed-forward's norm of layer 1")
