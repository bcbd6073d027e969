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


SEMAPHORE = """
import os, subprocess, sys
from controller.commands.processes import adopt_orphans, descendants, end_descendants
adopt_orphans()
code = (
    "import multiprocessing, time\\n"
    "lock = multiprocessing.get_context('spawn').Lock()\\n"
    "print(lock._semlock.name, flush=True)\\n"
    "time.sleep(600)"
)
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
file = f"/dev/shm/sem.{child.stdout.readline().strip().lstrip('/')}"
assert os.path.exists(file)
assert end_descendants(grace_s=0) == 2, "the process, and Python's tracker of its semaphores"
assert descendants() == []
assert not os.path.exists(file), "the tracker had no time to remove it"
"""


def test_processes_that_are_killed_leave_no_semaphores() -> None:
    subprocess.run([sys.executable, "-c", SEMAPHORE], check=True, timeout=LIMIT_S)
