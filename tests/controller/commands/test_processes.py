"""Covers: controller/commands/processes.py"""

import subprocess
import sys

from tests.waiting import LIMIT_S

CODE = """
import os, signal, subprocess
from controller.commands.processes import adopt_orphans, descendants, end_descendants
adopt_orphans()
# The shell ends at once; its own child, in another session, is an orphan then.
out = subprocess.run(["sh", "-c", "setsid sleep 600 >/dev/null & echo $!"], stdout=subprocess.PIPE, text=True).stdout
orphan = int(out)
assert descendants() == [orphan], (descendants(), orphan)
assert end_descendants(grace_s=60.0) == 1
assert descendants() == []
assert os.waitstatus_to_exitcode(os.waitpid(orphan, 0)[1]) == -signal.SIGTERM, "it was asked first"
assert end_descendants(grace_s=60.0) == 0
"""


def test_orphans_are_ended_too() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=LIMIT_S)


NAMED = """
from pathlib import Path
from controller.commands.processes import descendants
Path("/proc/self/comm").write_bytes("日本語日本語".encode()[:14])  # the kernel keeps 15 bytes, and cuts characters
assert descendants() == []
"""


def test_a_process_whose_name_is_no_text_is_passed_over() -> None:
    subprocess.run([sys.executable, "-c", NAMED], check=True, timeout=LIMIT_S)
