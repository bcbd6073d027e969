"""Hands vLLM prompts with images as they are: its engine reads exactly the tokens and patches that a trainer scores.

vLLM would render such prompts itself, and count an image's tokens again. Here it is given tokens and patches of the
family's `ImageRenderer`, for chats of its endpoints, too. `ModelFamily.vision` names its functions. They
import vLLM only when they are called.

vLLM's code of such models and of Qwen3.5 imports torchvision. The package registry's is built for CUDA: beside torch's
CPU build its operators do not load, and its import fails because it registers fakes for two that are missing, which
nothing here computes. Remove `import_torchvision` when the CPU lock can name a torchvision that fits its torch.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np

from rl.images import PlacedImage, images_of
from rl.lora import MLP_MODULES
from rl.rollouts.rendering import ImageRenderer
from rl.system.hf_config import VisionParts, read_config, vision_of

FOLDER = Path(sys.prefix) / "torchvision"
"""Where set-up keeps torchvision for the CPU: among the other packages, it would break transformers' import."""
_DECLARED: list[object] = []


def prepare_process(architecture: str) -> None:
    """Loads torchvision, before anything of transformers, and vLLM's class of this architecture.

    By default vLLM first looks at the class in a process of its own, where torchvision may not load. Chats of vLLM's
    endpoints are read by `read_chat` from then on. Raises ValueError if torchvision is not installed.
    """
    import_torchvision()
    from vllm.model_executor.models import registry
    from vllm.renderers.base import BaseRenderer

    setattr(BaseRenderer, "_process_multimodal", read_chat)  # noqa: B010 - vLLM's own name is private

    models = {**registry._TEXT_GENERATION_MODELS, **registry._MULTIMODAL_MODELS}  # pyright: ignore[reportPrivateUsage]
    module, name = models[architecture]
    found = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
    registry.ModelRegistry.register_model(architecture, found)


def import_torchvision() -> None:
    """Imports torchvision, also beside a torch that it is not built for. Raises ValueError if it is not installed."""
    if "torchvision" in sys.modules:
        return
    if importlib.util.find_spec("torchvision") is None:
        if not FOLDER.is_dir():
            raise ValueError(
                "vLLM's code of this model imports torchvision, which is not installed: run `make setup`, or install "
                "the one that fits the installed torch"
            )
        sys.path.append(str(FOLDER))
    import torch

    if torch.version.cuda is None and "+cpu" not in importlib.metadata.version("torchvision"):
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(library)  # the declarations end with it
    importlib.import_module("torchvision")


def adaptable(config: Mapping[str, Any]) -> Sequence[str]:
    """vLLM's names of a vision tower's projections, or their last parts, by the settings of `config.json`.

    The projections of Qwen's attention have their whole names: `proj` alone is also the convolution that reads patches.
    """
    vision = config["vision_config"]
    if "depth" not in vision:  # SigLIP, of Gemma 3
        return ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
    attention = [f"visual.blocks.{layer}.attn.proj" for layer in range(vision["depth"])]
    merger = ("visual.merger.mlp.0", "visual.merger.mlp.2")  # of Qwen2.5-VL
    return (*attention, "qkv", "linear_fc1", "linear_fc2", *MLP_MODULES, *merger)


def content_hash(image: PlacedImage) -> str:
    """Identifies an image and what the model reads of it."""
    digest = hashlib.sha256(image.data)
    for name in sorted(image.inputs):
        digest.update(f"{name}{image.inputs[name].shape}".encode())
        digest.update(np.ascontiguousarray(image.inputs[name]).data)
    return digest.hexdigest()[:32]


def engine_prompt(tokens: Sequence[int], images: Sequence[PlacedImage]) -> object:
    """What `LLMEngine.add_request` takes for a prompt of Qwen2.5-VL or Qwen3-VL.

    Images are the same for vLLM's caches if their `content_hash` is.
    """
    import torch
    from vllm.multimodal.inputs import MultiModalFieldConfig

    grids = torch.stack([torch.from_numpy(image.inputs["image_grid_thw"]) for image in images])
    made: dict[str, object] = {
        "pixel_values": torch.cat([torch.from_numpy(image.inputs["pixel_values"]) for image in images]),
        "image_grid_thw": grids,
    }
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    return _engine_input(tokens, images, made, fields)


def gemma_prompt(tokens: Sequence[int], images: Sequence[PlacedImage]) -> object:
    """The same for a prompt of Gemma 3."""
    import torch
    from vllm.multimodal.inputs import MultiModalFieldConfig

    ones = torch.ones(len(images), dtype=torch.long)  # pictures that the processor has made of each image
    made: dict[str, object] = {
        "pixel_values": torch.stack([torch.from_numpy(image.inputs["pixel_values"]) for image in images]),
        "num_patches": ones,
    }
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", ones),
        "num_patches": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    return _engine_input(tokens, images, made, fields)


def _engine_input(tokens: Sequence[int], images: Sequence[PlacedImage], made: Any, fields: Mapping[str, Any]) -> object:
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    items: object = MultiModalKwargsItems.from_hf_inputs(made, fields)
    return mm_input(
        list(tokens),
        items,
        {"image": [content_hash(image) for image in images]},
        {"image": [PlaceholderRange(offset=image.start, length=image.num_tokens) for image in images]},
    )


def read_chat(
    renderer: Any,
    prompt: Sequence[int],
    mm_data: Mapping[str, Any],
    mm_uuids: object,
    mm_processor_kwargs: object,
    media_io_kwargs: object = None,
    *,
    skip_mm_cache: bool = False,
) -> Any:
    """Reads the images of a chat that vLLM has rendered to tokens, in place of vLLM's `_process_multimodal`.

    vLLM's processors compute with torchvision and put transparent images on white, so other patches would come out.
    Returns an input of vLLM's engine whose `prompt_token_ids` know their images. Raises ValueError for an image that
    cannot be read, and for one that is named only.
    """
    del mm_uuids, skip_mm_cache
    if mm_processor_kwargs or media_io_kwargs:
        raise ValueError("mm_processor_kwargs and media_io_kwargs are not supported: the model's own settings hold")
    files = [getattr(image, "original_bytes", None) for image in mm_data.get("image", ())]
    if not files or None in files or len(mm_data) > 1:
        raise ValueError("a message has a part that is neither text nor an image by a data URL")
    vision, images = _parts_of(renderer.model_config.model)
    tokens = images.place(prompt, files)
    made = resolve_name(vision.prompt)(tokens, images_of(tokens))
    return {**made, "prompt_token_ids": tokens}


@functools.cache
def _parts_of(model: str) -> tuple[VisionParts, ImageRenderer]:
    vision = vision_of(read_config(Path(model)))
    assert vision is not None
    return vision, resolve_name(vision.renderer)(Path(model))
