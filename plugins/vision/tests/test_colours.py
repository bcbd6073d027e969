"""The task with pictures is a sound environment, and its problems become datums with images."""

from pathlib import Path

import numpy as np
import pytest

from ownloop_doctors.check_env import check_env
from ownloop_vision.colours import COLOURS, WORDS, GuessColour, colour_model
from ownloop_vision.qwen_images import pixels
from rl.data.sources import EnvExamples, examples_to_data
from rl.rollouts.rendering import Renderer


def test_the_environment_has_no_fault() -> None:
    assert check_env(GuessColour()) == []


@pytest.mark.parametrize("num_colours", [1, 7])
def test_a_number_of_colours_that_there_are_not_is_refused(num_colours: int) -> None:
    with pytest.raises(ValueError, match=f"num_colours is {num_colours}"):
        GuessColour(num_colours=num_colours)


def test_answers_are_the_colours_that_are_drawn() -> None:
    for problem in GuessColour(num_colours=4).train_problems(0, 0, 40):
        assert problem.answer is not None
        assert not isinstance(problem.prompt, str)
        image = np.asarray(pixels(problem.prompt[0]["content"][0]["image"]), dtype=int)
        grey = (np.ptp(image, axis=-1) == 0)[..., None]
        shade = np.ma.masked_array(image, np.broadcast_to(grey, image.shape)).mean(axis=(0, 1))
        nearest = min([*COLOURS][:4], key=lambda name: float(np.abs(shade - COLOURS[name]).sum()))
        assert nearest == problem.answer
        assert problem.reply(problem.answer).reward == 1
        assert {problem.reply(wrong).reward for wrong in (*problem.wrong_answers, "", "which")} == {0}


def test_the_model_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWNLOOP_CACHE", str(tmp_path))
    model = colour_model()
    made = (model / "model.safetensors").stat().st_mtime_ns
    assert colour_model() == model
    assert (model / "model.safetensors").stat().st_mtime_ns == made
    assert [path.name for path in (tmp_path / "models").iterdir()] == [model.name]
    examples = EnvExamples(env=GuessColour()).train_examples(0, 0, 4)
    data = examples_to_data(Renderer(model), examples, train_on="completion", max_tokens=64)
    assert [datum.images[0].num_tokens for datum in data] == [4] * 4
    assert not np.isin(0, data[0].tokens), "no word is unknown"
    assert len(WORDS) == 9
