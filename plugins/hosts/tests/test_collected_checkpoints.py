"""A trainer's checkpoints and models are collected from its host."""

import asyncio
from pathlib import Path

import pytest

from ownloop_hosts import files
from plugins.hosts.tests.hosts_with_files import ForgetfulHost, files_of
from rl.tiny_models import random_batch, tiny_llama
from tests.e2e.test_trainer import LENGTHS, PARAMS, launched
from tests.meshes_in_process import meshes_in_process
from trainer.config import TrainerConfig
from trainer.engines import load_engine

pytestmark = pytest.mark.e2e


def test_checkpoints_of_other_hosts_are_collected(tmp_path: Path) -> None:
    config, host = TrainerConfig(model=tiny_llama(tmp_path / "model"), max_tokens_per_microbatch=40), ForgetfulHost()
    batch, runs = random_batch(LENGTHS), tmp_path / "runs"

    async def controller() -> None:
        async with launched(config, tmp_path / "logs", files_of(host)) as trainer:
            for step in (1, 2):
                await trainer.forward_backward(batch, "ppo")
                await trainer.optim_step(PARAMS)
                await trainer.save_checkpoint(runs / f"step-{step}", asynchronous=True, keep_last=1)
                assert not (runs / f"step-{step}").exists()  # and the trainer is free for the next call
            await trainer.wait_for_checkpoint()
            await trainer.export_hf(runs / "model")
            assert sorted(path.name for path in runs.iterdir()) == ["model", "step-2"]
            host.fails_at = "read_piece"
            await trainer.save_checkpoint(runs / "step-3", asynchronous=True)
            with pytest.raises(ConnectionError, match="host h1 is lost"):
                await trainer.wait_for_checkpoint()
            await trainer.wait_for_checkpoint()  # an error is raised once
            assert not (runs / "step-3").exists()
            assert await trainer.load_checkpoint(runs / "step-2") == 2
            assert host.asked.count("write_piece") > 0

    with meshes_in_process():
        asyncio.run(controller())
    files.remove_unfinished()
    assert sorted(path.name for path in runs.iterdir()) == [".step-3.partial", "model", "step-2"]
    assert load_engine(config).load_checkpoint(runs / "step-2") == 2
