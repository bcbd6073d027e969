"""The benchmark of this plug-in runs in its smallest form."""

import pytest

from tests.benchmarks.smallest_form import check_smallest_form_here


def test_smallest_form(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    check_smallest_form_here("delta_rule", monkeypatch, capfd)


@pytest.mark.ranks
@pytest.mark.slow
def test_smallest_form_of_layouts(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    check_smallest_form_here("layouts_of_families", monkeypatch, capfd)
