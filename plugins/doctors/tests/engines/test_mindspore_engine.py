"""The MindSpore engine in its own environment: the contract, critics, exchange with torchtitan, a whole loop.

Each engine starts a process that imports MindSpore, which takes seconds, so everything here is slow.
"""

import asyncio
import io
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from controller.loops import sft
from controller.loops.sft import SFTConfig
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from examples.engines.mindspore_engine.child import ChildError
from examples.engines.mindspore_engine.engine import MindSporeEngine
from examples.engines.mindspore_engine.start import mindspore_python
from ownloop_doctors.comparisons import require_close, require_equal
from ownloop_doctors.one_rank import (
    BATCH,
    MICROBATCHES,
    MODEL_CHECKS,
    PARAMS,
    STATE_CHECKS,
    Check,
    Subject,
    step,
)
from rl.data.sources import JsonlExamples
from rl.losses import LossInputs, get_loss
from rl.tiny_models import critic_batch, random_batch, tiny_critic, tiny_dense, tiny_llama, tiny_qwen3
from tests.made_up_plugin import write_plugin
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine
from trainer.engines.contract.reference import gradients, parameters
from trainer.engines.pytorch.frozen_base import FrozenBase


def _environment_is_missing() -> bool:
    try:
        mindspore_python()
    except ValueError:
        return True
    return False


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_environment_is_missing(), reason="MindSpore's environment is not there; the README makes it"),
]
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": tiny_llama,
    "qwen2": lambda path: tiny_dense("qwen2", path, tied=False),
    "qwen3": lambda path: tiny_qwen3(path, tied=False),
}
CHECKS = {**MODEL_CHECKS, **STATE_CHECKS}


def config_of(model: Path) -> TrainerConfig:
    return TrainerConfig(model=model, compute_dtype="float32")


@pytest.mark.parametrize("check", [pytest.param(check, id=name) for name, check in CHECKS.items()])
def test_it_keeps_the_contract(check: Check, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    print(check(Subject(lambda: MindSporeEngine(config_of(model)), model, tmp_path)))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_it_computes_what_other_families_compute(family: str, tmp_path: Path) -> None:
    model = MODELS[family](tmp_path / "model")
    subject = Subject(lambda: MindSporeEngine(config_of(model)), model, tmp_path)
    for name in ("loss", "gradients", "parameters by name"):
        print(MODEL_CHECKS[name](subject))


def test_a_loss_of_the_entropy_gets_its_gradient(tmp_path: Path) -> None:
    config = config_of(tiny_llama(tmp_path))
    mine, reference = MindSporeEngine(config), load_engine(config)
    for engine in (mine, reference):
        engine.forward_backward(MICROBATCHES, get_loss(_with_entropy))
    require_close("gradients", gradients(mine), gradients(reference), 1e-5)


def test_a_critic_is_that_of_torchtitan(tmp_path: Path) -> None:
    config = replace(config_of(tiny_critic(tmp_path)), head="value")
    mine, reference = MindSporeEngine(config), load_engine(config)
    batch = [critic_batch((1, 17, 5)), critic_batch((40, 9))]
    outputs = [engine.forward_backward(batch, get_loss("value")) for engine in (mine, reference)]
    assert outputs[0].metrics["loss"] == pytest.approx(outputs[1].metrics["loss"], rel=1e-5)
    assert outputs[0].logprobs == ()
    require_close("gradients", gradients(mine), gradients(reference), 1e-5)
    require_close("values", _values(mine), _values(reference), 1e-5)


def test_a_new_critic_starts_at_zero(tmp_path: Path) -> None:
    engine = MindSporeEngine(replace(config_of(tiny_llama(tmp_path)), head="value"))
    assert not any(tensor.any() for tensor in _values(engine).values())
    with pytest.raises(ValueError, match="needs a trainer with head='lm'"):
        engine.forward_backward(MICROBATCHES, get_loss("ppo"))


def test_a_frozen_model_scores_and_is_not_trained(tmp_path: Path) -> None:
    config = replace(config_of(tiny_llama(tmp_path)), frozen=True)
    frozen, reference = FrozenBase(config, MindSporeEngine(config)), load_engine(config)
    found, expected = (engine.forward(MICROBATCHES).logprobs for engine in (frozen, reference))
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    with pytest.raises(ValueError, match="forward_backward: the model is frozen"):
        frozen.forward_backward(MICROBATCHES, get_loss("ppo"))


@pytest.mark.parametrize("forward", [True, False], ids=["to_torchtitan", "from_torchtitan"])
def test_training_goes_on_in_another_engine(forward: bool, tmp_path: Path) -> None:
    config = config_of(tiny_llama(tmp_path / "model"))
    engines: list[Engine] = [MindSporeEngine(config), load_engine(config)]
    writer, reader = engines if forward else reversed(engines)
    for _ in range(2):
        step(writer)
    writer.save_checkpoint(tmp_path / "checkpoint", asynchronous=True)
    writer.wait_for_checkpoint()
    assert reader.load_checkpoint(tmp_path / "checkpoint") == 2
    require_equal("loaded parameters", parameters(reader), parameters(writer))
    for engine in engines:
        step(engine)
    require_close("parameters after the next step", parameters(reader), parameters(writer), 1e-6)


def test_its_memory_counts_and_its_end_is_told(tmp_path: Path) -> None:
    engine = MindSporeEngine(config_of(tiny_llama(tmp_path)))
    step(engine)
    engine.forward_backward([BATCH], get_loss("ppo"))
    own = int(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line).split()[1])
    peaks = engine.optim_step(PARAMS).metrics
    assert peaks["memory_peak_bytes_forward_backward_max"] > own * 1024 + 50e6  # MindSpore itself takes more
    os.kill(engine._child.pid, signal.SIGKILL)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(ChildError, match="the child ended; exit status: -9"):
        engine.forward([random_batch((3,))])


@pytest.mark.usefixtures("in_process")
def test_a_loop_trains_as_with_torchtitan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_plugin(tmp_path / "site", {"engines.mindspore": "examples.engines.mindspore_engine.row:ROW"})
    monkeypatch.syspath_prepend(tmp_path / "site")
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"w{n} w{n + 9}", "completion": f"w{n + 1} w{n + 1}"} for n in range(10, 40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    norms: list[list[float]] = []
    for engine in ("mindspore", "torchtitan"):
        config = SFTConfig(
            model=str(tiny_llama(tmp_path / engine / "model")),
            data=JsonlExamples(path=data),
            trainer=TrainerConfig(engine=engine, compute_dtype="float32", max_tokens_per_microbatch=64),
            num_steps=5,
            examples_per_step=8,
            learning_rate=1e-3,
            max_tokens=64,
            num_eval=8,
            evaluate_every=5,
        )
        folder = RunFolder(tmp_path / engine / "run", config)
        asyncio.run(sft.train(config, folder, Console(io.StringIO())))
        norms.append([row["grad_norm"] for row in folder.metrics() if "grad_norm" in row])
    assert len(norms[0]) == 5
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def _values(engine: Engine) -> dict[str, Tensor]:
    found = engine.forward([critic_batch((7, 30))]).values
    assert found is not None
    return {str(index): torch.from_numpy(values) for index, values in enumerate(found)}


def _with_entropy(logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> object:
    assert entropy is not None
    return -(inputs.weights * (logprobs * inputs["advantages"] + 0.5 * entropy)).sum(), {}
