"""Memory of one trainer rank and of one generator rank, in bytes.

A trainer's step has several peaks, and the largest counts. At the output projection, all activations of the row are
there and the gradient is not. Then each layer's activations are computed again or are there, what later layers kept
is gone, and the gradient grows. At the end of the backward pass, the whole gradient is there. If a rank computes
several rows for a step, the gradient of the rows before is there at all peaks. So are moments, from the second step on.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from generator.config import LORA_RANKS, GeneratorConfig
from ownloop_plan.gpus import GPU
from ownloop_plan.sized_decoder import TensorSize
from ownloop_plan.sizes import ModelSize, Stage, of_rank
from rl.lora import LoRAConfig
from rl.weights.version import LIVING_VERSIONS, leaves_room
from trainer.config import TrainerConfig

_BF16, _FLOAT32 = 2, 4
_LOGITS_SHARE = 64  # `trainer.engines.pytorch.logprobs.chunk_bytes_on_gpu`
_PIECE_BYTES = 256 << 20  # of moments, `trainer.engines.pytorch.optimizer`


@dataclass(frozen=True, slots=True)
class Memory:
    """What one rank needs, by what for, in bytes. The parts are those at the peak."""

    parts: Mapping[str, int]
    allowance: int
    """Bytes of CUDA's context and NCCL's buffers, which are stated and not computed."""
    gpu: GPU
    reserved: int = 0
    """Bytes that vLLM takes, its context among them, and divides by itself, so that they do not fragment."""

    @property
    def allocated(self) -> int:
        """What torch's allocator holds for tensors."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the GPU has it, with a twentieth left to fragmentation, and nothing is below zero."""
        is_short = min(self.parts.values()) < 0
        others = self.allocated + self.allowance - self.reserved
        return not is_short and self.reserved + others * 1.05 <= self.gpu.memory_bytes


def trainer_memory(
    model: ModelSize,
    config: TrainerConfig,
    gpu: GPU,
    *,
    tokens: int | None = None,
    accumulates: bool = False,
    versions: int = 0,
) -> Memory:
    """Of the trainer's rank that needs most, for a row of `tokens`, by default `max_tokens_per_microbatch`.

    It `accumulates` gradients if it computes several rows for a step. `versions` are bytes of weights on their way that
    lie on its GPU.
    """
    tokens = config.max_tokens_per_microbatch if tokens is None else tokens
    of_stages = [_of_stage(model, config, gpu, stage, tokens, accumulates) for stage in model.stages(config)]
    parts = max(of_stages, key=lambda parts: sum(parts.values()))
    allowance = gpu.context_bytes + (gpu.nccl_bytes if config.num_ranks > 1 else 0)
    if config.placement == "colocated":  # a generator that sleeps keeps its context
        allowance += gpu.context_bytes
    return Memory({**parts, "versions": versions} if versions else parts, allowance, gpu)


def _of_stage(
    model: ModelSize, config: TrainerConfig, gpu: GPU, stage: Stage, tokens: int, accumulates: bool
) -> dict[str, int]:
    """Parts of the largest peak of a rank of a stage."""
    state = _state(model, config, stage)
    gradients, moments = state.pop("gradients"), state["moments"]
    step = {"gradients": gradients}
    if config.placement == "colocated" and not config.is_frozen:
        # Moments stay on the host; at a step, one piece is computed while one comes and one goes.
        state["moments"], step["moments"] = 0, min(moments, 3 * _PIECE_BYTES)
    earlier = gradients if accumulates else 0
    peaks = [
        *_at_layers(model, config, stage, tokens, earlier),
        {**_at_end(model, config, stage), "gradients": gradients},
        step,
    ]
    if stage.projects:
        peaks.append({**_at_projection(model, config, gpu, stage, tokens), "gradients": earlier})
    return {**state, **max(peaks, key=lambda parts: sum(parts.values()))}


def _state(model: ModelSize, config: TrainerConfig, stage: Stage) -> dict[str, int]:
    """Parameters, copies, gradients and moments of a rank; see docs/memory.md."""
    held = model.of_stage(config, stage)
    compute = _width(config)
    if config.is_frozen:
        adapter = 0 if config.lora is None else model.adapter(config.lora, stage)
        adapted = {"adapter": adapter * _FLOAT32, "moments": adapter * 2 * _FLOAT32}
        return {"parameters": held * compute, **adapted, "gradients": adapter * _FLOAT32}
    moments = 2 * (_BF16 if config.moments_dtype == "bfloat16" else _FLOAT32)
    copies = held * _BF16 if config.num_ranks == 1 and compute == _BF16 else 0
    return {
        "parameters": held * _FLOAT32,
        "copies": copies,
        "moments": held * moments,
        "gradients": held * _FLOAT32,
    }


def host_state(model: ModelSize, config: TrainerConfig, stage: Stage) -> dict[str, int]:
    """Bytes that a rank of a stage keeps in its host's memory where it takes turns with a generator."""
    state = _state(model, config, stage)
    return {name: state[name] for name in ("parameters", "adapter", "moments") if name in state}


def _width(config: TrainerConfig) -> int:
    """Bytes of a number of the compute dtype."""
    return _BF16 if config.compute_dtype == "bfloat16" else _FLOAT32


def activations_per_token(model: ModelSize, config: TrainerConfig, checkpointing: str, kind: int) -> int:
    """Bytes that one layer of a kind keeps of a token until its backward pass.

    `full` keeps the input. `selective`, torchtitan's, keeps it, the output of attention and of every second matrix
    product. `none` keeps the inputs of all operations.
    """
    d = model.decoder.dim
    width = _width(config)
    kept = {
        "full": d,
        "selective": 2 * d + model.decoder.kept_products(kind) + model.decoder.network_dim,
        "none": 4 * d + model.decoder.kept(kind),
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


def _saved(model: ModelSize, config: TrainerConfig, stage: Stage, tokens: int) -> int:
    """Bytes that all layers of a stage keep for the backward pass, of all rows in flight."""
    of_layer = _activations(model, config, tokens, config.activation_checkpointing)
    return stage.rows * sum(of_layer[kind] for kind in stage.kinds)


def _at_projection(model: ModelSize, config: TrainerConfig, gpu: GPU, stage: Stage, tokens: int) -> dict[str, int]:
    """At the first backward step: activations of all layers, and the projection's weight and gradient, whole."""
    rows = -(-model.decoder.vocab_size // config.tensor_parallel)
    limit = gpu.memory_bytes // _LOGITS_SHARE
    tokens_here = tokens // config.context_parallel
    num_chunks = max(1, -(-tokens_here * rows * _FLOAT32 // limit))
    weight, hidden = rows * model.decoder.dim, tokens_here * model.decoder.dim
    is_sharded = config.data_parallel_shard * config.context_parallel > 1
    own = _width(config)
    width = _FLOAT32 if config.head_dtype == "float32" else own  # of copies, if that is wider
    copies = (weight + hidden) * width if width > own else 0
    # A sum over chunks is in float32; the first chunk's gradient and the next one's are there beside it.
    gradient = 0 if config.is_frozen else weight * (width if num_chunks == 1 else 2 * width + _FLOAT32)
    return {
        "activations": _saved(model, config, stage, tokens) + hidden * (own + width),
        "projection": (weight * own if is_sharded else 0) + copies + gradient,
        "logits": min(2, num_chunks) * -(-tokens_here // num_chunks) * rows * width,  # of a chunk and the one before
    }


def _at_layers(
    model: ModelSize, config: TrainerConfig, stage: Stage, tokens: int, earlier: int
) -> Iterator[dict[str, int]]:
    """Bytes in the backward pass of each layer of a stage, from the last to the first.

    The weights of two layers are gathered, and at the first one the embedding. `earlier` are bytes of a gradient to
    which this one is added, so that it does not grow.
    """
    width = _width(config)
    is_sharded = config.data_parallel_shard * config.context_parallel > 1
    of_kinds = [sum(_gathered(each, config) for each in layer) for _, layer in model.layers]
    whole = _activations(model, config, tokens, "none")
    saved = _activations(model, config, tokens, config.activation_checkpointing)
    before = _saved(model, config, stage, tokens)
    of_products = 3 * model.decoder.network_dim  # of both projections and of their product
    passing = of_products * width * _tokens_here(config, tokens)
    keeps_gradient = not config.is_frozen and not earlier
    grown = of_rank(model.embedding, config) * _FLOAT32 if keeps_gradient and stage.projects else 0
    for index, kind in reversed(list(enumerate(stage.kinds))):
        before -= saved[kind]
        gathered = 2 * of_kinds[kind] + (
            0 if index or not stage.embeds else model.embedding.numel // config.tensor_parallel
        )
        weights = gathered * width if is_sharded else 0
        weights += 0 if config.is_frozen else of_kinds[kind] * (width + _FLOAT32)
        yield {"activations": before + whole[kind] + passing, "layer": weights, "gradients": earlier + grown}
        if keeps_gradient:
            grown += sum(of_rank(each, config) for each in model.layers[kind][1]) * _FLOAT32


def _gathered(tensor: TensorSize, config: TrainerConfig) -> int:
    """Elements of a layer's tensors while a rank computes with them."""
    return tensor.numel // (config.expert_parallel if tensor.kind == "expert" else config.tensor_parallel)


def _at_end(model: ModelSize, config: TrainerConfig, stage: Stage) -> dict[str, int]:
    """At the embedding: its gradient, whole in the compute dtype, beside the projection's if they are one."""
    whole = model.embedding.numel // config.tensor_parallel * _width(config)
    is_shared = model.decoder.tie_embeddings and config.num_ranks == 1
    return {"embedding": (2 if is_shared else 1) * whole if stage.embeds and not config.is_frozen else 0}


def longest_row(
    model: ModelSize, config: TrainerConfig, gpu: GPU, *, accumulates: bool = False, versions: int = 0
) -> int:
    """The most tokens of a row with which the trainer fits, in steps of 1,024; 0 if it does not fit at all."""

    def fits(thousands: int) -> bool:
        tokens = 1024 * thousands
        return trainer_memory(model, config, gpu, tokens=tokens, accumulates=accumulates, versions=versions).fits

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
    of_layer = model.decoder.latent or 2 * heads * model.decoder.head_dim
    return int(model.decoder.cached_layers(config.max_model_len) * of_layer * width)


def state_bytes(model: ModelSize, config: GeneratorConfig) -> int:
    """What delta rules keep of one sequence, however long it is, on one rank of the generator."""
    width = {"float32": _FLOAT32, "bfloat16": _BF16}
    states, inputs, dtype = model.decoder.state
    of_states = width.get(dtype, width[config.dtype])
    return (states * of_states + inputs * width[config.dtype]) // config.tensor_parallel


def generator_memory(model: ModelSize, config: GeneratorConfig, gpu: GPU, *, versions: int = 0) -> Memory:
    """Of a generator's rank: vLLM gives all of its share of the GPU that weights leave to keys and values.

    Delta rules have `max_num_seqs` states first, since vLLM starts with no fewer, and adapters their room. `versions`
    are bytes of weights on their way that lie on the same GPU. Keys and values are negative if it does not fit.
    """
    width = _FLOAT32 if config.dtype == "float32" else _BF16
    share = float(config.engine_args.get("gpu_memory_utilization", 0.8 if config.placement == "colocated" else 0.92))
    weights = model.numel * width // config.tensor_parallel
    num_seqs = config.max_num_seqs or gpu.num_seqs
    batch = max(int(config.engine_args.get("max_num_batched_tokens") or gpu.batched_tokens), num_seqs)
    working = batch * (4 * model.decoder.dim + 2 * model.decoder.network_dim) * width
    working += num_seqs * model.decoder.vocab_size * _FLOAT32 * 2
    states = num_seqs * state_bytes(model, config)
    room = _adapter_bytes(model, config, width)
    left = int(share * gpu.memory_bytes) - weights - working - states - room - gpu.context_bytes
    parts = {"weights": weights, "adapters": room, "working": working, "states": states, "keys and values": left}
    return Memory({**parts, "versions": versions}, gpu.context_bytes, gpu, reserved=int(share * gpu.memory_bytes))


def _adapter_bytes(model: ModelSize, config: GeneratorConfig, width: int) -> int:
    """vLLM's places for adapters, each for all projections and the highest rank; taken as if every rank had all."""
    if config.lora is None:
        return 0
    limit = config.lora.max_rank
    return config.lora.max_adapters * width * model.adapter(LoRAConfig(rank=min(r for r in LORA_RANKS if r >= limit)))


def fits_sequences(model: ModelSize, config: GeneratorConfig, memory: Memory) -> bool:
    """Whether a generator starts: vLLM wants room for a sequence of `max_model_len`."""
    return memory.fits and memory.parts["keys and values"] >= config.max_model_len * cache_bytes_per_token(
        model, config
    )


def version_bytes(model: ModelSize, config: TrainerConfig) -> int:
    """Weights on their way on one trainer's GPU, if they travel from GPU to GPU."""
    return LIVING_VERSIONS * model.numel * _BF16 // config.num_ranks


def versions_on_gpu(model: ModelSize, trainer: TrainerConfig, transport: str, gpu: GPU, *, one_host: bool) -> int:
    """Bytes of weights on their way on each of a trainer's GPUs: 0 if they go through memory of the host.

    Adapters always go through the host.
    """
    size = version_bytes(model, trainer)
    fits = leaves_room(size, allocated=0, free=gpu.memory_bytes, total=gpu.memory_bytes)
    chosen = transport == "gpu_memory" or (transport == "auto" and fits)
    return size if one_host and chosen and not trainer.is_frozen else 0
