"""What all tests share: no network, no accelerator unless there is one, and the real model."""

import os
from pathlib import Path

import pytest

# Before any test module imports transformers, which reads it once: models come from disk, never from a hub.
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips `gpu` tests where there is no CUDA device."""
    if Path("/dev/nvidia0").exists():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Directory of SmolLM2-135M-Instruct; converted on first use, which takes some seconds."""
    from controller.runs.models import resolve_model

    return resolve_model("smollm2-135m-instruct")
