"""Images for Qwen's vision-language models: patches by transformers' processor, and the tokens that stand for them.

The chat template puts one token where an image is. It is repeated here, once for each feature: a square of patches.
"""

import base64
import binascii
import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from rl.images import PlacedImage, TokensWithImages
from rl.system.hf_config import read_config_file

_ACCEPTED = "the bytes of an image file, a path, a data URL, or an image of Pillow"
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class QwenImages:
    """The `ImageRenderer` of Qwen2.5-VL and Qwen3-VL."""

    def __init__(self, model: Path) -> None:
        """Reads the processor's settings. Raises ValueError for a directory without them."""
        check_processor(model)
        # Loading it imports a part of transformers that text does without.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self._processor: Any = Qwen2VLImageProcessorPil.from_pretrained(model)
        self._token: int = read_config_file(model)["image_token_id"]

    def place(self, tokens: Sequence[int], images: Sequence[object]) -> TokensWithImages:
        """See `rl.rollouts.rendering.ImageRenderer`. Raises ValueError unless there is one token for each image."""
        places = places_of(tokens, self._token, len(images))
        placed: list[PlacedImage] = []
        longer: list[int] = []
        end = 0
        for place, image in zip(places, images, strict=True):
            longer += tokens[end:place]
            placed.append(self.read(image, start=len(longer)))
            longer += [self._token] * placed[-1].num_tokens
            end = place + 1
        return TokensWithImages([*longer, *tokens[end:]], placed)

    def alone(self, image: object) -> TokensWithImages:
        """See `rl.rollouts.rendering.ImageRenderer`."""
        placed = self.read(image, start=0)
        return TokensWithImages([self._token] * placed.num_tokens, [placed])

    def read(self, image: object, *, start: int) -> PlacedImage:
        """One image, in any of the forms of `file_bytes`, whose tokens begin at `start`."""
        data = file_bytes(image)
        made = self._processor(images=[pixels(data)])
        grid = np.asarray(made["image_grid_thw"][0], dtype=np.int64)  # [3]: images, rows and columns of patches
        return PlacedImage(
            start=start,
            num_tokens=int(grid.prod()) // self._processor.merge_size**2,
            data=data,
            inputs={"pixel_values": np.asarray(made["pixel_values"], dtype=np.float32), "image_grid_thw": grid},
        )


def check_processor(model: Path) -> None:
    """Raises ValueError for a model directory without the settings of a processor."""
    if not any((model / name).is_file() for name in _PROCESSOR_FILES):
        raise ValueError(f"{model} has neither {' nor '.join(_PROCESSOR_FILES)}, by which images become patches")


def places_of(tokens: Sequence[int], mark: int, num_images: int) -> list[int]:
    """Where the token `mark` is. Raises ValueError unless it is there once for each image."""
    places = [index for index, token in enumerate(tokens) if token == mark]
    if len(places) != num_images:
        raise ValueError(
            f"the chat template shows {len(places)} images and the prompt has {num_images}; it must show each once"
        )
    return places


def file_bytes(source: object) -> bytes:
    """The bytes of an image's file. An image of Pillow becomes a PNG, turned as its EXIF says.

    A mapping with `bytes` or `path`, as `datasets` makes of a column of images, stands for the first that it has.
    Raises ValueError for anything else, for a file that cannot be read, and for an address in a network: the controller
    fetches nothing.
    """
    if isinstance(source, Mapping):
        fields = cast("Mapping[str, Any]", source)
        source = fields.get("bytes") or fields.get("path")
    if isinstance(source, Image.Image):
        file, upright = io.BytesIO(), _of_8_bits(_upright(source))
        other = "RGBA" if upright.has_transparency_data else "RGB"
        (upright if upright.mode in _PNG_MODES else upright.convert(other)).save(file, "PNG")
        return file.getvalue()
    if isinstance(source, bytes | bytearray):
        return bytes(source)
    if isinstance(source, str) and source.startswith("data:"):
        return _data_url(source)
    if isinstance(source, str) and "://" in source[:16]:
        raise ValueError(f"an image is {source[:80]!r}; addresses are not fetched: give {_ACCEPTED}")
    if not isinstance(source, str | Path):
        raise ValueError(f"an image is a {type(source).__name__}; it must be {_ACCEPTED}")
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise ValueError(f"the image {str(source)[:200]} cannot be read: {error.strerror}") from None


def _data_url(url: str) -> bytes:
    head, comma, content = url.partition(",")
    try:
        if comma and head.endswith(";base64"):
            return base64.b64decode(content, validate=True)
    except binascii.Error:
        pass
    raise ValueError(f"an image is {url[:40]!r}; a data URL must be 'data:image/png;base64,' and the file in base64")


def pixels(data: bytes) -> Image.Image:
    """The whole image, decoded, in RGB, turned as its EXIF says, on white where it is transparent, as in vLLM.

    Raises ValueError for a file that is broken or of no known format.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            upright = _upright(image)
    except UnidentifiedImageError:
        raise ValueError(f"an image of {len(data)} bytes is in no format that Pillow knows") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"an image of {len(data)} bytes is broken: {error}") from None
    image = _of_8_bits(upright)
    if image.has_transparency_data:
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    """The image as a viewer shows it: cameras store photos lying, and say in EXIF how to turn them.

    transformers' and vLLM's readers turn them too. A photo whose EXIF cannot be read stays as it is stored.
    """
    image.load()  # raises for a broken file
    with contextlib.suppress(Exception):  # Pillow's errors for broken EXIF are of many kinds
        return ImageOps.exif_transpose(image)
    return image


def _of_8_bits(image: Image.Image) -> Image.Image:
    """The image with at most 8 bits a channel. Pillow would cut off what is above 255, so that it becomes white.

    Raises ValueError for pixels of 32 bits unless they are whole numbers from 0 to 255: their range is not known.
    """
    if image.mode.startswith("I;16"):
        return Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    values = np.asarray(image) if image.mode in ("I", "F") else np.zeros(1)
    if not np.array_equal(values, np.clip(np.rint(values), 0, 255)):
        raise ValueError(
            f"an image of mode {image.mode!r} has pixels from {values.min()} to {values.max()}; they must be whole "
            "numbers from 0 to 255"
        )
    return image
