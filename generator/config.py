"""The configuration of a generator, checked before any process starts. This module imports neither vLLM nor torch."""

import ast
import importlib.util
import operator
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from rl.checks import check_at_least, did_you_mean
from rl.configuration import AnyPath, Gpus, Positive, Rare, UpToOne, check_gpus, configuration, one_of
from rl.deadlines import Deadlines
from rl.images import TokensWithImages, images_of
from rl.lora import LivePolicy, Policy
from rl.system.hf_config import (
    find_family,
    is_tied,
    longest_context,
    num_experts,
    proven_architectures,
    read_config,
    rope_parameters,
    understanding,
    vision_of,
)
from rl.system.model_files import check_head, check_no_stray_weights
from rl.system.plugins import named_by
from rl.types import HeadDtype, Placement, SamplingParams, WeightTransport
from rl.weights.version import transports

GeneratorDtype = Literal["bfloat16", "float16", "float32"]
OnFailure = Literal["retry", "raise"]

_OWN_FIELDS = {
    "model": "model",
    "dtype": "dtype",
    "tensor_parallel_size": "tensor_parallel",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "enable_lora": "lora",
    "max_lora_rank": "lora.max_rank",
    "max_loras": "lora.max_adapters",
    "max_cpu_loras": "lora.max_loaded",
    "enable_tower_connector_lora": "lora.vision",
    "return_sampling_mask": "kept_sets",
    "enable_return_routed_experts": "routes",
    "speculative_config": "speculation",
}
_PROVEN = (
    "attention_backend",
    "block_size",
    "disable_custom_all_reduce",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_logprobs",
    "max_num_batched_tokens",
    "seed",
)
"""Options that were seen to change neither the distribution, nor log-probs, nor what a pull leaves."""
_REFUSED = {
    **dict.fromkeys(
        (
            "distributed_executor_backend",
            "load_format",
            "logprobs_mode",
            "pipeline_parallel_size",
            "data_parallel_size",
        ),
        "the generator sets it",
    ),
    "quantization": "vLLM would pack the weights when it loads them, and nothing can be pulled into packed ones",
    "moe_backend": "others than 'triton', which is chosen, reorder experts in place, so that a pull leaves garbage",
    "enable_eplb": "vLLM would move experts between ranks, and a pull would bring them back to where they were",
    "kv_transfer_config": "keys and values of the old weights would come back after a pull",
    "hf_overrides": "the trainer reads config.json, so that the two would compute different models; "
    "GeneratorConfig.head_dtype sets the head's dtype",
    "logits_processors": "tokens would come from a distribution that the trainer cannot compute",
    "trust_remote_code": "a model's folder may not bring code",
}


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum ranks that vLLM knows. A rank is rounded up to the next of these."""


@configuration
class LoRALimits:
    """How much room a generator makes for adapters when it starts."""

    max_rank: Annotated[int, Field(ge=1, le=LORA_RANKS[-1])] = 32
    """The highest rank of an adapter. An adapter of a lower rank costs as much memory as one of this rank."""
    max_adapters: PositiveInt = 4
    """Adapters that are computed at the same time. Requests of further adapters wait for a place."""
    max_loaded: PositiveInt = 32
    """Adapters that are kept in the host's memory. Every frozen version counts as one."""
    vision: bool = False
    """Whether adapters may change what reads images. An image is then computed for each adapter anew."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        if self.max_loaded < self.max_adapters:
            raise ValueError(
                f"LoRALimits.max_loaded is {self.max_loaded}; it must be at least max_adapters, {self.max_adapters}"
            )


@configuration
class Speculation:
    """Drafts of coming tokens, which one step checks all at once. Which tokens are sampled stays the same."""

    source: Annotated[str, one_of(lambda: named_by("generators"), "generators")] = "history"
    """Where drafts come from: the name of an entry point of `ownloop.generators`. The plug-in ownloop-speculation has
    "history", completions of the same prompt, and "ngram", the prompt and the completion itself."""
    max_draft: Annotated[int, Field(ge=1, le=64)] = 8
    """Tokens of the longest draft."""
    min_chance: UpToOne = 0.2
    """The least estimated chance at which a token is drafted. The cost of a step may ask for a higher one."""
    max_kept_tokens: PositiveInt = 1 << 24
    """Tokens of completions that a replica keeps for drafts. It forgets the prompts first that were sampled longest
    ago."""


@configuration
class GeneratorConfig:
    """One generator: `num_replicas` copies of the model, each held by `tensor_parallel` ranks, a process each."""

    model: Rare[AnyPath] = Path()
    """Directory of a Hugging Face causal language model: config.json, *.safetensors, tokenizer files. Recipes leave it
    out, because a loop sets it to its own model."""
    dtype: GeneratorDtype = "bfloat16"
    """Dtype of weights and activations. The trainer casts its weights to it when it pushes."""
    head_dtype: Rare[HeadDtype | None] = None
    """Dtype of the logits' product, as `TrainerConfig.head_dtype`. "float32" widens hidden states and output projection
    of `dtype`, on the CPU at every step. None: `dtype`."""
    numerics: Rare[str] = ""
    """What computes in place of vLLM's kernels: an entry point of `ownloop.generators`, such as "bitwise", whose
    log-probs are those of the trainer's engine of this name. A loop sets it by its own `numerics`."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share every matrix product; must divide the attention heads."""
    weight_transport: Rare[Annotated[WeightTransport, one_of(lambda: ("auto", *transports()), "transports")]] = "auto"
    """How pushed weights travel: from GPU to GPU of one host through `gpu_memory`, through `shared_memory` on one host,
    over the `network` into shared memory of other hosts, the same from GPU to GPU by `nccl`, or through `torchstore`.
    `auto` takes the network if a generator is on another host. On one host it takes memory of GPUs if they reach each
    other and two versions need at most a tenth of it, shared memory otherwise, and TorchStore if the host has too
    little memory. A transport that is asked for by name fails where `auto` would take another. Those between hosts
    come with the plug-in `ownloop-hosts`."""
    num_replicas: PositiveInt = 1
    """Copies of the model that share the requests; all pull the same weights."""
    evaluator: Rare[bool] = False
    """Whether a further copy, on GPUs of its own, answers evaluations only. A loop sets it by its own `evaluation`."""
    max_model_len: PositiveInt = 2048
    """The largest number of tokens of a prompt and its completion together. A prompt that is only scored, which is to
    say with `max_tokens=1`, may fill it."""
    max_num_seqs: PositiveInt | None = None
    """Sequences that a replica samples at the same time; further ones wait. None: 32 on the CPU, where memory is taken
    for each, and vLLM's default on a GPU: 1,024 on an H100, 256 on one of less than 70 GiB."""
    num_threads: PositiveInt = 1
    """Threads of each rank on the CPU."""
    gpus: Rare[Gpus] = None
    """The GPU of each rank, replica after replica, by its number, UUID or MIG name in `CUDA_VISIBLE_DEVICES`. Meshes
    may share GPUs that they both name. None takes the next free ones."""
    placement: Rare[Placement] = "split"
    """Whether it shares its GPUs with other meshes and takes turns with them. A loop sets it to its own `placement`."""
    on_failure: Rare[OnFailure] = "retry"
    """What happens to requests in progress when a replica's process, or vLLM in it, dies or hangs: "retry" sends them
    again and "raise" makes them raise `MeshError`. Both restart the replica."""
    request_timeout_s: Rare[Positive | None] = None
    """The longest time from sending a request to its answer, after which the request raises `RequestTimeoutError`. None
    sets no limit. A replica that hangs is found without it, see `deadlines`."""
    deadlines: Rare[Deadlines] = field(default_factory=Deadlines)
    """How long calls, and steps of the engine, may take before the replica counts as hung."""
    kept_sets: Rare[bool] = False
    """Whether GPUs return the tokens that a cut (top-k, top-p, min-p) has left for every token. A loop sets it if its
    sampling cuts; a CPU returns them in any case. Greedy log-probs of GPUs are then 0."""
    routes: Rare[bool] = False
    """Whether completions of a mixture have the experts that its layers chose. A loop sets it by its own `routes`."""
    lora: LoRALimits | None = None
    """Room for adapters (LoRA). None: this generator serves only the model itself."""
    speculation: Rare[Speculation | None] = None
    """Speculative decoding. None: every step samples one token of each sequence."""
    engine_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further options of vLLM's `EngineArgs`, under vLLM's names. Only options that are proven not to change what is
    sampled are taken; an error names them."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        check_gpus("GeneratorConfig", self.gpus, self.tensor_parallel * self.num_copies)
        if self.engine_args:
            _check_engine_args(self.engine_args)

    @property
    def num_copies(self) -> int:
        """Copies of the model: the replicas and the evaluator."""
        return self.num_replicas + self.evaluator

    def check_model(self) -> None:
        """Raises ValueError if this generator cannot serve the model in its directory."""
        if not (self.model / "config.json").is_file():
            raise ValueError(f"GeneratorConfig.model is {self.model}, which holds no config.json")
        with understanding(self.model):
            model = read_config(self.model)
            check_no_stray_weights(self.model)
            check_head(self.model, tied=is_tied(model))
            self.check_settings(model)

    def check_settings(self, model: Mapping[str, Any]) -> None:
        """`check_model` without weights, by the settings that `read_config` returns."""
        architectures = model.get("architectures") or []
        if not set(architectures) & {*proven_architectures(), *_vllm_architectures()}:
            raise ValueError(
                f"GeneratorConfig.model is {self.model} of architecture {', '.join(architectures) or '(none named)'},"
                f" which vLLM has no code of its own for; proven are {', '.join(proven_architectures())}"
            )
        family = find_family(model)
        most = None if family is None else family.generator_ranks
        if family is None and not set(architectures) & _vllm_architectures():
            most = 1  # vLLM serves it with the code of transformers, which is proven on one rank
        if most is not None and self.tensor_parallel > most:
            raise ValueError(
                f"GeneratorConfig.tensor_parallel is {self.tensor_parallel}; for {architectures[0]} it is proven up to"
                f" {most}"
            )
        heads, kv_heads = model["num_attention_heads"], model.get("num_key_value_heads") or model["num_attention_heads"]
        # vLLM splits the key-value heads over ranks, or gives several ranks a copy of each.
        accepted = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        if self.tensor_parallel not in accepted:
            raise ValueError(
                f"GeneratorConfig.tensor_parallel is {self.tensor_parallel}; this model has {heads} attention heads and"
                f" {kv_heads} key-value heads, which can be split over {', '.join(map(str, accepted))} ranks"
            )
        if self.lora is not None and self.lora.vision and vision_of(model) is None:
            raise ValueError(f"LoRALimits.vision is True and {self.model} is a model of text; it must be False")
        self._check_routes(model, {} if family is None else family.engine_args)
        if self.max_model_len > (longest := longest_context(model)):
            raise ValueError(
                f"GeneratorConfig.max_model_len is {self.max_model_len}; this model's context is {longest}"
            )

    def _check_routes(self, model: Mapping[str, Any], family_args: Mapping[str, object]) -> None:
        """Raises ValueError if vLLM cannot return the experts of this model's layers."""
        if not self.routes:
            return
        if not num_experts(model):
            raise ValueError(f"GeneratorConfig.routes is True and {self.model} is no mixture of experts; set it False")
        if count := model.get("first_k_dense_replace"):
            raise ValueError(
                f"GeneratorConfig.routes is True and the model's first_k_dense_replace is {count}; routes are proven "
                "where every layer has experts, so it must be False"
            )
        if not {**family_args, **self.engine_args}.get("enable_prefix_caching", True):
            raise ValueError(
                "GeneratorConfig.routes is True and enable_prefix_caching False; vLLM keeps routes by blocks of its "
                "prefix cache, so one of the two must change"
            )


def check_request(
    prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int, config: GeneratorConfig
) -> tuple[int, ...]:
    """Returns the prompt as plain integers.

    Raises ValueError if the request exceeds the context or asks for no samples, or if the prompt is not token ids.
    """
    if not isinstance(sampling, SamplingParams):
        raise ValueError(f"sampling is {sampling!r}; it must be SamplingParams")
    check_at_least(1, num_samples=num_samples)
    if len(prompt_tokens) < 1:
        raise ValueError("prompt_tokens is empty; a prompt has at least 1 token")
    try:
        tokens = tuple(map(operator.index, prompt_tokens))  # NumPy's integers and torch's are integers too
    except TypeError:
        start = prompt_tokens[:20]
        raise ValueError(f"prompt_tokens starts with {start!r}; it must be token ids, which are integers") from None
    check_length(len(tokens), sampling.max_tokens, config, scores_prompt=sampling.scores_prompt)
    images = images_of(prompt_tokens)
    if images and vision_of(read_config(config.model)) is None:
        raise ValueError(f"the prompt has {len(images)} images; {config.model} is a model of text")
    return TokensWithImages(tokens, images) if images else tokens


def check_length(num_prompt_tokens: int, max_tokens: int, config: GeneratorConfig, *, scores_prompt: bool) -> None:
    """Raises ValueError if prompt and completion exceed the context, which a prompt that is only scored may fill."""
    room, total = config.max_model_len, num_prompt_tokens + max_tokens
    if scores_prompt and (num_prompt_tokens, max_tokens) == (room, 1):
        room += room_to_score(config)
    if total > room:
        raise ValueError(
            f"a prompt of {num_prompt_tokens} tokens and max_tokens={max_tokens} need {total}"
            f" tokens; the generator's context holds {config.max_model_len} (GeneratorConfig.max_model_len)"
        )


def room_to_score(config: GeneratorConfig) -> int:
    """Tokens by which vLLM's own context is longer than `max_model_len`: 1, or 0 where that would change log-probs.

    vLLM scores a prompt only if it also samples a token after it. That token is sampled from the whole context, and
    nothing is computed of it, so that no position lies beyond the model's own context.
    """
    model = read_config(config.model)
    # vLLM takes the frequencies of "longrope" for long texts if its context is longer than the one before scaling.
    by_length = rope_parameters(model).get("rope_type") in ("longrope", "su")
    if by_length and config.max_model_len >= longest_context(model):
        return 0
    # Llama 4 scales attention if vLLM's context is longer than this.
    return 0 if str(model.get("model_type")).startswith("llama4") and config.max_model_len == 32768 else 1


def check_policy(policy: Policy, config: GeneratorConfig) -> None:
    """Raises ValueError if no generator of this configuration can serve such a policy."""
    if policy is None:
        return
    name = policy[0] if isinstance(policy, tuple) and len(policy) == 2 and isinstance(policy[1], int) else policy
    if not isinstance(name, str):
        accepted = "None, an adapter's name or (name, version); the model itself has no frozen versions"
        raise ValueError(f"policy is {policy!r}; it must be {accepted}")
    if config.lora is None:
        raise ValueError(f"policy is {policy!r}; set GeneratorConfig.lora for a generator that serves adapters")


def check_pull(policy: LivePolicy, config: GeneratorConfig, *, frozen: bool) -> None:
    """Raises ValueError if no generator of this configuration can pull versions of such a policy."""
    check_policy(policy, config)
    if isinstance(policy, tuple):
        raise ValueError(
            f"policy is {policy!r}; to pull, give the adapter's name, and frozen=True to freeze the version"
        )
    if frozen and policy is None:
        raise ValueError("frozen is True and policy is None; only versions of adapters can be frozen")


def _check_engine_args(engine_args: Mapping[str, object]) -> None:
    """Raises ValueError for all but proven options: many of vLLM's change how tokens or log-probs come about."""
    for name, value in engine_args.items():
        where = f"GeneratorConfig.engine_args[{name!r}]"
        if name in _PROVEN:
            continue
        if name in _OWN_FIELDS:
            raise ValueError(f"{where}: set GeneratorConfig.{_OWN_FIELDS[name]} instead")
        reason = _REFUSED.get(name) or (
            "it is not proven that tokens, log-probs and pulls stay right with it, as `ownloop parity` can show of an "
            f"option that is added to `_PROVEN` in generator/config.py{did_you_mean(name, _PROVEN)}"
        )
        raise ValueError(f"{where} is {value!r} and must be left out: {reason}")


def _vllm_architectures() -> set[str]:
    """The language models that vLLM serves by code of its own. Through that of transformers, pulls are not proven."""
    return {
        key.value
        for node in _vllm_source("model_executor/models/registry.py").body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        if any(isinstance(target, ast.Name) and target.id == "_TEXT_GENERATION_MODELS" for target in node.targets)
        for key in node.value.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }


def _vllm_source(name: str) -> ast.Module:
    """A file of vLLM, parsed: importing it takes seconds."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None, "vllm is not installed"
    return ast.parse((Path(spec.origin).parent / name).read_text())
