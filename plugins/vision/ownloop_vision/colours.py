"""Naming the colour of a square in a drawn picture: "which colour ?". A tiny model learns it on a CPU in minutes.

Each picture has a square of one colour, in any place and of any size, on grey of any brightness. Shades vary, so that
no two pictures are alike.
"""

import functools
import io
import random
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

from PIL import Image, ImageDraw
from pydantic import Field

from rl.configuration import configuration
from rl.envs.procedural import TextProblem, eval_set, train_stream
from rl.system.disk import cache_directory

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 70, 220),
    "yellow": (230, 210, 50),
    "purple": (150, 50, 180),
    "orange": (240, 140, 40),
}
"""Names and their typical shades."""
WORDS = (*COLOURS, "which", "colour", "?")
"""All words that a model for this task needs."""
_SIZE = 64  # pixels of a side: four features in the tiny models
_SPREAD = 25  # how far a shade may be from the typical one, of 255


@configuration
class GuessColour:
    """Name the colour of the square in a picture. Reward 1 for exactly its name, 0 for anything else."""

    num_colours: Annotated[int, Field(ge=2, le=len(COLOURS))] = 6
    """How many of the colours occur, from 2 to 6."""

    @property
    def name(self) -> str:
        """See `rl.protocols.Env`."""
        return f"colour of a square, one of {self.num_colours}"

    @property
    def stop(self) -> tuple[str, ...]:
        """The model's own end token is enough."""
        return ()

    def train_problems(self, seed: int, start: int, count: int) -> list[TextProblem]:
        """See `rl.protocols.Env`."""
        return train_stream(self._problem, seed, start, count)

    def eval_problems(self, count: int) -> list[TextProblem]:
        """See `rl.protocols.Env`."""
        return eval_set(self._problem, count)

    def _problem(self, number: int) -> TextProblem:
        choices = [*COLOURS][: self.num_colours]
        rng = random.Random(number)
        colour = rng.choice(choices)
        parts = [{"type": "image", "image": draw(colour, rng)}, {"type": "text", "text": " which colour ?"}]
        return TextProblem(
            id=f"picture {number}",
            prompt=[{"role": "user", "content": parts}],
            score=functools.partial(_exact, colour),
            answer=colour,
            wrong_answers=tuple(name for name in choices if name != colour),
        )


def draw(colour: str, rng: random.Random) -> bytes:
    """A PNG of a square of this colour on a grey ground."""
    grey = rng.randrange(30, 226)
    picture = Image.new("RGB", (_SIZE, _SIZE), (grey, grey, grey))
    side = rng.randrange(_SIZE // 3, _SIZE - 4)
    left, top = rng.randrange(_SIZE - side), rng.randrange(_SIZE - side)
    shade = tuple(min(255, max(0, value + rng.randint(-_SPREAD, _SPREAD))) for value in COLOURS[colour])
    ImageDraw.Draw(picture).rectangle((left, top, left + side, top + side), fill=shade)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def colour_model(seed: int = 0) -> Path:
    """The directory of a tiny Qwen3-VL with random weights that knows the task's words. The first use makes it."""
    target = cache_directory() / "models" / f"tiny-qwen3-vl-colours-{seed}"
    if target.is_dir():
        return target
    from ownloop_vision.tiny_vl import tiny_qwen3_vl  # loads torch

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    tiny_qwen3_vl(partial, WORDS, seed=seed)
    try:
        partial.rename(target)
    except OSError:  # another process has made it in the meantime
        shutil.rmtree(partial)
    return target


def _exact(colour: str, completion: str) -> float:
    return float(completion.strip() == colour)
