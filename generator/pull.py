"""The pulling side of weight synchronisation: a published version becomes the weights of a vLLM model in this process.

vLLM's own `load_weights` fuses and shards, so a tensor-parallel rank copies only what is its own. Everything that can
be known is checked before the first byte is copied; what was published for another model leaves the old weights as they
are. When to load is the engine's business.
"""

import asyncio
import contextlib
import queue
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from generator._compat import packed_experts, packed_layers
from generator.copy_plan import CopyPlan, CopyRecorder, pack_weights
from rl.weights.buffer import WeightBuffer
from rl.weights.checksums import element_sum
from rl.weights.copy_threads import Workers
from rl.weights.manifest import VersionRecord, WeightsError, WeightsMismatchError, corrupted
from rl.weights.registry import Store, check_within_reach

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Backup = tuple[list[tuple[nn.Parameter, torch.Tensor]], list[tuple[nn.Module, Any]]]
TensorQueue = queue.Queue[tuple[str, torch.Tensor] | BaseException | None]

_POLL_S = 0.002
_MAX_NAMED = 5


async def fetch_tensors(store: Store, record: VersionRecord, tensors: TensorQueue, done: asyncio.Future[Any]) -> None:
    """Fetches a version's tensors from TorchStore one by one into a bounded queue, None at the end, until `done`."""

    async def put(item: tuple[str, torch.Tensor] | BaseException | None) -> None:
        while not done.done():
            with contextlib.suppress(queue.Full):
                tensors.put_nowait(item)
                return
            await asyncio.sleep(_POLL_S)

    try:
        for spec, checksum in zip(record.manifest, record.checksums, strict=True):
            try:
                tensor = await store.get(record.key(spec.name))
            except Exception as error:  # KeyError, or what Monarch raises for a dead one
                raise WeightsError(f"TorchStore lost {spec.name!r} of version {record.version}: {error}") from error
            if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
                raise corrupted(record, spec, f"it is {tuple(tensor.shape)} of {tensor.dtype}")
            found = await asyncio.to_thread(element_sum, tensor)
            if found != checksum:
                raise corrupted(record, spec, f"its checksum is {found} instead of {checksum}")
            await put((spec.name, tensor))
        await put(None)
    except Exception as error:  # the engine's thread waits for the next tensor and has to hear of it
        await put(error)


def queued_tensors(tensors: TensorQueue) -> Iterator[tuple[str, torch.Tensor]]:
    """What `fetch_tensors` fetches. Raises what it raised."""
    while (item := tensors.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        yield item


class WeightLoader:
    """Loads published versions into one vLLM model."""

    def __init__(self, model: nn.Module, directory: Path, *, tied_embeddings: bool) -> None:
        """`directory` is where the model was loaded from: what its files hold is what a version has to bring."""
        self._model = model
        self._dtype = next(model.parameters()).dtype
        self._expected = _stored_shapes(directory)
        if tied_embeddings:
            self._expected.pop("lm_head.weight", None)  # some files repeat it; it is never published
        self._buffers: dict[tuple[int, int, int], WeightBuffer] = {}
        self._workers = Workers()
        self._plan: CopyPlan | None = None
        self._fitting = b""  # the layout that was found to be this model's
        packed_experts(model)  # raises for experts that cannot be loaded into

    def check(self, record: VersionRecord) -> None:
        """Raises `WeightsMismatchError` if the version is not one of this model, ValueError if it is out of reach."""
        if record.dtype != self._dtype:
            raise WeightsMismatchError(
                f"version {record.version} was published as {record.dtype}; this generator holds {self._dtype}"
            )
        if record.layout != self._fitting:
            self._check_shapes(record)
            self._fitting = record.layout
        check_within_reach(record)

    def _check_shapes(self, record: VersionRecord) -> None:
        published = {spec.name: spec.shape for spec in record.manifest}
        problems = [
            f"{what}: {_some(names)}"
            for what, names in (
                ("missing", self._expected.keys() - published.keys()),
                ("not of this model", published.keys() - self._expected.keys()),
                (
                    "of another shape",
                    {
                        f"{name} {published[name]} instead of {self._expected[name]}"
                        for name in published.keys() & self._expected.keys()
                        if published[name] != self._expected[name]
                    },
                ),
            )
            if names
        ]
        if problems:
            raise WeightsMismatchError(f"version {record.version} does not fit this model; {'; '.join(problems)}")

    @contextlib.contextmanager
    def shared_memory(self, record: VersionRecord) -> Generator[WeightBuffer]:
        """The buffer that holds the version, whole and unchanging while inside.

        Raises `UnknownVersionError` if a newer version took its place, `WeightsError` if the publisher is gone or a
        tensor is not what it published.
        """
        assert record.buffer is not None
        buffer = self._buffers.get(record.buffer)
        if buffer is None:
            buffer = WeightBuffer.open(record.buffer)
            if len(self._buffers) > 0 and next(iter(self._buffers))[0] != record.buffer[0]:
                self._close_buffers()  # those of a trainer that was restarted
            self._buffers[record.buffer] = buffer
        with buffer.reading(record):
            buffer.check_checksums(record)
            yield buffer

    def load_buffer(self, buffer: WeightBuffer, record: VersionRecord) -> None:
        """Copies the version that lies in `buffer` into the model. Raises as `load` does."""
        if self._plan is None or not self._plan.fits(record):
            with CopyRecorder(buffer) as recorder:
                self._load((spec.name, buffer.tensor(spec)) for spec in record.manifest)
            self._plan = CopyPlan(self._model, record, recorder)
            pack_weights(self._model, self._workers)
        else:
            self._plan.load(buffer, self._workers)

    def load(self, tensors: NamedTensors) -> None:
        """Copies the tensors into the model. Raises `WeightsError` if a parameter of the model was left as it was.

        After any exception the model is a mixture that must not be used until a later call succeeds, or `restore`.
        """
        self._load(tensors)
        pack_weights(self._model, self._workers)

    def backup(self) -> Backup:
        """A copy of this rank's weights, for `restore`. In the host's memory."""
        with torch.no_grad():
            parameters = [(p, p.detach().to("cpu", copy=True)) for p in self._model.parameters()]
        return parameters, [(layer, vars(layer)["cpu_linear"]) for layer in packed_layers(self._model)]

    def restore(self, backup: Backup) -> None:
        """Brings the weights back that `backup` copied."""
        parameters, packed = backup
        with torch.no_grad():
            for parameter, old in parameters:
                parameter.copy_(old)
        for layer, cpu_linear in packed:
            object.__setattr__(layer, "cpu_linear", cpu_linear)

    def _load(self, tensors: NamedTensors) -> None:
        with torch.no_grad():
            loaded: set[str] = self._model.load_weights(tensors)  # pyright: ignore[reportCallIssue]
        left = {name for name, _ in self._model.named_parameters()} - loaded
        if left:
            raise WeightsError(f"vLLM loaded nothing into these parameters: {_some(left)}")

    def _close_buffers(self) -> None:
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()


def _stored_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a model directory's safetensors files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return {name: shape for name, shape in shapes.items() if not name.endswith("rotary_emb.inv_freq")}


def _some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _MAX_NAMED} more" if len(ordered) > _MAX_NAMED else ""
    return ", ".join(ordered[:_MAX_NAMED]) + more
