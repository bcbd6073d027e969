import subprocess
import sys

CODE = """
import subprocess, time
from controller.commands.processes import adopt_orphans, descendants, end_descendants
adopt_orphans()
# The shell ends at once; its own child, in another session, is an orphan then.
out = subprocess.run(["sh", "-c", "setsid sleep 60 >/dev/null & echo $!"], stdout=subprocess.PIPE, text=True).stdout
orphan = int(out)
assert descendants() == [orphan], (descendants(), orphan)
began = time.monotonic()
assert end_descendants(grace_s=1.0) == 1
assert descendants() == []
assert time.monotonic() - began < 0.9, "it was asked first, and needed no more"
assert end_descendants(grace_s=1.0) == 0
"""


def test_orphans_are_ended_too() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=30)
