"""Two CPU cores, 12 GiB: SmolLM2-135M-Instruct teaches itself: with the answer as a hint, then without."""

from generator.config import GeneratorConfig
from ownloop_shelf.distill import DistillConfig
from ownloop_shelf.distillation import Objective
from rl.envs.largest_number import LargestNumber
from rl.system.hardware import cpu_dtype
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> DistillConfig:
    """The model is its own teacher: on its own answers, which it reads after the right one (`objective.hint`)."""
    dtype = cpu_dtype()
    trainer = TrainerConfig(compute_dtype=dtype, num_threads=2, max_tokens_per_microbatch=2048)
    return DistillConfig(
        model="smollm2-135m-instruct",
        teacher="self",
        objective=Objective(divergence="reverse_kl", top_k=8, hint="answer"),
        env=LargestNumber(),
        trainer=trainer,
        teacher_trainer=trainer,
        generator=GeneratorConfig(dtype=dtype, num_threads=2, max_model_len=256, max_num_seqs=128),
        sampling=SamplingParams(max_tokens=8),
        num_steps=12,
        prompts_per_step=16,
        group_size=4,
        learning_rate=2e-5,
        lora_learning_rate=2e-4,
        num_eval=96,
        evaluate_every=6,
        checkpoint_every=6,
    )
