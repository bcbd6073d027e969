"""Requests that no client should send: no 500, no crash, and the next good call works."""

from pathlib import Path

import httpx
import pytest

from plugins.server.tests.fuzzing import Known, Sender, check_many, requests
from plugins.server.tests.running_server import RunningServer, running_server
from plugins.server.tests.sdk import new_client, scores, train


def check(server: RunningServer, count: int) -> None:
    """Sends so many requests to a server of the toy model."""
    victim, good = new_client(server), new_client(server)
    server.gateway.training[victim.model_id].turns.gap_s = 0.02  # numbers that jump are most of what is sent
    session = victim.model_id.partition(":")[0]
    server.client().create_sampling_client(base_model="toy").result()
    (sampler,) = [name for each in server.gateway.sessions for name in server.gateway.samplers.of_session(each)]
    base = server.client().create_sampling_client(base_model="toy").result()  # whose numbers nobody else uses
    known = Known(session=session, run=victim.model_id, sampler=sampler, model="toy")

    def good_call() -> None:
        before = scores(good)
        train(good)
        assert scores(good) != before
        assert scores(base)

    check_many(Sender(server.url), good_call, requests(known), count)


@pytest.mark.seconds
def test_200_malformed_requests(tmp_path: Path) -> None:
    with running_server(tmp_path, poll_s=0.05) as server:
        check(server, 200)


@pytest.mark.seconds
def test_bodies_that_are_no_chat_are_refused(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        for body in (b"nonsense", b"[" * 100_000, b"[]", b"\xff\xfe"):
            answer = httpx.post(f"{server.url}/oai/api/v1/chat/completions", content=body)
            assert (answer.status_code, bool(answer.json()["error"]["message"])) == (400, True)
