"""Models on hosts: another one in the same place is refused, and a host without one gets a copy that is whole."""

import asyncio
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ownloop_hosts import other_hosts
from ownloop_hosts.model_copies import ModelOffer, ModelServer, check_same_model, model_files, receive_model
from plugins.hosts.tests.fake_hosts import FakeAgent, fake_host
from tests.waiting import wait_until

HERE = "127.0.0.1"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with files large and small; a link, as in the hub's cache, and an empty one."""
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "blob").write_bytes(bytes(range(256)) * 80_000)  # more than is sent at once
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    (folder / "config.json").write_text("{}")
    (folder / "empty.txt").touch()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"other")
    return folder


def test_another_model_in_the_same_place_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    with pytest.raises(ValueError, match="there is no model in"):
        check_same_model(model, {"config.json": "x"})
    model.mkdir()
    (model / "config.json").write_text("{}")
    expected = model_files(model)
    check_same_model(model, expected)
    (model / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"another one than the controller's: config\.json differ"):
        check_same_model(model, expected)


def test_a_copy_is_the_model(model: Path, tmp_path: Path) -> None:
    there = tmp_path / "other" / "place" / "model"
    server = ModelServer(model, HERE)
    receive_model(replace(server.offer, model=there))
    check_same_model(there, model_files(model))
    assert (there / "model.safetensors").read_bytes() == (tmp_path / "blob").read_bytes()
    assert not (there / "model.safetensors").is_symlink()
    assert [path.name for path in there.parent.iterdir()] == ["model"]
    assert server.offer.num_bytes == 256 * 80_000 + 2 + len("{{ tools }}")
    wait_until(lambda: server.sent_bytes == server.offer.num_bytes, "the thread that sends to have counted all")
    assert (there / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert not (there / "original").exists()


def test_a_stranger_gets_nothing_and_the_host_its_copy(model: Path, tmp_path: Path) -> None:
    server, there = ModelServer(model, HERE, token_s=1.0), tmp_path / "there"
    stranger = replace(server.offer, model=there, token=bytes(32))
    with pytest.raises(ValueError, match="none could be copied there: the controller closed the connection"):
        receive_model(stranger)
    assert not there.exists()
    with socket.create_connection((HERE, server.offer.port)):  # it says nothing
        receive_model(replace(server.offer, model=there))
    check_same_model(there, model_files(model))


def test_of_a_copy_that_is_interrupted_nothing_is_left(tmp_path: Path) -> None:
    with socket.create_server((HERE, 0)) as server:

        def send_half() -> None:
            with server.accept()[0] as connection:
                connection.recv(32)  # the token; what is not read would reset the connection
                connection.sendall(b'[["config.json", 10]]\n12345')

        threading.Thread(target=send_half).start()
        offer = ModelOffer(tmp_path / "new" / "model", 10, HERE, server.getsockname()[1], bytes(32))
        with pytest.raises(ValueError, match=r"there is no model in .*, and none could be copied there"):
            receive_model(offer)
    assert not list((tmp_path / "new").iterdir())


def test_a_model_without_room_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    offer = ModelOffer(tmp_path / "model", 1 << 60, HERE, 1, bytes(32))
    with pytest.raises(ValueError, match=r"no room for one: it takes 1152921504\.6 GB"):
        receive_model(offer)


def test_two_meshes_of_a_host_make_one_copy(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, host, told = tmp_path / "there", fake_host("n1"), list[str]()
    monkeypatch.setattr(other_hosts, "own_address_towards", lambda _: HERE)

    class OtherPlace(FakeAgent):
        """A host whose filesystem is below `there`."""

        def on_ask(self, question: Callable[..., Any], model: Path, *rest: Any) -> Any:
            """What the function answers there."""
            del model
            return question(there, *rest)

        def on_receive_model(self, offer: ModelOffer) -> None:
            """Fetches it to the other place."""
            receive_model(replace(offer, model=there))

    host.agent = OtherPlace()

    async def both() -> None:
        files = model_files(model)
        await asyncio.gather(*(other_hosts.ensure_model(host, model, files, told.append) for _ in range(2)))
        (there / "config.json").write_text("[]")
        with pytest.raises(ValueError, match=r"another one than the controller's: config\.json differ"):
            await other_hosts.ensure_model(host, model, files, told.append)

    asyncio.run(both())
    assert told == ["copying the model model to n1: 0.02 GB"]
