"""Eight CUDA GPUs of 80 GB: Qwen3.5-4B learns to write Python that passes the tests of MBPP."""

from controller.loops.grpo import GRPOConfig
from generator.config import GeneratorConfig
from ownloop_tasks.code_problems import CodeProblems
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> GRPOConfig:
    """The GPUs take turns at training and generating.

    The model is published with vision; first write its language model: `ownloop model Qwen/Qwen3.5-4B --text-only
    qwen3.5-4b`. MBPP (https://arxiv.org/abs/2108.07732) has 374 problems to train on and 500 to evaluate on: 5 steps
    are an epoch. No figure for this model was found that says how it was trained. Clipping is DAPO's. Only all tests
    earn a reward, since a part of them can be earned by the cases that the prompt shows.
    """
    return GRPOConfig(
        model="qwen3.5-4b",
        env=CodeProblems(
            dataset="google-research-datasets/mbpp",
            subset="full",
            eval_split="test",
            setup="test_setup_code",
            solution="code",
        ),
        trainer=TrainerConfig(data_parallel_shard=8, max_tokens_per_microbatch=16384),
        generator=GeneratorConfig(
            num_replicas=8, max_model_len=5120, max_num_seqs=128, engine_args={"gpu_memory_utilization": 0.6}
        ),
        placement="colocated",
        sampling=SamplingParams(max_tokens=4096),
        loss="ppo",
        loss_config={"clip_high_threshold": 1.28},
        num_steps=50,
        prompts_per_step=75,
        group_size=8,
        learning_rate=1e-6,
        lora_learning_rate=1e-5,
        num_eval=500,
        evaluate_every=10,
        checkpoint_every=10,
    )
