"""Which models and layouts the torchtitan engine can train, and whether this host can. Does not import torchtitan."""

import importlib.util
from collections.abc import Mapping

from rl.system.decoders import DecoderConfig
from rl.system.hardware import sees_gpu
from rl.system.hf_config import parse_decoder_config
from trainer.config import TrainerConfig
from trainer.engines.model_check import ModelLimits


def check_layout(config: TrainerConfig, hf_config: Mapping[str, object]) -> ModelLimits:
    """The engine's `LayoutCheck`."""
    decoder = parse_decoder_config(hf_config)
    _check_proven(config, decoder)
    check_divides(config, decoder)
    if config.expert_parallel > 1 and decoder.moe is None:
        raise ValueError(
            f"TrainerConfig.expert_parallel is {config.expert_parallel}; this model has no experts, so it must be 1"
        )
    _check_stages(config, decoder)
    if config.float8 != "none":
        _check_float8(config)
    if config.compile and not sees_gpu():
        _check_compile(config)
    return ModelLimits(vocab_size=decoder.vocab_size, max_seq_len=decoder.max_seq_len)


def _check_proven(config: TrainerConfig, decoder: DecoderConfig) -> None:
    """Raises ValueError for an option that is not proven for the family, or if ranks cannot cut its layers."""
    for name, value in decoder.proven.items():
        if (found := getattr(config, name)) != value:
            raise ValueError(
                f"TrainerConfig.{name} is {found!r}; for {decoder.family} only {value!r} is proven with engine "
                "'torchtitan'"
            )
    for name, size in decoder.cut.items():
        if size % config.tensor_parallel:
            raise ValueError(
                f"TrainerConfig.tensor_parallel is {config.tensor_parallel}, which does not divide the model's "
                f"{name} {size}; it must divide that"
            )


def check_divides(config: TrainerConfig, decoder: DecoderConfig) -> None:
    """Raises ValueError if tensor-parallel ranks cannot have equal parts of a decoder, naming how many could."""
    tensor_parallel = config.tensor_parallel
    sizes = {name: getattr(decoder, name) for name in ("num_heads", "num_kv_heads", "vocab_size")}
    if decoder.moe is None:
        sizes["hidden_dim"] = decoder.hidden_dim
    for name, size in sizes.items():
        if size % tensor_parallel:
            divisors = [n for n in range(1, decoder.num_kv_heads + 1) if all(s % n == 0 for s in sizes.values())]
            raise ValueError(
                f"TrainerConfig.tensor_parallel is {tensor_parallel}, which does not divide the model's {name} "
                f"{size}; its sizes allow {divisors}"
            )


def _check_stages(config: TrainerConfig, decoder: DecoderConfig) -> None:
    pipeline_parallel, num_stages = config.pipeline_parallel, config.num_stages
    if pipeline_parallel > 1 and decoder.tie_embeddings and config.head == "lm":
        raise ValueError(
            f"TrainerConfig.pipeline_parallel is {pipeline_parallel}; this model's output projection is its "
            "embedding (tie_word_embeddings), which cannot be in the first and the last stage at once, so it must "
            "be 1. data_parallel_shard, tensor_parallel and context_parallel work with such a model"
        )
    if num_stages > decoder.num_layers:
        largest = decoder.num_layers * pipeline_parallel // num_stages
        raise ValueError(
            f"TrainerConfig.pipeline_parallel is {pipeline_parallel}, which makes {num_stages} stages; the model "
            f"has {decoder.num_layers} layers and every stage needs one, so it must be at most {largest}"
            + (", or pipeline_schedule '1F1B', which makes half as many" if num_stages > pipeline_parallel else "")
        )


def _check_float8(config: TrainerConfig) -> None:
    import torch  # takes a second to load, and few options need it

    needed, family = ((9, 4), "an AMD GPU") if torch.version.hip else ((8, 9), "an NVIDIA GPU")
    missing = [] if _capability() >= needed else [f"{family} of compute capability {needed[0]}.{needed[1]} or later"]
    if importlib.util.find_spec("torchao") is None:
        missing.append("the package torchao")
    if missing:
        major, minor = _capability()
        found = f"a GPU of compute capability {major}.{minor}" if major else "no GPU"
        raise ValueError(
            f"TrainerConfig.float8 is {config.float8!r}, which needs {' and '.join(missing)}; this host has {found}. "
            f"Without that it must be 'none', which computes in compute_dtype {config.compute_dtype!r}"
        )


def _capability() -> tuple[int, int]:
    if not sees_gpu():
        return (0, 0)
    import torch

    return torch.cuda.get_device_capability()


def _check_compile(config: TrainerConfig) -> None:
    """Raises ValueError if this host, which has no GPU, cannot compile the model."""
    if config.tensor_parallel > 1:
        raise ValueError(
            f"TrainerConfig.compile is True and tensor_parallel is {config.tensor_parallel}, which torch does not "
            "compile on a host without GPU; compile must be False, which is as fast on a CPU"
        )
    # Imported here because they take seconds to import.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ValueError(
            "TrainerConfig.compile is True, which needs a C++ compiler on a host without GPU, and CXX names none, nor "
            "is there a g++. Install one (g++ or clang++), or leave compile False, which is as fast on a CPU"
        ) from None
