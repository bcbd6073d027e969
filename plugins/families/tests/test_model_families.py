"""Families are rows that entry points name: one is made up here, and others refuse what is not proven."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from generator.config import GeneratorConfig
from generator.options import engine_options
from ownloop_families.tiny import TINY_FAMILIES as MODELS
from rl.system.hf_config import proven_architectures
from rl.tiny_models import random_batch, tiny_llama
from tests.made_up_plugin import write_plugin
from trainer import engine_table
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.reference import ReferencePolicy
from trainer.engines.model_check import check_model

FAMILY = """
from rl.system.hf_config import ModelFamily


def check(trainer, config):
    if config["attention_bias"]:
        raise ValueError("config.json: attention_bias is true; this family has no biases")


def prepare(model):
    for layer in model.base_model.layers:
        layer.mlp.forward = lambda x: x * 0
        layer.register_forward_pre_hook(seen, with_kwargs=True)


def seen(layer, inputs, options):
    assert sum(options["document_bounds"].sizes) == inputs[0].shape[1]


ROW = ModelFamily(
    architectures=("QuietForCausalLM",), check="quiet:check", prepare="quiet:prepare", engine_args={"seed": 3}
)
"""


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A family of an installed package, a Llama without feed-forward networks, and the directory of a model."""
    write_plugin(tmp_path, {"families.quiet": "quiet:ROW"}, quiet=FAMILY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "quiet", raising=False)
    return named(tiny_llama(tmp_path / "model"), "QuietForCausalLM")


def named(model: Path, architecture: str, **settings: Any) -> Path:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": [architecture], **settings}))
    return model


def test_a_made_up_family_is_a_file_and_a_row(quiet: Path) -> None:
    assert "QuietForCausalLM" in proven_architectures()
    config = TrainerConfig(model=quiet, engine="fsdp2", compute_dtype="float32")
    check_model(config)
    batch = random_batch((5, 9, 12))
    (logprobs, *_) = load_engine(config).forward([batch]).logprobs
    weights = load_file(quiet / "model.safetensors")
    silent = {name: weight * (0 if ".mlp.down_proj." in name else 1) for name, weight in weights.items()}
    save_file(silent, quiet / "model.safetensors", {"format": "pt"})
    expected = ReferencePolicy(named(quiet, "LlamaForCausalLM")).logprobs(batch[0]).detach().numpy()
    scored = batch[0].weights > 0
    assert logprobs[scored] == pytest.approx(expected[scored], abs=1e-5)


def test_a_family_says_what_it_refuses_and_needs(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = engine_options(GeneratorConfig(model=quiet, max_model_len=64))
    assert options["seed"] == 3
    monkeypatch.setitem(engine_table.ENGINES, "another", engine_table.ENGINES["fsdp2"])
    with pytest.raises(ValueError, match="engine is 'another' and the model is a QuietForCausalLM, which 'fsdp2' can"):
        check_model(TrainerConfig(model=quiet, engine="another"))
    with pytest.raises(ValueError, match="attention_bias is true; this family has no biases"):
        check_model(TrainerConfig(model=named(quiet, "QuietForCausalLM", attention_bias=True), engine="fsdp2"))


def test_generators_of_several_ranks_are_refused_if_not_proven(tmp_path: Path) -> None:
    model = MODELS["gpt_oss"][1](tmp_path / "model")
    GeneratorConfig(model=model, max_model_len=64).check_model()
    with pytest.raises(ValueError, match="tensor_parallel is 2; for GptOssForCausalLM it is proven up to 1"):
        GeneratorConfig(model=model, max_model_len=64, tensor_parallel=2).check_model()


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("deepseek_v3", {"scoring_func": None}, "scoring_func is None; it must be 'sigmoid'"),
        ("gpt_oss", {"swiglu_limit": 6.0}, r"swiglu_limit is 6\.0; .* agree only on 7\.0"),
        (
            "gpt_oss",
            {"layer_types": ["full_attention"] * 2},
            r"layer_types is .* agree only on \['sliding_attention', ",
        ),
        ("gpt_oss", {"rope_parameters": {"rope_type": "default"}}, "rope_type is 'default'; .* agree only on 'yarn'"),
    ],
)
@pytest.mark.parametrize("engine", ["torchtitan", "fsdp2"])
def test_a_model_that_vllm_would_compute_otherwise_is_refused(
    tmp_path: Path, engine: str, name: str, changed: dict[str, Any], message: str
) -> None:
    """By the families' own checks, whichever engine trains."""
    architecture, make = MODELS[name]
    model = make(tmp_path / "model")
    check_model(TrainerConfig(model=model, engine=engine))
    with pytest.raises(ValueError, match=message):
        check_model(TrainerConfig(model=named(model, architecture, **changed), engine=engine))
