"""The script of the contract on several engine ranks, and what only these engines promise beyond it."""

import contextlib
import resource
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.config import TrainerConfig
from trainer.engines.base import Engine
from trainer.engines.contract.several_ranks import Build, layout_script


def script(build: Build, config: TrainerConfig, rank: int, directory: Path) -> dict[str, Any]:
    """The contract's script, and then a rank that has no room for its files."""
    engine = build(config)
    results = layout_script(lambda _: engine, config, rank, directory)
    fail_to_write(engine, rank, config.num_ranks, directory)
    return results


def fail_to_write(engine: Engine, rank: int, num_ranks: int, directory: Path) -> None:
    """One rank has no room for its files; every rank raises, and the checkpoint that was there stays."""
    with no_space(rank == num_ranks - 1), pytest.raises(OSError, match="checkpoint could not be written: rank"):
        engine.save_checkpoint(directory / "checkpoint")
    with no_space(rank == 0), pytest.raises(Exception, match="File too large"):
        engine.export_hf(directory / "export", torch.float32)
    assert engine.load_checkpoint(directory / "checkpoint") == 3


@contextlib.contextmanager
def no_space(applies: bool) -> Generator[None]:
    """Within the block, this process cannot write files of more than 100 bytes, if `applies`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 if applies else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
