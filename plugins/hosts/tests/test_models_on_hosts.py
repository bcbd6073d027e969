"""A model that only the host of the controller has reaches the hosts that need it."""

import sys
from pathlib import Path

import pytest

from plugins.hosts.tests.namespaces import hosts_on_one_machine

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MEGABYTES = 512


def test_two_hosts_without_a_model_get_it_once(tmp_path: Path) -> None:
    model = tmp_path / "model"
    with hosts_on_one_machine("ctl", "h1", "h2", own_folders=[tmp_path]) as net:
        for host in ("h1", "h2"):
            net.start_worker(host)
        net.run("ctl", ["mkdir", str(model)])
        net.run("ctl", ["dd", "if=/dev/urandom", f"of={model}/model.safetensors", "bs=1M", f"count={MEGABYTES}"])
        net.run("ctl", ["sh", "-c", f"echo {{}} > {model}/config.json"])
        before = net.bytes_sent("ctl")
        controller = [
            sys.executable,
            "-m",
            "plugins.hosts.tests.controllers",
            "copy",
            str(model),
            "trainer=tcp://h1,tcp://h2",
        ]
        said = net.run("ctl", controller)
        assert said.count("copying the model model to h") == 2, said
        sums = {host: net.run(host, ["md5sum", f"{model}/model.safetensors"]) for host in ("ctl", "h1", "h2")}
        assert len(set(sums.values())) == 1, sums
        assert net.run("h1", ["ls", "-a", str(tmp_path)]).split() == [".", "..", "model"]
        assert (net.bytes_sent("ctl") - before) / (2 * MEGABYTES << 20) == pytest.approx(1, abs=0.1)
        print(said)
