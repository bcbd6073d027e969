"""The commands of docs/ssh.md and docs/slurm.md do what the pages say, on simulated hosts."""

import re
from collections.abc import Generator
from pathlib import Path

import pytest

from plugins.hosts.tests.namespaces import Hosts
from plugins.hosts.tests.started_hosts import PAGES, command_line, environment, hosts_of_pages
from tests.docs.commands import commands_of
from tests.docs.pages import ROOT, blocks_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def net() -> Generator[Hosts]:
    """The hosts of the pages."""
    with hosts_of_pages() as net:
        yield net


@pytest.mark.parametrize("page", PAGES)
def test_the_doctor_of_a_page_examines_its_hosts(page: str, net: Hosts, tmp_path: Path) -> None:
    blocks = [block for block in blocks_of(ROOT / "plugins/hosts/docs" / page) if block.language == "bash"]
    (words,) = [words for block in blocks for words in commands_of(block.text) if words[:2] == ["ownloop", "doctor"]]
    output = net.run("ctl", command_line(words), environment(net, tmp_path))
    assert "nothing was found that would fail" in output
    for host in ("n1", "n2", "n3"):
        assert re.search(rf"^{host} +tls://{host}:2660", output, re.MULTILINE), output
        assert net.processes(host, "--lifeline") == []
