"""The families that read images: one row for each, which an entry point of `ownloop.families` names.

A row is data, so that the controller and generators can read it without PyTorch.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rl.system.hf_config import ModelFamily, VisionParts
from trainer.config import TrainerConfig

_TORCHVISION = "ownloop_vision.image_prompts:prepare_process"


def check_tensor_parallel(config: TrainerConfig, settings: Mapping[str, Any]) -> None:
    """The `check` of Qwen2.5-VL and Qwen3-VL: what ranks that share a language model can divide, and what is proven."""
    if (degree := config.tensor_parallel) == 1:
        return
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if settings[name] % degree:
            raise ValueError(
                f"TrainerConfig.tensor_parallel is {degree}, which does not divide the model's {name} "
                f"{settings[name]}; it must divide that"
            )
    for name, accepted in (("sequence_parallel", False), ("head", "lm")):
        if (found := getattr(config, name)) != accepted:
            raise ValueError(
                f"TrainerConfig.{name} is {found!r} and tensor_parallel is {degree}; for a model that reads images "
                f"{name} must be {accepted!r}"
            )


def check_gemma3(config: TrainerConfig, settings: Mapping[str, Any]) -> None:
    """The `check` of Gemma 3: vLLM attends from an image's tokens to all of them, and transformers within a window."""
    check_tensor_parallel(config, settings)
    num_tokens, window = settings.get("mm_tokens_per_image", 256), settings.get("sliding_window", 4096)
    vision = settings["vision_config"]
    num_patches = (vision.get("image_size", 224) // vision.get("patch_size", 16)) ** 2  # SigLIP's defaults
    if num_patches != 16 * num_tokens:
        raise ValueError(
            f"config.json: mm_tokens_per_image is {num_tokens}, and an image has {num_patches} patches; vLLM's "
            "adapters need 16 for each token"
        )
    if num_tokens > window:
        raise ValueError(
            f"config.json: mm_tokens_per_image is {num_tokens} and sliding_window {window}; an image must fit into the "
            "window, or trainer and generator would attend differently"
        )


QWEN3_VL = ModelFamily(
    architectures=("Qwen3VLForConditionalGeneration",),
    check="ownloop_vision.families:check_tensor_parallel",
    engine_args={
        "limit_mm_per_prompt": {"video": 0},
        # Patches come ready-made and normalised, so vLLM has none to keep.
        "mm_processor_cache_gb": 0,
        "mm_device_do_normalize": False,
        # vLLM's endpoints would fetch any address; with a list of one that is no host, only data URLs are read.
        "allowed_media_domains": ["none.invalid"],
    },
    prepare_process=_TORCHVISION,
    vision=VisionParts(
        renderer="ownloop_vision.qwen_images:QwenImages",
        hidden="ownloop_vision.qwen_vl:hidden",
        prompt="ownloop_vision.image_prompts:engine_prompt",
        tower=("model.visual.",),
        adaptable="ownloop_vision.image_prompts:adaptable",
        split="ownloop_vision.tensor_parallel:split",
    ),
)
assert QWEN3_VL.vision is not None
QWEN2_5_VL = replace(
    QWEN3_VL,
    architectures=("Qwen2_5_VLForConditionalGeneration",),
    vision=replace(QWEN3_VL.vision, renamed={"model.language_model.": "model.", "model.visual.": "visual."}),
)
GEMMA3 = ModelFamily(
    architectures=("Gemma3ForConditionalGeneration",),
    check="ownloop_vision.families:check_gemma3",
    # The CPU computes a prompt with images in one step; see image_attention.py.
    engine_args={**QWEN3_VL.engine_args, "limit_mm_per_prompt": {}, "enable_prefix_caching": False},
    prepare_process=_TORCHVISION,
    patch_cpu="ownloop_vision.image_attention:patch_image_attention",
    vision=VisionParts(
        renderer="ownloop_vision.gemma_images:GemmaImages",
        hidden="ownloop_vision.gemma3_images:hidden",
        prompt="ownloop_vision.image_prompts:gemma_prompt",
        tower=("model.vision_tower.", "model.multi_modal_projector."),
        adaptable="ownloop_vision.image_prompts:adaptable",
        split="ownloop_vision.tensor_parallel:split",
        renamed={
            "model.language_model.": "language_model.model.",
            "model.vision_tower.": "vision_tower.vision_model.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "lm_head.": "language_model.lm_head.",
        },
    ),
)
