"""A distillation that is killed and resumed does what it would have done."""

from pathlib import Path

import pytest

from plugins.shelf.tests import tiny_distillation
from tests.controller.runs.killed_runs import same_after_kills
from tests.e2e.killed_loops import same_as_whole

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("in_one_process")
def test_a_resumed_run_equals_one_that_was_left_alone(tmp_path: Path) -> None:
    same_after_kills("distill", tmp_path / "whole", teacher="smollm2-135m-instruct")


@pytest.mark.e2e
def test_a_killed_run_goes_on_to_the_same_metrics(tmp_path: Path) -> None:
    same_as_whole(tmp_path, tiny_distillation.__file__)
