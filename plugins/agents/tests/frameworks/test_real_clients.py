"""Sessions of three real clients, none of which knows ownloop: the trainer computes the log-probs that were captured.

A chat script with OpenAI's SDK; verifiers 0.4, whose Python OWNLOOP_VERIFIERS_PYTHON names; and mini-swe-agent 2.4.6,
unmodified, in a namespace without a network, whose folder OWNLOOP_MINI names. The last one needs bubblewrap.
"""

import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.agent_qwen3_gpu import recipe
from generator.engine import GenerationEngine
from ownloop_agents.programs import AgentEnv, AgentTask, Program, exit_code, run_agents
from ownloop_agents.repair import Repair
from ownloop_agents.sessions import Session, session_to_data
from ownloop_agents.splicing import whole_tokens
from ownloop_agents.verifiers_tasks import VerifiersTasks
from plugins.agents.tests.chatting import chat_model, endpoint_over
from plugins.agents.tests.frameworks.test_verifiers_tasks import CONFIG, SUMS
from plugins.agents.tests.test_programs import SDK_CHAT
from tests.generator.engines import EngineFactory
from tests.generator.running import run_paced
from trainer.config import TrainerConfig
from trainer.engines import load_engine

PYTHON, MINI = os.environ.get("OWNLOOP_VERIFIERS_PYTHON", ""), os.environ.get("OWNLOOP_MINI", "")
pytestmark = [
    *(pytest.mark.vllm, pytest.mark.slow),
    pytest.mark.skipif(not (PYTHON and MINI), reason="needs OWNLOOP_VERIFIERS_PYTHON and OWNLOOP_MINI"),
]
NUM_SESSIONS = int(os.environ.get("OWNLOOP_NUM_SESSIONS", "200"))
AT_ONCE = 4
FLOOR = 2e-5
"""Of float32, over prompts of 10,000 tokens."""


def _played(engine: GenerationEngine, env: AgentEnv, count: int) -> list[Session]:
    found: list[Session] = []

    async def main() -> None:
        async with endpoint_over(engine, max_tokens=48, seed=len(found)) as endpoint:
            tasks = env.train_problems(0, len(found), AT_ONCE)
            groups = await run_agents(endpoint, env.program, tasks, exit_code)
            assert [failure for group in groups for failure in group.failures] == []
            found.extend(session for group in groups for session in group.sessions)

    while len(found) < count:
        run_paced(main())
    return found


def _check(model: Path, sessions: list[Session], calls: float) -> None:
    """Every child begins with its parent's tokens, and the trainer's log-probs are the generator's.

    A session has at least so many `calls` that continue others, in the mean.
    """
    engine = load_engine(TrainerConfig(model=model, compute_dtype="float32"))
    differences, hows = list[float](), Counter[str]()
    for session in sessions:
        earlier = [call.as_earlier() for call in session.calls]
        for index, call in enumerate(session.calls):
            history = [] if call.parent is None else whole_tokens(earlier, call.parent)
            assert whole_tokens(earlier, index)[: len(history)] == history
            hows[call.how] += 1
        data = session_to_data(session, 1.0)
        for datum, found in zip(data, engine.forward([data], entropy=False).logprobs, strict=True):
            sampled = datum.loss_inputs["logprobs"][datum.counted]
            differences.append(float(np.abs(found[datum.counted] - sampled).max()))
        assert sum(datum.num_loss_tokens for datum in data) == session.num_sampled_tokens
    print(f"{len(sessions)} sessions, {dict(hows)}, largest difference {max(differences):.1e}")
    assert max(differences) < FLOOR
    assert hows["spliced"] + hows["extends"] >= calls * len(sessions)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, build_engine: EngineFactory) -> GenerationEngine:
    """Has room for the prompts of an assistant, in characters."""
    model = chat_model(tmp_path_factory.mktemp("chat") / "model", max_len=16384)
    return build_engine(model, "float32", max_model_len=16384, max_num_seqs=16)


def test_a_chat_script(engine: GenerationEngine) -> None:
    program = Program(argv=[sys.executable, "-c", SDK_CHAT, "{prompt}"], sandbox="local")
    sessions = _played(engine, _WithQuestion(Repair(program=program)), NUM_SESSIONS // 2)
    _check(Path(engine.llm.model_config.model), sessions, 2)


class _WithQuestion:
    """The tasks with the file that the chat script reads."""

    name, stop = "question", ()

    def __init__(self, env: Repair) -> None:
        self._env, self.program, self.reward = env, env.program, env.reward

    def train_problems(self, seed: int, start: int, count: int) -> list[AgentTask]:
        tasks = self._env.train_problems(seed, start, count)
        return [replace(task, files={"question.txt": f"{task.id} {task.prompt}"}) for task in tasks]

    def eval_problems(self, count: int) -> list[AgentTask]:
        return self._env.eval_problems(count)


def test_verifiers(engine: GenerationEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums.py").write_text(SUMS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    env = VerifiersTasks(python=Path(PYTHON), config=CONFIG, held_out={"num_tasks": 2})
    _check(Path(engine.llm.model_config.model), _played(engine, env, NUM_SESSIONS // 4), 0)


def test_an_unmodified_assistant_without_a_network(engine: GenerationEngine) -> None:
    env: Any = recipe().env
    program = env.program
    words = [word.replace(str(Path("mini-env").absolute()), MINI) for word in program.argv]
    four = ("-c", "mini.yaml", "-c", "agent.step_limit=4")
    env = Repair(program=replace(program, argv=[*words, *four], shows=(MINI,)))
    # It leaves answers without a tool call, which random weights do not make, out of its next request.
    _check(Path(engine.llm.model_config.model), _played(engine, env, NUM_SESSIONS // 4), 0)
