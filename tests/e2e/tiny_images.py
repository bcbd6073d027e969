"""Two CPU cores: as `tiny_recipe`, of a tiny vision-language model that is asked for colours."""

from dataclasses import replace

from configs import guess_colour_tinyvl_cpu
from controller.loops.grpo import GRPOConfig


def recipe() -> GRPOConfig:
    """In float32 on one thread, so that it is repeatable to the last bit."""
    whole = guess_colour_tinyvl_cpu.recipe()
    return replace(
        whole,
        trainer=replace(whole.trainer, num_threads=1, train_vision=True),
        generator=replace(whole.generator, num_threads=1, max_num_seqs=16),
        prompts_per_step=4,
        group_size=4,
        num_steps=5,
        num_eval=8,
        evaluate_every=3,
        checkpoint_every=2,
    )
