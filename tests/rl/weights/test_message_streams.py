"""Messages are cast ahead of the link, into memory that no message on its way still needs."""

from typing import Any, cast

import pytest
import torch

from rl.weights.links import Link
from rl.weights.message_streams import room_to_send, send_messages
from rl.weights.messages import Message, Part
from rl.weights.versions import build_manifest

ROWS = 40
MANIFEST = build_manifest([("rows", (ROWS, 64), torch.bfloat16)])
MESSAGES = [Message(0, (Part(0, ((row, row + 1), (0, 64))),), 128) for row in range(ROWS)]
WEIGHTS = torch.arange(ROWS * 64, dtype=torch.float32).view(ROWS, 64) % 97


class SlowLink:
    """Takes the bytes of a message as late as it may: when the sender waits for it."""

    def __init__(self) -> None:
        self.taken: list[torch.Tensor] = []

    def send(self, data: torch.Tensor) -> "SlowLink._Pending":
        return self._Pending(self, data)

    class _Pending:
        def __init__(self, link: "SlowLink", data: torch.Tensor) -> None:
            self._link, self._data = link, data

        def wait(self) -> None:
            self._link.taken.append(self._data.clone())


def test_no_message_is_overwritten_before_it_is_sent() -> None:
    link = SlowLink()
    send_messages(cast("Link", link), MESSAGES, MANIFEST, lambda part: WEIGHTS[part.slices], room_to_send(MESSAGES))
    assert torch.equal(torch.cat(link.taken).view(torch.bfloat16).view(ROWS, 64), WEIGHTS.to(torch.bfloat16))


@pytest.mark.parametrize("at", [0, 17, ROWS - 1])
def test_an_error_while_casting_reaches_the_sender(at: int) -> None:
    def source(part: Part) -> Any:
        if part.region[0][0] == at:
            raise RuntimeError("the device is gone")
        return WEIGHTS[part.slices]

    with pytest.raises(RuntimeError, match="the device is gone"):
        send_messages(cast("Link", SlowLink()), MESSAGES, MANIFEST, source, room_to_send(MESSAGES))
