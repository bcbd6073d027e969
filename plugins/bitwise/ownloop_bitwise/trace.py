"""Names the first operation whose output differs between trainer and generator: `ownloop parity RECIPE --bitwise`.

Both sides run in one process, from the model's files. Completions are sampled and then scored, and the outputs of all
operations on the way are compared bit by bit, in the order in which they are computed.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl.data.sources import text_to_datum
from rl.types import Completion, SamplingParams

if TYPE_CHECKING:  # the imports load vLLM and torchtitan
    from generator.engine import GenerationEngine
    from ownloop_bitwise.engine import BitwiseEngine

Outputs = dict[tuple[int, str], list[Tensor]]
"""(layer, operation) -> its outputs [rows, width], call by call. Layer -1 is before all layers, and 1 << 20 behind."""
_FIRST, _LAST = -1, 1 << 20
_NUM_PROMPTS, _NUM_TOKENS = 8, 16
_TRAINERS: Mapping[str, tuple[str, ...]] = {
    "tok_embeddings": ("embedding",),
    "attention_norm": ("attention's norm",),
    "attention.qkv_linear.wq": ("query product",),
    "attention.qkv_linear.wk": ("key product",),
    "attention.qkv_linear.wv": ("value product",),
    "attention.q_norm": ("query norm",),
    "attention.k_norm": ("key norm",),
    "attention.rope": ("query rotation", "key rotation"),
    "attention.inner_attention": ("attention",),
    "attention.wo": ("output product",),
    "after_attention": ("norm after attention",),
    "ffn_norm": ("feed-forward's norm",),
    "feed_forward.w1": ("gate product",),
    "feed_forward.w3": ("up product",),
    "feed_forward.w2": ("down product",),
    "after_ffn": ("norm after the feed-forward",),
    "norm": ("last norm",),
}
"""Module of a torchtitan model, in the layer -> what its outputs are."""
_GENERATORS: Mapping[str, tuple[str, ...]] = {
    "embed_tokens": ("embedding",),
    "self_attn.qkv_proj": ("query product", "key product", "value product"),
    "self_attn.q_norm": ("query norm",),
    "self_attn.k_norm": ("key norm",),
    "self_attn.rotary_emb": ("query rotation", "key rotation"),
    "self_attn.attn": ("attention",),
    "self_attn.o_proj": ("output product",),
    "mlp.gate_up_proj": ("gate product", "up product"),
    "mlp.down_proj": ("down product",),
    "norm": ("last norm",),
    "logits_processor": ("logits",),
}
"""The same of vLLM's models, but for a layer's norms, whose names families have of their own."""
_NORMS = ("attention_norm", "after_attention", "ffn_norm", "after_ffn")


@dataclass(frozen=True, slots=True)
class Differing:
    """The first operation that differs."""

    operation: str
    """With its layer."""
    num_different: int
    """Of its values."""
    num_compared: int
    largest: float

    def __str__(self) -> str:
        """A sentence."""
        return (
            f"the first operation that differs is {self.operation}: {self.num_different} of {self.num_compared} "
            f"values, by at most {self.largest:.3g}"
        )


def first_difference(trainers: Outputs, generators: Outputs) -> Differing | None:
    """Compares the operations that both sides have. Of the trainer's rows the last count, if it has more."""
    names = [name for names in _TRAINERS.values() for name in names]
    names[names.index("down product") : names.index("down product")] = ["activation"]
    places = {name: place for place, name in enumerate([*names, "logits"])}
    common = trainers.keys() & generators.keys()
    for layer, name in sorted(common, key=lambda key: (key[0], places[key[1]])):
        ours, theirs = torch.cat(trainers[layer, name]), torch.cat(generators[layer, name])
        ours = ours[-len(theirs) :]
        differs = _bits(ours) != _bits(theirs)
        if differs.any():
            largest = float((ours.double() - theirs.double()).abs().max())
            where = "" if layer in (_FIRST, _LAST) else f" of layer {layer}"
            return Differing(f"the {name}{where}", int(differs.sum()), differs.numel(), largest)
    return None


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int16 if values.element_size() == 2 else torch.int32)


@contextmanager
def traced(model: nn.Module, operations: Mapping[str, tuple[str, ...]], found: Outputs) -> Generator[None]:
    """Keeps the outputs of a model's operations while inside."""
    with ExitStack() as stack:
        for path, module in model.named_modules():
            layer, inner = _place(path)
            if (names := operations.get(inner)) is not None:
                hook = partial(_keep, found, layer, names, _widths(module, len(names)), operations is _TRAINERS)
                stack.callback(module.register_forward_hook(hook).remove)
            if inner in ("feed_forward.w2", "mlp.down_proj"):  # layers may share one activation

                def keep_input(_: nn.Module, inputs: tuple[Tensor, ...], layer: int = layer) -> None:
                    _add(found, layer, "activation", inputs[0].reshape(-1, inputs[0].shape[-1]))

                stack.callback(module.register_forward_pre_hook(keep_input).remove)
        yield


def _place(path: str) -> tuple[int, str]:
    """The layer of a module, and its name there."""
    before, is_layer, rest = path.rpartition("layers.")
    if is_layer:
        number, _, inner = rest.partition(".")
        return int(number), inner
    inner = before or rest
    inner = inner.rpartition(".")[2]
    return (_FIRST if "embed" in inner else _LAST), inner


def _widths(module: nn.Module, parts: int) -> list[int] | None:
    """How wide the parts of a fused product are."""
    of_product: Any = module
    return list(of_product.output_sizes) if parts > 1 and hasattr(of_product, "output_sizes") else None


def _keep(
    found: Outputs, layer: int, names: tuple[str, ...], widths: list[int] | None, in_a_row: bool, *call: Any
) -> None:
    """Keeps the outputs of a call (module, inputs, output). `in_a_row` they are [1, rows, ...]."""
    output = call[-1]
    first = output[0] if isinstance(output, tuple) else output
    if widths is not None:
        outputs: Sequence[Tensor] = first.split(widths, dim=-1)
    else:
        outputs = output if len(names) > 1 else [first]
    for name, each in zip(names, outputs, strict=True):
        _add(found, layer, name, each.squeeze(0) if in_a_row else each)


def _add(found: Outputs, layer: int, name: str, output: Tensor) -> None:
    found.setdefault((layer, name), []).append(output.detach().reshape(len(output), -1).clone())


def compare_sides(
    trainer: "BitwiseEngine", generator: "GenerationEngine", prompts: Sequence[Sequence[int]]
) -> Differing | None:
    """Samples after these prompts, scores what was sampled, and compares. None if all bits are equal.

    The generator keeps no prefix cache: it would not compute what it has.
    """
    sampling = SamplingParams(max_tokens=_NUM_TOKENS, seed=0, ignore_eos=True)
    model: Any = generator.llm.model_executor.driver_worker.model_runner.model  # pyright: ignore[reportAttributeAccessIssue]
    policy: Any = trainer
    stored = policy._parts[0].hf_layer_names
    operations = {**_GENERATORS, **{stored[norm]: _TRAINERS[norm] for norm in _NORMS if norm in stored}}
    for prompt in prompts:
        theirs, ours = Outputs(), Outputs()
        with traced(model, operations, theirs):
            (completion,) = asyncio.run(generator.generate(prompt, sampling))
        if policy._shape(policy._config.model).is_gemma:
            del theirs[_FIRST, "embedding"]  # vLLM scales it outside of all modules
        with traced(policy._model, _TRAINERS, ours), _traced_logits(policy._model, ours):
            _score(trainer, prompt, completion)
        if (found := first_difference(ours, theirs)) is not None:
            return found
    return None


def _score(trainer: "BitwiseEngine", prompt: Sequence[int], completion: Completion) -> None:
    datum = text_to_datum(tuple(prompt), completion.tokens, "completion")
    trainer.forward([[datum]])


@contextmanager
def _traced_logits(model: nn.Module, found: Outputs) -> Generator[None]:
    from ownloop_bitwise.titan import BitwiseHead

    (head,) = (module for module in model.modules() if isinstance(module, BitwiseHead))
    logits: Callable[..., Tensor] = head.logits

    def keep(*inputs: object, **options: object) -> Tensor:
        output = logits(*inputs, **options)
        _add(found, _LAST, "logits", output)
        return output

    head.__dict__["logits"] = keep
    try:
        yield
    finally:
        del head.__dict__["logits"]


def main(recipe: str, *fields: str) -> int:
    """Prints what differs first. Returns 1 if something does."""
    from controller.commands.output import CapturedOutput
    from controller.commands.recipes import runnable_configuration
    from controller.runs.models import resolve_model
    from generator.options import generator_env
    from rl.rollouts.rendering import Renderer

    config = runnable_configuration(recipe, [*fields], "parity")
    env = generator_env(config.generator_config)
    if any(os.environ.get(name) != value for name, value in env.items()):  # part of it is read as a process starts
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **env})
    with CapturedOutput() as output:
        from generator.engine import GenerationEngine
        from ownloop_bitwise.engine import BitwiseEngine

        model = resolve_model(config.model, output.say)
        renderer = Renderer(model)
        prompts = [renderer.encode_problem(problem) for problem in config.env.eval_problems(_NUM_PROMPTS)]
        args = {**config.generator_config.engine_args, "enable_prefix_caching": False}
        generator = GenerationEngine(replace(config.generator_config, model=model, lora=None, engine_args=args))
        found = compare_sides(BitwiseEngine(replace(config.policy_config, model=model, lora=None)), generator, prompts)
        generator.close()
        print("0 values differ in all operations" if found is None else found, file=output.terminal)
    return int(found is not None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
