"""Adapters over a frozen model, against peft on a transformers model and torch's AdamW, in float32."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor

from rl.lora import LoRAConfig
from rl.losses import LossInputs, get_loss
from rl.tiny_models import random_batch, tiny_llama, tiny_qwen3
from rl.types import AdamParams
from tests.trainer.adapters import randomize
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine
from trainer.engines.contract.plain_ranks import relative_error
from trainer.engines.contract.reference import ReferencePolicy, cross_entropy
from trainer.engines.pytorch.low_rank import check_targets

ENGINES = ("torchtitan", "fsdp2")
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama_tied": tiny_llama,
    "qwen3_untied": lambda path: tiny_qwen3(path, tied=False),
}
CONFIGS = {
    "all": LoRAConfig(rank=4, alpha=8.0, seed=1),
    "attention": LoRAConfig(rank=16, train_mlp=False, train_unembed=False),
    "head": LoRAConfig(rank=3, alpha=3.0, train_attn=False, train_mlp=False),
}
PARAMS = AdamParams(learning_rate=1e-3, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5)
BATCH = random_batch((1, 17, 5, 40))


class PeftPolicy(ReferencePolicy):
    """A transformers model with an adapter of peft's."""

    def __init__(self, path: Path, config: LoRAConfig, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(path)
        options: dict[str, Any] = {"lora_dropout": 0.0, "bias": "none", "target_modules": list(config.module_names)}
        lora = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, **options)  # pyright: ignore[reportArgumentType]
        self.model = peft.get_peft_model(self.model, lora)
        with torch.no_grad():
            for name, parameter in self.trained().items():
                parameter.copy_(tensors[name])

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """By the names of a PEFT directory."""
        named = self.model.named_parameters()
        return {name.replace(".default", ""): parameter for name, parameter in named if parameter.requires_grad}


def base(model: Path, engine: str = "torchtitan", **options: Any) -> Engine:
    options = {"compute_dtype": "float32", **options}
    return load_engine(TrainerConfig(model=model, engine=engine, lora=LoRAConfig(), **options))


def tensors(engine: Engine) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.hf_parameters()}


def gradients(engine: Engine) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in engine.hf_parameters() if p.grad is not None}


def worst(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(relative_error(actual[name], expected[name]) for name in expected)


def step(engine: Engine, times: int = 1) -> None:
    for _ in range(times):
        engine.forward_backward([BATCH], get_loss("cross_entropy"))
        engine.optim_step(PARAMS, 0.01)


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return MODELS[request.param](tmp_path / "model")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model")


@pytest.mark.seconds
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_interleaved_adapters_have_the_gradients_of_peft(model: Path, engine: str, checkpointing: str) -> None:
    frozen = base(model, engine, activation_checkpointing=checkpointing)
    adapters = {name: randomize(frozen.adapter(name, config)) for name, config in CONFIGS.items()}
    references = {name: PeftPolicy(model, CONFIGS[name], tensors(adapter)) for name, adapter in adapters.items()}
    batches = {
        name: [random_batch((30, 3), seed), random_batch((9, 21), seed + 9)] for seed, name in enumerate(CONFIGS)
    }
    for call in range(2):
        for name, adapter in adapters.items():
            output = adapter.forward_backward([batches[name][call]], get_loss("cross_entropy"))
            loss = references[name].backward(batches[name][call], cross_entropy)
            assert output.metrics["loss"] == pytest.approx(loss, rel=1e-5)
    for name, adapter in adapters.items():
        expected = {n: p.grad for n, p in references[name].trained().items() if p.grad is not None}
        assert worst(gradients(adapter), expected) <= 1e-5
    assert all(parameter.grad is None for _, parameter in frozen.hf_parameters())


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_equal_those_of_adamw_on_peft(model: Path, engine: str) -> None:
    config = CONFIGS["all"]
    adapter = randomize(base(model, engine).adapter("a", config))
    reference = PeftPolicy(model, config, tensors(adapter))
    trained = reference.trained()
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    # AdamW makes a whole step of the smallest gradient, so elements whose gradient is rounding are left out.
    kept = {name: torch.ones_like(parameter, dtype=torch.bool) for name, parameter in trained.items()}
    for version in (1, 2, 3):
        adapter.forward_backward([BATCH], get_loss("cross_entropy"))
        reference.backward(BATCH, cross_entropy)
        for name, parameter in trained.items():
            assert parameter.grad is not None
            kept[name] &= parameter.grad.abs() > 1e-2 * parameter.grad.square().mean().sqrt()
            parameter.grad.mul_(0.01)
        norm = float(torch.nn.utils.clip_grad_norm_(trained.values(), 0.5))
        result = adapter.optim_step(PARAMS, 0.01)
        optimizer.step()
        optimizer.zero_grad()
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        assert result.policy_version == version
    actual = tensors(adapter)
    assert sum(int(mask.sum()) for mask in kept.values()) > 0.9 * sum(mask.numel() for mask in kept.values())
    for name, expected in trained.items():
        assert relative_error(actual[name] * kept[name], expected.detach() * kept[name]) <= 1e-6


@pytest.mark.parametrize("engine", ENGINES)
def test_entropies_and_their_gradient_are_those_of_peft(llama: Path, engine: str) -> None:
    def entropy_bonus(logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> object:
        assert entropy is not None
        return -entropy.sum(), {}

    adapter = randomize(base(llama, engine).adapter("a", CONFIGS["all"]))
    reference = PeftPolicy(llama, CONFIGS["all"], tensors(adapter))
    output = adapter.forward([BATCH], entropy=True)
    assert output.entropy is not None
    for datum, entropy in zip(BATCH, output.entropy, strict=True):
        scored = torch.from_numpy(datum.weights) != 0
        expected = reference.entropy(datum) * scored
        np.testing.assert_allclose(entropy, expected.detach(), atol=1e-5)
        (-expected.sum()).backward()
    adapter.forward_backward([BATCH], get_loss(entropy_bonus))
    grads = {n: p.grad for n, p in reference.trained().items() if p.grad is not None}
    assert worst(gradients(adapter), grads) <= 1e-5


@pytest.mark.parametrize("engine", ENGINES)
def test_a_new_adapter_changes_nothing_and_is_alike_everywhere(llama: Path, engine: str) -> None:
    frozen, whole = base(llama, engine), load_engine(TrainerConfig(model=llama, engine=engine, compute_dtype="float32"))
    adapter, again = frozen.adapter("a", LoRAConfig(rank=8)), frozen.adapter("b", LoRAConfig(rank=8))
    other = frozen.adapter("c", LoRAConfig(rank=8, seed=1))
    expected = whole.forward([BATCH], entropy=True)
    for policy in (frozen, adapter):
        for actual, values in zip(policy.forward([BATCH]).logprobs, expected.logprobs, strict=True):
            np.testing.assert_array_equal(actual, values)
    first, same, different = tensors(adapter), tensors(again), tensors(other)
    for name, tensor in first.items():
        assert torch.equal(tensor, same[name])
        if "lora_A" in name:
            bound = tensor.shape[1] ** -0.5
            assert 0.9 * bound < tensor.abs().max() <= bound
            assert not torch.equal(tensor, different[name])
        else:
            assert not tensor.any()


@pytest.mark.parametrize("engine", ENGINES)
def test_adapters_leave_each_other_and_the_model_alone(llama: Path, engine: str) -> None:
    def fail(logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> object:
        raise ArithmeticError("my own mistake")

    frozen = base(llama, engine)
    one, two = frozen.adapter("one", CONFIGS["all"]), frozen.adapter("two", CONFIGS["attention"])
    alone = base(llama, engine).adapter("one", CONFIGS["all"])
    model_before = tensors(frozen)
    for _ in range(2):
        one.forward_backward([BATCH], get_loss("cross_entropy"))
        alone.forward_backward([BATCH], get_loss("cross_entropy"))
        step(two)
        before = gradients(one)
        with pytest.raises(ArithmeticError, match="my own mistake"):
            two.forward_backward([BATCH], get_loss(fail))
        with pytest.raises(ArithmeticError, match="my own mistake"):
            one.forward_backward([BATCH], get_loss(fail))
        assert all(torch.equal(grad, before[name]) for name, grad in gradients(one).items())
        frozen.forward([BATCH])
        one.optim_step(PARAMS, 0.01)
        alone.optim_step(PARAMS, 0.01)
    assert (one.policy_version, two.policy_version, frozen.policy_version) == (2, 2, 0)
    expected = tensors(alone)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(one).items())
    assert all(torch.equal(tensor, model_before[name]) for name, tensor in tensors(frozen).items())


def test_projections_that_a_model_lacks_are_named() -> None:
    names = [f"model.layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "dense")]
    with pytest.raises(
        ValueError, match=r"LoRAConfig\.train_attn is True, but the model has no projection named o_proj;"
    ):
        check_targets(LoRAConfig(), names, has_experts=False)
    names = [name.replace("dense", "o_proj") for name in names]
    with pytest.raises(ValueError, match="no projection named gate_proj or up_proj or down_proj; it must be False"):
        check_targets(LoRAConfig(), names, has_experts=False)
    with pytest.raises(ValueError, match=r"LoRAConfig\.train_unembed is True, .* named lm_head;"):
        check_targets(LoRAConfig(train_mlp=False), names, has_experts=False)
    check_targets(LoRAConfig(train_mlp=False, train_unembed=False), names, has_experts=False)


def test_what_cannot_be_adapted_is_refused(llama: Path) -> None:
    frozen = base(llama)
    frozen.adapter("a", LoRAConfig())
    for name, config, message in (
        ("a", LoRAConfig(), "there is an adapter 'a' already; drop it first"),
        ("big", LoRAConfig(rank=10**9), r"an adapter of rank 1000000000 needs \d+\.\d\d GB .* \d+\.\d\d GB are free"),
    ):
        with pytest.raises(ValueError, match=message):
            frozen.adapter(name, config)
    with pytest.raises(ValueError, match=r"there is no adapter 'b'; there are \['a'\]"):
        frozen.drop_adapter("b")
    frozen.drop_adapter("a")
    step(frozen.adapter("a", LoRAConfig()))


def test_a_frozen_model_refuses_to_train_and_names_what_does(llama: Path, tmp_path: Path) -> None:
    frozen = base(llama)
    calls: dict[str, Callable[[], object]] = {
        "forward_backward": lambda: frozen.forward_backward([BATCH], get_loss("cross_entropy")),
        "optim_step": lambda: frozen.optim_step(PARAMS),
        "save_checkpoint": lambda: frozen.save_checkpoint(tmp_path / "checkpoint"),
        "load_checkpoint": lambda: frozen.load_checkpoint(tmp_path / "checkpoint"),
        "export_peft": lambda: frozen.export_peft(tmp_path / "export", torch.float32),
    }
    for verb, call in calls.items():
        with pytest.raises(ValueError, match=f"{verb}: the model is frozen .* call it on an adapter"):
            call()
    whole = load_engine(TrainerConfig(model=llama))
    with pytest.raises(ValueError, match=r"start it with TrainerConfig\.lora"):
        whole.adapter("a", LoRAConfig())
    with pytest.raises(ValueError, match="use export_hf"):
        whole.export_peft(tmp_path / "export", torch.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "value"}, "head is 'value' and lora is given; with adapters it must be 'lm'"),
        ({"compile": True}, "compile is True and lora is given; with adapters it must be False"),
    ],
)
def test_options_that_do_not_go_with_adapters_are_refused(llama: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        base(llama, **options)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bfloat16_model_has_its_adapter_in_float32(llama: Path, engine: str) -> None:
    frozen, exact = base(llama, engine, compute_dtype="bfloat16"), base(llama, engine)
    assert {parameter.dtype for _, parameter in frozen.hf_parameters()} == {torch.bfloat16}
    adapter, expected = (randomize(each.adapter("a", CONFIGS["all"])) for each in (frozen, exact))
    for each in (adapter, expected):
        each.forward_backward([BATCH], get_loss("cross_entropy"))
    assert {grad.dtype for grad in gradients(adapter).values()} == {torch.float32}
    errors = {name: relative_error(grad, gradients(expected)[name]) for name, grad in gradients(adapter).items()}
    assert 0 < max(errors.values()) < 0.1, errors
    step(adapter)
    assert {parameter.dtype for _, parameter in adapter.hf_parameters()} == {torch.float32}
