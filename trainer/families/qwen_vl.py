"""Qwen's vision-language models over packed rows: each image's features stand in the embeddings of its own tokens.

The features go to the places that the row names, and not to all tokens of the image's kind as in transformers: a model
may sample such a token. Positions have three axes for rotary embeddings (M-RoPE, https://arxiv.org/abs/2409.12191) and
a fourth, by which transformers keeps documents apart. Qwen3-VL also adds features of deeper layers of the vision tower
to the first layers' hidden states (DeepStack, https://arxiv.org/abs/2406.04334).

Legend: L tokens of a row, D model dimension, F features of all images of the row.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl.images import PlacedImage
from trainer.engines.hf import document_kernel
from trainer.engines.pytorch.document_attention import Bounds


def hidden(
    model: Any, tokens: Tensor, positions: Tensor, bounds: Bounds | None, images: Sequence[PlacedImage] = ()
) -> Tensor:
    """The `trainer.engines.hf.transformers_policy.Hidden` of the family."""
    base = model.base_model
    merge_size: int = model.config.vision_config.spatial_merge_size
    axes = axis_positions(positions[0].cpu().numpy(), images, merge_size)
    embeddings = base.get_input_embeddings()(tokens)
    deep: dict[str, Any] = {}
    if images:
        features, deep = _features(base, images, tokens.device)
        at = torch.from_numpy(_places(tokens.shape[1], images)).to(tokens.device)[None]  # [1, L]
        embeddings = embeddings.masked_scatter(at[..., None], features.to(embeddings.dtype))
        deep = {"visual_pos_masks": at, **deep} if deep else {}
    return base.language_model(
        inputs_embeds=embeddings,
        position_ids=torch.from_numpy(axes).to(tokens.device)[:, None],
        use_cache=False,
        **deep,
        **document_kernel.arguments(bounds),
    ).last_hidden_state


def axis_positions(positions: NDArray[np.int64], images: Sequence[PlacedImage], merge_size: int) -> NDArray[np.int64]:
    """Positions [L] within the documents -> [4, L]: the same, then by time, by row and by column.

    An image takes as many positions as its longer side has features; the tokens after it continue from there.
    """
    axes = np.stack([positions] * 4)
    starts = np.append(np.flatnonzero(positions == 0), len(positions))
    for image in images:
        _, rows, columns = image.inputs["image_grid_thw"] // (1, merge_size, merge_size)
        end = image.start + image.num_tokens
        first = int(axes[1, image.start])
        axes[1, image.start : end] = first
        axes[2, image.start : end] = first + np.repeat(np.arange(rows), columns)
        axes[3, image.start : end] = first + np.tile(np.arange(columns), rows)
        end_of_document = starts[np.searchsorted(starts, image.start, side="right")]
        axes[1:, end:end_of_document] -= image.num_tokens - max(rows, columns)
    return axes


def _features(base: Any, images: Sequence[PlacedImage], device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    """[F, D], and what of the deeper layers the language model takes. A frozen tower computes no gradient."""
    patches = torch.from_numpy(np.concatenate([image.inputs["pixel_values"] for image in images]))
    grids = torch.from_numpy(np.stack([image.inputs["image_grid_thw"] for image in images]))
    trained = any(parameter.requires_grad for parameter in base.visual.parameters())
    with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
        read = base.get_image_features(patches.to(device), grids.to(device), return_dict=True)
    deeper: Sequence[Sequence[Tensor]] = getattr(read, "deepstack_features", None) or ()
    deep = {"deepstack_visual_embeds": [torch.cat([*layer]) for layer in deeper]} if deeper else {}
    return torch.cat([*read.pooler_output]), deep


def _places(length: int, images: Sequence[PlacedImage]) -> NDArray[np.bool_]:
    """[L] whether a token stands for an image."""
    places = np.zeros(length, dtype=np.bool_)
    for image in images:
        places[image.start : image.start + image.num_tokens] = True
    return places
