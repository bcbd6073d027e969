"""Keys, what users see of each other, and how much a request may ask for."""

import contextlib
import json
import socket
import ssl
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request as UrlRequest
from urllib.request import urlopen

import pytest
from starlette.datastructures import URL
from starlette.requests import Request

from controller.commands import cli
from ownloop_server.config import Limits
from ownloop_server.keys import Keys
from plugins.server.tests.running_server import RunningServer, running_server
from plugins.server.tests.sdk import datum, scores, train
from tests.waiting import LIMIT_S

tinker: Any = pytest.importorskip("tinker")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    limits = Limits(body_mb=1, batch_datums=4, batch_tokens=12)
    with running_server(tmp_path_factory.mktemp("server"), needs_key=True, limits=limits, poll_s=0.2) as running:
        yield running


@pytest.fixture(scope="module")
def ann(server: RunningServer) -> str:
    return server.keys.add("ann")


@pytest.fixture(scope="module")
def bob(server: RunningServer) -> str:
    return server.keys.add("bob")


def ask(
    server: RunningServer, path: str, key: str | None, body: Any = None, method: str | None = None, **headers: str
) -> tuple[int, Any]:
    """Status and answer of a request without the SDK."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **({} if key is None else {"X-API-Key": key}), **headers}
    request = UrlRequest(f"{server.url}{path}", data, headers, method=method)
    try:
        with urlopen(request, timeout=120) as response:
            text = response.read()
            return response.status, json.loads(text) if text.startswith(b"{") else text
    except HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_request_needs_a_key_that_the_server_knows(server: RunningServer, ann: str) -> None:
    for key in (None, "tml-local", ann + "x", ""):
        status, answer = ask(server, "/api/v1/get_server_capabilities", key)
        assert (status, "ownloop key add NAME" in answer["detail"]) == (401, True)
    assert ask(server, "/api/v1/get_server_capabilities", ann)[0] == 200
    assert ask(server, "/api/v1/get_server_capabilities", None, Authorization=f"Bearer {ann}")[0] == 200
    assert ask(server, "/api/v1/healthz", None)[0] == 200
    with pytest.raises(tinker.AuthenticationError, match="ownloop key add NAME"):
        server.client("tml-wrong").create_lora_training_client("toy", rank=4).result()


def test_a_password_of_a_browser_is_good_for_reading_alone(server: RunningServer, ann: str) -> None:
    import base64

    basic = {"Authorization": "Basic " + base64.b64encode(f"any:{ann}".encode()).decode()}
    assert ask(server, "/metrics", None, **basic)[0] == 200
    assert ask(server, "/api/v1/training_runs", None, **basic)[0] == 401
    body = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
    assert ask(server, "/api/v1/create_session", None, body, **basic)[0] == 401
    assert ask(server, "/metrics", None, Authorization="Basic ***")[0] == 401


def test_users_see_only_what_is_theirs(server: RunningServer, ann: str, bob: str) -> None:
    hers, his = (server.client(key).create_lora_training_client("toy", rank=4).result() for key in (ann, bob))
    train(hers)
    path = hers.save_state("hers").result().path
    weights = hers.save_weights_for_sampler("hers").result().path
    before = scores(hers)
    rest = tinker.RestClient(base_url=server.url, api_key=bob)
    assert hers.model_id not in {
        run.training_run_id for run in rest.list_training_runs(limit=100).result().training_runs
    }
    assert not rest.list_user_checkpoints().result().checkpoints
    assert hers.model_id.partition(":")[0] not in rest.list_sessions(limit=100).result().sessions
    with pytest.raises(tinker.APIStatusError, match="of user bob"):
        rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.APIStatusError, match="of user bob"):
        server.client(bob).create_training_client_from_state(path, base_model="toy").result()
    with pytest.raises(tinker.APIStatusError, match="of user bob"):
        server.client(bob).create_sampling_client(model_path=weights).result()
    own = {path, weights}
    everything = tinker.RestClient(base_url=server.url, api_key=server.keys.add("op", operator=True))
    assert own <= {c.tinker_path for c in everything.list_user_checkpoints().result().checkpoints}
    assert own == {c.tinker_path for c in tinker.RestClient(base_url=server.url, api_key=ann).list_user_checkpoints()
                   .result().checkpoints}  # fmt: skip
    assert scores(hers) == before
    assert scores(his)


def test_no_call_reaches_another_users_client_or_session(server: RunningServer, ann: str, bob: str) -> None:
    training = server.client(ann).create_lora_training_client("toy", rank=4).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    run, session = training.model_id, training.model_id.partition(":")[0]
    sampler_id = next(iter(server.gateway.samplers.of_session(session)))
    waiting = {"model_id": run, "seq_id": 7, "adam_params": {}}
    request_id = ask(server, "/api/v1/optim_step", ann, waiting)[1]["request_id"]
    message = _message(run)
    for path, body in (
        ("optim_step", {"model_id": run, "seq_id": 9, "adam_params": {}}),
        ("get_info", {"model_id": run}),
        ("save_weights", {"model_id": run, "seq_id": 9, "path": "x"}),
        ("save_weights_for_sampler", {"model_id": run, "seq_id": 9, "path": "x"}),
        ("create_model", {"session_id": session, "model_seq_id": 9, "base_model": "toy"}),
        ("session_heartbeat", {"session_id": session}),
        (f"sessions/{session}/finish", {}),
        ("retrieve_future", {"request_id": request_id}),
        ("cancel_future", {"request_id": request_id}),
        ("weights_info", {"tinker_path": f"tinker://{run}/weights/x"}),
        ("forward_backward", message),
        (
            "asample",
            {
                "sampling_session_id": sampler_id,
                "seq_id": 0,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [2]}]},
                "sampling_params": {"max_tokens": 1},
            },
        ),
    ):
        headers = {"Content-Type": "application/x-protobuf"} if isinstance(body, bytes) else {}
        assert ask(server, f"/api/v1/{path}", bob, body, **headers)[0] == 404, path
    for path in (f"training_runs/{run}", f"samplers/{sampler_id}", f"sessions/{session}"):
        assert ask(server, f"/api/v1/{path}", bob)[0] == 404, path
        assert ask(server, f"/api/v1/{path}", ann)[0] == 200, path
    checkpoint = f"/api/v1/training_runs/{run}/checkpoints/weights/x"
    assert ask(server, checkpoint, bob, method="DELETE")[0] == 404

    own = server.client(bob).create_lora_training_client("toy", rank=4).result().model_id
    names = {"run_id": own, "model_id": own, "session_id": own.partition(":")[0]}  # his, where the path names hers
    assert ask(server, f"/api/v1/sessions/{session}/finish", bob, names)[0] == 404
    assert ask(server, checkpoint, bob, names, method="DELETE")[0] == 404
    for kind in ("application/x+json", "Application/JSON", "text/plain"):
        assert ask(server, "/api/v1/get_info", bob, {"model_id": run}, **{"Content-Type": kind})[0] != 200, kind
        step = {"model_id": run, "seq_id": 9, "adam_params": {}}
        assert ask(server, "/api/v1/optim_step", bob, step, **{"Content-Type": kind})[0] != 200, kind
    assert scores(sampler)
    assert scores(training)


def _message(run: str) -> bytes:
    from tinker.proto import tinker_public_pb2 as messages

    return messages.ForwardBackwardRequest(model_id=run, seq_id=9, loss_fn="cross_entropy").SerializeToString()


def test_a_key_that_is_revoked_is_useless_at_once(server: RunningServer) -> None:
    key = server.keys.add("carl")
    assert ask(server, "/api/v1/training_runs", key)[0] == 200
    Keys(server.folder).revoke("carl")  # another process's
    assert ask(server, "/api/v1/training_runs", key)[0] == 401


def test_the_first_key_closes_a_server_that_runs(tmp_path: Path) -> None:
    path = "/api/v1/get_server_capabilities"
    with running_server(tmp_path) as running:
        assert ask(running, path, None)[0] == 200
        key = Keys(tmp_path).add("ann")
        assert ask(running, path, None)[0] == 401
        assert ask(running, path, key)[0] == 200
        Keys(tmp_path).revoke("ann")
        assert ask(running, path, None)[0] == 401, "it does not open again"


def test_the_file_of_keys_holds_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(["key", *arguments, "--folder", str(tmp_path / "gateway")])
        output = capsys.readouterr()
        return int(stop.value.code or 0), output.out + output.err

    status, key = command("add", "ann@home", "--operator")
    assert (status, key[:4], len(key.strip()) > 40) == (0, "tml-", True)
    file = tmp_path / "gateway" / "keys.json"
    assert (file.stat().st_mode & 0o777, key.strip() in file.read_text()) == (0o600, False)
    user = Keys(tmp_path / "gateway").find(key.strip())
    assert user is not None
    assert (user.name, user.is_operator) == ("ann@home", True)
    assert command("add", "ann@home") == (2, "error: 'ann@home' has a key; revoke it first\n")
    assert "must start with a letter" in command("add", "../x")[1]
    assert command("list")[1].startswith("ann@home  operator, made 20")
    assert command("revoke", "ann@home") == (0, "")
    assert command("revoke", "ann@home")[0] == 2
    assert Keys(tmp_path / "gateway").find(key.strip()) is None


def test_requests_and_batches_have_a_size(server: RunningServer, ann: str) -> None:
    training = server.client(ann).create_lora_training_client("toy", rank=4).result()
    with pytest.raises(tinker.RequestFailedError, match=r"has 5 datums; this server takes 4 at once.*batch-datums"):
        training.forward_backward([datum([2], [3])] * 5, "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match=r"has 13 tokens; this server takes 12 at once"):
        training.forward_backward([datum([2] * 13, [3] * 13)], "cross_entropy").result()
    assert scores(training)
    large = json.dumps({"model_id": training.model_id, "seq_id": 9, "pad": "x" * 2**20}).encode()
    assert ask(server, "/api/v1/optim_step", ann, large)[0] == 413
    assert _chunked(server, ann, large) == 413  # a body that does not say how long it is


def _chunked(server: RunningServer, key: str, body: bytes) -> int:
    import http.client

    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)
    parts = (body[start : start + 2**16] for start in range(0, len(body), 2**16))
    headers = {"X-API-Key": key, "Content-Type": "application/json"}
    connection.request("POST", "/api/v1/optim_step", parts, headers, encode_chunked=True)
    with connection.getresponse() as response:
        return response.status


def test_a_user_who_sends_too_much_waits_and_the_others_do_not(tmp_path: Path) -> None:
    with running_server(tmp_path, needs_key=True, limits=Limits(requests_per_s=5)) as server:
        fast, slow = server.keys.add("fast"), server.keys.add("slow")
        statuses: list[int] = []
        while 429 not in statuses and len(statuses) < 1000:
            statuses.append(ask(server, "/api/v1/training_runs", fast)[0])
        assert statuses[:10] == [200] * 10
        assert statuses[-1] == 429
        assert ask(server, "/api/v1/training_runs", slow)[0] == 200
        training = server.client(fast).create_lora_training_client("toy", rank=4).result()  # the SDK waits
        assert training.model_id


def test_https(tmp_path: Path) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    options = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key)]
    subprocess.run([*command, *options, "-out", str(certificate)], check=True, capture_output=True, timeout=120)
    with running_server(tmp_path, tls=(certificate, key)) as server:
        context = ssl.create_default_context(cafile=str(certificate))
        url = server.url.replace("127.0.0.1", "localhost")
        with urlopen(f"{url}/api/v1/healthz", timeout=120, context=context) as response:
            assert json.loads(response.read()) == {"status": "ok"}
        with pytest.raises(URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urlopen(f"{url}/api/v1/healthz", timeout=120)


@pytest.mark.stranger("2.A8")
@pytest.mark.parametrize("host", ["x/api/v1/healthz?", "x/api/v1/downloads/?", "x/metrics?", "x#"])
def test_the_host_header_opens_no_path(server: RunningServer, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Starlette before 1.0.1 makes `request.url` of it."""
    monkeypatch.setattr(
        Request, "url", property(lambda self: URL(f"http://{self.headers['host']}{self.scope['path']}")), raising=False
    )
    body = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
    status, _ = ask(server, "/api/v1/create_session", None, body, Host=host)
    assert status == 401
    assert ask(server, "/api/v1/healthz", None, Host=host)[0] == 200


@pytest.mark.stranger("2.E5")
def test_a_model_may_be_asked_for_by_its_name(server: RunningServer, ann: str, bob: str) -> None:
    run = server.client(ann).create_lora_training_client("toy", rank=4).result().model_id
    for name, key, found in (("toy", ann, 200), (run, ann, 200), (run, bob, 404), ("none", ann, 404)):
        status, answer = ask(server, f"/oai/api/v1/models/{name}", key)
        assert (status, answer.get("id")) == (found, name if found == 200 else None)


@pytest.mark.stranger("2.A9")
def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(tmp_path: Path, monkeypatch: Any) -> None:
    parsed: list[int] = []
    loads = json.loads
    monkeypatch.setattr("starlette.requests.json.loads", lambda text: parsed.append(len(text)) or loads(text))
    with running_server(tmp_path, needs_key=True) as server:
        key = server.keys.add("ann")
        for path in ("/api/v1/create_session", "/api/v1/forward_backward", "/oai/api/v1/chat/completions"):
            for body in (b'{"model": ' + b"[[]," * 5_000_000 + b"0", b'{"x": [' + b"1," * 10_000_000 + b"1]}"):
                status, answer = ask(server, path, key, body)
                assert status == (422 if "forward" in path else 413), answer
        assert max(parsed) < 1000
        text = {"tags": ["t" * 2_000_000], "user_metadata": None, "sdk_version": "0.38.0"}
        assert ask(server, "/api/v1/create_session", key, text)[0] == 200
        assert len([size for size in parsed if size > 1000]) == 1, "a body is parsed once"


@pytest.mark.stranger("2.A9")
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /api/v1/create_session HTTP/1.1\r\nHost: loc",
        b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET",
        b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
        b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 2**18,
    ],
)
def test_a_connection_that_does_not_go_on_is_closed(tmp_path: Path, monkeypatch: Any, sent: bytes) -> None:
    for module in ("web", "access"):
        monkeypatch.setattr(f"ownloop_server.{module}.PATIENCE_S", 0.3)
    monkeypatch.setattr("plugins.server.tests.running_server.KEEP_ALIVE_S", 0.3)
    with running_server(tmp_path) as server:
        address = "127.0.0.1", int(server.url.rpartition(":")[2])
        connections = [socket.create_connection(address, timeout=LIMIT_S) for _ in range(20)]
        for connection in connections:
            with contextlib.suppress(ConnectionError):  # closed in the middle of what is too long
                connection.sendall(sent)
        for connection in connections:
            with connection, contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
        monkeypatch.undo()  # the next one may take longer
        assert ask(server, "/api/v1/healthz", None)[0] == 200
