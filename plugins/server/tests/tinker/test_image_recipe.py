"""The cookbook's classifier of images, unchanged, on pictures in a folder: `-m slow test_image_recipe.py`."""

import random
from pathlib import Path

import pytest

pytest.importorskip("tinker", reason="the package tinker, of the extra tinker, is not installed")

from ownloop_server.child_server import served
from ownloop_vision.colours import COLOURS, draw
from ownloop_vision.image_prompts import FOLDER
from ownloop_vision.tiny_vl import tiny_qwen3_vl
from plugins.server.tests.tinker.conftest import FLOAT32
from plugins.server.tests.tinker.recipes import metric, run_recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not FOLDER.is_dir(), reason="torchvision for the CPU is not installed"),
]
WORDS = ("What is the name of the subject in this photo? The subject in this photo is:").split()


def write_pictures(folder: Path) -> None:
    """`dpdl-benchmark/caltech101`: a folder for each class, as `datasets` reads them."""
    rng = random.Random(0)
    for split, count in (("train", 8), ("test", 2)):
        for colour in COLOURS:
            of_class = folder / "dpdl-benchmark" / "caltech101" / split / colour
            of_class.mkdir(parents=True)
            for number in range(count):
                (of_class / f"{number}.png").write_bytes(draw(colour, rng))


def test_a_classifier_learns_and_is_evaluated(tmp_path: Path) -> None:
    model = tiny_qwen3_vl(tmp_path / "model", [*WORDS, *COLOURS], max_position_embeddings=1024)
    write_pictures(tmp_path / "recipe")
    options = {"--trainer.engine": "fsdp2", "--generator.max-model-len": "256"}
    arguments = [each for option in options.items() for each in option]
    with served(model, tmp_path / "server", *FLOAT32, *arguments) as server:
        log = run_recipe(
            server,
            "vlm_classifier.train",
            tmp_path / "recipe",
            model_name=model,
            renderer_name="qwen3_vl_instruct",
            log_path=None,
            experiment_dir=tmp_path / "recipe" / "log",
            learning_rate=1e-2,
            batch_size=16,
            num_epochs=4,
            eval_every=6,
            n_eval=8,
            max_tokens=8,
        )
        (experiment,) = [path for path in log.iterdir() if path.is_dir()]
        losses = metric(experiment, "train_mean_nll")
        assert losses[-1] < losses[0] - 1
