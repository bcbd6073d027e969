"""The trainer as a controller sees it: real processes, torchtitan, gloo, a tiny model."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from controller.handles.trainer_handle import TrainerHandle
from controller.processes.place import RunFiles
from rl.losses import LossInputs, get_loss
from rl.tiny_models import random_batch, tiny_llama
from rl.types import AdamParams
from tests.meshes_in_process import meshes_in_process
from tests.waiting import LIMIT_S
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.reference import ReferencePolicy, importance_sampling

pytestmark = pytest.mark.e2e

LENGTHS = (3, 17, 5, 40, 9, 23, 31)
PARAMS = AdamParams(learning_rate=1e-3)


@asynccontextmanager
async def launched(
    config: TrainerConfig, log_dir: Path, of_hosts: RunFiles | None = None
) -> AsyncGenerator[TrainerHandle]:
    trainer = await TrainerHandle.launch(config, "float32", log_dir)
    trainer = trainer if of_hosts is None else replace(trainer, files=of_hosts)
    try:
        yield trainer
    finally:
        await trainer.stop()


def raises(logprobs: torch.Tensor, entropy: torch.Tensor | None, inputs: LossInputs) -> object:
    """A custom loss with a mistake in it."""
    raise ArithmeticError("my own mistake")


def ends(logprobs: torch.Tensor, entropy: torch.Tensor | None, inputs: LossInputs) -> object:
    """A custom loss that would end its process."""
    sys.exit("my own end")


async def test_two_ranks_equal_plain_autograd(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    config = TrainerConfig(
        model=model, compute_dtype="float32", data_parallel_shard=2, max_tokens_per_microbatch=40, num_threads=1
    )
    batch, reference = random_batch(LENGTHS), ReferencePolicy(model)

    async with launched(config, tmp_path / "logs") as trainer:
        first, second, step = await asyncio.gather(  # three calls in flight, executed in this order
            trainer.forward_backward(batch[:6], "importance_sampling"),
            trainer.forward_backward(batch[6:], "importance_sampling"),
            trainer.optim_step(PARAMS, grad_scale=0.5),
        )
        loss = reference.backward(batch, importance_sampling)
        norm = torch.cat([grad.flatten() for grad in reference.gradients().values()]).norm()
        assert first.metrics["loss"] + second.metrics["loss"] == pytest.approx(loss, rel=1e-5)
        assert first.metrics["num_loss_tokens"] == sum(d.num_loss_tokens for d in batch[:6])
        assert step.grad_norm == pytest.approx(0.5 * float(norm), rel=1e-4)
        assert step.policy_version == 1
        peaks = [step.metrics[f"memory_peak_bytes_{verb}_max"] for verb in ("forward_backward", "optim_step")]
        assert min(peaks) > 50e6
        for datum, logprobs in zip(batch, first.logprobs + second.logprobs, strict=True):
            expected = np.where(datum.weights != 0, reference.logprobs(datum).detach().numpy(), 0)
            np.testing.assert_allclose(logprobs, expected, atol=1e-5)

        with pytest.raises(ArithmeticError, match="my own mistake"):
            await trainer.forward_backward(batch, raises)
        with pytest.raises(RuntimeError, match="SystemExit: my own end"):
            await trainer.forward_backward(batch, ends)
        with pytest.raises(ValueError, match="without a gradient"):
            await trainer.optim_step(PARAMS)

        await trainer.to("cpu", model=True, gradients=True, optimizer=True)  # where it is already
        with pytest.raises(ValueError, match="device is 'tpu'; it must be 'cpu' or 'cuda'"):
            await trainer.to("tpu", model=True)
        await trainer.save_checkpoint(tmp_path / "checkpoint")
        await trainer.export_hf(tmp_path / "export")
        output = await trainer.forward(batch, entropy=True)
        assert output.entropy is not None
        assert [len(array) for array in output.entropy] == list(LENGTHS)
        exported = ReferencePolicy(tmp_path / "export")
        for datum, logprobs in zip(batch, output.logprobs, strict=True):
            expected = np.where(datum.weights != 0, exported.logprobs(datum).detach().numpy(), 0)
            np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    one = load_engine(TrainerConfig(model=model, compute_dtype="float32"))
    assert one.load_checkpoint(tmp_path / "checkpoint") == 1


async def test_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path) -> None:
    config = TrainerConfig(model=tiny_llama(tmp_path / "model"), max_tokens_per_microbatch=40)
    batch = random_batch(LENGTHS)

    async def steps(trainer: TrainerHandle, count: int) -> None:
        for _ in range(count):
            await trainer.forward_backward(batch, "ppo")
            await trainer.optim_step(PARAMS, grad_scale=0.1)

    with meshes_in_process():
        async with launched(config, tmp_path / "logs") as trainer:
            await steps(trainer, 3)
            await trainer.save_checkpoint(tmp_path / "half")
            await steps(trainer, 3)
            await trainer.save_checkpoint(tmp_path / "uninterrupted")
        async with launched(config, tmp_path / "logs") as trainer:
            await trainer.forward_backward(batch, "ppo")  # dropped by the load
            assert await trainer.load_checkpoint(tmp_path / "half") == 3
            await steps(trainer, 3)
            await trainer.save_checkpoint(tmp_path / "resumed")
    uninterrupted, resumed = state(config, tmp_path / "uninterrupted"), state(config, tmp_path / "resumed")
    assert uninterrupted.keys() == resumed.keys()
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in resumed)


SCRIPT = """
import asyncio, pathlib, sys, types
from controller.launching.launcher import Launcher
from rl.tiny_models import random_batch, tiny_llama
from rl.types import AdamParams
from trainer.config import TrainerConfig
import my_losses

class OwnError(Exception):
    pass

def complains(logprobs, entropy, inputs):
    raise OwnError("no")

elsewhere = types.ModuleType("elsewhere")  # a module that no process finds
exec("def lost(logprobs, entropy, inputs): return logprobs.sum(), {}", elsewhere.__dict__)
sys.modules["elsewhere"] = elsewhere

async def main():
    model, batch = tiny_llama(pathlib.Path("model")), random_batch([3, 5])
    async with Launcher(pathlib.Path("logs")) as launcher:
        trainer = await launcher.trainer(model, TrainerConfig(compute_dtype="float32"))
        first = await trainer.forward_backward(batch, "my_losses:total")
        for loss in (elsewhere.lost, "elsewhere:lost", complains):
            try:
                await trainer.forward_backward(batch, loss)
            except (ValueError, OwnError) as error:
                print(type(error).__name__, "|", str(error).splitlines()[0])
        await trainer.optim_step(AdamParams(learning_rate=0.0))  # of the first call's gradient
        again = await trainer.forward_backward(batch, my_losses.total)
        print(await trainer.policy_version(), first.metrics["loss"] == again.metrics["loss"])

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow  # of one process that cannot read an argument: tests/controller/processes
@pytest.mark.stranger("B3")
def test_a_loss_beside_the_script_is_found_by_its_processes(tmp_path: Path) -> None:
    scripts, elsewhere = tmp_path / "scripts", tmp_path / "elsewhere"
    scripts.mkdir()
    elsewhere.mkdir()
    (scripts / "script.py").write_text(SCRIPT)
    (scripts / "my_losses.py").write_text("def total(logprobs, entropy, inputs): return logprobs.sum(), {}\n")
    command = [sys.executable, scripts / "script.py"]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    lost = "ArgumentsError | forward_backward: a process cannot read an argument of the call: ModuleNotFoundError: "
    *errors, last = done.stdout.splitlines()
    assert [error[: len(lost)] for error in errors] == [lost, lost, "OwnError | no"]
    assert last == "1 True"


def state(config: TrainerConfig, path: Path) -> dict[str, Any]:
    """Parameters of a checkpoint, and what one more step makes of them, which the optimizer's state decides."""
    engine = load_engine(config)
    assert engine.load_checkpoint(path) == 6
    loaded = {name: p.detach().clone() for name, p in engine.hf_parameters()}
    engine.forward_backward([random_batch(LENGTHS)], get_loss("cross_entropy"))
    engine.optim_step(PARAMS)
    return {**loaded, **{f"{name} stepped": p.detach().clone() for name, p in engine.hf_parameters()}}
