"""A model that `ownloop serve` serves judges: `ownloop_tasks.judged` against a real vLLM on loopback."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker", reason="the package tinker, of the extra tinker, is not installed")

import openai

from ownloop_tasks.judged import Judge, JudgedEnv
from plugins.server.tests.tiny_server import serving_tiny_model
from rl.rollouts.episodes import rollout_groups
from rl.tiny_tasks import EvenWords
from rl.types import SamplingParams
from tests.rl.fakes import ScriptedGenerator, WordRenderer

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process")]

ANSWERS = ["w3 w4", "w9"]


def test_a_served_model_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVED_KEY", "tml-local")
    generator, renderer = ScriptedGenerator(lambda prompt, i, seed: ANSWERS[i]), WordRenderer()
    with serving_tiny_model(tmp_path) as served:
        url = f"{served.url}/oai/api/v1"
        judge = Judge(
            base_url=url,
            model="tiny",
            api_key_variable="SERVED_KEY",
            template="w1 {prompt} w2 {answer}",
            score_pattern=r"w(\d+)",
            highest=63,
            options={"temperature": 0, "max_tokens": 4},
        )
        problems = JudgedEnv(env=EvenWords(), judge=judge).train_problems(0, 0, 1)
        rollouts = rollout_groups(generator, renderer, problems, SamplingParams(max_tokens=4), 2)  # pyright: ignore[reportArgumentType]
        (group,) = asyncio.run(rollouts)
        client = openai.OpenAI(base_url=url, api_key="tml-local")
        for rollout, answer in zip(group.rollouts, ANSWERS, strict=True):
            question: Any = {"role": "user", "content": f"w1 {group.prompt} w2 {answer}"}
            said = client.chat.completions.create(model="tiny", messages=[question], temperature=0, max_tokens=4)
            last_word = (said.choices[0].message.content or "").split()[-1]
            assert rollout.reward == pytest.approx(int(last_word.removeprefix("w")) / 63)
            assert said.usage is not None
            assert rollout.metrics["judge_prompt_tokens"] == said.usage.prompt_tokens
            assert rollout.metrics["judge_completion_tokens"] == said.usage.completion_tokens
