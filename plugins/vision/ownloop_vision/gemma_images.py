"""Images for Gemma 3: one square picture each by transformers' processor, and the tokens around it.

The chat template puts one token where an image is. In its place come two line breaks, a token that begins an image, as
many tokens as it has features, one that ends it, and two line breaks. Line breaks that touch are one token, as if the
whole text had been tokenised at once.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ownloop_vision.qwen_images import check_processor, file_bytes, pixels, places_of
from rl.images import PlacedImage, TokensWithImages
from rl.rollouts.tokenizer import load_tokenizer
from rl.system.hf_config import read_config


class GemmaImages:
    """The `ImageRenderer` of Gemma 3."""

    def __init__(self, model: Path) -> None:
        """Reads the settings. Raises ValueError for a directory without a processor, or whose processor cuts images."""
        check_processor(model)
        # Loading it imports a part of transformers that text does without.
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        self._processor: Any = Gemma3ImageProcessorPil.from_pretrained(model)
        if self._processor.do_pan_and_scan:
            raise ValueError(
                f"{model}: do_pan_and_scan is true in the processor's settings, which cuts images into several; only "
                "whole images are supported: set it to false"
            )
        config = read_config(model)
        self._num_tokens: int = config.get("mm_tokens_per_image", 256)
        self._begin: int = config.get("boi_token_index", 255_999)
        self._end: int = config.get("eoi_token_index", 256_000)
        self._token: int = config.get("image_token_index", 262_144)
        self._tokenizer: Any = load_tokenizer(model)
        vocabulary: Mapping[str, int] = self._tokenizer.get_vocab()
        self._breaks = {token: len(text) for text, token in vocabulary.items() if text and not text.strip("\n")}

    def place(self, tokens: Sequence[int], images: Sequence[object]) -> TokensWithImages:
        """See `rl.rollouts.rendering.ImageRenderer`. Raises ValueError unless there is one token for each image."""
        marks = places_of(tokens, self._begin, len(images))
        gap = self._line_breaks(2)
        ends = itertools.pairwise([-1, *marks, len(tokens)])
        first, *others = [[*tokens[before + 1 : mark]] for before, mark in ends]
        longer = self._merged([*first, *gap])
        placed: list[PlacedImage] = []
        for number, (image, after) in enumerate(zip(images, others, strict=True), 1):
            placed.append(self.read(image, start=len(longer) + 1))
            longer += [self._begin, *[self._token] * self._num_tokens, self._end]
            longer += self._merged([*gap, *after, *(gap if number < len(images) else ())])
        return TokensWithImages(longer, placed)

    def alone(self, image: object) -> TokensWithImages:
        """See `rl.rollouts.rendering.ImageRenderer`."""
        return TokensWithImages([self._token] * self._num_tokens, [self.read(image, start=0)])

    def read(self, image: object, *, start: int) -> PlacedImage:
        """One image, in any of the forms of `file_bytes`, whose tokens begin at `start`."""
        data = file_bytes(image)
        made = np.asarray(self._processor(images=[pixels(data)])["pixel_values"][0], dtype=np.float32)
        return PlacedImage(start=start, num_tokens=self._num_tokens, data=data, inputs={"pixel_values": made})

    def _merged(self, tokens: Sequence[int]) -> list[int]:
        """The tokens of the same text, in which line breaks that follow each other are as few tokens as they can be."""
        merged: list[int] = []
        for is_break, group in itertools.groupby(tokens, key=self._breaks.__contains__):
            run = [*group]
            again = is_break and len(run) > 1
            merged += self._line_breaks(sum(self._breaks[token] for token in run)) if again else run
        return merged

    def _line_breaks(self, count: int) -> list[int]:
        return self._tokenizer.encode("\n" * count, add_special_tokens=False)
