"""The pages of this plug-in list every loss, advantage and metric that it has.

`.venv/bin/python -m plugins.shelf.tests.test_pages` writes the lists of losses and advantages.
"""

from pathlib import Path

import pytest

from ownloop_shelf.published_advantages import ADVANTAGES
from ownloop_shelf.published_losses import LOSSES
from tests.controller.loops.test_place_in_data import assert_every_item_comes_once
from tests.docs.pages import ROOT, names_in_tables
from tests.docs.test_losses_page import written
from tests.docs.test_metrics_page import is_explained, names_written

PAGE = ROOT / "plugins" / "shelf" / "docs" / "losses.md"


def test_page_is_what_the_docstrings_say() -> None:
    assert PAGE.read_text() == written(PAGE.read_text(), LOSSES.keys(), ADVANTAGES.keys(), pairs=False)


@pytest.mark.slow  # runs a loop
@pytest.mark.usefixtures("in_one_process")
def test_metrics_of_distillation_are_explained(tmp_path: Path) -> None:
    names = names_written("distill", tmp_path / "distill", teacher="smollm2-135m-instruct")
    ours = names_in_tables(ROOT / "plugins" / "shelf" / "README.md", "Metrics")
    assert ours <= names
    assert {name for name in names - ours if not is_explained(name)} == set()


@pytest.mark.seconds
@pytest.mark.stranger("2.C3")
@pytest.mark.usefixtures("in_one_process")
def test_distillation_takes_every_problem_once(tmp_path: Path) -> None:
    assert_every_item_comes_once("distill", tmp_path, teacher="smollm2-135m-instruct")


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), LOSSES.keys(), ADVANTAGES.keys(), pairs=False))
