"""Tinker's image chunks as tokens, for models that read images.

A chunk is the file of an image alone: the tokens around it, such as `<|vision_start|>`, are the client's. The patches
are made here, by the model's own processor, and `expected_tokens` is compared with the tokens that stand for them.

A prompt may have a pointer in the place of the file. The server fetches nothing, so its location is a data URL, or a
path within a folder that the operator has chosen. In training the SDK sends no pointers.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

from rl.rollouts.rendering import ImageRenderer
from rl.system.hf_config import read_config, vision_of

ReadImage = Callable[[bytes | str], tuple[int, ...]]
"""The tokens that stand for an image, by its file or a pointer's location, which know it. Raises ValueError for what
cannot be read."""


def image_reader(model: Path, folder: Path | None = None) -> ReadImage | None:
    """What reads images for this model; None for a model of text. Pointers may name files below `folder`.

    Raises ValueError if the model lacks its processor.
    """
    vision = vision_of(read_config(model))
    if vision is None:
        return None
    renderer: ImageRenderer = resolve_name(vision.renderer)(model)
    return lambda image: renderer.alone(_pointed(image, folder) if isinstance(image, str) else image)


def image_tokens(field: str, image: bytes | str, expected: int | None, read_image: ReadImage) -> tuple[int, ...]:
    """The tokens of one chunk. Raises ValueError, naming the field, for a bad file and another number of tokens."""
    try:
        tokens = read_image(image)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None
    if expected is not None and expected != len(tokens):
        raise ValueError(
            f"{field} has an image whose expected_tokens is {expected}; this model reads it as {len(tokens)} tokens"
        )
    return tokens


def _pointed(location: str, folder: Path | None) -> str | Path:
    """What an asset pointer names. Raises ValueError for a file that the operator has not allowed, or is none."""
    if location.startswith("data:"):
        return location
    if folder is None:
        raise ValueError(
            f"an asset pointer's location is {location[:80]!r}; it must be a data URL, or a file where the server was"
            " started with --limits.image-folder; send an ImageChunk with the image's bytes in its place"
        )
    with contextlib.suppress(OSError):
        path = (folder / location).resolve(strict=True)  # where links lead
        if path.is_relative_to(folder.resolve()) and path.is_file():
            return path
    raise ValueError(
        f"an asset pointer's location is {location[:80]!r}; it must be a data URL, or name a file within the server's"
        " --limits.image-folder"
    )
