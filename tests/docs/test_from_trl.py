"""docs/from_trl.md: TRL's arguments and ours beside them give the same losses in two steps on recorded completions."""

import asyncio
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.locked_environment import locked_python
from rl.advantages import group_mean
from rl.losses import constant_length, sequence_mean, token_mean
from rl.rollouts.episodes import with_inputs
from rl.tiny_models import tiny_llama
from rl.types import AdamParams, Datum
from tests.docs.pages import ROOT
from tests.trainer.engine_trainer import EngineTrainer

GROUP_SIZE, MAX_TOKENS = 4, 9
ADAM = AdamParams(learning_rate=3e-3, beta1=0.9, beta2=0.95, grad_clip_norm=1.0)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Arguments of TRL's `GRPOConfig`, and a loss of ours with its options and its normaliser."""

    trl: dict[str, Any]
    loss: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    mean_over: str = "tokens"


PAIRS = [
    Pair(trl={"loss_type": "dapo"}, loss="ppo"),
    Pair(trl={"loss_type": "dapo", "epsilon_high": 0.28}, loss="ppo", options={"clip_high_threshold": 1.28}),
    Pair(trl={"loss_type": "grpo"}, loss="ppo", mean_over="sequences"),
    Pair(trl={"loss_type": "dr_grpo"}, loss="ppo", mean_over="constant"),
    Pair(trl={"loss_type": "cispo", "epsilon_high": 4.0}, loss="cispo"),
    Pair(
        trl={"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        loss="gspo",
        mean_over="sequences",
    ),
    Pair(
        trl={"loss_type": "dapo", "beta": 0.04, "use_bias_correction_kl": False}, loss="ppo", options={"kl_coef": 0.04}
    ),
]


def recorded() -> tuple[list[list[int]], list[list[int]], list[float]]:
    """Prompts, completions of different lengths and rewards of two groups; each group has one prompt."""
    random = np.random.default_rng(0)
    prompts = [prompt for length in (5, 8) for prompt in [random.integers(3, 60, length).tolist()] * GROUP_SIZE]
    completions = [random.integers(3, 60, int(length)).tolist() for length in random.integers(2, MAX_TOKENS, 8)]
    return prompts, completions, random.uniform(-1, 1, 8).tolist()


def data() -> list[Datum]:
    """The same as data of ours, with `group_mean` advantages, which TRL calls `scale_rewards="none"`."""
    prompts, completions, rewards = recorded()
    advantages = group_mean(np.array(rewards).reshape(-1, GROUP_SIZE)[0]), group_mean(np.array(rewards[GROUP_SIZE:]))
    batch: list[Datum] = []
    for prompt, completion, advantage in zip(prompts, completions, np.concatenate(advantages), strict=True):
        tokens = np.array(prompt + completion)
        scored = np.arange(len(tokens) - 1) >= len(prompt) - 1
        inputs = {"target_tokens": tokens[1:], "advantages": scored * advantage, "weights": scored.astype(float)}
        batch.append(Datum(tokens=tokens[:-1], loss_inputs=inputs))
    return batch


async def our_losses(model: Path, pair: Pair) -> list[float]:
    """The losses of two steps on `data`, whose old policy and whose reference are the model itself."""
    trainer, found = EngineTrainer(model), list[float]()
    batch = data()
    before = (await trainer.forward(batch)).logprobs
    batch = with_inputs(batch, logprobs=before, reference_logprobs=before)
    scale = token_mean(batch)
    if pair.mean_over == "sequences":
        batch, scale = sequence_mean(batch)
    elif pair.mean_over == "constant":
        scale = constant_length(len(batch), MAX_TOKENS)
    for _ in range(2):
        output = await trainer.forward_backward(batch, pair.loss, pair.options)
        found.append(output.metrics["loss"] * scale)
        await trainer.optim_step(ADAM, grad_scale=scale)
    return found


def their_losses(model: Path, folder: Path, arguments: Sequence[dict[str, Any]]) -> list[list[float]]:
    """The losses of TRL, in an environment of its own."""
    prompts, completions, rewards = recorded()
    adam = {
        "learning_rate": ADAM.learning_rate,
        "adam_beta1": ADAM.beta1,
        "adam_beta2": ADAM.beta2,
        "adam_epsilon": ADAM.eps,
        "weight_decay": ADAM.weight_decay,
        "max_grad_norm": ADAM.grad_clip_norm,
        "scale_rewards": "none",
    }
    settings = {"model": str(model), "output": str(folder / "trl"), "prompts": prompts, "completions": completions}
    settings |= {"rewards": rewards, "adam": adam, "group_size": GROUP_SIZE, "max_tokens": MAX_TOKENS}
    (folder / "settings.json").write_text(json.dumps(settings | {"arguments": arguments}))
    command = [locked_python(ROOT / "requirements" / "trl.lock"), ROOT / "tests/docs/trl_steps.py"]
    env = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1"}
    result = subprocess.run(
        [*command, folder / "settings.json"], capture_output=True, text=True, check=False, timeout=500, env=env
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


@pytest.mark.slow
def test_two_steps_of_trl_and_of_ours_have_the_same_losses(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    theirs = their_losses(model, tmp_path, [pair.trl for pair in PAIRS])
    for pair, expected in zip(PAIRS, theirs, strict=True):
        ours = asyncio.run(our_losses(model, pair))
        print(pair.trl, ours, expected)
        assert len(expected) == 2
        assert ours == pytest.approx(expected, abs=1e-5), pair.trl
        assert abs(expected[0] - expected[1]) > 1e-4, "the second loss would prove nothing"


def test_the_page_has_each_pair_in_its_table() -> None:
    rows = [line for line in (ROOT / "docs/from_trl.md").read_text(encoding="utf-8").splitlines() if "`" in line]
    for pair in PAIRS:
        arguments = [f"`{name}={value!r}`" for name, value in pair.trl.items()]
        assert any(all(text in row for text in (*arguments, f"`{pair.loss}`")) for row in rows), pair
