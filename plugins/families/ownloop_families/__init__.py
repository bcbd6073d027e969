"""Families of models that need more than the core's decoders: one row for each, named by an entry point.

A row is data, so that the controller and generators can read it without PyTorch. Its functions are in the files of this
folder.
"""

from collections.abc import Mapping
from typing import Any

from rl.system.hf_config import ModelFamily
from trainer.config import TrainerConfig

_ROUTES = "ownloop_families.routes:patch_routes"
_TORCHVISION = "ownloop_vision.image_prompts:prepare_process"


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


DEEPSEEK_V3 = ModelFamily(
    architectures=("DeepseekV3ForCausalLM",),
    engines=("fsdp2", "torchtitan"),
    check="ownloop_families:check_routers",
    decoder="ownloop_families.decoders:deepseek_v3",
    patch_cpu=_ROUTES,
    generator_ranks=1,
)
GEMMA4 = ModelFamily(architectures=("Gemma4ForCausalLM",))
GLM4_MOE = ModelFamily(
    architectures=("Glm4MoeForCausalLM",),
    engines=("fsdp2", "torchtitan"),
    decoder="ownloop_families.decoders:glm4_moe",
    patch_cpu=_ROUTES,
)
GPT_OSS = ModelFamily(
    architectures=("GptOssForCausalLM",),
    engines=("fsdp2", "torchtitan"),
    check="ownloop_families:check_gpt_oss",
    decoder="ownloop_families.decoders:gpt_oss",
    patch_cpu=_ROUTES,
    generator_ranks=1,
)
QWEN3_MOE = ModelFamily(
    architectures=("Qwen3MoeForCausalLM",),
    engines=("torchtitan", "megatron", "fsdp2"),
    decoder="ownloop_families.decoders:qwen3_moe",
    patch_cpu=_ROUTES,
)
QWEN3_5 = ModelFamily(
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    engines=("fsdp2", "torchtitan"),
    decoder="ownloop_families.decoders:qwen3_5",
    prepare="ownloop_families.gated_delta:by_documents",
    # vLLM keeps states of prefixes only with chunked prefill, which its CPU sampling does not allow.
    engine_args={"enable_prefix_caching": False},
    generator_ranks=1,
    prepare_process=_TORCHVISION,
    patch_cpu=_ROUTES,
)
