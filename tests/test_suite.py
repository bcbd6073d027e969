"""What `.ci/run` relies on: a strict run fails for a skipped test that needs no other hardware."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_LEAVES_OUT = """
import pytest

def test_skipped():
    pytest.skip("no such device; " + 20 * "one needs another machine ")
"""

_WITH_PLUGIN = """
from tests.suite import LeftOut

def pytest_configure(config):
    config.pluginmanager.register(LeftOut(strict={strict}))
"""

_SKIPS = """
import pytest

def test_of_a_gpu():
    pytest.skip("hardware: needs a GPU")
"""

_SKIPS_A_FILE = """
import pytest

pytest.importorskip("a_package_that_nobody_has")
"""


@pytest.mark.seconds
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ((_SKIPS,), None),
        ((_SKIPS, _LEAVES_OUT), "no such device"),
        ((_SKIPS, _SKIPS_A_FILE), "a_package_that_nobody_has"),
    ],
)
def test_a_strict_run_fails_for_what_can_be_installed(
    tmp_path: Path, files: tuple[str, ...], reason: str | None, workers: int
) -> None:
    for number, text in enumerate(files):
        (tmp_path / f"test_fake_{number}.py").write_text(text)
    (tmp_path / "conftest.py").write_text(_WITH_PLUGIN.format(strict=True))
    command = [sys.executable, "-m", "pytest", "-cpyproject.toml", "-pno:cacheprovider", f"-n{workers}", str(tmp_path)]
    done = subprocess.run(command, env=_env(), capture_output=True, text=True, timeout=300, check=False)
    errors = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    if reason is None:
        assert (done.returncode, errors) == (0, [])
    else:
        assert done.returncode == 1
        assert reason in errors[0]
        assert "GPU" not in errors[0]


def _env() -> dict[str, str]:
    """Without what a run of this test may set itself: it may be one under pytest-xdist, and under a cap."""
    ours = ("PYTEST_", "ONEDNN_", "ATEN_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}
