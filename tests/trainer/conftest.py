"""Engines in the tests' own process leave nothing behind."""

from collections.abc import Generator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def process_group_ends() -> Generator[None]:
    """Ends the process group that an engine of one rank may have made."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
