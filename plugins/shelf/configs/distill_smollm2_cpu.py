"""Two CPU cores, 12 GiB: SmolLM2-135M-Instruct learns from a teacher of its own size, which was fine-tuned.

The teacher is what the recipe `sft_smollm2_cpu` exports; make it first:

    ownloop run sft_smollm2_cpu --name teacher
"""

from generator.config import GeneratorConfig
from ownloop_shelf.distill import DistillConfig
from rl.envs.largest_number import LargestNumber
from rl.system.hardware import cpu_dtype
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> DistillConfig:
    """`--teacher DIRECTORY` names another teacher with the same tokenizer."""
    dtype = cpu_dtype()
    trainer = TrainerConfig(compute_dtype=dtype, num_threads=2, max_tokens_per_microbatch=2048)
    return DistillConfig(
        model="smollm2-135m-instruct",
        teacher="runs/teacher/model",
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
