"""The recipe `calculator_grpo_qwen3_gpu` trains two steps with a tiny model that sometimes says a whole tool call."""

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("math_verify", reason="math-verify is not installed")

from configs.calculator_grpo_qwen3_gpu import recipe
from controller.loops import grpo
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.recording import read_recording
from generator.config import GeneratorConfig
from ownloop_tasks.math_problems import MathProblems
from rl.types import SamplingParams
from tests.generator.served_models import served_llama
from trainer.config import TrainerConfig

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process")]

CALL = '<tool_call>{"name":"calculate","arguments":{"expression":"6*7"}}</tool_call>'
TEMPLATE = "{% for t in tools or [] %}w3 {% endfor %}{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}w4"


def _talking_model(path: Path) -> Path:
    """A tiny model, an eighth of whose vocabulary are tool calls, and another eighth right answers."""
    model = served_llama(path, tied=True)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    for number in range(40, 48):
        words[f"{CALL}<!--{number}-->"] = words.pop(f"w{number}")
    for number in range(48, 56):
        words[f"\\boxed{{42}}<!--{number}-->"] = words.pop(f"w{number}")
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


def test_a_model_learns_to_answer_with_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    rows = [{"question": f"{i} * 7 / {i} * 6?", "answer": "42"} for i in range(1, 60)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = recipe()
    env: Any = config.env
    config = replace(
        config,
        model=str(_talking_model(tmp_path / "model")),
        env=replace(env, env=MathProblems(dataset=str(tmp_path / "sums.jsonl"), template="{question}")),
        trainer=TrainerConfig(compute_dtype="float32", max_tokens_per_microbatch=512),
        generator=GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=64),
        sampling=SamplingParams(max_tokens=4),
        num_steps=2,
        prompts_per_step=4,
        group_size=8,
        learning_rate=1e-3,
        num_eval=2,
        evaluate_every=2,
        checkpoint_every=0,
    )
    folder = RunFolder(tmp_path / "run", config)
    asyncio.run(grpo.train(config, folder, Console(io.StringIO())))

    steps = [row for row in folder.metrics() if "grad_norm" in row]
    assert [row["policy_version"] for row in steps] == [1, 2]
    assert all(row["grad_norm"] > 0 and row["logprob_mismatch_max"] < 1e-3 for row in steps)
    assert all(row["tool_calls"] > 0 and row["tool_errors"] == 0 and 0 < row["reward_mean"] < 1 for row in steps)
    groups = [group for step in (1, 2) for group in read_recording(tmp_path / "run" / "rollouts")[step]]
    later = [turn for group in groups for rollout in group.rollouts for turn in rollout.turns[1:]]
    assert later
    assert all(set(turn.prompt.split()) == {"42"} for turn in later)  # what the calculator answered
    first = [rollout.turns[0] for group in groups for rollout in group.rollouts]
    assert {turn.prompt_tokens[0] for turn in first} == {3}  # w3: the template was given one tool
