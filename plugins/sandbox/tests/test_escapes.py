"""Code in a sandbox cannot get out of it. Each attempt prints "out" if it succeeds.

Attempts that harm nobody are also made without a sandbox, where they must succeed: so they would be seen to.
"""

import asyncio
import os
import socket
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from ownloop_sandbox import Sandbox, SandboxResult, run_python
from plugins.sandbox.tests.here import REAL, need
from plugins.sandbox.tests.test_run import is_running
from tests.waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.seconds

OUT = "\nprint('out')"
LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
CALL = "def call(result):\n    if result < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))\n"
DETACH = (
    "import os, sys, time\n"
    "if os.fork() == 0:\n    os.setsid()\n"
    "    if os.fork() == 0: os.execv('/bin/sleep', ['sleep', '{seconds}'])\n"
    "    os._exit(0)\n"
    "time.sleep(0.2)\n"
)

HARMLESS = {
    "write to the home folder": "open('{home}/planted', 'w').write('x')" + OUT,
    "write to a folder of the host": "open('{folder}/planted', 'w').write('x')" + OUT,
    "read a secret file": "open('{folder}/id_rsa').read()" + OUT,
    "read a secret file through a shell": "import subprocess\n"
    "subprocess.check_output(['/bin/cat', '{folder}/id_rsa'])" + OUT,
    "read the list of the host's users": "open('/etc/passwd').read()" + OUT,
    "connect to a TCP server of the host": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)" + OUT,
    "connect to an abstract socket": "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0{name}')" + OUT,
    "connect to a socket in a folder": "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('{folder}/s')"
    + OUT,
    "signal the controller": "import os\nos.kill({pid}, 0)" + OUT,
    "see the host's processes": "assert '{pid}' in __import__('os').listdir('/proc')" + OUT,
    "read an environment variable": "assert __import__('os').environ['OWNLOOP_TEST_SECRET']" + OUT,
    "read the controller's environment": "open('/proc/{pid}/environ').read()" + OUT,
    "call the C library": LIBC + "assert libc.system(b'touch {folder}/planted') == 0" + OUT,
    "leave a process behind": DETACH + "print('out')",
    "open a network socket": "import socket\nsocket.socket()" + OUT,
    "open a netlink socket": "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)" + OUT,
    "keep memory in a memfd": "import os\nos.memfd_create('x')" + OUT,
    "keep memory in System V": LIBC
    + CALL
    + "n = libc.shmget(0, 4096, 0o600)\ncall(n)\ncall(libc.shmctl(n, 0, None))"
    + OUT,
    "keep memory in a pipe": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETPIPE_SZ, 1 << 20)" + OUT,
    "keep memory in a socket": "import socket\nsocket.socketpair()[0].setsockopt(1, socket.SO_SNDBUF, 1 << 20)" + OUT,
    "watch files": LIBC + CALL + "call(libc.inotify_init1(0))" + OUT,
    "ask for a personality": LIBC + CALL + "call(libc.personality(0xFFFFFFFF))" + OUT,
    "choose a core": "import os\nos.sched_setaffinity(0, os.sched_getaffinity(0))" + OUT,
    "read a priority back": "import os\nos.setpriority(0, 0, os.getpriority(0, 0))" + OUT,
    "share the machine's name": "import os\nassert os.readlink('/proc/self/ns/uts') == '{name_space}'" + OUT,
}

HARMFUL = {
    "clear the list of what is forbidden": "import __main__\n__main__.forbidden.clear()" + OUT,
    "write to the Python that runs": "import os\nopen(os.__file__, 'a').write('')" + OUT,
    "write to /usr": "open('/usr/planted', 'w')" + OUT,
    "write beside the scratch folder": "open('/planted', 'w')" + OUT,
    "fill the scratch folder": "for i in range(100): open(str(i), 'wb').write(bytes(1 << 20))" + OUT,
    "fill the memory for files": "for i in range(100): open(f'/dev/shm/{{i}}', 'wb').write(bytes(1 << 20))" + OUT,
    "make files without end": "for i in range(10**9): open(str(i), 'w').close()" + OUT,
    "start processes without end": "import os\nwhile True: os.fork()" + OUT,
    "start twenty processes": "import os, time\nfor _ in range(20):\n    if os.fork() == 0: time.sleep(9)" + OUT,
    "take all memory": "x = []\nwhile True: x.append(bytearray(1 << 24))" + OUT,
    "take memory in processes": "import os\nfor _ in range(100): os.fork() or bytearray(1 << 27)" + OUT,
    "print 10 GB": "for _ in range(10 << 10): print('x' * (1 << 20))" + OUT,
    "loop forever": "while True: pass" + OUT,
    "ignore all signals": "import signal, time\n"
    "for s in set(signal.Signals) - {{signal.SIGKILL, signal.SIGSTOP}}: signal.signal(s, signal.SIG_IGN)\n"
    "time.sleep(60)" + OUT,
    "raise a limit": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))" + OUT,
    "send a packet": "import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('203.0.113.1', 9))" + OUT,
    "trace the controller": LIBC + CALL + "call(libc.ptrace(16, {pid}, 0, 0))" + OUT,
    "enter the host's files by process 1": "import os\nassert os.listdir('/proc/1/root')" + OUT,
    "kill process 1": "import os, time\nos.kill(1, 9)\ntime.sleep(0.2)\nraise OSError('still there')",
    "mount": LIBC + CALL + "call(libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None))" + OUT,
    "make a user namespace": LIBC + CALL + "call(libc.unshare(0x10000000))" + OUT,
    "become root": "import os\nos.setuid(0)" + OUT,
    "run a program of root's": "import subprocess\nassert b'uid=0' in subprocess.check_output('su -c id', shell=True)"
    + OUT,
    "make a device": "import os, stat\nos.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(254, 0))" + OUT,
    "leave the root folder": "import os\nos.mkdir('x'); os.chroot('x'); os.chdir('../../../..'); os.chroot('.')" + OUT,
    "set the clock": "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)" + OUT,
    "set the machine's name": "import socket\nsocket.sethostname('x')" + OUT,
    "write to another descriptor": "import os\n"
    "for fd in range(3, 10**4):\n    try: os.write(fd, b'x'); print('out')\n    except OSError: pass\nraise OSError",
}

ENDLESS = ("loop forever", "ignore all signals", "make files without end")


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[dict[str, object]]:
    """What the attempts aim at: a file and servers of this test."""
    (tmp_path / "id_rsa").write_text("secret")
    tmp_path.chmod(0o755)
    monkeypatch.setenv("OWNLOOP_TEST_SECRET", "secret")
    name = f"ownloop-test-{os.getpid()}-{time.time_ns()}"
    servers = [socket.create_server(("127.0.0.1", 0))]
    for address in (f"\0{name}", str(tmp_path / "s")):
        servers.append(socket.socket(socket.AF_UNIX))
        servers[-1].bind(address)
        servers[-1].listen()
    yield {
        "folder": tmp_path,
        "home": tmp_path,  # the tests leave the real one alone
        "port": servers[0].getsockname()[1],
        "name": name,
        "pid": os.getpid(),
        "seconds": f"600{time.time_ns()}",
        "name_space": Path("/proc/self/ns/uts").readlink(),
    }
    for server in servers:
        server.close()


def attempt(sandbox: Sandbox, code: str, time_limit_s: float = LIMIT_S) -> SandboxResult:
    return asyncio.run(run_python(code, sandbox=sandbox, time_limit_s=time_limit_s, memory_bytes=256 << 20))


@pytest.mark.parametrize("name", [*HARMLESS, *HARMFUL])
@pytest.mark.parametrize("sandbox", REAL)
def test_no_way_leads_out(sandbox: Sandbox, name: str, values: dict[str, object]) -> None:
    need(sandbox)
    before = sorted(Path(str(values["folder"])).iterdir())
    result = attempt(sandbox, {**HARMLESS, **HARMFUL}[name].format(**values), 1.5 if name in ENDLESS else LIMIT_S)
    if name == "leave a process behind":
        assert result.ok
    else:
        assert not result.ok
        assert "out" not in result.output.partition("TimeoutError")[0].split("\n"), result
        assert not result.output.startswith(("NameError", "SyntaxError", "ImportError", "ModuleNotFound")), result
    assert attempt(sandbox, "print(6 * 7)") == SandboxResult(output="42", ok=True)
    assert sorted(Path(str(values["folder"])).iterdir()) == before
    wait_until(lambda: not is_running(str(values["seconds"])), "the process that was left behind to end")


@pytest.mark.parametrize("sandbox", REAL)
def test_the_machine_has_another_name_in_a_sandbox(sandbox: Sandbox) -> None:
    need(sandbox)
    assert attempt(sandbox, "import socket\nprint(socket.gethostname())") == SandboxResult(output="sandbox", ok=True)


@pytest.mark.parametrize("name", sorted(HARMLESS.keys() - {"read an environment variable", "leave a process behind"}))
def test_without_a_sandbox_the_same_code_gets_out(name: str, values: dict[str, object]) -> None:
    result = attempt("none", HARMLESS[name].format(**values))
    assert result.ok, result
    assert result.output.split("\n")[-1] == "out"
