"""Ends what tests of the gateway leave behind."""

from collections.abc import Generator
from typing import Any

import pytest

pytest.importorskip("tinker", reason="the tinker package is not installed: pip install 'ownloop[tinker]'")

from tinker.lib.internal_client_holder import InternalClientHolder


@pytest.fixture(autouse=True)
def sdk_clients_end(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Closes the SDK's clients that a test makes: each would call its server, long gone, until pytest ends."""
    holders: list[InternalClientHolder] = []
    initialise = InternalClientHolder.__init__

    def recording(self: InternalClientHolder, *arguments: Any, **options: Any) -> None:
        initialise(self, *arguments, **options)
        holders.append(self)

    monkeypatch.setattr(InternalClientHolder, "__init__", recording)
    yield
    for holder in holders:
        holder.close()
