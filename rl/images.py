"""Images among the tokens of a sequence: which tokens stand for an image, its file, and what the model reads of it.

Text needs nothing of this. Tokens with images are a tuple that knows its images, so that both kinds of prompts pass
through the same calls: a renderer makes one, a generator samples from it, a datum is made of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImage:
    """An image, and the tokens of a sequence that stand for it."""

    start: int
    """Index of the first of these tokens."""
    num_tokens: int
    """How many there are, one for each feature that the model computes of the image."""
    data: bytes = field(repr=False)
    """The image's file, such as a PNG."""
    inputs: Mapping[str, np.ndarray] = field(repr=False, compare=False)
    """What the features are computed from, by transformers' names: patches, and the grid that they are from."""

    def moved(self, by: int) -> "PlacedImage":
        """The same image, `by` tokens further on."""
        return replace(self, start=self.start + by)


class TokensWithImages(tuple[int, ...]):
    """Tokens, some of which stand for images. Equal to the plain tuple of the same tokens."""

    images: tuple[PlacedImage, ...]
    """In the order of their places."""

    def __new__(cls, tokens: Sequence[int], images: Sequence[PlacedImage]) -> "TokensWithImages":
        """`images` have places among these tokens, in order."""
        self = super().__new__(cls, tokens)
        self.images = tuple(images)
        return self

    def __reduce__(self) -> tuple[type, tuple[tuple[int, ...], tuple[PlacedImage, ...]]]:
        """Pickles the tokens and the images."""
        return TokensWithImages, (tuple(self), self.images)


def images_of(tokens: Sequence[int]) -> tuple[PlacedImage, ...]:
    """The images that these tokens know; none for plain tokens."""
    return tokens.images if isinstance(tokens, TokensWithImages) else ()


def join_tokens(*parts: Sequence[int]) -> tuple[int, ...]:
    """The tokens of all parts, one part after the other, with the images of every part."""
    tokens: list[int] = []
    images: list[PlacedImage] = []
    for part in parts:
        images += [image.moved(len(tokens)) for image in images_of(part)]
        tokens.extend(part)  # an array's too
    return TokensWithImages(tokens, images) if images else tuple(tokens)
