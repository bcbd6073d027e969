"""Two CPU cores, 8 GiB: a tiny vision-language model learns to name the colour of a square in a picture, in minutes."""

from controller.loops.grpo import GRPOConfig
from generator.config import GeneratorConfig
from ownloop_vision.colours import GuessColour, colour_model
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> GRPOConfig:
    """`--model runs/<run>/model` continues a run of `guess_colour_sft_tinyvl_cpu`; the default has random weights."""
    return GRPOConfig(
        model=str(colour_model()),
        env=GuessColour(),
        trainer=TrainerConfig(engine="fsdp2", compute_dtype="float32", num_threads=2),
        generator=GeneratorConfig(dtype="float32", num_threads=2, max_model_len=64, max_num_seqs=128),
        sampling=SamplingParams(max_tokens=4),
        num_steps=80,
        prompts_per_step=32,
        group_size=8,
        learning_rate=1e-3,
        num_eval=256,
        evaluate_every=20,
        checkpoint_every=40,
    )
