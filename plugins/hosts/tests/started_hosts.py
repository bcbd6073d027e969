"""The hosts `n1` to `n3` of the pages about ssh and Slurm, and programs on `ctl` that stand in for those.

The hosts have no workers. What the stand-ins are asked to run there, a `node_server` runs.
"""

import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from plugins.hosts.tests import slurm_stand_in
from plugins.hosts.tests.namespaces import Hosts, hosts_on_one_machine
from tests.docs.commands import commands_of
from tests.docs.pages import ROOT, blocks_of
from tests.waiting import wait_for_line

HOSTS = ("n1", "n2", "n3")
PAGES = ("ssh.md", "slurm.md")
_SSH = f'while [ "$1" != -- ]; do shift; done; exec {sys.executable} -m plugins.hosts.tests.node_server "$2" "$3"'


@contextmanager
def hosts_of_pages(*own_folders: Path) -> Generator[Hosts]:
    """The hosts; each has the folders for itself. Skips the test where they cannot be made."""
    with hosts_on_one_machine("ctl", *HOSTS, own_folders=own_folders) as net:
        for name, script in {"ssh": _SSH, **slurm_stand_in.scripts()}.items():
            (net.folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (net.folder / name).chmod(0o755)
        (net.folder / "nodes").write_text(" ".join(HOSTS))
        (net.folder / "pending").write_text("2")
        for host in HOSTS:
            server = net.popen(host, [sys.executable, "-m", "plugins.hosts.tests.node_server", host])
            assert wait_for_line(server.stdout, f"the server of {host}") == "ready"
        yield net


def run_options(page: str) -> list[str]:
    """What the first `ownloop run` of a page says after its recipe."""
    blocks = [block for block in blocks_of(ROOT / "plugins/hosts/docs" / page) if block.language == "bash"]
    runs = [words for block in blocks for words in commands_of(block.text) if words[:2] == ["ownloop", "run"]]
    return runs[0][3:]


def command_line(words: Sequence[str]) -> list[str]:
    """A command of a page, for a process."""
    assert words[0] == "ownloop"
    return [sys.executable, "-m", "controller.commands.cli", *words[1:]]


def environment(net: Hosts, folder: Path) -> Mapping[str, str]:
    """Variables for `ctl`, with a folder that all hosts share."""
    return {
        "OWNLOOP_CACHE": str(folder / "cache"),
        "STAND_INS": str(net.folder),
        "PATH": f"{net.folder}:{os.environ['PATH']}",
    }
