"""What the engine must equal: transformers and plain autograd, one datum at a time, in float32.

The comparisons say in words what differs. `published` is a push without a generator: the weights that one would get,
read back in the same process.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rl.system.model_files import stored_shapes
from rl.tiny_models import VOCAB_SIZE
from rl.types import Datum
from rl.weights.memory import WeightBuffer
from rl.weights.store import living_versions
from trainer.engines.base import Engine
from trainer.push import WeightPublisher

TokenLoss = Callable[[Tensor, dict[str, Tensor]], Tensor]
"""(log-probs [T], loss inputs [T]) -> loss [T], before weights."""


def random_groups(
    sizes: Sequence[tuple[int, Sequence[int]]],
    seed: int = 0,
    opening: int = 0,
    *,
    reported: bool = False,
    vocab_size: int = VOCAB_SIZE,
) -> list[Datum]:
    """Datums that begin alike, shuffled: for each group the length of its prompt and of each of its completions.

    All prompts have `opening` more tokens before them, the same ones. As in a rollout, the last token of the prompt is
    the first position that counts; those before it may be reported. Completions are of `vocab_size` different tokens:
    of few, some begin alike.
    """
    rng = np.random.default_rng(seed)
    batch: list[Datum] = []
    start = rng.integers(0, VOCAB_SIZE, opening)
    for own_length, completion_lengths in sizes:
        prompt = np.concatenate([start, rng.integers(0, VOCAB_SIZE, own_length)])
        prompt_length = len(prompt)
        for length in completion_lengths:
            tokens = np.concatenate([prompt, rng.integers(0, vocab_size, length)])
            sampled = np.arange(len(tokens) - 1) >= prompt_length - 1
            inputs: dict[str, np.ndarray] = {
                "target_tokens": tokens[1:],
                "weights": sampled.astype(np.float32),
                "reported_mask": ~sampled & reported,
                "logprobs": rng.normal(-4.0, 0.5, len(tokens) - 1).astype(np.float32),
                "advantages": rng.normal(size=len(tokens) - 1).astype(np.float32),
            }
            batch.append(Datum(tokens=tokens[:-1], loss_inputs=inputs))
    return [batch[i] for i in rng.permutation(len(batch))]  # in no order that a packer could rely on


def routed(batch: Sequence[Datum], experts: tuple[int, int, int] | None) -> list[Datum]:
    """The datums with random experts, the same for all tokens of one position; as they are for a dense model.

    `experts` is the answer of `rl.system.hf_config.experts_of`.
    """
    if experts is None:
        return list(batch)
    num_layers, per_token, num_experts = experts
    longest = max(len(datum.tokens) for datum in batch)
    order = np.random.default_rng(0).random((longest, num_layers, num_experts)).argsort(-1)
    routes = order[..., :per_token].astype(np.uint8)
    return [replace(datum, routes=routes[: len(datum.tokens)]) for datum in batch]


class ReferencePolicy:
    """A transformers model in float32 and the loop that anyone would write around it."""

    def __init__(self, path: Path) -> None:
        # eager: no kernel of another implementation
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
        self._stored = stored_shapes(path).keys()

    def logits(self, datum: Datum) -> Tensor:
        """[T, V]"""
        with contextlib.ExitStack() as hooks:
            if datum.routes is not None:
                for layer, experts in zip(self.model.model.layers, np.moveaxis(datum.routes, 1, 0), strict=True):
                    ids = torch.from_numpy(experts.astype(np.int64))
                    router = layer.mlp.router if hasattr(layer.mlp, "router") else layer.mlp.gate
                    hooks.enter_context(router.register_forward_hook(partial(_replay, ids)))
            return self.model(torch.from_numpy(datum.tokens)[None]).logits[0]

    def logprobs(self, datum: Datum) -> Tensor:
        """[T] of the target tokens, scored or not."""
        targets = torch.from_numpy(datum.loss_inputs["target_tokens"])
        return self._distributions(datum).gather(1, targets[:, None])[:, 0]

    def entropy(self, datum: Datum) -> Tensor:
        """[T]"""
        logprobs = self._distributions(datum)
        return -(logprobs.exp() * logprobs).sum(-1)

    def _distributions(self, datum: Datum) -> Tensor:
        """[T, V] log-probs at the datum's temperature, of kept tokens; finite and below all others elsewhere."""
        logits = self.logits(datum) / datum.temperature
        if datum.kept is not None:
            cut_off = torch.from_numpy(np.repeat(datum.kept.counts > 0, logits.shape[1])).view_as(logits)
            cut_off[np.repeat(np.arange(len(logits)), datum.kept.counts), datum.kept.ids.astype(np.int64)] = False
            logits = logits.masked_fill(cut_off, -1e9)
        return torch.log_softmax(logits, -1)

    def backward(self, batch: Sequence[Datum], token_loss: TokenLoss) -> float:
        """Adds the gradient of the weighted sum over all datums; returns the sum."""
        total = 0.0
        for datum in batch:
            inputs = {name: torch.from_numpy(array) for name, array in datum.loss_inputs.items()}
            loss = (token_loss(self.logprobs(datum), inputs) * torch.from_numpy(datum.weights)).sum()
            loss.backward()
            total += loss.item()
        return total

    def gradients(self) -> dict[str, Tensor]:
        """Hugging Face name -> tensor."""
        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return by_stored_name(grads, self._stored)

    def parameters(self) -> dict[str, Tensor]:
        """Hugging Face name -> tensor."""
        return by_stored_name({name: p.detach() for name, p in self.model.named_parameters()}, self._stored)


def _replay(
    ids: Tensor, router: nn.Module, _inputs: object, output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """A router's output with the experts `ids` [T, k] in the place of its own."""
    logits = output[0]
    weights = logits.softmax(-1).gather(1, ids)
    # as most mixtures normalise the scores of chosen experts
    return logits, weights / weights.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights, ids


def by_stored_name(tensors: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """Views by the `names` in a checkpoint; in memory transformers fuses the weights of experts."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, experts, projection = name.partition(".experts.")
        if not experts or name in names:
            stored[name] = tensor
            continue
        parts = {"gate_proj": 0, "up_proj": 1} if projection == "gate_up_proj" else {"down_proj": 0}
        for part, half in parts.items():
            for index, expert in enumerate(tensor.chunk(len(parts), dim=1)[half]):
                stored[f"{layer}.experts.{index}.{part}.weight"] = expert
    return stored


def cross_entropy(logprobs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """-p"""
    del inputs
    return -logprobs


def importance_sampling(logprobs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """-exp(p - q) A"""
    return -torch.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]


def published(version: int, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Publishes parameters in float32 and returns what lies in shared memory then, on rank 0; {} on other ranks.

    A collective.
    """
    store = LocalStore()
    publisher = WeightPublisher(torch.float32, "shared_memory", store=store)
    asyncio.run(publisher.publish(version, parameters))
    if not store.values:
        return {}
    record = asyncio.run(living_versions(store))[-1]
    buffer = WeightBuffer.open(record.location)
    with buffer.reading(record):
        buffer.check_checksums(record)
        return {spec.name: buffer.tensor(spec).clone() for spec in record.manifest}


class LocalStore:
    """A dictionary with TorchStore's interface."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}

    async def put(self, key: str, value: object) -> None:
        """See `Store`."""
        self.values[key] = value

    async def get(self, key: str) -> object:
        """See `Store`."""
        return self.values[key]

    async def delete(self, key: str) -> None:
        """See `Store`."""
        del self.values[key]


def gradients(engine: Engine) -> dict[str, Tensor]:
    """A copy of every gradient of this rank, by Hugging Face name."""
    return {name: p.grad.clone() for name, p in engine.hf_parameters() if p.grad is not None}


def parameters(engine: Engine) -> dict[str, Tensor]:
    """A copy of every parameter of this rank, by Hugging Face name."""
    return {name: p.detach().clone() for name, p in engine.hf_parameters()}
