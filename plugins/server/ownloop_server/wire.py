"""Tinker's messages of training as our types, and back.

Requests and results of `forward_backward` are protobuf messages of the `tinker` package. Nothing here unpickles or
imports what a client sent: a loss is a name from a fixed list, and arrays are bytes of a known dtype and shape.
Legend: N tokens of a datum, K targets per token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import zstandard
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tinker import types
from tinker.proto import tinker_public_pb2 as messages

from ownloop_server.config import Limits
from ownloop_server.image_chunks import ReadImage, image_tokens
from ownloop_shelf.traced_loss import PREFIX, Node, TracedLoss
from rl.images import images_of, join_tokens
from rl.losses import Loss, get_loss
from rl.losses.shared import SharedOptions
from rl.sampling import KeptSets
from rl.types import Datum

SERVED_LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
"""Tinker's losses that have a published formula. `forward_backward_custom` is made of them by the client."""
OWN_LOSS = "for a loss of your own, there are create_custom_loss, and forward_backward_custom with a function"
_OPTIONAL_INPUTS = ("weights", "old_logprobs", "reference_logprobs", "temperature", "kept")
"""Two are inputs of this server alone: `temperature`, at which the client sampled, the same number at every token, and
`kept`, int64 [N, W], the tokens that its cut left for each target, filled up with -1; nothing but -1 for all tokens."""
_DTYPES: Mapping[int, type[np.generic]] = {messages.DTYPE_FLOAT32: np.float32, messages.DTYPE_INT64: np.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """The content of a `forward_backward` request."""

    data: tuple[Datum, ...]
    """One per datum of the request, or K for a datum with [N, K] targets."""
    widths: tuple[int, ...]
    """The K of each datum of the request; 0 for [N] targets."""
    loss: Loss
    """The loss with the options of the request."""
    forward_only: bool


def decode_request(body: bytes, encoding: str | None, max_bytes: int) -> messages.ForwardBackwardRequest:
    """Parses a body. Raises ValueError if it is not such a message, or larger than `max_bytes` when decompressed."""
    if encoding not in (None, "", "identity", "zstd"):
        raise ValueError(f"Content-Encoding is {encoding!r}; it must be zstd or absent")
    if encoding == "zstd":
        try:
            with zstandard.ZstdDecompressor().stream_reader(body) as reader:
                body = reader.read(max_bytes + 1)
        except zstandard.ZstdError as error:
            raise ValueError(f"the body is not zstd, as its Content-Encoding says: {error}") from None
    if len(body) > max_bytes:
        raise ValueError(f"the request is larger than {max_bytes} bytes; send fewer datums at a time")
    request = messages.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise ValueError(f"the body is not a ForwardBackwardRequest: {error}") from None
    return request


def check_size(request: messages.ForwardBackwardRequest, limits: Limits) -> None:
    """Raises ValueError for a batch that is larger than the server takes at once."""
    chunks = [chunk for datum in request.data for chunk in datum.model_input]
    num_tokens = sum(len(chunk.encoded_text.tokens) // 4 + chunk.image.expected_tokens for chunk in chunks)
    for what, found, limit, option in (
        ("datums", len(request.data), limits.batch_datums, "batch-datums"),
        ("tokens", num_tokens, limits.batch_tokens, "batch-tokens"),
    ):
        if found > limit:
            raise ValueError(
                f"the request has {found} {what}; this server takes {limit} at once "
                f"(`ownloop serve --limits.{option}`): send several; their gradients add up until optim_step"
            )


def read_batch(
    request: messages.ForwardBackwardRequest, own_losses: Mapping[str, Loss], read_image: ReadImage | None = None
) -> TrainingBatch:
    """The datums and the loss of a request. `own_losses` are the losses that the client's session has made, by id.

    `read_image` is of a model that reads images. Raises ValueError naming the datum and the field that cannot be used.
    """
    loss = _read_loss(request, own_losses)
    data: list[Datum] = []
    widths: list[int] = []
    for index, message in enumerate(request.data):
        # the SDK's own losses may have other inputs than ours
        read = _read_own_datum if isinstance(loss.function, TracedLoss) else _read_datum
        parts, width = read(f"data[{index}]", message, loss, read_image)
        data += parts
        widths.append(width)
    return TrainingBatch(data=tuple(data), widths=tuple(widths), loss=loss, forward_only=request.forward_only)


def encode_output(batch: TrainingBatch, logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """A `ForwardBackwardOutput` with the log-probs of every datum, in the shape of its targets.

    Metrics get the name of their reduction, by which the client merges the metrics of one call's requests.
    """
    output = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    remaining = iter(logprobs)
    for width in batch.widths:
        array = next(remaining) if width == 0 else np.stack([next(remaining) for _ in range(width)], axis=1)
        record = output.loss_fn_outputs.add(num_datums=1)
        field = record.fields["logprobs"]
        field.dtype = messages.DTYPE_FLOAT32
        field.data = np.ascontiguousarray(array, dtype=np.float32).tobytes()
        field.offsets = np.array([0, array.size * 4], dtype=np.int64).tobytes()
        if width:
            field.trailing_shape.append(width)
    for name, value in metrics.items():
        if name.startswith(PREFIX):  # the trainer adds up over datums
            # the trainer divides nothing: its sums are over datums
            output.metrics[name] = value / len(batch.data) if name.endswith(":mean") else value
        else:
            output.metrics[_with_reduction(name)] = value
    return output.SerializeToString()


def _with_reduction(name: str) -> str:
    for reduction in ("max", "min"):
        if name.endswith(f"_{reduction}"):
            return f"{name.removesuffix(f'_{reduction}')}:{reduction}"
    return f"{name.removesuffix('_sum')}:sum"  # the SDK merges the parts of a batch by these endings


def traced_loss(request: types.CreateCustomLossRequest) -> Loss:
    """The loss that a client sends as a graph. Raises ValueError for one that this server does not run."""
    if [each.name for each in request.inputs[:1]] != ["logprobs"] or any(each.rank == 2 for each in request.inputs):
        ranks = {each.name: each.rank for each in request.inputs}
        raise ValueError(
            f"loss {request.name!r} has inputs of ranks {ranks}; this server takes logprobs of rank 1, and then inputs "
            "of rank 0 or 1"
        )
    inputs = request.inputs[1:]
    traced = TracedLoss(
        name=request.name,
        inputs=tuple(each.name for each in inputs),
        scalars=frozenset(each.name for each in inputs if each.rank == 0),
        nodes=tuple(Node(n.op, n.name, n.target, tuple(n.args), n.kwargs) for n in request.graph.nodes),
    )
    return Loss(name="custom", function=traced, required_inputs=tuple(f"{PREFIX}{each.name}" for each in inputs))


def _read_loss(request: messages.ForwardBackwardRequest, own_losses: Mapping[str, Loss]) -> Loss:
    name = request.loss_fn
    if name == "custom":
        loss_id = request.loss_fn_config_v2["loss_id"].text
        if loss_id not in own_losses:
            raise ValueError(f"loss_id is {loss_id!r}; this session has made {sorted(own_losses)}; {OWN_LOSS}")
        return own_losses[loss_id]
    if name == "stable_reinforce":
        raise ValueError(
            "loss_fn is 'stable_reinforce', whose formula is not published; use loss_fn=ppo, cispo, gspo or "
            "importance_sampling"
        )
    if name not in SERVED_LOSSES:
        raise ValueError(f"loss_fn is {name!r}; this server computes {', '.join(SERVED_LOSSES)}; {OWN_LOSS}")
    config: dict[str, float | str] = dict(request.loss_fn_config)
    for option, value in request.loss_fn_config_v2.items():  # the older field has numbers, the newer also texts
        config[option] = value.number if value.WhichOneof("value") == "number" else value.text
    return get_loss(name, config)


def _read_datum(
    field: str, message: messages.Datum, loss: Loss, read_image: ReadImage | None
) -> tuple[list[Datum], int]:
    """The datum, or K of them that together have its gradient; and K, or 0."""
    sequence = _read_tokens(f"{field}.model_input", message, read_image)
    tokens, images = np.array(sequence, dtype=np.int64), images_of(sequence)
    arrays = {name: _read_tensor(f"{field}.loss_fn_inputs[{name!r}]", t) for name, t in message.loss_fn_inputs.items()}
    accepted = ("target_tokens", *loss.required_inputs, *_OPTIONAL_INPUTS)
    if loss.name == "gspo":  # the SDK sends it for GSPO, which counts sequences with it
        accepted = (*accepted, "sequence_ratio_mask")
    for name, array in arrays.items():
        if name not in accepted:
            raise ValueError(f"{field}.loss_fn_inputs has {name!r}; {loss.name} takes {', '.join(accepted)}")
        if len(array) != len(tokens):
            raise ValueError(
                f"{field}.loss_fn_inputs[{name!r}] has length {len(array)}; there are {len(tokens)} tokens"
            )
    if "target_tokens" not in arrays:
        raise ValueError(f"{field}.loss_fn_inputs lacks 'target_tokens'; it has {sorted(arrays)}")
    targets = arrays["target_tokens"]
    if targets.dtype != np.int64:
        raise ValueError(f"{field}.loss_fn_inputs['target_tokens'] is of dtype {targets.dtype}; it must be int64")
    kept = _read_kept(field, arrays.pop("kept", None))
    inputs = {name: a if name == "target_tokens" else a.astype(np.float32) for name, a in arrays.items()}
    # the SDK leaves them out for weights of 1
    weights = inputs.setdefault("weights", np.ones(targets.shape, np.float32))
    # Our losses skip tokens of weight 0 and report no log-prob for them; Tinker reports all.
    only_reported = (weights == 0) | _without_effect(loss, inputs)
    inputs |= {"weights": np.where(only_reported, np.float32(0), weights), "reported_mask": only_reported}
    temperature = _read_temperature(field, inputs.pop("temperature", None))
    if targets.ndim == 1:
        return [Datum(tokens=tokens, loss_inputs=inputs, temperature=temperature, images=images, kept=kept)], 0
    if loss.name != "cross_entropy" or any(a.shape != targets.shape for a in inputs.values()):
        shapes = {name: a.shape for name, a in inputs.items()}
        raise ValueError(f"{field}.loss_fn_inputs has shapes {shapes}; only cross_entropy takes [N, K], all of one K")
    columns = range(targets.shape[1])
    parts = [{name: np.ascontiguousarray(a[:, k]) for name, a in inputs.items()} for k in columns]
    whole = Datum(tokens=tokens, loss_inputs={}, temperature=temperature, images=images, kept=kept)
    return [replace(whole, loss_inputs=part) for part in parts], len(columns)


def _read_own_datum(
    field: str, message: messages.Datum, loss: Loss, read_image: ReadImage | None
) -> tuple[list[Datum], int]:
    """The datum with the inputs of a traced loss, and 0."""
    traced, sequence = loss.function, _read_tokens(f"{field}.model_input", message, read_image)
    tokens = np.array(sequence, dtype=np.int64)
    assert isinstance(traced, TracedLoss)
    arrays = {name: _read_tensor(f"{field}.loss_fn_inputs[{name!r}]", t) for name, t in message.loss_fn_inputs.items()}
    inputs: dict[str, np.ndarray] = {"weights": np.ones(len(tokens), np.float32)}
    for name in ("target_tokens", *traced.inputs):
        if name not in arrays:
            raise ValueError(f"{field}.loss_fn_inputs lacks {name!r}; it has {sorted(arrays)}")
        length = 1 if name in traced.scalars else len(tokens)
        if arrays[name].shape != (length,):
            raise ValueError(f"{field}.loss_fn_inputs[{name!r}] has shape {arrays[name].shape}; it must be [{length}]")
        key = name if name == "target_tokens" else f"{PREFIX}{name}"
        # of its own memory: torch wants arrays that can be written to
        inputs[key] = np.broadcast_to(arrays[name], len(tokens)).copy()
    dtypes = [torch.from_numpy(inputs[f"{PREFIX}{name}"]).dtype for name in traced.inputs]
    try:
        traced.check(dtypes, len(tokens))
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error
    return [Datum(tokens=tokens, loss_inputs=inputs, images=images_of(sequence))], 0


def _read_temperature(field: str, given: NDArray[np.float32] | None) -> float:
    """The temperature that all tokens of a datum have."""
    if given is None or given.size == 0:
        return 1.0
    if not (np.isfinite(given).all() and given.flat[0] > 0 and (given == given.flat[0]).all()):
        raise ValueError(f"{field}.loss_fn_inputs['temperature'] must be one finite number above 0 at every token")
    return float(given.flat[0])


def _read_kept(field: str, given: np.ndarray | None) -> KeptSets | None:
    """The kept sets of a datum's targets. The trainer checks the tokens."""
    if given is None:
        return None
    if given.ndim != 2 or given.dtype != np.int64:
        raise ValueError(
            f"{field}.loss_fn_inputs['kept'] is {given.dtype} of shape {list(given.shape)}; it must be int64 [N, W], "
            "the tokens that were kept for each target, filled up with -1"
        )
    return KeptSets.of([np.unique(row[row >= 0]) for row in given])


def _without_effect(loss: Loss, inputs: Mapping[str, np.ndarray]) -> NDArray[np.bool_]:
    """[N] the leading tokens whose term and gradient are always 0, such as the tokens of a prompt.

    The trainer computes what a group's datums begin with once if it only has to be reported.
    """
    advantages, mask = inputs.get("advantages"), inputs.get("sequence_ratio_mask")
    known = loss.name in ("importance_sampling", "ppo", "cispo") or (loss.name == "gspo" and mask is not None)
    if not known or advantages is None or loss.shared != SharedOptions():
        # with any other option the term of such a token may not be 0
        return np.zeros(inputs["weights"].shape, np.bool_)
    return np.logical_and.accumulate((advantages == 0) if mask is None else (advantages == 0) & (mask == 0))


def _read_tokens(field: str, message: messages.Datum, read_image: ReadImage | None) -> tuple[int, ...]:
    """[N] the tokens of all chunks, which know their images."""
    chunks: list[Sequence[int]] = []
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind == "encoded_text":
            chunks.append(_from_bytes(field, chunk.encoded_text.tokens, np.int32).tolist())
        elif kind == "image" and read_image is not None:
            if chunk.image.HasField("override_dimensions"):
                raise ValueError(f"{field} has an image with override_dimensions; resize the image in its place")
            expected = chunk.image.expected_tokens if chunk.image.HasField("expected_tokens") else None
            chunks.append(image_tokens(field, chunk.image.data, expected, read_image))
        else:
            raise ValueError(f"{field} has a chunk of kind {kind}; this server trains on text only: leave it out")
    return join_tokens(*chunks)


def _read_tensor(field: str, tensor: messages.Tensor) -> np.ndarray:
    """[N] or [N, K]; cells that a sparse tensor leaves out are 0."""
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"{field} has the dtype number {tensor.dtype}; it must be float32 or int64")
    shape = tuple(tensor.shape)
    sparse = tensor.WhichOneof("encoding") == "sparse_csr"
    values = _from_bytes(field, tensor.sparse_csr.values if sparse else tensor.dense, _DTYPES[tensor.dtype])
    if sparse:
        return _from_sparse(field, values, tensor.sparse_csr, shape)
    shape = shape or values.shape  # a shape may be left out for one dimension
    if len(shape) not in (1, 2) or any(size < 0 for size in shape) or int(np.prod(shape)) != values.size:
        raise ValueError(f"{field} has {values.size} values and shape {list(shape)}; they must agree: [N] or [N, K]")
    return values.reshape(shape)


def _from_sparse(field: str, values: np.ndarray, csr: messages.SparseCsr, shape: tuple[int, ...]) -> np.ndarray:
    starts = _from_bytes(field, csr.crow_indices, np.int64)
    columns = _from_bytes(field, csr.col_indices, np.int64)
    rows = csr_rows(field, starts, columns, len(values), shape)
    dense = np.zeros(shape, values.dtype)
    dense[rows, columns] = values
    return dense


def csr_rows(
    field: str, starts: NDArray[np.int64], columns: NDArray[np.int64], num_values: int, shape: Sequence[int]
) -> NDArray[np.int64]:
    """The row of every value of a sparse matrix. Raises ValueError if its indices do not describe one."""
    # A few bytes could ask for any amount of memory: a sparse tensor is at most 1,024 targets wide.
    consistent = (
        len(shape) == 2
        and 0 < shape[1] <= 1024
        and len(starts) == shape[0] + 1
        and len(columns) == num_values
        and starts[0] == 0
        and starts[-1] == num_values
        and bool((np.diff(starts) >= 0).all())
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if not consistent:
        raise ValueError(f"{field} is not a sparse CSR matrix [N, K] of shape {list(shape)} with K at most 1024")
    return np.repeat(np.arange(shape[0]), np.diff(starts))


def _from_bytes(field: str, data: bytes, dtype: Any) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise ValueError(f"{field} has {len(data)} bytes, which is no whole number of {np.dtype(dtype).name} values")
    return np.frombuffer(data, dtype).copy()  # torch wants arrays that can be written to
