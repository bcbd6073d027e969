"""Gemma 3 over packed rows: an image's tokens attend to each other in both directions, and to what is before them.

https://arxiv.org/abs/2503.19786. In layers with a sliding window that bounds the past of an image's tokens, too.

Legend: L tokens of a row, D model dimension.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ownloop_vision.image_features import compute, images_to_read, put
from rl.images import PlacedImage
from trainer.engines.hf import document_kernel
from trainer.engines.pytorch.document_attention import Bounds


def hidden(
    model: Any, tokens: Tensor, positions: Tensor, bounds: Bounds | None, images: Sequence[PlacedImage] = ()
) -> Tensor:
    """The `trainer.engines.hf.transformers_policy.Hidden` of the family."""
    base, config = model.base_model, model.config.text_config
    embeddings = base.get_input_embeddings()(tokens)
    tower, size = (base.vision_tower, base.multi_modal_projector), model.config.vision_config.image_size
    if read := images_to_read(tower, images, lambda: _blank(size)):
        pictures = torch.from_numpy(np.stack([image.inputs["pixel_values"] for image in read])).to(tokens.device)
        features = compute(tower, lambda: base.get_image_features(pictures, return_dict=True).pooler_output)
        embeddings, _ = put(embeddings, features.flatten(0, 1), images)
    return base.language_model(
        inputs_embeds=embeddings,
        # A mask of its own, so attention by documents refuses it.
        attention_mask=_masks(positions[0], images, config.sliding_window, embeddings.dtype),
        position_ids=positions,
        use_cache=False,
        **document_kernel.arguments(bounds),
    ).last_hidden_state


def _blank(size: int) -> PlacedImage:
    return PlacedImage(
        start=0, num_tokens=0, data=b"", inputs={"pixel_values": np.zeros((3, size, size), dtype=np.float32)}
    )


def _masks(positions: Tensor, images: Sequence[PlacedImage], window: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """positions [L] within the documents -> what is added to logits [1, 1, L, L], for each kind of layer."""
    place = torch.arange(len(positions), device=positions.device)
    document = (positions == 0).cumsum(0)
    block = torch.full_like(place, -1)
    for number, image in enumerate(images):
        block[image.start : image.start + image.num_tokens] = number
    back = place[:, None] - place
    seen = (back >= 0) | ((block[:, None] == block) & (block >= 0))
    seen &= document[:, None] == document
    nothing = torch.zeros((), dtype=dtype, device=positions.device)
    masks = {"full_attention": seen, "sliding_attention": seen & (back < window)}
    return {kind: torch.where(mask, nothing, torch.finfo(dtype).min)[None, None] for kind, mask in masks.items()}
