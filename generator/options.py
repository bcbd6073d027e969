"""Translates a `GeneratorConfig` for vLLM: the environment of a rank's process and the arguments of its engine.

CPU and GPU share one path. Options are set for the CPU only where vLLM's defaults are wrong or slow there; all others
keep vLLM's defaults. `GeneratorConfig.engine_args` overrides these.
"""

import platform
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from generator.config import LORA_RANKS, GeneratorConfig, room_to_score
from generator.engine_part import engine_parts
from rl.lora import ATTENTION_MODULES, FURTHER_ATTENTION_MODULES, MLP_MODULES, UNEMBED_MODULES
from rl.system.hardware import cpu_features, cpu_malloc_env, cpu_thread_env, sees_gpu
from rl.system.hf_config import find_family, num_experts, read_config, vision_of

CPU_KERNELS = "ownloop_cpu"
"""The name under which `cpu/patches.py` registers kernels with vLLM."""
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vLLM's CPUAttentionBackend
_CPU_LATENT_SIZE = 576  # its CPUMLABackend
_MIN_BATCHED_TOKENS = 2048  # vLLM's own default
_CPU_NUM_SEQS = 32


def generator_env(config: GeneratorConfig, *, has_gpu: bool | None = None) -> dict[str, str]:
    """The environment of each rank's process. It has to be set before the process imports anything.

    `has_gpu` says whether the host that computes has a GPU; None stands for this host.
    """
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the rank's own process
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a directory
        # By `room_to_score`, vLLM's context may be longer than the model's by a token. `check_model` checks the rest.
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    }
    if _has_gpu(has_gpu):
        # FlashInfer compiles its sampler at the start, and cannot sample where log-probs are asked for, as always here.
        env["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        if config.kept_sets or config.routes:
            env["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # only this one returns them
    else:
        env |= {
            # vLLM compiles some functions even with `enforce_eager`, such as the embedding of a tensor-parallel group:
            # the first request would wait for the compiler, and fail on a host without g++.
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default gives two ranks of one NUMA node the same core
            **cpu_thread_env(config.num_threads),
            # Saves 4 % of a step's CPU time and 15 % of a pull's.
            **cpu_malloc_env(),
        }
    for part in engine_parts(config, has_gpu=_has_gpu(has_gpu)):
        env |= part.env()
    return env


def check_hardware(config: GeneratorConfig, *, has_gpu: bool | None = None) -> None:
    """Raises ValueError for options that vLLM, or a part of a plug-in, cannot correctly carry out on a host.

    `has_gpu` is that of `generator_env`.
    """
    for part in engine_parts(config, has_gpu=_has_gpu(has_gpu)):
        part.check()
    if _has_gpu(has_gpu):
        return
    model = read_config(config.model)
    if model.get("kv_lora_rank") and _latent_size(model) != _CPU_LATENT_SIZE:
        raise ValueError(
            f"GeneratorConfig.model is {config.model}, whose latent attention keeps {_latent_size(model)} numbers of a "
            f"token (kv_lora_rank and qk_rope_head_dim); on the CPU vLLM can do {_CPU_LATENT_SIZE}"
        )
    if not model.get("kv_lora_rank") and _head_size(model) not in _CPU_HEAD_SIZES:
        raise ValueError(
            f"GeneratorConfig.model is {config.model}, whose attention heads have {_head_size(model)} dimensions; on "
            f"the CPU vLLM can do {', '.join(map(str, _CPU_HEAD_SIZES))}"
        )
    if model.get("linear_num_key_heads") and config.dtype != "bfloat16":
        raise ValueError(
            f"GeneratorConfig.dtype is {config.dtype!r}; on the CPU vLLM computes the gated delta rule of "
            f"{config.model.name} in 'bfloat16' only"
        )
    for name, needed, why in (
        ("enable_chunked_prefill", False, "a request with a seed would end vLLM"),
        ("enforce_eager", True, "a compiled model would still compute with the weights it had before a pull"),
    ):
        if bool(config.engine_args.get(name, needed)) != needed:
            raise ValueError(
                f"GeneratorConfig.engine_args[{name!r}] is {not needed}; on the CPU it must be {needed}, or {why}"
            )


def engine_options(config: GeneratorConfig) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs`."""
    max_model_len = config.max_model_len + room_to_score(config)
    options: dict[str, Any] = {
        "model": str(config.model),
        "load_format": "safetensors",  # by default vLLM prefers consolidated*.safetensors, of other names
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_parallel,
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "logprobs_mode": "processed_logprobs",  # of the distribution that tokens are sampled from
        "disable_log_stats": True,
        "skip_tokenizer_init": not any(config.model.glob("tokenizer*")),
    }
    if config.tensor_parallel > 1:
        options["distributed_executor_backend"] = "external_launcher"
    if not sees_gpu():
        options |= {
            "enforce_eager": True,  # compiling takes 25 s longer than it saves in an hour
            "ir_op_priority": {"rms_norm": [CPU_KERNELS], "fused_add_rms_norm": [CPU_KERNELS]},
            "max_num_seqs": config.max_num_seqs or _CPU_NUM_SEQS,
            "kv_cache_memory_bytes": _kv_cache_bytes(config),
            "block_size": cpu_block_size(config.dtype),
            # A seeded request whose prompt is chunked crashes the engine: "CPU Generator does not use offset".
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_model_len, _MIN_BATCHED_TOKENS),
        }
        if read_config(config.model).get("kv_lora_rank"):
            # Where a processor has AMX, vLLM would keep packed parts of `kv_b_proj` only, and nothing to pull into.
            options["attention_backend"] = "CPU_MLA"
        if config.tensor_parallel > 1:
            options["worker_cls"] = "generator.cpu.mesh_worker.CPUMeshWorker"
    elif num_experts(read_config(config.model)):
        # By default vLLM takes FlashInfer on Blackwell, which reorders experts in place; a pull would not repeat that.
        options["moe_backend"] = "triton"
    if config.kept_sets and sees_gpu():
        options["return_sampling_mask"] = True
    if config.routes:
        options["enable_return_routed_experts"] = True
    if config.placement == "colocated" and sees_gpu():
        # A trainer's process keeps a little of the memory in the generator's turns, for CUDA itself and NCCL.
        options |= {"enable_sleep_mode": True, "gpu_memory_utilization": 0.8}
    options |= _lora_options(config)
    family = find_family(read_config(config.model))
    head = {} if config.head_dtype is None else {"head_dtype": config.head_dtype}
    options |= {**({} if family is None else family.engine_args), **config.engine_args}
    options |= {"hf_overrides": head, "trust_remote_code": False}
    for part in engine_parts(config, has_gpu=sees_gpu()):
        options |= part.engine_args()
    return options


def _lora_options(config: GeneratorConfig) -> dict[str, Any]:
    """The room for adapters."""
    if config.lora is None:
        return {}
    return {
        "enable_lora": True,
        "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= config.lora.max_rank),
        "max_loras": config.lora.max_adapters,
        "max_cpu_loras": config.lora.max_loaded + 1,  # a new version is loaded before the old one goes
        "lora_target_modules": _adaptable_modules(config),
        "enable_tower_connector_lora": config.lora.vision,
    }


def _has_gpu(has_gpu: bool | None) -> bool:
    return sees_gpu() if has_gpu is None else has_gpu


def _adaptable_modules(config: GeneratorConfig) -> list[str]:
    """The names of the projections that vLLM makes adaptable, or their last parts."""
    # The projections of experts have the same names as an MLP's. No adapter has them, and where vLLM could adapt
    # experts it computes them with Triton, which a CPU does not have: the first request would end the engine.
    model = read_config(config.model)
    mlp = () if num_experts(model) > 0 else MLP_MODULES
    parts = vision_of(model) if config.lora and config.lora.vision else None
    vision = () if parts is None else resolve_name(parts.adaptable)(model)
    return [*ATTENTION_MODULES, *FURTHER_ATTENTION_MODULES, *mlp, *UNEMBED_MODULES, *vision]


def cpu_block_size(dtype: str) -> int:
    """Tokens of a block of keys and values.

    Only whole blocks of a prompt are shared, so each of its samples computes what follows the last one again: with 16
    in place of 32, sampling 8 short answers to prompts of 56 tokens takes 0.6 of the time. vLLM's own 128 is longer
    than most prompts. The matrix units (AMX) need 32, and so do processors whose kernels were not tried.
    """
    if platform.machine() != "x86_64" or (dtype == "bfloat16" and "amx_bf16" in cpu_features()):
        return 32
    return 16


def _kv_cache_bytes(config: GeneratorConfig) -> int:
    """Size of one rank's keys and values of `max_num_seqs` sequences of full length."""
    import torch  # takes a second to load; the controller needs only the rest of this file

    model = read_config(config.model)
    num_heads = model["num_attention_heads"]
    kv_heads = -(-(model.get("num_key_value_heads") or num_heads) // config.tensor_parallel)
    itemsize = getattr(torch, config.dtype).itemsize
    block_size = cpu_block_size(config.dtype)
    blocks_per_sequence = -(-config.max_model_len // block_size) + 1
    num_tokens = ((config.max_num_seqs or _CPU_NUM_SEQS) * blocks_per_sequence + 1) * block_size
    largest = max(_head_size(model), model.get("global_head_dim") or 0)  # the latter is of Gemma 4
    per_token = _latent_size(model) if model.get("kv_lora_rank") else 2 * kv_heads * largest
    return model["num_hidden_layers"] * per_token * itemsize * num_tokens


def _latent_size(model: Mapping[str, Any]) -> int:
    """Numbers that latent attention (MLA) keeps of a token in each layer, on every rank."""
    return model["kv_lora_rank"] + model["qk_rope_head_dim"]


def _head_size(model: Mapping[str, Any]) -> int:
    """Dimensions of one attention head, from a model's config.json."""
    return model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
