"""Tinker's image chunks as tokens, for models that read images.

A chunk is the file of an image alone: the tokens around it, such as `<|vision_start|>`, are the client's. The patches
are made here, by the model's own processor, and `expected_tokens` is compared with the tokens that stand for them.
"""

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

from rl.rollouts.rendering import ImageRenderer
from rl.system.hf_config import read_config, vision_of

ReadImage = Callable[[bytes], tuple[int, ...]]
"""The tokens that stand for an image's file, which know it. Raises ValueError for a file that cannot be read."""


def image_reader(model: Path) -> ReadImage | None:
    """What reads images for this model; None for a model of text. Raises ValueError if it lacks its processor."""
    vision = vision_of(read_config(model))
    if vision is None:
        return None
    renderer: ImageRenderer = resolve_name(vision.renderer)(model)
    return renderer.alone


def image_tokens(field: str, data: bytes, expected: int | None, read_image: ReadImage) -> tuple[int, ...]:
    """The tokens of one chunk. Raises ValueError, naming the field, for a bad file and another number of tokens."""
    try:
        tokens = read_image(data)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None
    if expected is not None and expected != len(tokens):
        raise ValueError(
            f"{field} has an image whose expected_tokens is {expected}; this model reads it as {len(tokens)} tokens"
        )
    return tokens
