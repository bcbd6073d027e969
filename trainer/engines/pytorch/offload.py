"""Where the parts of an engine's state rest, on the accelerator or in host memory, and that they are in while used.

Where a part rests is what `to` said last. A call brings in what it needs and puts it back where it rests; blocks may be
nested, and then the outermost moves. Moving itself is the engine's business.
"""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

import torch

Part = Literal["model", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)
HOST = torch.device("cpu")


class Offload:
    """Which part of the state is where. On a machine without an accelerator host and device are one."""

    def __init__(self, device: torch.device, move: Callable[[Part, torch.device], None]) -> None:
        """Everything is on `device`. `move` takes one part to another device."""
        self._device = device
        self._move = move
        self._rests = dict.fromkeys(PARTS, device)
        self._place = dict.fromkeys(PARTS, device)
        self._users: Counter[Part] = Counter()

    def device_of(self, part: Part) -> torch.device:
        """Where a part is now."""
        return self._place[part]

    def rest(self, parts: Sequence[Part], device: str) -> None:
        """Lets parts rest on `device` from now on. Raises ValueError for no part and for a device there is not."""
        if device not in (HOST.type, self._device.type):
            accepted = " or ".join(repr(kind) for kind in dict.fromkeys((HOST.type, self._device.type)))
            raise ValueError(f"to: device is {device!r}; this trainer's state can be on {accepted}")
        if not parts:
            raise ValueError(f"to: nothing to move; say which of {', '.join(f'{part}=True' for part in PARTS)}")
        for part in parts:
            self._rests[part] = self._device if device == self._device.type else HOST
            self._settle(part)

    @contextmanager
    def resident(self, *parts: Part) -> Generator[None]:
        """Has these parts on the device within the block."""
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
        """Moves a part to where it should be now."""
        wanted = self._device if self._users[part] else self._rests[part]
        if wanted != self._place[part]:
            self._move(part, wanted)
            self._place[part] = wanted
