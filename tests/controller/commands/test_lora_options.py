"""`--lora.rank 32` alone makes a recipe train an adapter, on both of its sides."""

import pytest

from controller.commands.command_line import CommandEndedError
from controller.commands.recipes import configuration, recipe_files
from generator.config import LoRALimits
from rl.lora import LoRAConfig


def _overridden(*options: str, recipe: str = "grpo_smollm2_cpu") -> tuple[LoRAConfig, LoRALimits]:
    config = configuration(recipe, options, "run")
    assert config.policy_config.lora == config.lora
    return config.lora, config.generator_config.lora


@pytest.mark.parametrize(
    ("options", "lora", "room"),
    [
        ([], None, None),
        (["--lora.rank", "8"], LoRAConfig(rank=8), LoRALimits(max_rank=8)),
        (["--lora.rank=64", "--lora.no-train-mlp"], LoRAConfig(rank=64, train_mlp=False), LoRALimits(max_rank=64)),
        (
            ["--lora.alpha", "16", "--generator.lora.max-adapters", "2"],
            LoRAConfig(alpha=16.0),
            LoRALimits(max_adapters=2),
        ),
        (["--lora.rank=8", "--trainer.train-vision"], LoRAConfig(rank=8), LoRALimits(max_rank=8, vision=True)),
        (["--lora.rank", "64", "--generator.lora.max-rank", "32"], LoRAConfig(rank=64), LoRALimits(max_rank=64)),
    ],
)
def test_any_option_of_an_adapter_switches_it_on(
    options: list[str], lora: LoRAConfig | None, room: LoRALimits | None
) -> None:
    assert _overridden(*options) == (lora, room)


@pytest.mark.seconds
def test_every_recipe_has_the_options() -> None:
    for recipe in recipe_files():
        assert configuration(recipe, ["--lora.rank", "8"], "run").policy_config.lora == LoRAConfig(rank=8)


def test_an_adapter_learns_at_the_rate_for_adapters_by_default() -> None:
    full = configuration("grpo_smollm2_cpu", [], "run")
    adapter = configuration("grpo_smollm2_cpu", ["--lora.rank", "8"], "run")
    given = configuration("grpo_smollm2_cpu", ["--lora.rank", "8", "--learning-rate", "3e-5"], "run")
    assert adapter.learning_rate == adapter.lora_learning_rate > full.learning_rate
    assert given.learning_rate == 3e-5


@pytest.mark.seconds
def test_gpu_logic_recipes_compile_whole_models_alone() -> None:
    for recipe in (name for name in recipe_files() if name.endswith("qwen3_gpu")):
        assert configuration(recipe, [], "run").trainer.compile
        assert not configuration(recipe, ["--lora.rank", "8"], "run").trainer.compile


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora.rank", "0"], "rank is 0"),
        (["--trainer.profile-steps", "90:91"], "trainer.profile_steps is .90:91.; the run has 24 steps"),
    ],
)
def test_mistakes_are_named(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _overridden(*options)


def test_help_shows_the_rate_of_the_whole_model() -> None:
    with pytest.raises(CommandEndedError) as caught:
        configuration("grpo_smollm2_cpu", ["--help"], "run")
    text = str(caught.value)
    assert "--lora.rank" in text
    assert "(default: 2e-05)" in text[text.index("--learning-rate") : text.index("--optimizer")]


@pytest.mark.parametrize("options", [("--lora-learning-rate", "0.1"), ("--lora.rank=8", "--lora_learning_rate=0.1")])
def test_the_rate_of_adapters_is_given_as_the_learning_rate(options: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"--lora-learning-rate is a recipe's .* for adapters; give --learning-rate"):
        configuration("grpo_smollm2_cpu", options, "run")
    config = configuration("grpo_smollm2_cpu", ["--lora.rank=8", "--learning-rate=0.1"], "run")
    assert config.learning_rate == 0.1
