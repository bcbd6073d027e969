"""What the instruments' tests share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is computed with as many threads as its trainer had, which the test's process would keep."""
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
