"""What families of models that read images share: which images a row computes, and where their features go.

Features go to the places that the row names, and not to all tokens of the image's kind as in transformers: a model may
sample such a token.

Legend: L tokens of a row, D model dimension, F features of all images of the row.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rl.images import PlacedImage
from trainer.engines.pytorch.low_rank import Adaptable

T = TypeVar("T")


def images_to_read(
    tower: Sequence[nn.Module], images: Sequence[PlacedImage], blank: Callable[[], PlacedImage]
) -> Sequence[PlacedImage]:
    """The row's images. If there are none and the tower is trained, a blank one that has no place in the row.

    Its gradient is zero. Ranks that share the tower's weights must all compute it, also those whose rows have no image.
    """
    return images or ([blank()] if is_trained(tower) else ())


def is_trained(tower: Sequence[nn.Module]) -> bool:
    """Whether a parameter of these modules is trained, or an adapter of theirs."""
    parts = [part for module in tower for part in module.modules()]
    return any(isinstance(part, Adaptable) and part.low_rank is not None for part in parts) or any(
        parameter.requires_grad for module in tower for parameter in module.parameters()
    )


def compute(tower: Sequence[nn.Module], read: Callable[[], T]) -> T:
    """What `read` returns. A frozen tower computes no gradient."""
    with torch.set_grad_enabled(is_trained(tower) and torch.is_grad_enabled()):
        return read()


def put(embeddings: Tensor, features: Tensor, images: Sequence[PlacedImage]) -> tuple[Tensor, Tensor]:
    """embeddings [1, L, D] with features [F, D] at the images' tokens, and where these are [1, L]."""
    at = torch.from_numpy(_places(embeddings.shape[1], images)).to(embeddings.device)[None]
    return embeddings.masked_scatter(at[..., None], features.to(embeddings.dtype)), at


def _places(length: int, images: Sequence[PlacedImage]) -> NDArray[np.bool_]:
    """[L] whether a token stands for an image."""
    places = np.zeros(length, dtype=np.bool_)
    for image in images:
        places[image.start : image.start + image.num_tokens] = True
    return places
