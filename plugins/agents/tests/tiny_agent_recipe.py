"""One CPU core: a random model of characters is trained on a script that asks it twice; for tests of whole runs."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from generator.config import GeneratorConfig
from ownloop_agents.agent_loop import AgentConfig
from ownloop_agents.programs import AgentTask, Attempt, Program
from ownloop_sandbox.sandboxes import Work
from plugins.agents.tests.chatting import chat_model
from rl.types import SamplingParams
from trainer.config import TrainerConfig

SCRIPT = r"""
import json, os, sys, urllib.request
chat = [{"role": "user", "content": sys.argv[1]}]
for _ in range(2):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    body = json.dumps({"messages": chat}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    chat += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
open("said.txt", "w").write(said)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Letters:
    """The reward is the part of the last answer that are letters."""

    name: str = "letters"
    stop: tuple[str, ...] = ()

    @property
    def program(self) -> Program:
        """The script."""
        return Program(argv=[sys.executable, "-I", "-S", "-c", SCRIPT, "{prompt}"], sandbox="local")

    def train_problems(self, seed: int, start: int, count: int) -> list[AgentTask]:
        return [AgentTask(id=f"{seed}-{index}", prompt=f"task {index}") for index in range(start, start + count)]

    def eval_problems(self, count: int) -> list[AgentTask]:
        return [AgentTask(id=f"eval-{index}", prompt=f"held out {index}") for index in range(count)]

    async def reward(self, task: AgentTask, work: Work, attempt: Attempt) -> float:
        del task, attempt
        said = (work / "said.txt").read_text()
        return sum(letter.isalpha() for letter in said) / max(len(said), 1)


def recipe() -> AgentConfig:
    """In float32 on one thread."""
    model = Path(os.environ["OWNLOOP_TINY_MODEL"])
    if not model.exists():
        chat_model(model)
    return AgentConfig(
        model=str(model),
        env=Letters(),
        trainer=TrainerConfig(compute_dtype="float32", max_tokens_per_microbatch=512),
        generator=GeneratorConfig(dtype="float32", max_model_len=256, max_num_seqs=16),
        sampling=SamplingParams(max_tokens=16),
        num_steps=6,
        prompts_per_step=3,
        group_size=4,
        learning_rate=3e-3,
        num_eval=4,
        evaluate_every=6,
        checkpoint_every=2,
    )
