"""plugins/server/README.md lists every method of the SDK, and what it says is so."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from plugins.server.tests.running_server import RunningServer
from plugins.server.tests.sdk import new_client, scores
from plugins.server.tests.sdk_table import NOT_SUPPORTED, REFUSED, methods, table

tinker: Any = pytest.importorskip("tinker")


def test_the_page_lists_every_method() -> None:
    assert set(NOT_SUPPORTED) <= set(methods())
    page = (Path(__file__).parents[1] / "README.md").read_text()
    assert table() in page, f"plugins/server/README.md needs this table:\n{table()}"


_PATH = "tinker://x:train:0/weights/y"
_CALLS: dict[str, Callable[[Any], Any]] = {
    "RestClient.assign_session_project": lambda rest: rest.assign_session_project("session", "project"),
    "RestClient.copy_weights": lambda rest: rest.copy_weights(_PATH, destination_project_id="project"),
    "RestClient.export_session_trace": lambda rest: rest.export_session_trace("session"),
    "RestClient.get_audit_log": lambda rest: rest.get_audit_log(),
    "RestClient.get_billing_usage": lambda rest: rest.get_billing_usage(
        datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
    ),
    "RestClient.get_current_checkpoint_storage_usage": lambda rest: rest.get_current_checkpoint_storage_usage(),
    "RestClient.publish_checkpoint_from_tinker_path": lambda rest: rest.publish_checkpoint_from_tinker_path(_PATH),
    "RestClient.search_sessions": lambda rest: rest.search_sessions(tinker.types.SessionSearchRequest()),
    "RestClient.unpublish_checkpoint_from_tinker_path": lambda rest: rest.unpublish_checkpoint_from_tinker_path(_PATH),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("method", [name for name in methods() if NOT_SUPPORTED.get(name, "").startswith(REFUSED)])
def test_what_is_refused_says_so_and_the_next_call_works(server: RunningServer, method: str) -> None:
    training = new_client(server)
    calls: dict[str, Callable[[], Any]] = {
        "ServiceClient.copy_weights": lambda: tinker.ServiceClient(
            base_url=server.url, api_key="tml-local", project_id="project"
        ).copy_weights(_PATH),
    }
    rest = tinker.RestClient(base_url=server.url, api_key="tml-local")
    call = calls.get(method, lambda: _CALLS[method](rest))
    with pytest.raises((tinker.APIStatusError, tinker.RequestFailedError), match=r"not supported"):
        call().result()
    assert scores(training)


def test_a_client_is_told_what_its_session_made(server: RunningServer) -> None:
    service = server.client()
    training = service.create_lora_training_client("toy", rank=4).result()
    sampler = service.create_sampling_client(base_model="toy").result()
    rest = tinker.RestClient(base_url=server.url, api_key="tml-local")
    session = rest.get_session(training.model_id.partition(":")[0]).result()
    assert session.training_run_ids == [training.model_id]
    assert len(session.sampler_ids) == 1
    assert rest.get_sampler(session.sampler_ids[0]).result().base_model == "toy"
    assert training.model_id.partition(":")[0] in rest.list_sessions(limit=100).result().sessions
    assert scores(sampler)
