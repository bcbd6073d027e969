"""What all tests share: no network, no accelerator unless there is one, the real model, and how workers share the tests."""

import os
from pathlib import Path

import pytest

# Before any test module imports transformers, which reads it once: models come from disk, never from a hub.
os.environ["HF_HUB_OFFLINE"] = "1"

_TESTS = Path(__file__).parent
_SHARED = ("vllm", "ranks")
"""Markers of tests that share what takes longest: vLLM's imports, and the process that ranks are forked from."""
_LONGEST_FIRST = ("vllm", "e2e", "ranks")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders and groups tests for `--dist loadgroup`, and skips `gpu` tests where there is no CUDA device.

    A file's tests stay together because they share fixtures, and all that need vLLM in the test's own process stay
    together because importing it takes seconds.
    """
    items.sort(key=_place)
    has_gpu = Path("/dev/nvidia0").exists()
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _group(item: pytest.Item) -> str:
    """The tests that one worker runs together, by the marker or the file that they have in common."""
    return next((name for name in _SHARED if item.get_closest_marker(name)), str(item.path.relative_to(_TESTS)))


def _place(item: pytest.Item) -> int:
    """Longest first, so that no worker is left with a long group at the end."""
    return next((place for place, name in enumerate(_LONGEST_FIRST) if item.get_closest_marker(name)), 9)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Directory of SmolLM2-135M-Instruct; converted on first use, which takes some seconds."""
    from controller.runs.models import resolve_model

    return resolve_model("smollm2-135m-instruct")
