"""What whole loops run on: meshes in the test's own process, where processes are not what is tested."""

from collections.abc import Generator

import pytest

from tests.in_process import meshes_in_process, vllm_in_process


@pytest.fixture(scope="module")
def in_process() -> Generator[None]:
    """The loops of a module start no process; vLLM runs in this one."""
    with vllm_in_process(), meshes_in_process():
        yield
