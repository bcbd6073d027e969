"""One CUDA GPU of 80 GB: Qwen3-1.7B learns to solve GSM8K with a calculator, which it calls in its own format."""

from controller.loops.grpo import GRPOConfig
from generator.config import GeneratorConfig
from ownloop_tasks.math_problems import MathProblems
from ownloop_tasks.tools import ToolEnv
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> GRPOConfig:
    """Trainer and generator share the GPU, so vLLM gets only a part of its memory. Any function can be a tool."""
    return GRPOConfig(
        model="Qwen/Qwen3-1.7B",
        env=ToolEnv(
            env=MathProblems(
                dataset="openai/gsm8k",
                subset="main",
                eval_split="test",
                template="{question}\nCalculate with the tool, and put your final answer within \\boxed{}. /no_think",
            ),
            tools=("ownloop_tasks.calculator:calculate",),
            max_turns=8,
        ),
        trainer=TrainerConfig(max_tokens_per_microbatch=16384, activation_checkpointing="selective", compile=True),
        generator=GeneratorConfig(max_model_len=4096, max_num_seqs=256, engine_args={"gpu_memory_utilization": 0.4}),
        sampling=SamplingParams(max_tokens=512),
        num_steps=100,
        prompts_per_step=32,
        group_size=8,
        learning_rate=1e-6,
        lora_learning_rate=1e-5,
        num_eval=500,
        evaluate_every=20,
    )
