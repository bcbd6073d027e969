"""The benchmark of this plug-in runs in its smallest form."""

import pytest

from tests.benchmarks.smallest_form import check_smallest_form_here


def test_smallest_form(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    check_smallest_form_here("delta_rule", monkeypatch, capfd)
