"""Checkpoints are complete or not there, and never replace what is not ours."""

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.losses import get_loss
from rl.tiny_models import random_batch, tiny_llama, tiny_qwen3
from rl.types import AdamParams
from tests.trainer.engine_params import INSTALLED
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine
from trainer.engines.contract.reference import ReferencePolicy
from trainer.engines.pytorch import checkpoint
from trainer.engines.pytorch.hf_directory import write_hf_directory

BATCH = random_batch((5, 12, 9))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model")


@pytest.fixture
def engine(model: Path) -> Engine:
    return load_engine(TrainerConfig(model=model))


def train(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        engine.forward_backward([BATCH], get_loss("cross_entropy"))
        engine.optim_step(AdamParams(learning_rate=1e-2), 0.1)


def parameters(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.hf_parameters()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_resume_is_bitwise_and_restores_randomness(engine: Engine, model: Path, tmp_path: Path) -> None:
    train(engine, 2)
    engine.save_checkpoint(tmp_path / "runs" / "one" / "step2")
    noise = torch.rand(3)
    train(engine, 2)

    fresh = load_engine(TrainerConfig(model=model, seed=1))
    train(fresh, 1)
    fresh.forward_backward([BATCH], get_loss("cross_entropy"))  # dropped by the load
    assert fresh.load_checkpoint(tmp_path / "runs" / "one" / "step2") == fresh.policy_version == 2
    assert torch.equal(torch.rand(3), noise)
    train(fresh, 2)
    assert equal(parameters(fresh), parameters(engine))


def test_untrained_model_can_be_saved(engine: Engine, model: Path, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path / "start")
    train(engine, 1)
    fresh = load_engine(TrainerConfig(model=model))
    fresh.load_checkpoint(tmp_path / "start")
    train(fresh, 1)
    assert equal(parameters(fresh), parameters(engine))


def test_own_checkpoint_is_replaced(engine: Engine, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path / "last")
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "last")
    assert checkpoint.read_info(tmp_path / "last").policy_version == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "model"]


def test_save_in_the_background_is_of_the_moment_of_the_call(engine: Engine, model: Path, tmp_path: Path) -> None:
    train(engine, 1)
    before = parameters(engine)
    engine.save_checkpoint(tmp_path / "background", asynchronous=True)
    train(engine, 2)
    engine.save_checkpoint(tmp_path / "second", asynchronous=True)  # after the first
    assert checkpoint.read_info(tmp_path / "background").policy_version == 1
    engine.wait_for_checkpoint()
    assert checkpoint.read_info(tmp_path / "second").policy_version == 3
    fresh = load_engine(TrainerConfig(model=model))
    assert fresh.load_checkpoint(tmp_path / "background") == 1
    assert equal(parameters(fresh), before)
    train(fresh, 2)
    assert equal(parameters(fresh), parameters(engine))


def test_a_save_in_the_background_leaves_the_cpu_to_the_steps(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    priorities, complete = list[int](), checkpoint.complete

    def recorded(*arguments: Any) -> None:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        complete(*arguments)

    monkeypatch.setattr(checkpoint, "complete", recorded)
    engine.save_checkpoint(tmp_path / "step0", asynchronous=True)
    engine.wait_for_checkpoint()
    engine.save_checkpoint(tmp_path / "step1")  # as before a run ends, which waits for it
    assert priorities == [19, os.getpriority(os.PRIO_PROCESS, 0)]


def test_failure_in_the_background_is_told_once(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no space left")

    (tmp_path / "file").write_text("text")
    with pytest.raises(ValueError, match="will not be overwritten"):
        engine.save_checkpoint(tmp_path / "file", asynchronous=True)
    monkeypatch.setattr(checkpoint, "complete", fail)
    engine.save_checkpoint(tmp_path / "checkpoint", asynchronous=True)
    with pytest.raises(ValueError, match="no space left"):
        engine.wait_for_checkpoint()
    monkeypatch.undo()
    assert not (tmp_path / "checkpoint").exists()
    engine.wait_for_checkpoint()
    engine.save_checkpoint(tmp_path / "checkpoint")
    assert engine.load_checkpoint(tmp_path / "checkpoint") == 0


def test_only_the_newest_checkpoints_are_kept(engine: Engine, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    engine.export_hf(runs / "export", torch.float32)
    (runs / "notes").mkdir()
    for step in range(4):
        engine.save_checkpoint(runs / f"step{step}", keep_last=2, asynchronous=step % 2 == 0)
        train(engine, 1)
    engine.wait_for_checkpoint()
    assert sorted(path.name for path in runs.iterdir()) == ["export", "notes", "step2", "step3"]
    engine.load_checkpoint(runs / "step2", weights_only=True)  # versions begin again from 0
    engine.save_checkpoint(runs / "branch", keep_last=2)
    assert sorted(path.name for path in runs.iterdir()) == ["branch", "export", "notes", "step3"]
    wrong: Any
    for wrong in (0, "x", 1.5, True):
        with pytest.raises(ValueError, match=f"keep_last is {wrong!r}; it must be at least 1, and a whole number"):
            engine.save_checkpoint(runs / "step4", keep_last=wrong)


def test_loading_weights_only_starts_anew_from_them(engine: Engine, model: Path, tmp_path: Path) -> None:
    train(engine, 3)
    engine.save_checkpoint(tmp_path / "checkpoint")
    engine.export_hf(tmp_path / "export", torch.float32)
    fresh, other = load_engine(TrainerConfig(model=tmp_path / "export")), load_engine(TrainerConfig(model=model))
    train(other, 2)
    assert other.load_checkpoint(tmp_path / "checkpoint", weights_only=True) == other.policy_version == 0
    for each in (fresh, other, engine):
        train(each, 1)
    assert equal(parameters(other), parameters(fresh))
    assert not equal(parameters(engine), parameters(fresh))


def test_engines_resume_from_each_other(model: Path, tmp_path: Path) -> None:
    configs = [TrainerConfig(model=model, engine=name, compute_dtype="float32") for name in INSTALLED]
    for config, other in zip(configs, (*configs[1:], configs[0]), strict=True):
        engine, resumed = load_engine(config), load_engine(other)
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "checkpoint")
        assert resumed.load_checkpoint(tmp_path / "checkpoint") == 2
        for each in (engine, resumed):
            train(each, 1)
        for name, parameter in parameters(resumed).items():
            torch.testing.assert_close(parameter, parameters(engine)[name], atol=1e-4, rtol=1e-4)


def test_a_killed_save_leaves_the_old_checkpoint_alone(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.save_checkpoint(tmp_path / "last")

    class Killed(BaseException):
        pass

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    train(engine, 1)
    monkeypatch.setattr(checkpoint, "complete", die)
    for name in ("last", "first"):
        with pytest.raises(Killed):
            engine.save_checkpoint(tmp_path / name)
    monkeypatch.undo()
    assert checkpoint.read_info(tmp_path / "last").policy_version == 0
    for missing in ("first", ".first.partial"):
        with pytest.raises(ValueError, match=r"does not exist|not an ownloop checkpoint"):
            engine.load_checkpoint(tmp_path / missing)
    engine.save_checkpoint(tmp_path / "first")
    assert engine.load_checkpoint(tmp_path / "first") == 1


def test_what_is_not_ours_is_not_overwritten(engine: Engine, model: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("text")
    (tmp_path / "notes" / "mine").touch()
    for name in ("notes", "file", "model"):
        with pytest.raises(ValueError, match=f"{name} exists and is not an ownloop checkpoint"):
            engine.save_checkpoint(tmp_path / name)
    with pytest.raises(ValueError, match="exists and is not"):
        engine.export_hf(model, torch.float32)
    assert (tmp_path / "file").read_text() == "text"


def test_unwritable_place_is_refused(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(ValueError, match="cannot be written"):
        engine.save_checkpoint(tmp_path / "file" / "checkpoint")


def test_full_disk_is_refused_before_writing(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(OSError, match=r"needs 0\.00 GB; 0\.00 GB are free"):
        engine.save_checkpoint(tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_missing_and_foreign_checkpoints_are_refused(engine: Engine, tmp_path: Path) -> None:
    other = load_engine(TrainerConfig(model=tiny_qwen3(tmp_path / "qwen3")))
    other.save_checkpoint(tmp_path / "other")
    engine.export_hf(tmp_path / "export", torch.float32)
    train(engine, 1)
    before = parameters(engine)
    for path, message in (
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path / "qwen3", "not an ownloop checkpoint"),
        (tmp_path / "other", "another model: family 'qwen3' instead of 'llama'"),
        (tmp_path / "export", "an ownloop export; a checkpoint is needed"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.load_checkpoint(path)
    assert engine.policy_version == 1
    assert equal(parameters(engine), before)


def test_damaged_checkpoints_are_refused_and_change_nothing(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    engine.save_checkpoint(path)
    train(engine, 1)
    before = parameters(engine)
    data = next(path.glob("*.distcp"))
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=f"damaged: {data.name} has {len(content) - 1} bytes"):
        engine.load_checkpoint(path)
    data.unlink()
    with pytest.raises(ValueError, match="is missing"):
        engine.load_checkpoint(path)
    info = json.loads((path / "ownloop.json").read_text())
    (path / "ownloop.json").write_text(json.dumps({**info, "format": 99}))
    with pytest.raises(ValueError, match="format 99; this version reads format 1"):
        engine.load_checkpoint(path)
    (path / "ownloop.json").write_text("{")
    with pytest.raises(ValueError, match=r"ownloop.json is damaged"):
        engine.load_checkpoint(path)
    assert equal(parameters(engine), before)


def test_a_flipped_bit_is_found_and_changes_nothing(engine: Engine, tmp_path: Path) -> None:
    path, saved = tmp_path / "checkpoint", parameters(engine)
    engine.save_checkpoint(path)
    train(engine, 1)
    before, data = parameters(engine), next(path.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    place = content.index(saved["model.embed_tokens.weight"].numpy().tobytes())
    content[place] ^= 1
    data.write_bytes(content)
    with pytest.raises(ValueError, match=f"damaged: {data.name} changed since the checkpoint was written"):
        engine.load_checkpoint(path)
    assert equal(parameters(engine), before)
    content[place] ^= 1
    data.write_bytes(content)
    engine.load_checkpoint(path)
    assert equal(parameters(engine), saved)


def test_a_checkpoint_without_checksums_loads(engine: Engine, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "ownloop.json"
    info = json.loads(file.read_text())
    assert [*info.pop("checksums")] == [path.name for path in sorted(file.parent.glob("*.distcp"))]
    file.write_text(json.dumps(info))
    assert engine.load_checkpoint(file.parent) == 0


def test_an_empty_folder_may_be_filled(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    engine.export_hf(tmp_path / "export", torch.float32)
    assert load_file(tmp_path / "export" / "model.safetensors").keys() == parameters(engine).keys()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_export_is_a_model_that_transformers_loads(tmp_path: Path, make: Any, tied: bool) -> None:
    engine = load_engine(TrainerConfig(model=make(tmp_path / "model", tied=tied), compute_dtype="float32"))
    train(engine, 2)
    engine.export_hf(tmp_path / "export", torch.float32)
    reference, output = ReferencePolicy(tmp_path / "export"), engine.forward([BATCH])
    for datum, logprobs in zip(BATCH, output.logprobs, strict=True):
        expected = reference.logprobs(datum).detach() * (torch.from_numpy(datum.weights) != 0)
        torch.testing.assert_close(torch.from_numpy(logprobs), expected, atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "export")("w5 w7")["input_ids"] == [5, 7]

    engine.export_hf(tmp_path / "export", torch.bfloat16)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export").dtype == torch.bfloat16
    weights = load_file(tmp_path / "export" / "model.safetensors")
    assert ("lm_head.weight" in weights) is not tied
    assert all(torch.equal(weights[name], p.bfloat16()) for name, p in parameters(engine).items())


def test_large_export_is_sharded(engine: Engine, model: Path, tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    parameters_of = engine.hf_parameters()
    write_hf_directory(tmp_path / "export", model, parameters_of, torch.float32, "lm", shard_bytes=10_000)
    assert len(list((tmp_path / "export").glob("model-*.safetensors"))) > 2
    assert equal(parameters(load_engine(TrainerConfig(model=tmp_path / "export"))), parameters(engine))
