"""The tiny models with attention heads of a size that vLLM's CPU kernels know."""

from pathlib import Path

from rl.tiny_models import SERVABLE, tiny_dense, tiny_llama, tiny_qwen3, tiny_qwen3_moe


def served_llama(path: Path, *, tied: bool) -> Path:
    """A float32 Llama with 4 heads and 2 key-value heads of 32 dimensions, and a context of 128 tokens."""
    return tiny_llama(path, tied=tied, **SERVABLE)


def served_mistral(path: Path, *, tied: bool) -> Path:
    """A float32 Mistral of the same shape."""
    return tiny_dense("mistral", path, tied=tied, **SERVABLE)


def served_qwen2(path: Path, *, tied: bool) -> Path:
    """A float32 Qwen2 of the same shape, with biases."""
    return tiny_dense("qwen2", path, tied=tied, **SERVABLE)


def served_qwen3(path: Path, *, tied: bool) -> Path:
    """A float32 Qwen3 of the same shape."""
    return tiny_qwen3(path, tied=tied, **SERVABLE)


def served_qwen3_moe(path: Path, *, moe_intermediate_size: int = 64) -> Path:
    """The same with four experts in every layer; vLLM's CPU kernels like them to be a multiple of 32 wide."""
    return tiny_qwen3_moe(path, **SERVABLE, moe_intermediate_size=moe_intermediate_size)
