"""Random adapters, published without a TorchStore, and the merged model that each of them stands for."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from generator.engine import GenerationEngine
from rl.lora import LoRAConfig, module_name, tensor_name
from rl.types import Completion
from tests.generator.running import no_steps
from tests.stores import FakeStore
from trainer.push import WeightPublisher

Adapter = dict[str, torch.Tensor]
WHOLE = LoRAConfig(rank=4, alpha=12.0)


def random_adapter(directory: Path, seed: int, config: LoRAConfig = WHOLE) -> Adapter:
    """Float32 tensors that change every adapted projection of the model much."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: tuple(t.shape) for name, t in load_file(directory / "model.safetensors").items()}
    shapes.setdefault("lm_head.weight", shapes["model.embed_tokens.weight"])
    adapter: Adapter = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if config.adapts(module):
            num_out, num_in = shape
            adapter[tensor_name(module, "A")] = torch.randn(config.rank, num_in, generator=generator) / num_in**0.5
            adapter[tensor_name(module, "B")] = 0.1 * torch.randn(num_out, config.rank, generator=generator)
    return adapter


async def pull_adapter(
    engine: GenerationEngine,
    name: str,
    version: int,
    adapter: Adapter,
    config: LoRAConfig = WHOLE,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> None:
    store = FakeStore()
    publisher = WeightPublisher(dtype, policy=name, lora=config, store=store)
    with no_steps():
        record = await publisher.publish(version, adapter.items())
    assert record is not None
    with no_steps() if options.get("mode") == "inflight" else nullcontext():
        await engine.update_weights(record, store, **options)


def merged(directory: Path, adapter: Adapter, config: LoRAConfig = WHOLE) -> Any:
    """The float32 model with the adapter added to its weights. Its output projection is its own."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for module in dict.fromkeys(map(module_name, adapter)):
            product = adapter[tensor_name(module, "B")] @ adapter[tensor_name(module, "A")]
            parameters[f"{module}.weight"] += config.alpha / config.rank * product
    return model.eval()


@torch.no_grad()
def largest_error(model: Any, prompt: Sequence[int], completion: Completion, start: int = 0) -> float:
    """The largest difference of a greedy completion's log-probs from the model's, from token `start` on."""
    tokens = torch.tensor([[*prompt, *completion.tokens]])
    logprobs = torch.log_softmax(model(tokens).logits[0, len(prompt) - 1 : -1].float(), -1)
    expected = logprobs.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
    assert logprobs.argmax(-1)[start:].tolist() == list(completion.tokens)[start:]
    return float((expected - torch.tensor(completion.logprobs))[start:].abs().max())
