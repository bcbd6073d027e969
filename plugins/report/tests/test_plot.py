import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from controller.runs.folder import RunFolder
from ownloop_report.plot import CurveDrawer, plot_comparison, plot_curve
from rl.system.disk import RecordingError
from tests.rl.recordings import disk_of

TRAINING = [{"step": float(i), "reward_mean": 0.3 + i / 100, "reward_std": 0.2} for i in range(1, 31)]
EVAL = [{"step": float(i), "eval_reward": 0.4, "eval_reward_low": 0.35, "eval_reward_high": 0.44} for i in (0, 30)]
BLUE, RED = (0x44, 0x77, 0xAA), (0xCC, 0x33, 0x11)


def has_colour(file: Path, colour: tuple[int, int, int]) -> bool:
    """Whether a PNG has pixels of exactly this colour."""
    pixels = np.round(np.asarray(imread(file))[..., :3] * 255).astype(int)
    return bool((pixels == colour).all(axis=-1).any())


@pytest.mark.parametrize(
    ("metrics", "training", "evaluated"),
    [
        (TRAINING + EVAL, True, True),
        (TRAINING, True, False),
        (EVAL, False, True),
        (TRAINING[:1], True, False),
        ([], False, False),
        ([{"step": 1.0, "reward_mean": math.nan, "reward_std": 0.0}], False, False),
    ],
)
def test_draws_what_there_is(
    metrics: Sequence[Mapping[str, float]], training: bool, evaluated: bool, tmp_path: Path
) -> None:
    plot_curve(metrics, tmp_path / "reward.png", "title")
    assert has_colour(tmp_path / "reward.png", BLUE) == training
    assert has_colour(tmp_path / "reward.png", RED) == evaluated


def test_an_interval_on_one_side_of_its_mean_is_drawn(tmp_path: Path) -> None:
    row = {"step": 0.0, "eval_reward": 1.0, "eval_reward_low": 1.0, "eval_reward_high": 1.0 - 1e-16}
    plot_curve([row], tmp_path / "reward.png", "title")
    assert has_colour(tmp_path / "reward.png", RED)


def test_draws_the_metric_that_it_is_told_to(tmp_path: Path) -> None:
    rows = [{"step": 1.0, "loss": 2.0, "reward_mean": 0.5, "eval_reward": 0.5}]
    plot_curve(rows, tmp_path / "loss.png", "title", name="loss", training="loss")
    assert has_colour(tmp_path / "loss.png", BLUE)
    assert not has_colour(tmp_path / "loss.png", RED)


def test_a_full_disk_leaves_the_last_curve_whole(tmp_path: Path) -> None:
    file = tmp_path / "reward.png"
    plot_curve(TRAINING[:1], file, "title")
    before = file.read_bytes()
    with disk_of(1000), pytest.raises(RecordingError, match=r"reward\.png cannot be written: File too large"):
        plot_curve(TRAINING + EVAL, file, "title")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def test_names_with_dollars_are_no_formulas(tmp_path: Path) -> None:
    name = "$SEED_$LR"  # as a shell leaves it within single quotes
    plot_curve(TRAINING + EVAL, tmp_path / "reward.png", name)
    plot_comparison({name: [EVAL, EVAL]}, tmp_path / "compared.png")
    assert has_colour(tmp_path / "reward.png", RED)


@pytest.mark.seconds
def test_curves_are_drawn_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, {})
    drawer = CurveDrawer(folder, seconds_between=1e9)
    image = folder.path / "reward.png"

    def evaluate() -> None:
        drawer.after_evaluation({"reward": "reward_mean"})
        folder.flush()

    evaluate()
    image.unlink()
    evaluate()
    assert not image.exists()  # it was drawn a moment ago
    drawer.seconds_between = 0.0
    evaluate()
    image.unlink()
    drawer.finish()
    folder.flush()
    assert image.exists()
