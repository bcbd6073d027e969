"""The script in this plug-in's examples/, as a user starts it."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.docs.test_examples import output_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.usefixtures("smollm2")
def test_self_play(tmp_path: Path) -> None:
    output = output_of(ROOT / "plugins" / "shelf" / "examples" / "self_play.py", tmp_path, "1")
    assert re.search(r"^step 0: the first player won \d+ of 32", output, re.MULTILINE)
