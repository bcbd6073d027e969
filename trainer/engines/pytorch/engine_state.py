"""The state of an engine apart from its model and optimizer: gradients, master weights, and the place of each part.

`MixedPrecision` does what FSDP's `MixedPrecisionPolicy` does, for a model that is not sharded: bfloat16 copies compute,
and float32 master weights accumulate and step. FSDP casts every parameter in every forward pass; here the copies are
recast once per optimizer step.

`HostMemory` holds a part while it is away from the GPU. A GPU copies to and from pinned memory at the speed of PCIe and
beside its computation. The driver takes other memory through buffers of its own, at about a tenth of the speed.

`Offload` keeps parts of the state in host memory and moves them to the device while they are used. `rest` chooses where
a part stays between uses. `resident` blocks move parts to the device and back afterwards; they may be nested, and then
the outermost block moves. The engine does the moving itself.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl.system.cuda import pin, unpin

Part = Literal["model", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)
HOST = torch.device("cpu")
_PIECE_BYTES = 64 << 20  # small tensors share pieces of this size; a larger tensor has one of its own
_ALIGNMENT = 512


class HostMemory:
    """Pinned memory that holds one part of the state at a time. It stays, as pinning takes longer than a copy."""

    def __init__(self) -> None:
        """Takes no memory yet."""
        self._pieces: list[Tensor] = []
        self._piece = self._used = 0

    def mover(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """A function that copies tensors to `device`. On the host they replace what was copied there before.

        Copies to and from a GPU are queued on its current stream. Synchronize before the host reads a tensor.
        """
        if device != HOST:
            return functools.partial(Tensor.to, device=device, non_blocking=True)
        self._piece = self._used = 0
        return self.keep

    def keep(self, tensor: Tensor) -> Tensor:
        """Queues a copy of a tensor, or of a DTensor's local part, next to what is held. Tensors of the host stay."""
        if tensor.device == HOST:
            return tensor
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        without_gaps = torch.empty_like(local, device="meta").stride()
        copy = self._room(local.nbytes).view(local.dtype).as_strided(local.shape, without_gaps)
        copy.copy_(local, non_blocking=True)
        # The public constructor would move the local part to the mesh's device.
        return DTensor(copy, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else copy  # pyright: ignore

    def _room(self, num_bytes: int) -> Tensor:
        """Pinned memory (uint8 [num_bytes]) with arbitrary content."""
        while self._piece < len(self._pieces) and self._used + num_bytes > len(self._pieces[self._piece]):
            self._piece, self._used = self._piece + 1, 0
        if self._piece == len(self._pieces):
            piece = torch.empty(max(num_bytes, _PIECE_BYTES), dtype=torch.uint8)
            if problem := pin(piece, writable=True):
                print(f"offloading will be slow: {problem}", flush=True)
            else:  # before the memory is freed: CUDA would refuse to pin what comes to lie there next
                weakref.finalize(self, unpin, piece).atexit = False
            self._pieces.append(piece)
        begin, self._used = self._used, self._used + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._pieces[self._piece][begin : begin + num_bytes]


class Gradients:
    """Keeps each gradient in `parameter.grad`, or apart from its parameter while they are on different devices.

    torch refuses a `parameter.grad` on another device than the parameter's.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """`parameters` by any name."""
        self._parameters = parameters
        self._detached: dict[str, Tensor] = {}
        self._host = HostMemory()

    @property
    def exist(self) -> bool:
        """Whether any parameter has a gradient."""
        return bool(self._detached) or any(parameter.grad is not None for parameter in self._parameters.values())

    def clear(self) -> None:
        """Drops all gradients."""
        self._detached = {}
        for parameter in self._parameters.values():
            parameter.grad = None

    def detach(self) -> None:
        """Takes the gradients off their parameters, so that either can be moved."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._detached[name] = parameter.grad
                parameter.grad = None

    def to(self, device: torch.device) -> None:
        """Moves detached gradients."""
        move = self._host.mover(device)
        self._detached = {name: move(grad) for name, grad in self._detached.items()}

    def attach(self) -> None:
        """Puts detached gradients back into `parameter.grad`. They must be on the parameters' device."""
        for name, grad in self._detached.items():
            self._parameters[name].grad = grad
        self._detached = {}

    def attached(self) -> dict[str, Tensor | None]:
        """The present `grad` of every parameter, by name."""
        return {name: parameter.grad for name, parameter in self._parameters.items()}

    def restore(self, earlier: Mapping[str, Tensor | None]) -> None:
        """Replaces the gradients by earlier ones, which `attached` returned."""
        for name, parameter in self._parameters.items():
            parameter.grad = earlier[name]

    def add(self, earlier: Mapping[str, Tensor | None]) -> None:
        """Adds the gradients that `attached` returned to those accumulated since."""
        for name, parameter in self._parameters.items():
            grad = earlier[name]
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


class MasterWeights(Protocol):
    """The float32 parameters of a model that computes with other ones."""

    def to(self, device: torch.device, compute_device: torch.device) -> None:
        """Moves the parameters to `device`. The model is of use only while that is `compute_device`."""
        ...

    def refresh(self) -> None:
        """Gives the model the values of the parameters, which have changed."""
        ...


class MixedPrecision:
    """The float32 master weights of a model that computes in another dtype."""

    def __init__(self, parameters: Iterable[nn.Parameter], compute_dtype: torch.dtype) -> None:
        """Turns float32 parameters into `compute_dtype` copies, whose gradients go to the master weights."""
        self._host = HostMemory()
        self._copies = list(parameters)
        self.master_weights = [nn.Parameter(parameter.data) for parameter in self._copies]
        for copy, master in zip(self._copies, self.master_weights, strict=True):
            copy.data = master.data.to(compute_dtype)
            copy.register_post_accumulate_grad_hook(_Accumulate(master))

    def to(self, device: torch.device, compute_device: torch.device) -> None:
        """Moves the master weights to `device`. The copies exist only while that is `compute_device`."""
        move = self._host.mover(device)
        for copy, master in zip(self._copies, self.master_weights, strict=True):
            master.data = move(master.data)
            copy.data = master.data.to(copy.dtype) if device == compute_device else copy.data.new_empty(0)

    def refresh(self) -> None:
        """Recasts the copies after the master weights changed."""
        with torch.no_grad():
            for copy, master in zip(self._copies, self.master_weights, strict=True):
                copy.copy_(master)


class _Accumulate:
    """Adds a copy's gradient to its master weight's as soon as the backward pass has computed it, and frees it."""

    def __init__(self, master: nn.Parameter) -> None:
        self._master = master

    def __call__(self, copy: torch.Tensor) -> None:
        assert copy.grad is not None
        if self._master.grad is None:
            self._master.grad = copy.grad.float()
        else:
            self._master.grad.add_(copy.grad)
        copy.grad = None


class Offload:
    """Tracks where each part of the state is. Without an accelerator, the host is the device and nothing moves."""

    def __init__(self, device: torch.device, move: Callable[[Part, torch.device], None]) -> None:
        """Everything starts on `device`. `move` moves one part to another device."""
        self._device = device
        self._move = move
        self._rests = dict.fromkeys(PARTS, device)
        self._place = dict.fromkeys(PARTS, device)
        self._users: Counter[Part] = Counter()

    def device_of(self, part: Part) -> torch.device:
        """The device on which a part is now."""
        return self._place[part]

    def rest(self, parts: Sequence[Part], device: str) -> None:
        """Keeps parts on `device` between uses. Raises ValueError for no parts and for an unknown device.

        On the CPU, where nothing moves, "cuda" is accepted as well, so that a loop that offloads runs anywhere.
        """
        accelerator = "cuda" if self._device == HOST else self._device.type
        if device not in (HOST.type, accelerator):
            raise ValueError(f"to: device is {device!r}; it must be {HOST.type!r} or {accelerator!r}")
        if not parts:
            raise ValueError(f"to: nothing to move; say which of {', '.join(f'{part}=True' for part in PARTS)}")
        for part in parts:
            self._rests[part] = HOST if device == HOST.type else self._device
            self._settle(part)

    @contextmanager
    def resident(self, *parts: Part) -> Generator[None]:
        """Keeps these parts on the device within the block."""
        self._users.update(parts)
        try:
            for part in parts:
                self._settle(part)
            yield
        finally:
            self._users.subtract(parts)
            for part in parts:
                self._settle(part)

    def _settle(self, part: Part) -> None:
        """Moves a part to where it should be now, unless it is there already."""
        wanted = self._device if self._users[part] else self._rests[part]
        if wanted != self._place[part]:
            self._move(part, wanted)
            self._place[part] = wanted
