"""Hands vLLM prompts with images as they are: its engine reads exactly the tokens and patches that a trainer scores.

vLLM would render such prompts itself, and count an image's tokens again. Here it is given what its own processor would
make. An optional part: `ModelFamily.vision` names its functions. They import vLLM only when they are called.

vLLM's code of such models and of Qwen3.5 imports torchvision. The package registry's is built for CUDA: beside torch's
CPU build its operators do not load, and its import fails because it registers fakes for two that are missing, which
nothing here computes. Remove `import_torchvision` when the CPU lock can name a torchvision that fits its torch.
"""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl.images import PlacedImage, TokensWithImages

FOLDER = Path(sys.prefix) / "torchvision"
"""Where set-up keeps torchvision for the CPU: among the other packages, it would break transformers' import."""
_DECLARED: list[Any] = []


def prepare_process(architecture: str) -> None:
    """Loads torchvision, before anything of transformers, and vLLM's class of this architecture.

    By default vLLM first looks at the class in a process of its own, where torchvision may not load. Raises ValueError
    if torchvision is not installed.
    """
    import_torchvision()
    from vllm.model_executor.models import registry

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


def engine_prompt(tokens: Sequence[int], images: Sequence[PlacedImage]) -> Any:
    """What `LLMEngine.add_request` takes for a prompt of Qwen2.5-VL or Qwen3-VL.

    Images are the same for vLLM's caches if their `content_hash` is.
    """
    import torch
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    grids = torch.stack([torch.from_numpy(image.inputs["image_grid_thw"]) for image in images])
    made: Any = {
        "pixel_values": torch.cat([torch.from_numpy(image.inputs["pixel_values"]) for image in images]),
        "image_grid_thw": grids,
    }
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    items: Any = MultiModalKwargsItems.from_hf_inputs(made, fields)
    return mm_input(
        list(tokens),
        items,
        {"image": [image.content_hash for image in images]},
        {"image": [PlaceholderRange(offset=image.start, length=image.num_tokens) for image in images]},
    )


def tokens_with_images(prompt: Mapping[str, Any]) -> TokensWithImages:
    """The tokens and the images of a prompt that vLLM has made, of a chat for example. It has no files of them."""
    places, items = prompt["mm_placeholders"]["image"], prompt["mm_kwargs"]["image"]
    images = [
        PlacedImage(
            start=place.offset,
            num_tokens=place.length,
            data=b"",
            inputs={name: np.asarray(value) for name, value in item.get_data().items()},
        )
        for place, item in zip(places, items, strict=True)
    ]
    return TokensWithImages(prompt["prompt_token_ids"], images)
