"""The status page: what it holds, for whom, and what a browser makes of it."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from ownloop_server.answers import BUCKET_S, Throughput
from plugins.server.tests.running_server import RunningServer, running_server
from plugins.server.tests.sdk import new_client, scores, train

tinker: Any = pytest.importorskip("tinker")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def get(server: RunningServer, path: str, key: str = "") -> str:
    """The text of an answer."""
    request = Request(f"{server.url}{path}", headers={"X-API-Key": key})
    with urlopen(request, timeout=120) as response:
        return response.read().decode()


def test_the_status_is_what_goes_on(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        training = new_client(server)
        train(training, 2)
        sampler = training.save_weights_and_get_sampling_client().result()
        scores(sampler)
        training.save_state("two").result()
        status = json.loads(get(server, "/status.json"))
        (run,) = status["sessions"][0]["training"]
        assert (run["id"], run["rank"], run["steps"], run["queue"]) == (training.model_id, 4, 2, 0)
        assert (run["tokens"], run["checkpoints"], run["is_running"]) == (6, 1, False)
        (client,) = status["sessions"][0]["sampling"]
        assert (client["kept"], client["model"]) == (True, "toy")
        assert client["policy"].startswith("version 2 of ")
        (model,) = status["models"]
        assert (model["snapshots"], model["trained_tokens"], model["sampled_tokens"]) == (1, 6, 1)
        assert status["memory"]["server"] > 2**20
        assert 'gateway_tokens_total{model="toy",work="trained"} 6.0' in get(server, "/metrics")


def test_a_user_sees_their_own_sessions_and_an_operator_all(tmp_path: Path) -> None:
    with running_server(tmp_path, needs_key=True) as server:
        keys = {name: server.keys.add(name, operator=name == "op") for name in ("ann", "bob", "op")}
        for name in ("ann", "bob"):
            server.client(keys[name]).create_lora_training_client("toy", rank=4).result()
        seen = {
            name: [session["user"] for session in json.loads(get(server, "/status.json", key))["sessions"]]
            for name, key in keys.items()
        }
        assert seen == {"ann": ["ann"], "bob": ["bob"], "op": ["ann", "bob"]}


def test_tokens_per_second_are_those_of_the_last_minutes() -> None:
    now = [100 * BUCKET_S]
    throughput = Throughput(lambda: now[0])
    throughput.add("trained", 30)
    throughput.add("trained", 20)
    assert throughput.history("trained")[-1] == 0, "this one is not full yet"
    now[0] += BUCKET_S
    assert throughput.history("trained")[-2:] == [0, 50 / BUCKET_S]
    assert throughput.history("sampled")[-1] == 0
    now[0] += 400
    throughput.add("sampled", 1)
    assert sum(throughput.history("trained")) == 0
    assert throughput.totals == {"trained": 50, "sampled": 1}


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        page = get(server, "/")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|src=|href=|innerHTML", page)
    assert "prefers-color-scheme: dark" in page


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    with running_server(tmp_path / "server") as server:
        training = new_client(server)
        train(training)
        session = server.gateway.sessions[training.model_id.partition(":")[0]]
        session.user = "<script>document.title = 'caught'</script>"
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        command = [str(BROWSER), *options, "--virtual-time-budget=1000", "--dump-dom", server.url]
        drawn = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert f"<td>{training.model_id}</td>" in drawn
    assert re.search(r"<b>1</b><span class=\"dim\"> session<", drawn)
    assert drawn.count("<polyline") == 2
    assert "tokens/s trained (3 in all)" in drawn
    assert "GiB" in drawn  # the last section: no script error came before it
    assert '<div class="warning"' not in drawn
    assert "<title>ownloop serve</title>" in drawn
    assert "<td>&lt;script&gt;" in drawn
