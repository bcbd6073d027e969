"""Qwen's vision-language models over packed rows: each image's features stand in the embeddings of its own tokens.

Positions have three axes for rotary embeddings (M-RoPE, https://arxiv.org/abs/2409.12191) and a fourth, by which
transformers keeps documents apart. Qwen3-VL also adds features of deeper layers of the vision tower to the first
layers' hidden states (DeepStack, https://arxiv.org/abs/2406.04334).

Legend: L tokens of a row, D model dimension, F features of all images of the row.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ownloop_vision.image_features import compute, images_to_read, put
from rl.images import PlacedImage
from trainer.engines.hf import document_kernel
from trainer.engines.pytorch.document_attention import Bounds


def hidden(
    model: Any, tokens: Tensor, positions: Tensor, bounds: Bounds | None, images: Sequence[PlacedImage] = ()
) -> Tensor:
    """The `trainer.engines.hf.transformers_policy.Hidden` of the family."""
    base, vision = model.base_model, model.config.vision_config
    axes = axis_positions(positions[0].cpu().numpy(), images, vision.spatial_merge_size)
    embeddings = base.get_input_embeddings()(tokens)
    deep: dict[str, object] = {}
    if read := images_to_read((base.visual,), images, lambda: _blank(vision)):
        features, deeper = compute((base.visual,), lambda: _features(base, read, tokens.device))
        embeddings, at = put(embeddings, features, images)
        deep = {"visual_pos_masks": at, "deepstack_visual_embeds": deeper} if deeper else {}
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


def _features(base: Any, images: Sequence[PlacedImage], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """[F, D], and the same of the deeper layers that the language model takes."""
    patches = torch.from_numpy(np.concatenate([image.inputs["pixel_values"] for image in images]))
    grids = torch.from_numpy(np.stack([image.inputs["image_grid_thw"] for image in images]))
    read = base.get_image_features(patches.to(device), grids.to(device), return_dict=True)
    deeper: Sequence[Sequence[Tensor]] = getattr(read, "deepstack_features", None) or ()
    return torch.cat([*read.pooler_output]), [torch.cat([*layer]) for layer in deeper]


def _blank(vision: Any) -> PlacedImage:
    """One feature's worth of patches."""
    side = vision.spatial_merge_size
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    patches = np.zeros((side**2, size), dtype=np.float32)
    inputs = {"pixel_values": patches, "image_grid_thw": np.array([1, side, side])}
    return PlacedImage(start=0, num_tokens=0, data=b"", inputs=inputs)
