"""Many architectures: log-probs and gradients are transformers', and weights keep their names."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import StableLmConfig, StableLmForCausalLM

from plugins.vision.tests.vision import WITH_IMAGES
from rl.losses import get_loss
from rl.system.hf_config import proven_architectures
from rl.system.model_files import stored_shapes
from rl.tiny_models import TINY_SHAPE, random_batch, save_tiny
from rl.types import AdamParams
from tests.architectures import MODELS
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.plain_ranks import relative_error
from trainer.engines.contract.reference import ReferencePolicy, importance_sampling, published
from trainer.engines.decoder_config import FAMILIES
from trainer.engines.model_check import check_model

DECAYS = ("A_log", "dt_bias")
"""Parameters of the gated delta rule of whose gradients transformers' float32 is itself 2e-5 from float64."""
BUILT_BY_TORCHTITAN = ("gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_moe", "qwen3_5", "qwen3_5_moe")
BOUNDS = {"qwen3_5_moe": 3e-5}
"""Worst relative errors of gradients other than 1e-5: experts below delta rules repeat their rounding."""


@pytest.mark.filterwarnings("ignore:no test covers")
@pytest.mark.parametrize(
    ("name", "engine_name"),
    [*((name, "fsdp2") for name in MODELS), *((name, "torchtitan") for name in BUILT_BY_TORCHTITAN)],
)
def test_logprobs_gradients_and_names_are_those_of_transformers(tmp_path: Path, name: str, engine_name: str) -> None:
    model = MODELS[name][1](tmp_path / "model")
    batch = random_batch((1, 17, 5, 40, 9, 23, 33, 12, 7))
    engine = load_engine(TrainerConfig(model=model, engine=engine_name, compute_dtype="float32"))
    output = engine.forward_backward([batch[:8], batch[8:]], get_loss("importance_sampling"))
    reference = ReferencePolicy(model)
    reference.model.eval()
    for logprobs, datum in zip(output.logprobs, batch, strict=True):
        scored = datum.weights > 0
        assert logprobs[scored] == pytest.approx(reference.logprobs(datum).detach().numpy()[scored], abs=2e-5)
    reference.backward(batch, importance_sampling)
    expected = reference.gradients()
    parameters = dict(engine.hf_parameters())
    actual = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    assert actual.keys() == expected.keys()
    errors = {n: relative_error(actual[n], expected[n]) for n in expected}
    assert {n: e for n, e in errors.items() if e > BOUNDS.get(name, 1e-5) and not n.endswith(DECAYS)} == {}
    assert max(errors.values()) < 1e-4
    assert {n: tuple(p.shape) for n, p in parameters.items()} == stored_shapes(model)
    stored = load_file(model / "model.safetensors")
    pushed = published(0, parameters.items())
    assert [n for n, p in parameters.items() if not torch.equal(p, stored[n]) or not torch.equal(pushed[n], p)] == []
    engine.optim_step(AdamParams(learning_rate=1e-2))
    assert {n for n, p in engine.hf_parameters() if not torch.equal(p, stored[n])} == expected.keys()


@pytest.fixture
def unproven(tmp_path: Path) -> Path:
    config = StableLmConfig(num_key_value_heads=2, tie_word_embeddings=False, **TINY_SHAPE)
    return save_tiny(StableLmForCausalLM, config, tmp_path / "model")


def test_an_unproven_architecture_is_tried_with_a_warning(unproven: Path) -> None:
    with pytest.warns(UserWarning, match=r"no test covers StableLmForCausalLM .* Proven are "):
        check_model(TrainerConfig(model=unproven, engine="fsdp1"))
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
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `") and "For" in line.split("|")[1]]
    engines = {row[1].strip(" `"): row[3] for row in rows}
    assert tuple(engines) == proven_architectures()
    tried = {architecture for architecture, _ in MODELS.values()} | {*WITH_IMAGES}
    assert {name for name, cell in engines.items() if "fsdp2" in cell} == tried & set(proven_architectures())
    families = {MODELS[name][0] for name in BUILT_BY_TORCHTITAN}
    assert {name for name, cell in engines.items() if "torchtitan" in cell} == {*FAMILIES, *families}
