"""Malformed requests: valid ones in which fields were replaced, removed or added, and damaged protobuf."""

import copy
import http.client
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("tinker", reason="the package tinker, of the extra tinker, is not installed")

from tinker.proto import tinker_public_pb2 as messages

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
_CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
_TEXTS = ("", "x", "..", "../x", "tinker://a/b/c", "tinker://a:train:0/weights/x", "\x00", "\ud800", "Ω" * 999, "toy")
_NUMBERS = (0, 1, -1, 2**31, 2**53, 2**63, 2**70, -(2**63), 0.5, 1e308, -1e308, math.nan, math.inf)
_VALUES = st.one_of(
    st.sampled_from((None, True, False, [], {}, [[]], {"a": 1}, [None], *_TEXTS, *_NUMBERS)),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.recursive(st.none() | st.integers(), lambda inner: st.lists(inner, max_size=3), max_leaves=5),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Ids of the server's own, which lead a request past the first checks."""

    session: str
    run: str
    sampler: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRequest:
    """One request."""

    method: str
    path: str
    body: bytes
    media_type: str


def requests(known: Known) -> list[st.SearchStrategy[BadRequest]]:
    """Requests of each kind: of every route that takes JSON, of training, and of what lists and manages."""
    of_routes = [_json_requests(known, path) for path in sorted(_bodies(known))]
    return [*of_routes, *[_protobuf_requests(known)] * 4, *[_listing_requests(known)] * 4]


def _bodies(known: Known) -> dict[str, dict[str, Any]]:
    """A valid body for every route that takes JSON."""
    numbered: dict[str, Any] = {"model_id": known.run, "seq_id": 1}
    sampling = {"max_tokens": 2, "seed": 1, "stop": ["a"], "temperature": 1.0, "top_k": -1, "top_p": 1.0}
    adam = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 1.0}
    lora = {"rank": 4, "seed": 1, "train_mlp": True, "train_attn": True, "train_unembed": True}
    return {
        "optim_step": {**numbered, "adam_params": adam},
        "asample": {
            "sampling_session_id": known.sampler,
            "seq_id": 1,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [2, 3]}]},
            "sampling_params": sampling,
            "prompt_logprobs": True,
            "prompt_logprobs_last_n": 1,
            "topk_prompt_logprobs": 0,
            "target_prompt_logprobs": {
                "data": [3],
                "dtype": "int64",
                "shape": [1, 1],
                "sparse_crow_indices": [0, 1],
                "sparse_col_indices": [0],
            },
        },
        "create_model": {
            "session_id": known.session,
            "model_seq_id": 5,
            "base_model": known.model,
            "lora_config": lora,
            "user_metadata": {"a": "b"},
        },
        "load_weights": {**numbered, "path": "tinker://a:train:0/weights/x", "optimizer": True},
        "save_weights": {**numbered, "path": "p", "ttl_seconds": 4000, "overwrite": True},
        "save_weights_for_sampler": {**numbered, "kind": "snapshot", "sampling_session_seq_id": 3},
        "save_weights_external": {**numbered, "path": "p", "age_recipients": []},
        "create_sampling_session": {
            "session_id": known.session,
            "sampling_session_seq_id": 9,
            "base_model": known.model,
        },
        "retrieve_future": {"request_id": "x", "allow_metadata_only": True},
        "cancel_future": {"request_id": "x"},
        "get_info": {"model_id": known.run},
        "create_session": {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"},
        "session_heartbeat": {"session_id": known.session},
        "weights_info": {"tinker_path": "tinker://a:train:1/weights/b"},
        "telemetry": {},
        "client/config": {"sdk_version": "0.38.0"},
    }


@st.composite
def _json_requests(draw: st.DrawFn, known: Known, path: str) -> BadRequest:
    """A valid request with up to four changes, or bytes that are no JSON."""
    body: Any = copy.deepcopy(_bodies(known)[path])
    if "seq_id" in body:
        body["seq_id"] = draw(st.integers(1, 2000))
    for _ in range(draw(st.sampled_from((0, 1, 1, 1, 2, 4)))):
        _change(draw, body)
    # Python writes NaN and lone surrogates, which other clients may send too.
    raw = json.dumps(draw(_VALUES) if draw(st.sampled_from(range(30))) == 7 else body).encode()
    if draw(st.sampled_from(range(20))) == 7:
        raw = raw[: draw(st.integers(0, len(raw)))] + draw(st.binary(max_size=8))
    return BadRequest(method="POST", path=path, body=raw, media_type=JSON)


def _change(draw: st.DrawFn, body: Any) -> None:
    """Replaces, removes or adds one field at some depth."""
    node = body
    while isinstance(node, dict | list) and node:
        keys: Sequence[Any] = sorted(node) if isinstance(node, dict) else range(len(node))
        key = draw(st.sampled_from(keys))
        if isinstance(node[key], dict | list) and node[key] and draw(st.booleans()):
            node = node[key]
            continue
        what = draw(st.sampled_from(("replace", "replace", "remove", "add")))
        if what == "remove":
            del node[key]
        elif what == "add" and isinstance(node, dict):
            node[draw(st.text(max_size=5))] = copy.deepcopy(draw(_VALUES))
        else:
            node[key] = copy.deepcopy(draw(_like(node[key]) if draw(st.booleans()) else _VALUES))
        return


def _like(value: object) -> st.SearchStrategy[Any]:
    """Values of the same type, which lead further into the server."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.sampled_from((-(2**63), -1, 0, 1, 2, 7, 100, 2**31, 2**53)) | st.integers(0, 70)
    if isinstance(value, float):
        return st.sampled_from((*map(float, _NUMBERS[:9]), math.nan)) | st.floats(0, 1)
    return st.sampled_from(_TEXTS) | st.text(max_size=20) if isinstance(value, str) else _VALUES


@st.composite
def _protobuf_requests(draw: st.DrawFn, known: Known) -> BadRequest:
    """A training batch with fields that do not fit together, or with damaged bytes."""
    losses = ("cross_entropy", "ppo", "gspo", "dro", "stable_reinforce", "os:system", "", "value")
    request = messages.ForwardBackwardRequest(
        model_id=known.run, seq_id=draw(st.integers(-5, 2000)), loss_fn=draw(st.sampled_from(losses))
    )
    request.forward_only = draw(st.booleans())
    for _ in range(draw(st.integers(0, 2))):
        datum = request.data.add()
        count = draw(st.integers(0, 4))
        tokens = np.array(draw(st.lists(st.integers(-1, 70), min_size=count, max_size=count)), np.int32)
        if draw(st.integers(0, 10)):
            datum.model_input.add().encoded_text.tokens = tokens.tobytes() + draw(st.binary(max_size=1))
        else:
            datum.model_input.add().image.data = b"png"
        names = draw(
            st.lists(st.sampled_from(("target_tokens", "weights", "logprobs", "advantages", "mask", "")), max_size=4)
        )
        for name in {"target_tokens", *names} if draw(st.integers(0, 5)) else names:
            _fill_tensor(draw, datum.loss_fn_inputs[name], len(tokens))
    for option in draw(st.lists(st.sampled_from(("clip_low_threshold", "beta", "kl_coef", "x")), max_size=2)):
        request.loss_fn_config[option] = draw(st.floats(width=32))
    raw = bytearray(request.SerializeToString())
    for _ in range(draw(st.sampled_from((0, 0, 1, 4)))):
        if raw:
            raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return BadRequest(method="POST", path="forward_backward", body=bytes(raw), media_type=PROTOBUF)


def _fill_tensor(draw: st.DrawFn, tensor: Any, length: int) -> None:
    """Bytes, dtype and shape that may contradict each other."""
    kind = draw(st.sampled_from((np.int64, np.float32)))
    size = draw(st.sampled_from((length, length, length + 1, 0)))
    values = np.array(draw(st.lists(st.integers(-2, 70), min_size=size, max_size=size)), kind)
    tensor.dtype = draw(st.sampled_from((1, 2, 2, 1, 0, 99)))
    shapes = ((size,), (size,), (), (size, 1), (0, 0), (-1,), (2**62, 4), (size, 2**20))
    tensor.shape.extend(draw(st.sampled_from(shapes)))
    if draw(st.integers(0, 3)):
        tensor.dense = values.tobytes()
        return
    tensor.sparse_csr.values = values.tobytes()
    tensor.sparse_csr.crow_indices = np.arange(draw(st.integers(0, size + 2))).tobytes()
    tensor.sparse_csr.col_indices = draw(st.binary(max_size=17))


@st.composite
def _listing_requests(draw: st.DrawFn, known: Known) -> BadRequest:
    """Paths and queries of the routes that list and manage."""
    word = st.sampled_from(("x", "..", "%2e%2e", "..%2f..", known.run, known.session, "weights", "%00", "a" * 300))
    path = draw(st.sampled_from(("training_runs", "checkpoints", "sessions", "samplers", "healthz", "nothing")))
    path = "/".join([path, *draw(st.lists(word, max_size=5))])
    number = st.sampled_from(("-1", "0", "x", "1e9", "9" * 25, ""))
    if draw(st.booleans()):
        path += f"?limit={draw(number)}&offset={draw(number)}"
    method = draw(st.sampled_from(("GET", "GET", "DELETE", "PUT", "POST", "PATCH")))
    body = json.dumps({"ttl_seconds": draw(_VALUES)}).encode() if method == "PUT" else b""
    return BadRequest(method=method, path=path, body=body, media_type=JSON)


class Sender:
    """Sends requests over one connection, and remembers what must not happen."""

    def __init__(self, url: str) -> None:
        """`url` is the server's."""
        self._host = url.removeprefix("http://")
        self._connection = http.client.HTTPConnection(self._host, timeout=120)
        self.accepted: list[str] = []
        self.statuses: dict[int, int] = {}

    def send(self, request: BadRequest) -> None:
        """Raises AssertionError for an answer that is not the protocol's."""
        status, content = self._post(request)
        self.statuses[status] = self.statuses.get(status, 0) + 1
        assert status < 500, (request, content)
        if status == 204:
            return
        answer = json.loads(content)
        if status >= 400:
            assert status == 408 or isinstance(answer["detail"], str), (request, answer)
        elif isinstance(answer, dict) and "request_id" in answer:
            self.accepted.append(answer["request_id"])

    def check_results(self, timeout_s: float = 120.0) -> None:
        """Every request that was accepted has a result, and none is a fault of the server's."""
        end = time.monotonic() + timeout_s
        while self.accepted and time.monotonic() < end:
            body = json.dumps({"request_id": self.accepted[-1]}).encode()
            status, content = self._post(BadRequest(method="POST", path="retrieve_future", body=body, media_type=JSON))
            if status == 408:
                continue
            assert status in (200, 410), content  # 410: its session was ended by another request
            assert b'"category": "server"' not in content, content
            self.accepted.pop()
        assert not self.accepted

    def _post(self, request: BadRequest) -> tuple[int, bytes]:
        headers = {"Content-Type": request.media_type, "X-API-Key": "tml-local"}
        self._connection.request(request.method, f"/api/v1/{request.path}", request.body, headers)
        response = self._connection.getresponse()
        return response.status, response.read()


def check_many(
    sender: Sender, good_call: Callable[[], object], kinds: Sequence[st.SearchStrategy[BadRequest]], count: int
) -> None:
    """Sends at least `count` requests, as many of each kind; good calls between them work."""
    sent = 0

    def send(request: BadRequest) -> None:
        nonlocal sent
        sender.send(request)
        sent += 1
        if sent % 100 == 0:
            sender.check_results()
            good_call()

    for kind in kinds:
        share = settings(
            max_examples=-(-count // len(kinds)), derandomize=True, deadline=None, suppress_health_check=_CHECKS
        )
        share(given(kind)(send))()
    sender.check_results()
    good_call()
    print(f"{sent} requests: {sender.statuses}")
    assert sent >= count * 0.8  # hypothesis sends no request of a small kind twice
