"""Eight CUDA GPUs of 80 GB: Qwen3-4B-Instruct is trained through an unmodified coding assistant, mini-swe-agent."""

from pathlib import Path

from generator.config import GeneratorConfig
from ownloop_agents.agent_loop import AgentConfig
from ownloop_agents.endpoint import SessionLimits
from ownloop_agents.programs import Program
from ownloop_agents.repair import Repair
from rl.types import SamplingParams
from trainer.config import TrainerConfig

ASSISTANT = Path("mini-env")
"""An environment of its own, where `uv pip install --python mini-env/bin/python mini-swe-agent==2.4.6` was run."""
SETTINGS = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"}


def recipe() -> AgentConfig:
    """Half of the GPUs train, the other half generate. It has not run on GPUs; its program and tasks have, on CPUs."""
    words = ("--yolo", "--exit-immediately", "--model", "openai/policy", "--task", "{prompt}")
    program = Program(
        argv=[str(ASSISTANT.absolute() / "bin" / "mini"), *words],
        env=SETTINGS,
        shows=(str(ASSISTANT.absolute()),),
        time_limit_s=600.0,
        max_at_once=256,
    )
    return AgentConfig(
        model="Qwen/Qwen3-4B-Instruct-2507",
        env=Repair(program=program),
        tool_parser="hermes",
        trainer=TrainerConfig(data_parallel_shard=4, max_tokens_per_microbatch=32768, compile=True),
        generator=GeneratorConfig(num_replicas=4, max_model_len=16384, max_num_seqs=64),
        sampling=SamplingParams(max_tokens=1024),
        limits=SessionLimits(max_calls=20, max_sampled_tokens=8192),
        num_steps=100,
        prompts_per_step=32,
        group_size=8,
        learning_rate=1e-6,
        lora_learning_rate=1e-5,
        num_eval=64,
        evaluate_every=10,
        checkpoint_every=10,
    )
