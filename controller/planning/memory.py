"""Memory of one trainer rank and of one generator rank, in bytes.

A trainer's step has three peaks, and the largest counts. At the output projection, all activations of the row are there
and the gradient is not. At the last layer, its activations are computed again or are there, and the gradient grows. At
the end of the backward pass, the whole gradient is there. If a rank computes several rows for a step, the gradient of
the rows before is there in all three. So are moments, from the second step on.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from controller.planning.gpus import GPU
from controller.planning.sizes import ModelSize
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
    earlier = {"gradients": gradients if accumulates else 0}
    last_layer = _at_last_layer(model, config, tokens)
    if accumulates:
        del last_layer["projection"]  # it has been added to the gradient
    peaks = [
        {**_at_projection(model, config, gpu, tokens), **earlier},
        {**last_layer, **earlier},
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


def activations_per_token(model: ModelSize, config: TrainerConfig, checkpointing: str) -> int:
    """Bytes that one layer keeps of a token until its backward pass.

    `full` keeps the input. `selective`, torchtitan's, keeps it, the output of attention and of every second matrix
    product. `none` keeps the inputs of all operations.
    """
    d, q, k, f = model.decoder.dim, model.queries, model.keys, model.feed_forward
    width = _BF16 if config.compute_dtype == "bfloat16" else _FLOAT32
    kept = {
        "full": d,
        "selective": 2 * d + 2 * q + k + f,
        "none": 4 * d + model.kept,
    }[checkpointing]
    moe = model.decoder.moe
    if moe is not None and checkpointing == "none":  # tokens are copied once for each of their experts, there and back
        kept += 2 * moe.experts_per_token * d
    return kept * width


def _activations(model: ModelSize, config: TrainerConfig, tokens: int, checkpointing: str) -> int:
    """Of one layer, for the tokens of a row that this rank has. A pipeline's first stage keeps several rows."""
    split = config.context_parallel * config.num_token_shards
    return tokens // split * activations_per_token(model, config, checkpointing)


def _saved(model: ModelSize, config: TrainerConfig, tokens: int) -> int:
    layers = -(-model.decoder.num_layers // config.pipeline_parallel)
    rows = config.pipeline_parallel  # of a pipeline's first stage under 1F1B
    return rows * layers * _activations(model, config, tokens, config.activation_checkpointing)


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


def _at_last_layer(model: ModelSize, config: TrainerConfig, tokens: int) -> dict[str, int]:
    """At the last layer: activations of all, this layer's whole, and gathered weights of two layers."""
    width = _BF16 if config.compute_dtype == "bfloat16" else _FLOAT32
    is_sharded = config.data_parallel_shard * config.context_parallel > 1
    of_layer = sum(each.numel for each in model.layer if each.kind != "expert") // config.tensor_parallel
    of_layer += sum(each.numel for each in model.layer if each.kind == "expert") // config.expert_parallel
    whole = _activations(model, config, tokens, "none") if config.activation_checkpointing != "none" else 0
    tokens_here = tokens // (config.context_parallel * config.num_token_shards)
    gradients = 3 * tokens_here * model.feed_forward * width  # of both projections and of their product
    weights = (2 if is_sharded else 0) * of_layer * width + (0 if config.is_frozen else of_layer * (width + _FLOAT32))
    return {
        "activations": _saved(model, config, tokens) + whole + gradients,
        "layer": weights,
        "projection": 0 if config.is_frozen else model.embedding.of_rank(config) * _FLOAT32,
    }


def _at_end(model: ModelSize, config: TrainerConfig) -> dict[str, int]:
    """At the embedding: its gradient, whole in the compute dtype, beside the projection's if they are one."""
    width = _BF16 if config.compute_dtype == "bfloat16" else _FLOAT32
    whole = model.embedding.numel // config.tensor_parallel * width
    return {"embedding": 0 if config.is_frozen else (2 if config.num_ranks == 1 else 1) * whole}


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


def generator_memory(model: ModelSize, config: GeneratorConfig, gpu: GPU, *, versions: int = 0) -> Memory:
    """Of a generator's rank: vLLM gives all of its share of the GPU that weights leave to keys and values.

    `versions` are bytes of weights on their way that lie on the same GPU. Keys and values are negative if it does not
    fit.
    """
    width = _FLOAT32 if config.dtype == "float32" else _BF16
    share = float(config.engine_args.get("gpu_memory_utilization", 0.8 if config.placement == "colocated" else 0.92))
    weights = model.numel * width // config.tensor_parallel
    batch = max(int(config.engine_args.get("max_num_batched_tokens", 8192)), config.max_num_seqs)
    working = batch * (4 * model.decoder.dim + 2 * model.feed_forward) * width
    working += config.max_num_seqs * model.decoder.vocab_size * _FLOAT32 * 2
    left = int(share * gpu.memory_bytes) - weights - working - gpu.context_bytes
    return Memory(
        {"weights": weights, "working": working, "keys and values": left, "versions": versions}, gpu.context_bytes, gpu
    )


def version_bytes(model: ModelSize, config: TrainerConfig) -> int:
    """Weights on their way on one trainer's GPU, if they travel from GPU to GPU."""
    return LIVING_VERSIONS * model.numel * _BF16 // config.num_ranks
