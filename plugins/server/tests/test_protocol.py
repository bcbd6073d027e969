"""What a client can do wrong, or a network: each is an error with a text, after which the next call works."""

import http.client
import json
import socket
from collections.abc import Generator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import httpx
import pytest

from plugins.server.tests.running_server import RunningServer, running_server
from plugins.server.tests.sdk import datum, new_client, scores, train
from tests.waiting import LIMIT_S, wait_until

tinker: Any = pytest.importorskip("tinker")
types: Any = tinker.types
optimizers: Any = pytest.importorskip("tinker.types.optimizer")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server"), poll_s=0.2) as running:
        yield running


def post(server: RunningServer, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    """Status and answer of a request without the SDK."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = Request(f"{server.url}/api/v1/{path}", data, {"Content-Type": "application/json", **headers})
    try:
        with urlopen(request, timeout=120) as response:
            return response.status, json.loads(response.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())


def result(server: RunningServer, request_id: str) -> Any:
    """The result of a call, or its error, for which a client polls again and again."""
    answers: list[tuple[int, Any]] = []

    def polled() -> bool:
        answers.append(post(server, "retrieve_future", {"request_id": request_id}))
        return answers[-1][0] != 408

    wait_until(polled, f"the result of {request_id}")
    return answers[-1][1]


def _of_dtype(name: str, dtype: Any) -> Any:
    """A datum with one array of another dtype."""
    inputs = {"target_tokens": types.TensorData(data=[3], dtype="int64", shape=[1])}
    inputs[name] = types.TensorData(data=[3], dtype=dtype, shape=[1])
    return types.Datum(model_input=types.ModelInput.from_ints([2]), loss_fn_inputs=inputs)


def test_a_newer_sdk_is_warned_and_works(server: RunningServer) -> None:
    body = {"tags": [], "user_metadata": None, "sdk_version": "0.41.2"}
    status, answer = post(server, "create_session", body)
    assert (status, answer["warning_message"]) == (
        200,
        "this server was tested with tinker 0.38, and the client is 0.41.2",
    )
    assert post(server, "create_session", {**body, "sdk_version": "0.38.5"})[1]["warning_message"] is None


def test_a_call_that_is_sent_twice_runs_once(server: RunningServer) -> None:
    training = new_client(server)
    body = {"model_id": training.model_id, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
    server.host.calls.clear()
    (_, first), (_, second) = post(server, "optim_step", body), post(server, "optim_step", body)
    assert first["request_id"] == second["request_id"]
    for _ in range(2):  # a lost answer is fetched again
        assert result(server, first["request_id"])["metrics"]["policy_version"] == 1
    assert [verb for _, verb in server.host.calls] == ["optim_step"]


def test_calls_run_by_sequence_number_and_not_by_arrival(server: RunningServer) -> None:
    run = new_client(server).model_id
    ids = {}
    for number in (3, 2, 1):
        body = {"model_id": run, "seq_id": number, "adam_params": {"learning_rate": number / 10}}
        ids[number] = post(server, "optim_step", body)[1]["request_id"]
        if number > 1:  # polling ends without a result, and the client polls again
            status, answer = post(server, "retrieve_future", {"request_id": ids[number]})
            assert (status, answer["type"], answer["queue_state"]) == (408, "try_again", "active")
    versions = {number: result(server, i)["metrics"]["policy_version"] for number, i in ids.items()}
    assert versions == {1: 1, 2: 2, 3: 3}


def test_a_sequence_number_that_jumps_is_an_error_in_time(server: RunningServer) -> None:
    training = new_client(server)
    server.gateway.training[training.model_id].turns.gap_s = 0.05
    body = {"model_id": training.model_id, "adam_params": {}}
    _, jumped = post(server, "optim_step", {**body, "seq_id": 1000})
    answer = result(server, jumped["request_id"])
    assert answer["category"] == "user"
    assert "waited 0.05 s for call 1, which never arrived" in answer["error"]
    _, later = post(server, "optim_step", {**body, "seq_id": 1001})
    assert "metrics" in result(server, later["request_id"])
    _, used = post(server, "optim_step", {**body, "seq_id": 5})
    assert "has been used" in result(server, used["request_id"])["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("optim_step", b"{", 422, "not valid"),
        ("optim_step", {"model_id": "x", "seq_id": 1, "adam_params": {"learning_rat": 1}}, 422, "not valid"),
        ("optim_step", {"model_id": "no:train:0", "seq_id": 1, "adam_params": {}}, 404, "has ended, or never was"),
        ("forward_backward", b"\xff\xff not protobuf", 422, "not a ForwardBackwardRequest"),
        (
            "asample",
            {"sampling_session_id": "no", "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {}},
            404,
            "ended",
        ),
        ("retrieve_future", {"request_id": "no"}, 410, "not known"),
        ("session_heartbeat", {"session_id": "no"}, 410, "make a ServiceClient"),
        ("publish_everything", {}, 404, "not supported by this server"),
        ("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.20.1"}, 400, "too old"),
    ],
)
def test_a_request_that_makes_no_sense(server: RunningServer, path: str, body: Any, status: int, text: str) -> None:
    found, answer = post(server, path, body)
    assert found == status
    assert text in answer["detail"]


def test_a_body_that_does_not_decompress_or_grows_too_large(server: RunningServer) -> None:
    import zstandard

    zstd = {"Content-Encoding": "zstd", "Content-Type": "application/x-protobuf"}
    assert "not zstd" in post(server, "forward_backward", b"plain", **zstd)[1]["detail"]
    announced = {"Content-Length": str(65 * 2**20)}  # refused before it is read
    assert post(server, "asample", b"{", **announced)[0] == 413
    bomb = zstandard.ZstdCompressor().compress(bytes(70 * 2**20))
    assert "larger than" in post(server, "forward_backward", bomb, **zstd)[1]["detail"]


@pytest.mark.parametrize(
    ("batch", "loss", "config", "text"),
    [
        (
            [datum([2], [3])],
            "stable_reinforce",
            {},
            "not published; use loss_fn=ppo, cispo, gspo or importance_sampling",
        ),
        ([datum([2], [3])], "os:system", {}, "forward_backward_custom"),
        ([datum([2], [3])], "value", {}, "this server computes cross_entropy"),
        ([datum([2], [3])], "ppo", {}, "needs the input 'logprobs'|lacks 'logprobs'"),
        ([datum([2], [3], logprobs=[0.0], advantages=[1.0])], "ppo", {"clip_hi": 2.0}, "clip_high_threshold"),
        ([datum([2], [3], advantages=[1.0])], "cross_entropy", {}, "has 'advantages'; cross_entropy takes"),
        ([datum([2, 3], [3])], "cross_entropy", {}, r"data\[0\].*length 1; there are 2 tokens"),
        ([datum([2], [99])], "cross_entropy", {}, "token ids are between 0 and 15"),
        ([datum([2], [3], weights=[float("nan")])], "cross_entropy", {}, "must be finite"),
        ([datum([], [])], "cross_entropy", {}, "length 0"),
        ([_of_dtype("target_tokens", "float32")], "cross_entropy", {}, "of dtype float32; it must be int64"),
        ([_of_dtype("sequence_ratio_mask", "int64")], "cross_entropy", {}, "has 'sequence_ratio_mask'"),
    ],
)
def test_a_batch_that_cannot_be_computed_is_the_users_mistake(
    server: RunningServer, batch: Any, loss: Any, config: dict[str, float], text: str
) -> None:
    training = new_client(server)
    with pytest.raises(tinker.RequestFailedError, match=text) as error:
        training.forward_backward(batch, loss, config).result()
    assert error.value.category == "user"
    before = scores(training)
    train(training)  # the numbers go on
    assert scores(training) != before


@pytest.mark.stranger("E5")
@pytest.mark.parametrize("name", ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_step_with_a_number_that_is_none_is_refused_by_name(server: RunningServer, name: str, value: float) -> None:
    training: Any = new_client(server)
    text = (
        f"{name} is -1.0: Input should be"
        if value < 0
        else f"{name}: Input should be a valid number, and is null, as the SDK sends NaN and infinity"
    )
    with pytest.raises(tinker.RequestFailedError, match=text) as error:
        training.optim_step(types.AdamParams(**{name: value})).result()
    assert error.value.category == "user"
    step = training.optim_step(types.AdamParams()).result()
    assert step.metrics is not None
    assert step.metrics["policy_version"] == 1


@pytest.mark.stranger("E5")
def test_a_session_keeps_its_name_and_metadata(server: RunningServer) -> None:
    service = tinker.ServiceClient(
        base_url=server.url, api_key="tml-local", user_metadata={"team": "blue"}, display_name="nightly"
    )
    training = service.create_lora_training_client("toy", rank=4, user_metadata={"run": "3"}).result()
    rest = tinker.RestClient(base_url=server.url, api_key="tml-local")
    session = rest.get_session(training.model_id.partition(":")[0]).result()
    assert (session.user_metadata, session.display_name) == ({"team": "blue"}, "nightly")
    assert rest.get_training_run(training.model_id).result().user_metadata == {"run": "3"}


@pytest.mark.parametrize(
    ("given", "kept"),
    [({"epoch": 3}, {"epoch": "3"}), ({"a": None, "b": [0.5]}, {"a": "None", "b": "[0.5]"})],
)
def test_metadata_of_any_type_lists_as_text(server: RunningServer, given: Any, kept: dict[str, str]) -> None:
    training = server.client().create_lora_training_client("toy", rank=4, user_metadata=given).result()
    listed = tinker.RestClient(base_url=server.url, api_key="tml-local").list_training_runs().result()
    assert next(r for r in listed.training_runs if r.training_run_id == training.model_id).user_metadata == kept


def test_metadata_that_no_answer_could_hold_is_refused(server: RunningServer) -> None:
    session = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
    for broken in ({"user_metadata": {"a": "\ud800"}}, {"user_metadata": {"\ud800": 1}}, {"display_name": "\ud800"}):
        status, answer = post(server, "create_session", session | broken)
        assert (status, "which is not Unicode" in answer["detail"]) == (422, True)
    named = {"session_id": post(server, "create_session", session)[1]["session_id"], "base_model": "toy"}
    created = post(server, "create_model", named | {"model_seq_id": 0, "user_metadata": {"a": "\ud800"}})
    answer = result(server, created[1]["request_id"])
    assert (answer["category"], "'\\ud800', which is not Unicode" in answer["error"]) == ("user", True)
    assert httpx.get(f"{server.url}/api/v1/training_runs").status_code == 200


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ({"lora_config": {"rank": 4, "seed": 2**63}}, f"seed is {2**63}; it must be in"),
        ({"lora_config": {"rank": 4, "seed": -(2**63) - 1}}, "seed is -9223372036854775809"),
        ({"model_seq_id": -1}, "model_seq_id is -1"),
        ({"model_seq_id": 10**9}, "model_seq_id is 1000000000"),
    ],
)
def test_numbers_of_a_new_client_have_bounds(server: RunningServer, field: dict[str, Any], text: str) -> None:
    session = post(server, "create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"})[1]
    body = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "toy", **field}
    status, created = post(server, "create_model", body)
    assert status == 200
    answer = result(server, created["request_id"])
    assert (answer["category"], text in answer["error"]) == ("user", True)


def test_pages_of_lists_start_at_zero(server: RunningServer) -> None:
    for path in ("training_runs", "checkpoints", "sessions"):
        for name in ("limit", "offset"):
            answer = httpx.get(f"{server.url}/api/v1/{path}?{name}=-1")
            assert (answer.status_code, f"{name}: Input should be greater" in answer.json()["detail"]) == (422, True)


@pytest.mark.stranger("E6")
def test_a_pickled_loss_and_other_optimizers_are_refused(server: RunningServer) -> None:
    body = {"session_id": "x", "name": "mine", "inputs": [], "graph": "AAAA", "custom_loss_seq_id": 0}
    status, answer = post(server, "create_custom_loss", body)
    assert (status, "graph" in answer["detail"]) == (422, True)
    training: Any = new_client(server)
    with pytest.raises(tinker.RequestFailedError, match="loss_id is ''; this session has made"):
        training.forward_backward([datum([2], [3])], "custom").result()
    with pytest.raises(tinker.RequestFailedError, match="the optimizer is 'lion'; pass AdamParams or DimuonParams"):
        training.optim_step(optimizers.OptimParamsBase(type="lion")).result()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 0}, "full fine-tuning.*rank from 1 to 32"),
        ({"rank": 64}, "--max-rank"),
        ({"base_model": "other/model"}, "serves toy, toy/alias"),
        (
            {"optimizer": optimizers.OptimizerConfigBase(type="lion")},
            "the optimizer is 'lion'; it must be adamw or dimuon",
        ),
    ],
)
def test_an_adapter_that_cannot_be_made(server: RunningServer, options: dict[str, Any], text: str) -> None:
    create: Any = server.client().create_lora_training_client
    with pytest.raises(tinker.RequestFailedError, match=text):
        create(**{"base_model": "toy", "rank": 4, **options}).result()


@pytest.mark.seconds
def test_a_flooding_client_does_not_starve_the_others(server: RunningServer) -> None:
    flooding, polite = new_client(server), new_client(server)
    asked, executed, name = server.host.asked, server.host.calls, polite.model_id.replace(":", "-")
    asked.clear()
    executed.clear()
    server.host.holds = True
    try:
        futures = [flooding.forward_backward([datum([2], [3])], "cross_entropy") for _ in range(100)]
        wait_until(lambda: asked, "the first call of the client that floods")
        futures.append(polite.forward_backward([datum([2], [3])], "cross_entropy"))
        wait_until(lambda: any(each.startswith(name) for each in asked), "the other's call")
    finally:
        server.host.holds = False
    for future in futures:
        future.result()
    assert len(executed) == 101
    assert executed[1][0].startswith(name)


def test_a_session_that_ends_gives_up_adapters_and_snapshots(server: RunningServer) -> None:
    before = len(server.host.adapters), len(server.host.generator.tables)
    with server.client() as service:
        training = service.create_lora_training_client("toy", rank=4).result()
        training.save_weights_and_get_sampling_client().result()
        assert (len(server.host.adapters), len(server.host.generator.tables)) == (before[0] + 1, before[1] + 1)
    assert (len(server.host.adapters), len(server.host.generator.tables)) == before


def test_metrics_count_requests_by_route_and_show_what_is_there(server: RunningServer) -> None:
    def metrics() -> dict[str, float]:
        with urlopen(f"{server.url}/metrics", timeout=120) as response:
            lines = [line for line in response.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    before = metrics()
    training: Any = new_client(server)
    train(training)
    after = metrics()
    steps = 'gateway_requests_total{route="/api/v1/optim_step",status="200"}'
    assert after[steps] == before.get(steps, 0) + 1
    assert after["gateway_training_clients"] == before["gateway_training_clients"] + 1
    assert after["gateway_requests_waiting"] == 0
    assert training.model_id not in " ".join(after)


def test_answers_are_sent_at_once(server: RunningServer) -> None:
    """Nagle's algorithm would hold each of them back for 40 ms."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=LIMIT_S)
    connection.request("GET", "/api/v1/healthz")
    assert json.loads(connection.getresponse().read()) == {"status": "ok"}
    connections: list[Any] = [*server.http.server_state.connections]  # those of other clients come and go meanwhile
    transports = {each.transport.get_extra_info("peername"): each.transport for each in connections}
    ours = transports[connection.sock.getsockname()].get_extra_info("socket")
    assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_web_page_with_its_name_at_this_host_gets_nothing(server: RunningServer) -> None:
    body = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
    status, answer = post(server, "create_session", body, Host="evil.example:80")
    assert (status, "answers for 127.0.0.1" in answer["detail"]) == (421, True)
    assert post(server, "create_session", body, Host="localhost:80")[0] == 200
