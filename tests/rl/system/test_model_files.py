"""The reader of model directories, with transformers as the reference."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from generator.config import GeneratorConfig
from rl.system.hf_config import inspect_model
from rl.system.model_files import check_no_stray_weights, stored_shapes, weight_files
from rl.tiny_models import tiny_llama, tiny_qwen3
from trainer.config import TrainerConfig
from trainer.engines.model_check import check_model
from trainer.engines.pytorch.frozen_base import base_identity
from trainer.engines.pytorch.hf_directory import load_hf_weights, write_hf_directory

SINGLE = "model.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def edit_weights(model: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrites model.safetensors."""
    weights = load_file(model / SINGLE)
    edit(weights)
    save_file(weights, model / SINGLE, {"format": "pt"})


def edit_config(model: Path, **changes: Any) -> None:
    """Overwrites keys of config.json."""
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def loaded(model: Path) -> dict[str, torch.Tensor]:
    """What the trainer's engines load."""
    parameters = {name: torch.full(shape, torch.nan) for name, shape in stored_shapes(model).items()}
    load_hf_weights(parameters, model)
    return parameters


def reference(model: Path) -> dict[str, torch.Tensor]:
    """What transformers loads."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()


@pytest.mark.stranger("A3")
@pytest.mark.parametrize("stray", ["zz_best", "aa", "consolidated", "adapter_model", "model-00001-of-00002"])
def test_a_stray_file_is_not_read(tmp_path: Path, stray: str) -> None:
    model = tiny_llama(tmp_path / "model", tied=False)
    expected, identity = reference(model), base_identity(model)
    others = {name: weight + 1 for name, weight in load_file(model / SINGLE).items()}
    save_file(others | {"further": torch.ones(1)}, model / f"{stray}.safetensors", {"format": "pt"})
    assert loaded(model).keys() == expected.keys()
    for name, weight in loaded(model).items():
        assert torch.equal(weight, expected[name])
        assert torch.equal(weight, reference(model)[name])
    assert base_identity(model) == identity
    with pytest.raises(ValueError, match=rf"and vLLM .*{stray}.*; move {stray}\.safetensors elsewhere"):
        GeneratorConfig(model=model).check_model()


@pytest.mark.stranger("A3")
@settings(deadline=None, max_examples=25)
@given(
    names=st.lists(st.sampled_from(["a", "pytorch-1", "model-00002-of-00002", "z"]), min_size=1, unique=True),
    strays=st.lists(st.sampled_from(["b", "consolidated", "model"]), unique=True),
    cuts=st.integers(0, 1000),
)
def test_any_split_is_read_as_transformers_reads_it(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], strays: list[str], cuts: int
) -> None:
    source = tiny_llama(tmp_path_factory.mktemp("source"), tied=False)
    weights, model = load_file(source / SINGLE), tmp_path_factory.mktemp("split")
    shutil.copy(source / "config.json", model)
    weight_map = {name: f"{names[(cuts * i) % len(names)]}.safetensors" for i, name in enumerate(sorted(weights))}
    for file in set(weight_map.values()):
        save_file({n: weights[n] for n in weights if weight_map[n] == file}, model / file, {"format": "pt"})
    (model / f"{SINGLE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for stray in strays:
        save_file({n: weight + 1 for n, weight in weights.items()}, model / f"{stray}.safetensors", {"format": "pt"})
    expected, found = reference(model), loaded(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    if "model" in strays:
        with pytest.raises(ValueError, match=r"or remove model\.safetensors\.index\.json"):
            check_no_stray_weights(model)
    else:
        check_no_stray_weights(model)


@pytest.mark.stranger("A3")
def test_an_index_names_files_of_its_directory(tmp_path: Path) -> None:
    for content in ('{"weight_map": {"a": "../b.safetensors"}}', '{"weight_map": {}}', "{", "[]", '{"weight_map": 3}'):
        (tmp_path / f"{SINGLE}.index.json").write_text(content)
        with pytest.raises(ValueError, match=r"names '\.\./b\.safetensors'|has no weight_map"):
            weight_files(tmp_path)


@pytest.mark.stranger("A3")
def test_a_weight_in_two_files_or_of_another_name_is_refused(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", tied=False)
    edit_config(model, transformers_weights=SINGLE)
    with pytest.raises(ValueError, match=r"transformers_weights is 'model\.safetensors' in config\.json; leave it out"):
        inspect_model(model)
    edit_config(model, transformers_weights=None)
    weights = load_file(model / SINGLE)
    save_file({HEAD: weights[HEAD] + 1}, model / "b.safetensors", {"format": "pt"})
    (model / SINGLE).rename(model / "a.safetensors")
    weight_map = dict.fromkeys(weights, "a.safetensors") | {HEAD: "b.safetensors"}
    (model / f"{SINGLE}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"a\.safetensors and b\.safetensors hold lm_head\.weight; keep one"):
        inspect_model(model)


@pytest.mark.stranger("A1")
def test_files_of_a_tied_model_may_repeat_the_head(tmp_path: Path) -> None:
    model = tiny_qwen3(tmp_path / "model")
    edit_weights(model, lambda weights: weights.update({HEAD: weights[EMBEDDING].clone()}))
    inspect_model(model)
    check_model(TrainerConfig(model=model))


def _other(weights: dict[str, torch.Tensor]) -> None:
    weights[HEAD] = weights[EMBEDDING].clone()
    weights[HEAD][-1, -1] += 1


@pytest.mark.stranger("A2")
@pytest.mark.parametrize(
    ("tied", "edit", "message"),
    [
        (True, _other, "set tie_word_embeddings to false to keep both"),
        (True, lambda w: w.update({HEAD: w[EMBEDDING].bfloat16()}), "is another matrix"),
        (True, lambda w: w.update({HEAD: w.pop(EMBEDDING)}), "holds lm_head.weight only"),
        (False, lambda w: None, "but no file holds lm_head.weight"),
    ],
)
@pytest.mark.parametrize("engine", ["torchtitan", "fsdp2"])
def test_a_head_that_contradicts_the_configuration_is_refused(
    tmp_path: Path, tied: bool, edit: Any, message: str, engine: str
) -> None:
    model = tiny_qwen3(tmp_path / "model")
    edit_config(model, tie_word_embeddings=tied)
    edit_weights(model, edit)
    for check in (
        lambda: inspect_model(model),
        lambda: check_model(TrainerConfig(model=model, engine=engine)),
        lambda: GeneratorConfig(model=model).check_model(),
    ):
        with pytest.raises(ValueError, match=rf"model directory {model}: tie_word_embeddings .*{message}"):
            check()


@pytest.mark.stranger("A6")
def test_an_export_keeps_every_chat_template(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(model)
    (model / "config.json").chmod(0o444)  # as in a store of models that only its owner changes
    (tmp_path / "export").mkdir()
    write_hf_directory(tmp_path / "export", model, load_file(model / SINGLE).items(), torch.float32, "lm")
    assert (tmp_path / "export" / "config.json").stat().st_mode & 0o200
    exported: Any = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert exported.chat_template == AutoTokenizer.from_pretrained(model).chat_template == tokenizer.chat_template
