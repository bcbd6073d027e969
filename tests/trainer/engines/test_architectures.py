"""Many architectures: log-probs and gradients are transformers', and weights keep their names."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import StableLmConfig, StableLmForCausalLM

from rl.system.decoders import DENSE
from rl.system.hf_config import PROVEN_ARCHITECTURES
from rl.tiny_models import TINY_SHAPE, save_tiny
from tests.architectures import MODELS
from tests.docs.pages import ROOT, table_of_architectures
from tests.trainer.engines.as_transformers import assert_as_transformers
from trainer.config import TrainerConfig
from trainer.engines.model_check import check_model


@pytest.mark.filterwarnings("ignore:no test covers")
@pytest.mark.parametrize("name", MODELS)
def test_logprobs_gradients_and_names_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    assert_as_transformers(MODELS[name][1](tmp_path / "model"), "fsdp2")


@pytest.mark.parametrize("name", ["ernie4_5", "exaone4", "hunyuan"])
def test_torchtitan_computes_what_transformers_does(tmp_path: Path, name: str) -> None:
    assert_as_transformers(MODELS[name][1](tmp_path / "model"), "torchtitan")


@pytest.fixture
def unproven(tmp_path: Path) -> Path:
    config = StableLmConfig(num_key_value_heads=2, tie_word_embeddings=False, **TINY_SHAPE)
    return save_tiny(StableLmForCausalLM, config, tmp_path / "model")


def test_an_unproven_architecture_is_tried_with_a_warning(unproven: Path) -> None:
    with pytest.warns(UserWarning, match=r"no test covers StableLmForCausalLM .* Proven are "):
        check_model(TrainerConfig(model=unproven, engine="fsdp2"))
    with pytest.raises(ValueError, match=r"\['StableLmForCausalLM'\]; this engine's are .* 'fsdp2' trains others"):
        check_model(TrainerConfig(model=unproven))


def test_weights_with_other_names_on_disk_are_refused(unproven: Path) -> None:
    file = unproven / "model.safetensors"
    weights = load_file(file)
    weights["model.final_norm.weight"] = weights.pop("model.norm.weight")
    weights["lm_head.weight"] = weights["lm_head.weight"][:-1].clone()
    save_file(weights, file, metadata={"format": "pt"})
    expected = (
        r"the checkpoint lacks model\.norm\.weight; transformers has no model\.final_norm\.weight; "
        r"of another shape in the checkpoint: lm_head\.weight\. A checkpoint"
    )
    with pytest.raises(ValueError, match=expected):
        check_model(TrainerConfig(model=unproven, engine="fsdp2"))


def test_every_proven_architecture_is_in_the_documented_table() -> None:
    engines = table_of_architectures(ROOT / "docs" / "models.md")
    assert tuple(engines) == PROVEN_ARCHITECTURES
    tried = {architecture for architecture, _ in MODELS.values()}
    assert {name for name, cell in engines.items() if "fsdp2" in cell} == tried & {*PROVEN_ARCHITECTURES}
    assert {name for name, cell in engines.items() if "torchtitan" in cell} == {
        row.architecture for row in DENSE if row.built_as
    }
