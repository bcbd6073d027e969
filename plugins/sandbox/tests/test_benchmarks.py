"""The benchmark of this plug-in runs in its smallest form."""

import pytest

from plugins.sandbox.tests.here import need
from tests.benchmarks.smallest_form import check_smallest_form_here


def test_smallest_form(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    need("auto")
    check_smallest_form_here("sandbox", monkeypatch, capfd)
