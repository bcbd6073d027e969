"""Real environments of the `verifiers` package. It is not in the locked environment, so most of these tests run with

    uv run --no-project --python 3.11 --with "verifiers==0.1.14" --with pytest --with pytest-timeout \
        --with pytest-xdist python -m pytest tests/rl/envs/test_verifiers_env.py

Covers: rl/envs/verifiers_env.py, rl/envs/check.py
"""

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from rl.envs.check import check_env
from rl.envs.verifiers_env import VerifiersEnv
from rl.rollouts.episodes import rollout_groups
from rl.types import Group, SamplingParams
from tests.rl.fakes import ScriptedGenerator, WordRenderer

installed = pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="needs verifiers")

SOURCE = '''
import verifiers as vf
from datasets import Dataset

def rows(start, count):
    return Dataset.from_list([{"question": f"Say {i}.", "answer": str(i)} for i in range(start, start + count)])

def right(completion, answer):
    return float(completion[-1]["content"] == answer)

async def length(completion):
    return float(len(completion))

class Insisting(vf.MultiTurnEnv):
    async def setup_state(self, state):
        if state["answer"] == "13":
            raise vf.Error("unlucky")

    async def env_response(self, messages, state, **kwargs):
        if self.forgets:
            messages.pop(0)
        return [{"role": "user", "content": f"Really? You said {messages[-1].content}."}]

    @vf.stop
    async def said_twice(self, state):
        return len(state["trajectory"]) == 2

def tool(x: int) -> int:
    """Does nothing."""
    return x

def together(states):
    return [0.0 for _ in states]

def load_environment(kind="single", with_eval=True, forgets=False):
    options = {"dataset": rows(0, 40), "rubric": vf.Rubric(funcs=[right, length], weights=[1.0, 0.0])}
    if with_eval:
        options["eval_dataset"] = rows(30, 20)
    if kind == "single":
        return vf.SingleTurnEnv(system_prompt="Obey.", **options)
    if kind == "tools":
        return vf.ToolEnv(tools=[tool], **options)
    if kind == "group":
        return vf.SingleTurnEnv(**{**options, "rubric": vf.Rubric(funcs=[together])})
    env = Insisting(**options)
    env.forgets = forgets
    return env
'''


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_for_tests.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)


def _env(**args: Any) -> VerifiersEnv:
    return VerifiersEnv(environment="made-for-tests", args=args)


class ChatRenderer(WordRenderer):
    """Encodes chats with one token per word of each message."""

    def encode(self, prompt: Any) -> tuple[int, ...]:
        return tuple(len(word) for message in prompt for word in message["content"].split())


def _play(env: VerifiersEnv, said: str, count: int = 1, num_samples: int = 1) -> list[Group]:
    generator, renderer = ScriptedGenerator(lambda prompt, i, seed: said), ChatRenderer()
    problems, sampling = env.train_problems(0, 0, count), SamplingParams(max_tokens=4)
    groups = rollout_groups(generator, renderer, problems, sampling, num_samples, time_limit_s=20)  # pyright: ignore[reportArgumentType]
    return asyncio.run(groups)


@installed
def test_a_single_turn_has_the_rubrics_reward_and_metrics() -> None:
    env = _env()
    (problem,) = env.train_problems(0, 0, 1)
    assert problem.prompt[0] == {"role": "system", "content": "Obey."}
    (group,) = _play(env, problem.row["answer"], num_samples=3)
    assert group.rewards.tolist() == [1, 1, 1]
    assert group.rollouts[0].metrics["length"] == 1
    assert _play(env, "wrong")[0].rewards.tolist() == [0]


@installed
def test_several_turns_are_the_environments_own() -> None:
    env = _env(kind="multi")
    groups = _play(env, "no", count=60)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert all([turn.prompt for turn in r.turns][1:] == ["Really? You said no."] for r in rollouts)
    assert rollouts[0].metrics["num_turns"] == 2
    failures = [failure for group in groups for failure in group.failures]
    assert failures
    assert all("unlucky" in failure for failure in failures)


@installed
@pytest.mark.parametrize("with_eval", [True, False])
def test_no_prompt_is_in_both_splits(with_eval: bool) -> None:
    env = _env(with_eval=with_eval)
    train_prompts = {str(p.prompt) for p in env.train_problems(0, 0, 200)}
    eval_prompts = {str(p.prompt) for p in env.eval_problems(2)}
    assert train_prompts.isdisjoint(eval_prompts)
    assert len(train_prompts) == 30 if with_eval else 30 < len(train_prompts) < 40
    with pytest.raises(ValueError, match="num_eval is 100, but"):
        env.eval_problems(100)


@installed
def test_rewriting_the_conversation_fails_the_rollouts() -> None:
    failures = [
        failure for group in _play(_env(kind="multi", forgets=True), "no", count=4) for failure in group.failures
    ]
    assert len(failures) == 4
    assert sum("rewrites its conversation" in failure for failure in failures) >= 3


@installed
def test_unsupported_environments_are_refused() -> None:
    for kind, message in (
        ("tools", "has tools in the model's own call format"),
        ("group", "rewards that compare the rollouts"),
    ):
        with pytest.raises(ValueError, match=message):
            _env(kind=kind)
    with pytest.raises(ValueError, match="'no-such-thing' cannot be loaded"):
        VerifiersEnv(environment="no-such-thing")


@installed
def test_a_supported_environment_has_no_findings() -> None:
    assert check_env(_Wide(_env())) == []


class _Wide:
    """The environment behind the bare methods of `rl.protocols.Env`."""

    def __init__(self, env: VerifiersEnv) -> None:
        self.name, self.stop = env.name, env.stop
        self.train_problems, self.eval_problems = env.train_problems, env.eval_problems


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="needs an environment without verifiers")
def test_without_the_package_the_error_says_how_to_install_it() -> None:
    with pytest.raises(ValueError, match=r"cannot be loaded: .* install -e '\.\[verifiers\]'"):
        _env()
