"""Two CPU cores, 12 GiB: SmolLM2-135M-Instruct trains on word problems of one step, in GSM8K's format."""

from controller.loops.grpo import GRPOConfig
from generator.config import GeneratorConfig
from ownloop_tasks.math_problems import MathProblems, word_problems_file
from rl.system.hardware import cpu_dtype
from rl.types import SamplingParams
from trainer.config import TrainerConfig

# Two solved examples, because a small model continues a pattern better than it follows an instruction. Answers without
# words take fewer tokens. Problems of two steps are left out: too few sampled answers to them are right.
_TEMPLATE = """Question: Sam has 7 nuts. Sam eats 2 and then finds 6. How many nuts does Sam have now?
Answer: 7 - 2 = 5, 5 + 6 = 11

Question: Ann has 3 bags with 4 nuts each. How many nuts does Ann have?
Answer: 3 * 4 = 12

Question: {question}
Answer:"""


def recipe() -> GRPOConfig:
    """Trainer and generator take turns, so each may use both cores."""
    dtype = cpu_dtype()
    return GRPOConfig(
        model="smollm2-135m-instruct",
        env=MathProblems(
            dataset=str(word_problems_file(max_steps=1)),
            template=_TEMPLATE,
            chat=False,
            answer_form="anywhere",
            stop=("\n",),
        ),
        trainer=TrainerConfig(compute_dtype=dtype, num_threads=2, max_tokens_per_microbatch=2048),
        generator=GeneratorConfig(dtype=dtype, num_threads=2, max_model_len=256, max_num_seqs=128),
        sampling=SamplingParams(max_tokens=24),
        num_steps=8,  # see benchmarks/LEARNING.md: more steps gain nothing
        prompts_per_step=16,
        group_size=8,
        learning_rate=2e-5,
        lora_learning_rate=2e-4,
        num_eval=200,
        evaluate_every=4,
        checkpoint_every=4,
    )
