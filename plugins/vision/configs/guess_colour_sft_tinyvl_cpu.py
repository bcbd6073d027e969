"""Two CPU cores, 4 GiB: a tiny Qwen3-VL with random weights is shown the colours of squares, in a minute."""

from controller.loops.sft import SFTConfig
from ownloop_vision.colours import GuessColour, colour_model
from rl.data.sources import EnvExamples
from trainer.config import TrainerConfig


def recipe() -> SFTConfig:
    """A beginning for `guess_colour_grpo_tinyvl_cpu`: far above chance, and far from perfect."""
    return SFTConfig(
        model=str(colour_model()),
        data=EnvExamples(env=GuessColour()),
        trainer=TrainerConfig(engine="fsdp2", compute_dtype="float32", num_threads=2),
        num_steps=12,
        examples_per_step=32,
        learning_rate=3e-3,
        warmup_steps=4,
        num_eval=128,
        evaluate_every=6,
        checkpoint_every=12,
        max_tokens=64,
    )
