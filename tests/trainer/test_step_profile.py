"""Chosen steps of an engine are recorded, each in a file of its own, and computed as without."""

import asyncio
import gzip
import json
from pathlib import Path

import pytest
import torch

from rl.data.sources import text_to_datum
from rl.tiny_models import tiny_llama
from rl.types import AdamParams
from tests.trainer.engine_trainer import EngineTrainer
from trainer.config import TrainerConfig
from trainer.step_profile import profile_steps


def _trained(trainer: EngineTrainer) -> list[torch.Tensor]:
    batch = [text_to_datum([3, 4, 5], [6, 7], "completion")]
    for _ in range(4):
        asyncio.run(trainer.forward(batch))
        asyncio.run(trainer.forward_backward(batch, "cross_entropy"))
        asyncio.run(trainer.optim_step(AdamParams(learning_rate=1e-3)))
    return [parameter.detach() for _, parameter in trainer.engine.hf_parameters()]


def test_the_chosen_steps_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(tmp_path / "model")
    plain, recorded = EngineTrainer(model), EngineTrainer(model)
    monkeypatch.setenv("OWNLOOP_LOG_FILE", str(tmp_path / "trainer-0.log"))
    profile_steps(recorded.engine, "2:3")
    for expected, found in zip(_trained(plain), _trained(recorded), strict=True):
        assert torch.equal(expected, found)
    files = sorted(tmp_path.glob("profile-*"))
    assert [file.name for file in files] == [f"profile-trainer-0-step-{step}.json.gz" for step in (2, 3)]
    for file in files:
        with gzip.open(file, "rt") as stream:
            events = [event["name"] for event in json.load(stream)["traceEvents"] if event.get("ph") == "X"]
        assert [events.count(verb) for verb in ("forward", "forward_backward", "optim_step")] == [1, 1, 1]
        assert "aten::mm" in events


@pytest.mark.parametrize("steps", ["3", "5:3", "0:2"])
def test_steps_have_the_form_first_last(steps: str) -> None:
    with pytest.raises(ValueError, match=rf"TrainerConfig.profile_steps is '{steps}'"):
        TrainerConfig(profile_steps=steps)
