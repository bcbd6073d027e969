"""SFT and DPO with a tiny model, in one process: what they learn, and that they resume where they stopped."""

import asyncio
import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from controller.loops import dpo, sft
from controller.loops.dpo import DPOConfig
from controller.loops.sft import SFTConfig
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from rl.data.sources import JsonlExamples, JsonlPreferences, Preference, Preferences
from rl.tiny_models import tiny_llama
from trainer.config import TrainerConfig

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process")]

TRAINER = TrainerConfig(compute_dtype="float32", max_tokens_per_microbatch=128)


def _write(path: Path, *fields: str) -> Path:
    """Prompts of two words; the first answer is the first word's successor, the second its predecessor, both twice."""
    answers = [lambda n: f"w{n + 1} w{n + 1}", lambda n: f"w{n - 1} w{n - 1}"]
    rows = [
        {"prompt": f"w{n} w{m}"} | {name: answer(n) for name, answer in zip(fields, answers, strict=False)}
        for n in range(10, 30)
        for m in range(30, 60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _measured(folder: RunFolder) -> dict[int, dict[str, float]]:
    """What was measured on held-out data, by step."""
    rows = [row for row in folder.metrics() if "eval_loss" in row]
    return {int(row["step"]): {name: row[name] for name in row if name != "time"} for row in rows}


def test_sft_learns_and_keeps_its_schedule(tmp_path: Path) -> None:
    config = SFTConfig(
        model=str(tiny_llama(tmp_path / "model")),
        data=JsonlExamples(path=_write(tmp_path / "data.jsonl", "completion")),
        trainer=TRAINER,
        num_steps=24,
        examples_per_step=16,
        learning_rate=1e-2,
        warmup_steps=3,
        max_tokens=64,
        num_eval=100,
        evaluate_every=12,
    )
    folder, stream = RunFolder(tmp_path / "run", config), io.StringIO()
    asyncio.run(sft.train(config, folder, Console(stream)))
    rows = folder.metrics()
    measured = [row for row in rows if "eval_loss" in row]
    assert [row["step"] for row in measured] == [0, 12, 24]
    assert measured[0]["eval_loss"] == pytest.approx(np.log(64), rel=0.4)
    assert measured[-1]["eval_loss_high"] < 0.3 * measured[0]["eval_loss_low"]
    steps = [row for row in rows if "grad_norm" in row]
    assert [row["policy_version"] for row in steps] == list(range(1, 25))
    assert steps[0]["learning_rate"] == pytest.approx(1e-2 / 4)
    assert max(row["learning_rate"] for row in steps) == pytest.approx(1e-2, rel=0.1)
    assert 0 < steps[-1]["learning_rate"] < 1e-4  # the cosine ends after the last step, which trains too
    assert AutoModelForCausalLM.from_pretrained(folder.path / "model").config.hidden_size == 32
    output = stream.getvalue()
    assert "held-out loss before training: " in output
    assert output.rstrip().splitlines()[-1].startswith("Held-out loss went from ")


@dataclass(frozen=True)
class Interrupted:
    """Preferences whose source fails when asked for the pairs from number `until` on, once all were asked for once."""

    data: Preferences
    until: int
    num_asked: list[int] = field(default_factory=list[int])

    def train_preferences(self, seed: int, start: int, count: int) -> Sequence[Preference]:
        if start in self.num_asked and start >= self.until:
            raise ConnectionError("the pairs are gone")
        self.num_asked.append(start)
        return self.data.train_preferences(seed, start, count)

    def eval_preferences(self, count: int) -> Sequence[Preference]:
        return self.data.eval_preferences(count)


def test_dpo_learns_and_goes_on_with_the_reference_it_had(tmp_path: Path) -> None:
    data = JsonlPreferences(path=_write(tmp_path / "data.jsonl", "chosen", "rejected"))
    config = DPOConfig(
        model=str(tiny_llama(tmp_path / "model")),
        data=data,
        trainer=TRAINER,
        num_steps=32,
        pairs_per_step=16,
        learning_rate=1e-2,
        beta=0.5,
        max_tokens=64,
        num_eval=100,
        evaluate_every=16,
        checkpoint_every=8,
    )
    begun = RunFolder(tmp_path / "begun", config)
    with pytest.raises(ConnectionError, match="the pairs are gone"):
        asyncio.run(dpo.train(replace(config, data=Interrupted(data, until=20 * 16)), begun, Console(io.StringIO())))
    assert max(row["step"] for row in begun.metrics()) == 20
    resumed = RunFolder(shutil.copytree(begun.path, tmp_path / "resumed"), config, resume=True)
    asyncio.run(dpo.train(config, resumed, Console(io.StringIO())))

    measured = _measured(resumed)
    assert list(measured) == [0, 16, 32]
    # At step 16 policy and reference are far apart, so another reference would be seen.
    assert measured[16] == _measured(begun)[16]
    assert abs(measured[16]["eval_margin"]) > 0.1
    before, after = measured[0], measured[32]
    assert before["eval_loss"] == pytest.approx(np.log(2), abs=1e-6)  # policy and reference are one
    assert (before["eval_margin"], before["eval_reward_accuracy"]) == (0, 0.5)
    assert after["eval_loss_high"] < 0.6
    assert after["eval_accuracy_low"] > before["eval_accuracy_high"]
    assert after["eval_reward_accuracy_low"] > 0.6
    steps = [row for row in resumed.metrics() if "grad_norm" in row]
    assert [row["step"] for row in steps] == [row["policy_version"] for row in steps] == list(range(1, 33))
    assert steps[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)


def test_a_users_mistakes_are_told_before_any_process_starts(tmp_path: Path) -> None:
    model = str(tiny_llama(tmp_path / "model"))
    good = JsonlExamples(path=_write(tmp_path / "good.jsonl", "completion"))
    (tmp_path / "bad.jsonl").write_text('{"prompt": "w3 w4"}\n')
    config = SFTConfig(
        model=model, data=good, trainer=TRAINER, num_steps=2, examples_per_step=2, learning_rate=1e-3, max_tokens=64
    )

    def refused(changed: SFTConfig, message: str) -> None:
        folder = RunFolder(tmp_path / f"run-{len(list(tmp_path.iterdir()))}", changed)
        with pytest.raises(ValueError, match=message):
            asyncio.run(sft.train(changed, folder, Console(io.StringIO())))
        assert not list(folder.logs.iterdir())

    refused(replace(config, data=JsonlExamples(path=tmp_path / "bad.jsonl")), r"bad.jsonl:1 lacks 'completion'")
    refused(replace(config, max_tokens=500), r"max_tokens is 500; it must be between 2 and the model's context of 128")
    refused(replace(config, max_tokens=4), r"max_tokens is 4; every held-out text is longer")
    with pytest.raises(ValueError, match=r"train_on is 'prompt'"):
        replace(config, train_on="prompt")  # type: ignore[arg-type]
    refused(replace(config, model="gpt-5"), r"model 'gpt-5' is neither a local directory nor a known name")
    with pytest.raises(ValueError, match=r"examples_per_step is 0"):
        replace(config, examples_per_step=0)
    with pytest.raises(ValueError, match=r"weight_decay is -1"):
        replace(config, weight_decay=-1.0)
    pairs = JsonlPreferences(path=good.path)
    of_pairs = DPOConfig(model=model, data=pairs, trainer=TRAINER, num_steps=2, pairs_per_step=2, learning_rate=1e-3)
    with pytest.raises(ValueError, match=r"loss is 'dpo2': not known; did you mean 'dpo'"):
        replace(of_pairs, loss="dpo2")
    with pytest.raises(ValueError, match=r"beta is 0"):
        replace(of_pairs, beta=0)
