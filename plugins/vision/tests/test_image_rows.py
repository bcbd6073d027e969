"""Packed rows with images: log-probs and gradients are transformers', computed one document at a time in float32."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from ownloop_vision.qwen_vl import axis_positions
from plugins.vision.tests.vision import (
    UNSEEN,
    WITH_IMAGES,
    WORDS,
    ImageReference,
    errors,
    image_batch,
    image_datum,
    parts,
)
from rl.images import PlacedImage
from rl.lora import LoRAConfig, module_name
from rl.losses import get_loss
from rl.rollouts.rendering import Renderer
from rl.system.model_files import stored_shapes
from rl.tiny_models import tiny_llama
from rl.types import AdamParams, Datum
from tests.docs.pages import ROOT, table_of_architectures
from tests.trainer.adapters import randomize
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine
from trainer.engines.contract.plain_ranks import relative_error, spawn, whole
from trainer.engines.model_check import check_model

STEP = AdamParams(learning_rate=1e-2, eps=1e-4)  # with a smaller eps, rounding errors would become whole steps
LOSS = get_loss("importance_sampling")
RENAMED = {
    "Qwen2_5_VLForConditionalGeneration": {"model.language_model.": "model.", "model.visual.": "visual."},
    "Gemma3ForConditionalGeneration": {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    },
}
WITH_AXES = ("Qwen3VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
PEFT = "base_model.model."
LANGUAGE = LoRAConfig(rank=4, alpha=2.0)
NO_LANGUAGE = replace(LANGUAGE, train_attn=False, train_mlp=False, train_unembed=False)
VISION = ("model.visual.", "visual.", "vision_tower.", "multi_modal_projector.")


@pytest.fixture(scope="module", params=WITH_IMAGES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WITH_IMAGES[name](tmp_path_factory.mktemp("models") / "vl", WORDS)


def engine_of(model: Path, **options: object) -> Engine:
    return load_engine(TrainerConfig(model=model, engine="fsdp2", compute_dtype="float32", **options))  # pyright: ignore[reportArgumentType]


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in engine.hf_parameters() if p.grad is not None}


def test_a_row_is_transformers_document_by_document(name: str, model: Path) -> None:
    check_model(TrainerConfig(model=model, engine="fsdp2", train_vision=True))
    batch, engine, reference = image_batch(model), engine_of(model, train_vision=True), ImageReference(model)
    output = engine.forward_backward([batch], LOSS)
    for logprobs, datum in zip(output.logprobs, batch, strict=True):
        scored = datum.weights > 0
        assert logprobs[scored] == pytest.approx(reference.logprobs(datum).detach().numpy()[scored], abs=1e-5)
    reference.backward(batch)
    expected = reference.gradients(RENAMED.get(name))
    assert any(key.startswith(VISION) for key in expected)
    assert max(errors(gradients(engine), expected).values()) < 1e-5
    parameters = dict(engine.hf_parameters())
    assert {key: tuple(p.shape) for key, p in parameters.items()} == stored_shapes(model)
    stored = load_file(model / "model.safetensors")
    assert all(torch.equal(p, stored[key]) for key, p in parameters.items())


def test_a_frozen_tower_gets_no_gradient_and_stays(model: Path) -> None:
    batch, whole, frozen = image_batch(model), engine_of(model, train_vision=True), engine_of(model)
    for engine in (whole, frozen):
        engine.forward_backward([batch], LOSS)
    language = {key: grad for key, grad in gradients(whole).items() if not key.startswith(VISION)}
    assert max(errors(gradients(frozen), language).values()) == 0
    frozen.optim_step(STEP)
    stored = load_file(model / "model.safetensors")
    changed = {key for key, p in frozen.hf_parameters() if not torch.equal(p, stored[key])}
    assert changed == language.keys() == stored.keys() - frozen.frozen_names


def test_cuts_into_microbatches_change_nothing(model: Path) -> None:
    batch = image_batch(model)
    found = []
    for cuts in ([batch], [[datum] for datum in batch], [batch[3:], batch[:3]]):
        engine = engine_of(model, train_vision=True)
        engine.forward_backward(cuts, LOSS)
        found.append(gradients(engine))
    assert max(max(errors(each, found[0]).values()) for each in found[1:]) < 1e-5


def test_other_documents_images_are_not_seen(model: Path) -> None:
    batch, engine = image_batch(model), engine_of(model)
    rng = np.random.default_rng(1)

    def other(image: PlacedImage) -> PlacedImage:
        patches = rng.normal(size=image.inputs["pixel_values"].shape).astype(np.float32)
        return replace(image, inputs={**image.inputs, "pixel_values": patches})

    changed = [*batch[:2], replace(batch[2], images=tuple(map(other, batch[2].images))), *batch[3:]]
    before, after = engine.forward([batch]).logprobs, engine.forward([changed]).logprobs
    alike = [bool(np.allclose(one, two, atol=1e-6)) for one, two in zip(before, after, strict=True)]
    assert alike == [True, True, False, True, True]


def test_a_sampled_image_token_is_a_word(model: Path) -> None:
    """Its embedding is copied to another word, and the two must be scored alike."""
    engine, (image_token, word) = engine_of(model), (6, 13)
    embeddings = next(p for key, p in engine.hf_parameters() if key.endswith("embed_tokens.weight"))
    with torch.no_grad():
        embeddings[word] = embeddings[image_token]
    prompt = Renderer(model).encode(parts("what", (64, 64)))
    sampled, spelled = (image_datum(prompt, (10, token, 11, 3)) for token in (image_token, word))
    inputs = {**sampled.loss_inputs, "target_tokens": spelled.loss_inputs["target_tokens"]}
    output = engine.forward([[replace(sampled, loss_inputs=inputs), spelled]])
    assert np.allclose(*output.logprobs, atol=1e-6)


def test_positions_are_transformers(name: str, model: Path) -> None:
    if name not in WITH_AXES:
        return  # it has one axis, as text
    batch = image_batch(model)
    base = AutoModelForImageTextToText.from_pretrained(model).model
    for datum in batch:
        kinds = np.zeros_like(datum.tokens)
        for image in datum.images:
            kinds[image.start : image.start + image.num_tokens] = 1
        grids = [image.inputs["image_grid_thw"] for image in datum.images]
        expected, _ = base.get_rope_index(
            torch.from_numpy(datum.tokens)[None],
            mm_token_type_ids=torch.from_numpy(kinds)[None],
            image_grid_thw=torch.from_numpy(np.stack(grids)) if grids else None,
        )
        found = axis_positions(np.arange(len(datum.tokens)), datum.images, 2)
        assert np.array_equal(found[1:], expected[:, 0].numpy())


def test_checkpoints_resume_and_exports_load(name: str, model: Path, tmp_path: Path) -> None:
    batch, params = image_batch(model), STEP
    engine = engine_of(model, train_vision=True)

    def step(trained: Engine) -> None:
        trained.forward_backward([batch], LOSS)
        trained.optim_step(params)

    step(engine)
    engine.save_checkpoint(tmp_path / "checkpoint")
    step(engine)
    resumed = engine_of(model, train_vision=True)
    assert resumed.load_checkpoint(tmp_path / "checkpoint") == 1
    step(resumed)
    ours, theirs = dict(engine.hf_parameters()), dict(resumed.hf_parameters())
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    engine.export_hf(tmp_path / "export", torch.float32)
    exported = ImageReference(tmp_path / "export")
    for logprobs, datum in zip(engine.forward([batch]).logprobs, batch, strict=True):
        scored = datum.weights > 0
        assert logprobs[scored] == pytest.approx(exported.logprobs(datum).detach().numpy()[scored], abs=1e-5)


@pytest.mark.parametrize("kind", ["language", "vision", "both"])
def test_adapters_have_the_gradients_of_peft(name: str, model: Path, tmp_path: Path, kind: str) -> None:
    """peft reads the exported adapter, and so does a plain model once it is merged."""
    lora = NO_LANGUAGE if kind == "vision" else LANGUAGE
    batch, base = image_batch(model), engine_of(model, lora=lora, train_vision=kind != "language")
    adapter = randomize(base.adapter("a", lora))
    kinds = {NO_LANGUAGE.adapts(module_name(key)) for key, _ in adapter.hf_parameters()}
    assert kinds == {"language": {False}, "vision": {True}, "both": {False, True}}[kind]
    output = adapter.forward_backward([batch], LOSS)
    adapter.export_peft(tmp_path / "adapter", torch.float32)
    adapter.export_hf(tmp_path / "merged", torch.float32)
    merged, reference = ImageReference(tmp_path / "merged"), ImageReference(model)
    reference.model = peft.PeftModel.from_pretrained(reference.model, tmp_path / "adapter", is_trainable=True)
    for logprobs, datum in zip(output.logprobs, batch, strict=True):
        scored = datum.weights > 0
        for each in (merged, reference):
            assert logprobs[scored] == pytest.approx(each.logprobs(datum).detach().numpy()[scored], abs=2e-5)
    reference.backward([datum for datum in batch if datum.images or kind != "vision"])
    renamed = {f"{PEFT}{start}": f"{PEFT}{stored}" for start, stored in RENAMED.get(name, {}).items()}
    expected = {key.replace(".default", ""): grad for key, grad in reference.gradients(renamed).items()}
    assert max(errors(gradients(adapter), expected).values()) < 1e-5


def test_bfloat16_computes_near_float32(model: Path) -> None:
    batch = image_batch(model)
    engines = [engine_of(model), load_engine(TrainerConfig(model=model, engine="fsdp2"))]
    outputs = [engine.forward_backward([batch], LOSS).logprobs for engine in engines]
    assert all(np.abs(one - two).max() < 0.2 for one, two in zip(*outputs, strict=True))
    assert engines[1].optim_step(AdamParams(learning_rate=1e-3)).grad_norm > 0


def test_vision_is_trained_where_that_is_proven(model: Path, tmp_path: Path) -> None:
    text = tiny_llama(tmp_path / "llama")
    for config, said in (
        (TrainerConfig(model=text, engine="fsdp2", train_vision=True), "needs a model that reads images"),
        (TrainerConfig(model=model, engine="fsdp2", lora=NO_LANGUAGE), "True, or TrainerConfig.train_vision"),
    ):
        with pytest.raises(ValueError, match=said):
            check_model(config)
    with pytest.raises(ValueError, match=r"the engine 'fsdp2' trains others"):
        check_model(TrainerConfig(model=model))


def test_the_tower_may_have_a_rate_of_its_own(model: Path) -> None:
    steps: list[dict[str, torch.Tensor]] = []
    for rate in (1.0, 0.5):
        engine = engine_of(model, train_vision=True)
        before = {key: p.detach().clone() for key, p in engine.hf_parameters()}
        rates = {f"{start}*": rate for start in VISION if any(key.startswith(start) for key in before)}
        engine.forward_backward([image_batch(model)], LOSS)
        engine.optim_step(AdamParams(learning_rate=1e-3, learning_rate_multipliers=rates))
        steps.append({key: p.detach() - before[key] for key, p in engine.hf_parameters()})
    for key, whole_step in steps[0].items():
        assert torch.allclose(steps[1][key], whole_step * (0.5 if key.startswith(VISION) else 1), atol=1e-6), key


def trained(model: Path, lora: LoRAConfig | None, **options: object) -> Engine:
    """An adapter with random values, or the whole model."""
    engine = engine_of(model, lora=lora, train_vision=True, **options)
    return engine if lora is None else randomize(engine.adapter("a", lora))


def run_rank(rank: int, model: Path, lora: LoRAConfig | None, batch: list[Datum], file: Path) -> None:
    """Computes a rank's part of the batch, with pictures on the first only, steps, and saves gradients and weights."""
    engine = trained(model, lora, data_parallel_shard=2, max_tokens_per_microbatch=48)
    batch = sorted(batch, key=lambda datum: len(datum.images) == 0)
    half = sum(len(datum.images) > 0 for datum in batch)
    engine.forward_backward([[each] for each in (batch[:half], batch[half:])[rank]], LOSS)
    found = whole(engine, gradients=True)
    engine.optim_step(STEP)
    weights = whole(engine)
    if rank == 0:
        torch.save((found, weights), file)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("lora", [None, LANGUAGE], ids=["whole", "adapter"])
def test_two_ranks_compute_what_one_does(model: Path, tmp_path: Path, lora: LoRAConfig | None) -> None:
    """The second rank has no picture, and must compute the tower, sharded or adapted, nevertheless."""
    pictures = [datum for datum in image_batch(model) if datum.images]
    text = [image_datum(Renderer(model).encode(parts("what red")), (8, 3), seed) for seed in range(len(pictures))]
    batch, one = [*pictures, *text], trained(model, lora)
    spawn(2, run_rank, model, lora, batch, tmp_path / "found")
    one.forward_backward([batch], LOSS)
    found, weights = torch.load(tmp_path / "found")
    assert max(errors(found, gradients(one)).values()) < 1e-5
    one.optim_step(STEP)
    expected = dict(one.hf_parameters())
    assert weights.keys() == expected.keys()
    assert max(relative_error(weights[key], expected[key]) for key in expected if key not in UNSEEN) < 1e-4


def test_every_architecture_is_in_the_documented_table() -> None:
    engines = table_of_architectures(ROOT / "plugins" / "vision" / "README.md")
    assert engines.keys() == WITH_IMAGES.keys()
    assert {cell.strip() for cell in engines.values()} == {"fsdp2"}
