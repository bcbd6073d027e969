"""Further families of models, an optional part: one row for each, which an entry point of `ownloop.families` names.

A row is data, so that the controller and generators can read it without PyTorch. Its functions are in the files of this
folder.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rl.system.hf_config import ModelFamily, VisionParts
from trainer.config import TrainerConfig

_TORCHVISION = "generator.image_prompts:prepare_process"


def check_routers(config: TrainerConfig, settings: Mapping[str, Any]) -> None:
    """The `check` of DeepSeek-V3: transformers has one kind of router, and vLLM takes another where none is named."""
    del config
    for key, needed in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if settings.get(key) != needed:
            raise ValueError(
                f"config.json: {key} is {settings.get(key)!r}; it must be {needed!r}, or trainer and generator would "
                "choose experts in different ways"
            )


def check_gpt_oss(config: TrainerConfig, settings: Mapping[str, Any]) -> None:
    """The `check` of gpt-oss: vLLM has one order of layers, one activation, and always YaRN."""
    del config
    rope = settings.get("rope_parameters") or {"rope_type": "yarn"}
    count = settings["num_hidden_layers"]
    alternating = [("full_attention" if layer % 2 else "sliding_attention") for layer in range(count)]
    for key, found, agreed in (
        ("rope_type", rope.get("rope_type"), "yarn"),
        ("layer_types", settings.get("layer_types") or alternating, alternating),
        ("swiglu_alpha", settings.get("swiglu_alpha", 1.702), 1.702),
        ("swiglu_limit", settings.get("swiglu_limit", 7.0), 7.0),
    ):
        if found != agreed:
            raise ValueError(f"config.json: {key} is {found!r}; vLLM and transformers agree only on {agreed!r}")


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


DEEPSEEK_V3 = ModelFamily(
    architectures=("DeepseekV3ForCausalLM",),
    engines=("fsdp2", "torchtitan"),
    check="trainer.families:check_routers",
    decoder="trainer.families.decoders:deepseek_v3",
    generator_ranks=1,
)
GEMMA4 = ModelFamily(architectures=("Gemma4ForCausalLM",))
GLM4_MOE = ModelFamily(
    architectures=("Glm4MoeForCausalLM",),
    engines=("fsdp2", "torchtitan"),
    decoder="trainer.families.decoders:glm4_moe",
)
GPT_OSS = ModelFamily(
    architectures=("GptOssForCausalLM",),
    engines=("fsdp2", "torchtitan"),
    check="trainer.families:check_gpt_oss",
    decoder="trainer.families.decoders:gpt_oss",
    generator_ranks=1,
)
QWEN3_MOE = ModelFamily(
    architectures=("Qwen3MoeForCausalLM",),
    engines=("torchtitan", "megatron", "fsdp2"),
    decoder="trainer.families.decoders:qwen3_moe",
)
QWEN3_5 = ModelFamily(
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    engines=("fsdp2", "torchtitan"),
    decoder="trainer.families.decoders:qwen3_5",
    prepare="trainer.families.gated_delta:by_documents",
    # vLLM keeps states of prefixes only with chunked prefill, which its CPU sampling does not allow.
    engine_args={"enable_prefix_caching": False},
    generator_ranks=1,
    prepare_process=_TORCHVISION,
)
QWEN3_VL = ModelFamily(
    architectures=("Qwen3VLForConditionalGeneration",),
    check="trainer.families:check_tensor_parallel",
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
        renderer="rl.vision.qwen_images:QwenImages",
        hidden="trainer.families.qwen_vl:hidden",
        prompt="generator.image_prompts:engine_prompt",
        tower=("model.visual.",),
        adaptable="generator.image_prompts:adaptable",
        split="trainer.families.tensor_parallel:split",
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
    check="trainer.families:check_gemma3",
    # The CPU computes a prompt with images in one step; see generator/cpu/image_attention.py.
    engine_args={**QWEN3_VL.engine_args, "limit_mm_per_prompt": {}, "enable_prefix_caching": False},
    prepare_process=_TORCHVISION,
    vision=VisionParts(
        renderer="rl.vision.gemma_images:GemmaImages",
        hidden="trainer.families.gemma3_images:hidden",
        prompt="generator.image_prompts:gemma_prompt",
        tower=("model.vision_tower.", "model.multi_modal_projector."),
        adaptable="generator.image_prompts:adaptable",
        split="trainer.families.tensor_parallel:split",
        renamed={
            "model.language_model.": "language_model.model.",
            "model.vision_tower.": "vision_tower.vision_model.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "lm_head.": "language_model.lm_head.",
        },
    ),
)
