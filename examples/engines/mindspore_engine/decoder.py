"""A decoder of the Llama, Qwen2 or Qwen3 family in MindSpore, as functions of its parameters by Hugging Face name.

Runs in MindSpore's own environment. Legend: L tokens of a row, S scored positions, D model dimension, V vocabulary,
K key-value heads, G query heads for each of them, E size of a head.

Exponentials and logarithms are computed in float64: in float32, MindSpore's on the CPU are approximations that are
wrong in the sixth digit, and its `log_softmax` is in float64 too.
"""

import math
from collections.abc import Mapping
from typing import Any

from mindspore import Tensor, float32, float64, ops  # pyright: ignore[reportMissingImports]

from examples.engines.mindspore_engine.messages import Shape

Weights = Mapping[str, Any]


def hidden_states(weights: Weights, shape: Shape, tokens: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
    """[L, D] after the last norm."""
    x = ops.gather(weights["model.embed_tokens.weight"], tokens, 0)
    for layer in range(shape.num_layers):
        of_layer = _Layer(weights, f"model.layers.{layer}.", shape)
        x = x + of_layer.attention(of_layer.norm("input_layernorm", x), cos, sin, mask)
        x = x + of_layer.feed_forward(of_layer.norm("post_attention_layernorm", x))
    return _rms_norm(x, weights["model.norm.weight"], shape.norm_eps)


def logprobs_and_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, cut: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies, [S] each, of `hidden` [S, D] under the output projection [V, D].

    Logits are multiplied by `scale` [S], and `cut` [S, V] is added.
    """
    logits = _linear(hidden, weight).astype(float64) * scale.reshape(-1, 1) + cut
    logits = logits - ops.stop_gradient(logits.max(-1, keepdims=True))
    logprobs = logits - ops.log(ops.exp(logits).sum(-1, keepdims=True))
    entropy = -(ops.exp(logprobs) * logprobs).sum(-1)
    scores = ops.gather_elements(logprobs, 1, targets.reshape(-1, 1)).reshape(-1)
    return scores.astype(float32), entropy.astype(float32)


def values(hidden: Tensor, weight: Tensor) -> Tensor:
    """[S] of `hidden` [S, D] under a value head [1, D]."""
    return _linear(hidden, weight).reshape(-1)


class _Layer:
    def __init__(self, weights: Weights, prefix: str, shape: Shape) -> None:
        self._weights = weights
        self._prefix = prefix
        self._shape = shape

    def norm(self, name: str, x: Tensor) -> Tensor:
        return _rms_norm(x, self._weights[f"{self._prefix}{name}.weight"], self._shape.norm_eps)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        shape, length = self._shape, x.shape[0]
        q, k, v = (self._heads(name, x) for name in ("q_proj", "k_proj", "v_proj"))  # [heads, L, E]
        if f"{self._prefix}self_attn.q_norm.weight" in self._weights:
            q, k = self.norm("self_attn.q_norm", q), self.norm("self_attn.k_norm", k)
        q = _rotate(q, cos, sin).reshape(shape.num_kv_heads, -1, length, shape.head_dim)  # [K, G, L, E]
        k = _rotate(k, cos, sin).reshape(shape.num_kv_heads, 1, length, shape.head_dim)
        v = v.reshape(shape.num_kv_heads, 1, length, shape.head_dim)
        scores = ops.matmul(q, k.swapaxes(-1, -2)) / math.sqrt(shape.head_dim) + mask
        weights = ops.softmax(scores.astype(float64), -1).astype(float32)
        mixed = ops.matmul(weights, v).reshape(shape.num_heads, length, shape.head_dim)
        return self._project("self_attn.o_proj", mixed.swapaxes(0, 1).reshape(length, -1))

    def feed_forward(self, x: Tensor) -> Tensor:
        gate = self._project("mlp.gate_proj", x)
        activated = gate * ops.sigmoid(gate.astype(float64)).astype(float32)
        return self._project("mlp.down_proj", activated * self._project("mlp.up_proj", x))

    def _heads(self, name: str, x: Tensor) -> Tensor:
        projected = self._project(f"self_attn.{name}", x)
        return projected.reshape(x.shape[0], -1, self._shape.head_dim).swapaxes(0, 1)

    def _project(self, name: str, x: Tensor) -> Tensor:
        projected = _linear(x, self._weights[f"{self._prefix}{name}.weight"])
        bias = self._weights.get(f"{self._prefix}{name}.bias")
        return projected if bias is None else projected + bias


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return ops.matmul(x, weight.swapaxes(0, 1))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * ops.rsqrt((x * x).mean(-1, keep_dims=True) + eps) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embeddings of [heads, L, E], in transformers' order: the first half of a head and the second are pairs."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return ops.cat((first * cos - second * sin, second * cos + first * sin), -1)
