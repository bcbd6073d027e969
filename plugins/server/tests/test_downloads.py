"""Exported checkpoints over HTTP: `tinker checkpoint download`, and who may fetch what."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest

from plugins.server.tests.running_server import RunningServer, running_server
from plugins.server.tests.sdk import scores, train

tinker: Any = pytest.importorskip("tinker")

from click.testing import CliRunner  # noqa: E402, needs the packages of the extra
from tinker.cli.__main__ import main_cli  # noqa: E402


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server"), needs_key=True) as running:
        yield running


@pytest.fixture(scope="module")
def ann(server: RunningServer) -> str:
    return server.keys.add("ann")


def trained(server: RunningServer, key: str) -> Any:
    """A training client that has made a step."""
    training = server.client(key).create_lora_training_client("toy", rank=4).result()
    train(training)
    return training


def fetch(url: str) -> tuple[int, bytes]:
    """Status and body, without a key."""
    try:
        with urlopen(url, timeout=120) as response:
            return response.status, response.read()
    except HTTPError as error:
        return error.code, error.read()


def test_the_command_downloads_a_state_and_deletes_its_export(
    server: RunningServer, ann: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = trained(server, ann)
    path = training.save_state("one").result().path
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", ann)
    result = CliRunner().invoke(main_cli, ["checkpoint", "download", path, "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "adapter_config.json").read_text()) == {}
    (adapter,) = (a for name, a in server.host.adapters.items() if name.startswith(training.model_id.replace(":", "-")))
    exported = json.loads((folder / "inner" / "table.json").read_text())
    np.testing.assert_allclose(exported, adapter.table.tolist(), rtol=1e-6)
    rest = tinker.RestClient(base_url=server.url, api_key=ann)
    assert [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints] == [path]


def test_an_address_is_its_users_alone_and_does_not_last(
    server: RunningServer, ann: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = trained(server, ann)
    path = training.save_weights_external("two", ttl_seconds=3600).result().path
    bob = tinker.RestClient(base_url=server.url, api_key=server.keys.add("bob"))
    with pytest.raises(tinker.NotFoundError):
        bob.get_external_weights_urls(path).result()
    rest = tinker.RestClient(base_url=server.url, api_key=ann)
    url = rest.get_external_weights_urls(path).result().urls["adapter_config.json"]
    assert fetch(url) == (200, b"{}")
    for other in (
        url.replace("adapter_config.json", "inner/table.json"),
        url.replace("adapter_config.json", "../../../gateway.sqlite"),
        url.replace("/two/", "/three/"),
        url.replace("expires=", "expires=9"),
        url[:-1] + ("0" if url[-1] != "0" else "1"),
    ):
        assert fetch(other)[0] == 403, other
    monkeypatch.setattr("ownloop_server.listing.time.time", lambda: 9e9)
    assert fetch(url)[0] == 403
    monkeypatch.undo()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert fetch(url)[0] in (404, 422)


def test_exports_are_not_loaded_and_encryption_is_refused(server: RunningServer, ann: str) -> None:
    training = trained(server, ann)
    path = training.save_weights_external("three").result().path
    for load in (
        lambda: server.client(ann).create_sampling_client(model_path=path).result(),
        lambda: server.client(ann).create_training_client_from_state(path, base_model="toy").result(),
    ):
        with pytest.raises((tinker.APIStatusError, tinker.RequestFailedError, ValueError), match=r"exported|external"):
            load()
    with pytest.raises(tinker.RequestFailedError, match="age_encryption_recipients is not supported"):
        training.save_weights_external("four", age_encryption_recipients=["age1xyz"]).result()
    assert scores(training)
