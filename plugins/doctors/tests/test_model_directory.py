"""`ownloop model --dequantize` and `--text-only` against transformers, which reads the same checkpoints in float32."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    FineGrainedFP8Config,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)
from transformers.utils.quantization_config import Mxfp4Config

from ownloop_doctors.model_directory import dequantize, fp8, write_text_only
from ownloop_families.tiny import TINY_FAMILIES as MODELS
from ownloop_vision.tiny_vl import tiny_gemma3, tiny_qwen3_vl
from rl.system.hf_config import inspect_model
from rl.system.model_files import weight_files
from rl.tiny_models import tiny_llama
from tests.controller.commands.test_run import refused
from tests.rl.recordings import disk_of

TILE = 16  # divides all sides, as transformers asks
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
FP8 = {"quant_method": "fp8", "weight_block_size": [TILE, TILE], "activation_scheme": "dynamic", "fmt": "e4m3"}


def _quantised(path: Path, settings: dict[str, Any], quantise: Callable[[str, Tensor], dict[str, Tensor]]) -> Path:
    """The checkpoint with what `quantise` makes of each weight, all others in bfloat16."""
    weights: dict[str, Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        weights |= quantise(name, tensor) or {name: tensor if "correction_bias" in name else tensor.bfloat16()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings, "dtype": "bfloat16"}))
    return path


def _to_mxfp4(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Experts become random numbers of the format, about as large as they were."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {}
    experts, columns, rows = tensor.shape
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(120, 125, (experts, rows, columns // 32), dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def _to_fp8(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Projections get a random factor for each tile."""
    if not name.endswith("_proj.weight"):
        return {}
    rows, columns = tensor.shape
    factors = torch.rand(-(-rows // TILE), -(-columns // TILE)) * 0.01 + 0.001
    whole = factors.repeat_interleave(TILE, 0)[:rows].repeat_interleave(TILE, 1)[:, :columns]
    return {name: (tensor / whole).clamp(-400, 400).to(torch.float8_e4m3fn), f"{name}_scale_inv": factors}


CASES = {
    "gpt_oss": (MXFP4, _to_mxfp4, Mxfp4Config(dequantize=True)),
    "deepseek_v3": (FP8, _to_fp8, FineGrainedFP8Config(dequantize=True)),
}


@pytest.mark.parametrize("family", CASES)
def test_the_model_is_what_transformers_dequantises(family: str, tmp_path: Path) -> None:
    settings, quantise, dequantising = CASES[family]
    source, target = (
        _quantised(MODELS[family][1](tmp_path / "quantised"), settings, quantise),
        tmp_path / "out" / "model",
    )
    with pytest.raises(ValueError, match="`ownloop model NAME --dequantize DIR` writes them"):
        inspect_model(source)
    dequantize(source, target, lambda _: None, file_bytes=1 << 16)
    assert len(weight_files(target)) > 1
    inspect_model(target)
    tokens = torch.arange(1, 60).unsqueeze(0)
    reference: Any = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=dequantising, dtype=torch.bfloat16
    )
    ours: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(ours.float()(tokens).logits, reference.float()(tokens).logits)


@pytest.mark.parametrize("family", CASES)
def test_missing_scales_are_named_and_leave_nothing(family: str, tmp_path: Path) -> None:
    settings, quantise, _ = CASES[family]
    source = _quantised(MODELS[family][1](tmp_path / "quantised"), settings, quantise)
    weights = load_file(source / "model.safetensors")
    lost = next(name for name in sorted(weights) if name.endswith(("_scales", "_scale_inv")))
    save_file({name: tensor for name, tensor in weights.items() if name != lost}, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"no file holds (its |.*_)scales"):
        dequantize(source, tmp_path / "new", lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["quantised"]


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    source = _quantised(MODELS["gpt_oss"][1](tmp_path / "quantised"), MXFP4, _to_mxfp4)
    with disk_of(10_000), pytest.raises(ValueError, match=r"--dequantize is .*new: "):
        dequantize(source, tmp_path / "new", lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["quantised"]


def test_tiles_at_the_edges_may_be_smaller() -> None:
    weight, factors = torch.randn(5, 7).to(torch.float8_e4m3fn), torch.rand(3, 2)
    wanted = [[weight[i, j].item() * factors[i // 2, j // 4].item() for j in range(7)] for i in range(5)]
    assert torch.equal(fp8(weight, factors, (2, 4)), torch.tensor(wanted).bfloat16())


def test_what_cannot_be_dequantised_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain = tiny_llama(tmp_path / "plain")
    told = refused(capfd, "model", str(plain), "--dequantize", str(tmp_path / "new"))
    assert "has no quantization_config in config.json; its weights can be trained as they are" in told
    other = _quantised(tiny_llama(tmp_path / "other"), {"quant_method": "awq"}, lambda name, tensor: {})
    told = refused(capfd, "model", str(other), "--dequantize", str(tmp_path / "new"))
    assert "quantization_config has quant_method 'awq'; read are 'mxfp4', and 'fp8' with weight_block_size" in told
    quantised = _quantised(MODELS["gpt_oss"][1](tmp_path / "quantised"), MXFP4, _to_mxfp4)
    assert "which exists; name a new folder" in refused(capfd, "model", str(quantised), "--dequantize", str(plain))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "plain", "quantised"]


def _published_qwen3_5(path: Path) -> Path:
    """Of the tiny Qwen3.5, with what reads images and with the layer that predicts a further token."""
    text = MODELS["qwen3_5"][1](path)
    config = json.loads((text / "config.json").read_text())
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_position_embeddings": 16}
    vision["out_hidden_size"] = config["hidden_size"]
    torch.manual_seed(0)
    whole = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=config, vision_config=vision))
    whole.save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    save_file({**weights, "mtp.fc.weight": torch.zeros(2, 2)}, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("publish", [_published_qwen3_5, lambda path: tiny_gemma3(path, ["a", "b", "c", "d"])])
def test_the_language_model_computes_what_it_did_as_a_part(publish: Callable[[Path], Path], tmp_path: Path) -> None:
    source, target = publish(tmp_path / "whole"), tmp_path / "alone"
    write_text_only(source, target, lambda _: None)
    whole = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.bfloat16).float()
    alone = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).float()
    tokens = torch.arange(3, 11)[None]
    assert torch.equal(alone(tokens).logits, whole(tokens).logits)
    inspect_model(target)


def test_what_has_no_language_model_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain, new = tiny_llama(tmp_path / "plain"), str(tmp_path / "new")
    told = refused(capfd, "model", str(plain), "--text-only", new)
    assert "has model_type None in the text_config of config.json; it must be one that transformers has" in told
    told = refused(capfd, "model", str(tiny_qwen3_vl(tmp_path / "vl", ["a"])), "--text-only", new)
    assert "has model_type 'qwen3_vl_text' in the text_config" in told
    both = refused(capfd, "model", str(plain), "--text-only", new, "--dequantize", new)
    assert "--dequantize and --text-only are both given" in both
    with pytest.raises(ValueError, match=r"`ownloop model NAME --text-only DIR` writes the one that it contains"):
        inspect_model(_published_qwen3_5(tmp_path / "qwen3_5"))
    save_file({"model.visual.x": torch.zeros(2)}, tmp_path / "qwen3_5" / "model.safetensors", {"format": "pt"})
    told = refused(capfd, "model", str(tmp_path / "qwen3_5"), "--text-only", new)
    assert "has no weights of a language model; their names begin with model.language_model. or language_model." in told
