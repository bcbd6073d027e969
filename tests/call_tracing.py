"""Which functions of the repository run within a block, and whether they are those that docs/architecture.md names."""

import sys
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from tests.docs.pages import ROOT, blocks_of


class TracedCall(NamedTuple):
    """One entry into a function, also that of a coroutine which goes on after a wait."""

    at: float
    """On the clock that all processes of this machine share."""
    file: str
    """Its path in the repository."""
    function: str
    """Its qualified name, as `TrainerHandle.forward_backward`."""


class Tracer:
    """Notes the calls of functions in some folders of the repository."""

    def __init__(self, *folders: str) -> None:
        """`folders` are paths in the repository."""
        self.calls: list[TracedCall] = []
        self._roots = tuple(f"{ROOT / folder}/" for folder in folders)

    def start(self) -> None:
        """Traces this thread, and threads that begin from now on."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def stop(self) -> None:
        """Traces no longer."""
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self._roots):
            file = str(Path(frame.f_code.co_filename).relative_to(ROOT))
            self.calls.append(TracedCall(time.monotonic(), file, frame.f_code.co_qualname))


@contextmanager
def traced_calls(*folders: str) -> Generator[list[TracedCall]]:
    """The calls within the block, as `Tracer` notes them."""
    tracer = Tracer(*folders)
    tracer.start()
    try:
        yield tracer.calls
    finally:
        tracer.stop()


def named_hops(heading: str) -> list[tuple[str, str]]:
    """File and function of each hop, from the fenced block of docs/architecture.md that begins with a heading.

    A line of it is `file.py  function  what happens`, with two spaces or more between them. A line that begins with
    spaces says more about the hop before.
    """
    texts = [block.text for block in blocks_of(ROOT / "docs" / "architecture.md")]
    (found,) = (text for text in texts if text.startswith(f"{heading}\n"))
    lines = [line for line in found.splitlines()[1:] if line and not line.startswith(" ")]
    return [(file, function) for file, function, _ in (line.split(maxsplit=2) for line in lines)]


def check_hops(heading: str, calls: Iterable[TracedCall]) -> None:
    """Asserts that the calls pass the named hops in their order."""
    came_by = iter([(call.file, call.function) for call in sorted(calls)])
    for hop in named_hops(heading):
        assert hop in came_by, f"{heading}: no call of {hop} after those of the hops before it"
