"""Memory of one trainer rank and of one generator rank, in bytes.

A trainer's step has several peaks, and the largest counts. At the output projection, all activations of the row are
there and the gradient is not. Then each layer's activations are computed again or are there, what later layers kept
is gone, and the gradient grows. At the end of the backward pass, the whole gradient is there. If a rank computes
several rows for a step, the gradient of the rows before is there at all peaks. So are moments, from the second step on.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from controller.planning.gpus import GPU
from controller.planning.sizes import ModelSize, TensorSize
from generator.config import GeneratorConfig
from trainer.config import TrainerConfig

_BF16, _FLOAT32 = 2, 4
_LOGITS_SHARE = 64  # `trainer.engines.pytorch.logprobs.chunk_bytes_on_gpu`
LIVING_VERSIONS = 2  # `rl.weights.versions.LIVING_VERSIONS`, whose module loads torch


@dataclass(frozen=True, slots=True)
class Memory:
    """What one rank needs, by what for, in bytes. The parts are those at the peak."""

    parts: Mapping[str, int]
    allowance: int
    """Bytes of CUDA's context and NCCL's buffers, which are stated and not computed."""
    gpu: GPU

    @property
    def allocated(self) -> int:
        """What torch's allocator holds for tensors."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the GPU has it, with a twentieth left to fragmentation, and nothing is below zero."""
        is_short = min(self.parts.values()) < 0
        return not is_short and (self.allocated + self.allowance) * 1.05 <= self.gpu.memory_bytes


def trainer_memory(
    model: ModelSize, config: TrainerConfig, gpu: GPU, *, tokens: int | None = None, accumulates: bool = False
) -> Memory:
    """Of the trainer's rank that needs most, for a row of `tokens`, by default `max_tokens_per_microbatch`.

    It `accumulates` gradients if it computes several rows for a step.
    """
    tokens = config.max_tokens_per_microbatch if tokens is None else tokens
    state = _state(model, config)
    gradients = state.pop("gradients")
    held = sum(state.values())
    earlier = gradients if accumulates else 0
    peaks = [
        {**_at_projection(model, config, gpu, tokens), "gradients": earlier},
        *_at_layers(model, config, tokens, earlier),
        {**_at_end(model, config), "gradients": gradients},
    ]
    peak = max(peaks, key=lambda parts: sum(parts.values()))
    step = {"gradients": gradients}
    largest = peak if held + sum(peak.values()) >= held + gradients else step
    return Memory({**state, **largest}, gpu.context_bytes + (gpu.nccl_bytes if config.num_ranks > 1 else 0), gpu)


def _state(model: ModelSize, config: TrainerConfig) -> dict[str, int]:
    """Parameters, copies, gradients and moments of a rank; see docs/memory.md."""
    of_rank = model.of_rank(config)
    compute = _BF16 if config.compute_dtype == "bfloat16" else _FLOAT32
    if config.is_frozen:
        adapter = 0 if config.lora is None else model.adapter(config.lora.rank)
        adapted = {"adapter": adapter * _FLOAT32, "moments": adapter * 2 * _FLOAT32}
        return {"parameters": of_rank * compute, **adapted, "gradients": adapter * _FLOAT32}
    moments = 2 * (_BF16 if config.moments_dtype == "bfloat16" else _FLOAT32)
    copies = of_rank * _BF16 if config.num_ranks == 1 and compute == _BF16 else 0
    return {
        "parameters": of_rank * _FLOAT32,
        "copies": copies,
        "moments": of_rank * moments,
        "gradients": of_rank * _FLOAT32,
    }


def activations_per_token(model: ModelSize, config: TrainerConfig, checkpointing: str, kind: int) -> int:
    """Bytes that one layer of a kind keeps of a token until its backward pass.

    `full` keeps the input. `selective`, torchtitan's, keeps it, the output of attention and of every second matrix
    product. `none` keeps the inputs of all operations.
    """
    d = model.decoder.dim
    width = _BF16 if config.compute_dtype == "bfloat16" else _FLOAT32
    kept = {
        "full": d,
        "selective": 2 * d + model.kept_products(kind) + model.feed_forward,
        "none": 4 * d + model.kept(kind),
    }[checkpointing]
    moe = model.decoder.moe
    if moe is not None and checkpointing == "none":  # tokens are copied once for each of their experts, there and back
        kept += 2 * moe.experts_per_token * d
    return kept * width


def _activations(model: ModelSize, config: TrainerConfig, tokens: int, checkpointing: str) -> list[int]:
    """Of one layer of each kind, for the tokens of a row that this rank has."""
    tokens_here = _tokens_here(config, tokens)
    return [tokens_here * activations_per_token(model, config, checkpointing, kind) for kind in (0, 1)]


def _tokens_here(config: TrainerConfig, tokens: int) -> int:
    return tokens // (config.context_parallel * config.num_token_shards)


def _stage(model: ModelSize, config: TrainerConfig) -> tuple[int, ...]:
    """The kinds of the first stage's layers."""
    return model.kinds[: -(-model.decoder.num_layers // config.pipeline_parallel)]


def _saved(model: ModelSize, config: TrainerConfig, tokens: int) -> int:
    """Of all layers of the first stage, which under 1F1B keeps as many rows as there are stages."""
    of_layer = _activations(model, config, tokens, config.activation_checkpointing)
    return config.pipeline_parallel * sum(of_layer[kind] for kind in _stage(model, config))


def _at_projection(model: ModelSize, config: TrainerConfig, gpu: GPU, tokens: int) -> dict[str, int]:
    """At the first backward step: activations of all layers, and the projection's weight and gradient, whole."""
    words = -(-model.decoder.vocab_size // config.tensor_parallel)
    limit = gpu.memory_bytes // _LOGITS_SHARE
    tokens_here = tokens // config.context_parallel
    num_chunks = max(1, -(-tokens_here * words * _FLOAT32 // limit))
    weight = words * model.decoder.dim
    is_sharded = config.data_parallel_shard * config.context_parallel > 1
    width = _BF16 if config.compute_dtype == "bfloat16" else _FLOAT32
    # A sum over chunks is in float32; the first chunk's gradient and the next one's are there beside it.
    gradient = 0 if config.is_frozen else weight * (width if num_chunks == 1 else 2 * width + _FLOAT32)
    return {
        "activations": _saved(model, config, tokens) + 2 * tokens_here * model.decoder.dim * width,
        "projection": (weight * width if is_sharded else 0) + gradient,
        "logits": min(2, num_chunks) * -(-tokens_here // num_chunks) * words * width,  # of a chunk and the one before
    }


def _at_layers(model: ModelSize, config: TrainerConfig, tokens: int, earlier: int) -> Iterator[dict[str, int]]:
    """Bytes in the backward pass of each layer of the first stage, from the last to the first.

    The weights of two layers are gathered, and at the first one the embedding. `earlier` are bytes of a gradient to
    which this one is added, so that it does not grow.
    """
    width = _BF16 if config.compute_dtype == "bfloat16" else _FLOAT32
    is_sharded = config.data_parallel_shard * config.context_parallel > 1
    of_kinds = [sum(_gathered(each, config) for each in layer) for _, layer in model.layers]
    whole = _activations(model, config, tokens, "none")
    saved = _activations(model, config, tokens, config.activation_checkpointing)
    before = _saved(model, config, tokens)
    passing = 3 * model.feed_forward * width * _tokens_here(config, tokens)  # of both projections and of their product
    keeps_gradient = not config.is_frozen and not earlier
    grown = model.embedding.of_rank(config) * _FLOAT32 if keeps_gradient else 0
    for index, kind in reversed(list(enumerate(_stage(model, config)))):
        before -= saved[kind]
        gathered = 2 * of_kinds[kind] + (0 if index else model.embedding.numel // config.tensor_parallel)
        weights = gathered * width if is_sharded else 0
        weights += 0 if config.is_frozen else of_kinds[kind] * (width + _FLOAT32)
        yield {"activations": before + whole[kind] + passing, "layer": weights, "gradients": earlier + grown}
        if keeps_gradient:
            grown += sum(each.of_rank(config) for each in model.layers[kind][1]) * _FLOAT32


def _gathered(tensor: TensorSize, config: TrainerConfig) -> int:
    """Elements of a layer's tensors while a rank computes with them."""
    return tensor.numel // (config.expert_parallel if tensor.kind == "expert" else config.tensor_parallel)


def _at_end(model: ModelSize, config: TrainerConfig) -> dict[str, int]:
    """At the embedding: its gradient, whole in the compute dtype, beside the projection's if they are one."""
    width = _BF16 if config.compute_dtype == "bfloat16" else _FLOAT32
    whole = model.embedding.numel // config.tensor_parallel * width
    is_shared = model.decoder.tie_embeddings and config.num_ranks == 1
    return {"embedding": 0 if config.is_frozen else (2 if is_shared else 1) * whole}


def longest_row(model: ModelSize, config: TrainerConfig, gpu: GPU, *, accumulates: bool = False) -> int:
    """The most tokens of a row with which the trainer fits, in steps of 1,024; 0 if it does not fit at all."""

    def fits(thousands: int) -> bool:
        return trainer_memory(model, config, gpu, tokens=1024 * thousands, accumulates=accumulates).fits

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high) and high < 1 << 14:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return 1024 * low


def cache_bytes_per_token(model: ModelSize, config: GeneratorConfig) -> int:
    """Keys and values of a token on one rank of the generator, in a sequence of `max_model_len`.

    Latent attention keeps the latent state, which every rank has whole.
    """
    width = _FLOAT32 if config.dtype == "float32" else _BF16
    heads = -(-model.decoder.num_kv_heads // config.tensor_parallel)
    of_layer = model.latent or 2 * heads * model.decoder.head_dim
    return int(model.cached_layers(config.max_model_len) * of_layer * width)


def state_bytes(model: ModelSize, config: GeneratorConfig) -> int:
    """What delta rules keep of one sequence, however long it is, on one rank of the generator."""
    width = {"float32": _FLOAT32, "bfloat16": _BF16}
    states, inputs = model.state
    of_states = width.get(model.state_dtype, width[config.dtype])
    return (states * of_states + inputs * width[config.dtype]) // config.tensor_parallel


def generator_memory(model: ModelSize, config: GeneratorConfig, gpu: GPU, *, versions: int = 0) -> Memory:
    """Of a generator's rank: vLLM gives all of its share of the GPU that weights leave to keys and values.

    Delta rules have `max_num_seqs` states first, since vLLM starts with no fewer. `versions` are bytes of weights on
    their way that lie on the same GPU. Keys and values are negative if it does not fit.
    """
    width = _FLOAT32 if config.dtype == "float32" else _BF16
    share = float(config.engine_args.get("gpu_memory_utilization", 0.8 if config.placement == "colocated" else 0.92))
    weights = model.numel * width // config.tensor_parallel
    batch = max(int(config.engine_args.get("max_num_batched_tokens", 8192)), config.max_num_seqs)
    working = batch * (4 * model.decoder.dim + 2 * model.feed_forward) * width
    working += config.max_num_seqs * model.decoder.vocab_size * _FLOAT32 * 2
    states = config.max_num_seqs * state_bytes(model, config)
    left = int(share * gpu.memory_bytes) - weights - working - states - gpu.context_bytes
    parts = {"weights": weights, "working": working, "states": states, "keys and values": left, "versions": versions}
    return Memory(parts, gpu.context_bytes, gpu)


def version_bytes(model: ModelSize, config: TrainerConfig) -> int:
    """Weights on their way on one trainer's GPU, if they travel from GPU to GPU."""
    return LIVING_VERSIONS * model.numel * _BF16 // config.num_ranks
