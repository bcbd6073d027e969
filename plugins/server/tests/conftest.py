"""What all tests of the gateway share."""

import functools
import ssl
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from tests.waiting import LIMIT_S

if TYPE_CHECKING:  # the import would load the server, or skip where the SDK is not installed
    from plugins.server.tests.running_server import RunningServer


@pytest.fixture(scope="module", autouse=True)
def results_of_the_sdk_have_a_limit() -> Generator[None]:
    """`future.result()` of Tinker's clients waits for ever by default."""
    futures: Any = sys.modules.get("tinker.lib.public_interfaces.api_future")
    if futures is None:  # the module under test does not use the SDK
        yield
        return
    own = futures.AwaitableConcurrentFuture.result
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(futures.AwaitableConcurrentFuture, "result", lambda self, timeout=LIMIT_S: own(self, timeout))
        yield


@pytest.fixture(scope="module", autouse=True)
def certificates_are_read_once() -> Generator[None]:
    """Every client reads those of the public authorities anew otherwise: 30 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> "Generator[RunningServer]":
    """A server of the toy model for the tests of a module."""
    from plugins.server.tests.running_server import running_server

    with running_server(tmp_path_factory.mktemp("server")) as running:
        yield running
