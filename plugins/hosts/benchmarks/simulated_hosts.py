"""Several hosts on this machine: namespaces with a network, processes, a host name and an `/etc/hosts` of their own.

    with simulated_hosts("ctl", "h1", "h2") as net:
        net.start_worker("h1")
        controller = net.popen("ctl", [sys.executable, "script.py"])
        net.cut("h1")

All are on one bridge. What runs in a host sees its own `/proc` and `/dev/shm`, so `host_identity()` differs between
hosts, and a file system that they share. Every process in a host ends with the block, and if this process is killed.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from benchmarks.harness import REPOSITORY

PORT = 26600
_LIMIT_S = 120.0  # for what the kernel does at once on a machine that is not busy
_TOOLS = ("ip", "unshare", "nsenter", "mount")

# The first process of a host. It collects the orphans, and ends, with everything in the host, when its input does.
_INIT = """
hostname "$1"; mount --bind "$2" /etc/hosts; mount -t tmpfs shm /dev/shm
shift 2
while [ $# -gt 0 ]; do mount --bind "$1" "$2"; shift 2; done
echo ready
read
"""


def why_not() -> str | None:
    """Why this process cannot make namespaces; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"network namespaces need the commands {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False
    )
    return None if tried.returncode == 0 else f"namespaces cannot be made here: {tried.stderr.decode().strip()}"


class Hosts:
    """The hosts of one bridge. Use `simulated_hosts`."""

    def __init__(self, hub: int, inits: Mapping[str, int], folder: Path) -> None:
        """`hub` is a process in the bridge's namespace, `inits` are the first processes of the hosts."""
        self.folder = folder
        """For logs; removed with the hosts."""
        self.addresses = {name: _address(index) for index, name in enumerate(inits)}
        self._hub = hub
        self._inits = inits
        self._processes: list[subprocess.Popen[bytes]] = []
        self._workers: dict[str, subprocess.Popen[bytes]] = {}

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """The command line, for this process, that runs a command in a host."""
        inside = ["--net", "--mount", "--uts", "--pid"]
        return ["nsenter", "-t", str(self._inits[host]), *inside, f"--wdns={Path.cwd()}", *command]

    def popen(
        self, host: str, command: Sequence[str], env: Mapping[str, str] | None = None, log: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a process in a host, with `env` added to this process's environment. It ends with the host.

        Its output goes to `log`, or to a pipe that is its `stdout`.
        """
        path = os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(REPOSITORY)]).strip(os.pathsep)
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(self.folder / "state")}
        output = subprocess.PIPE if log is None else log.open("ab")
        process = subprocess.Popen(
            self.command(host, command),
            env={**os.environ, **own, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        if not isinstance(output, int):
            output.close()
        self._processes.append(process)
        return process

    def run(
        self, host: str, command: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> str:
        """What a command in a host prints. Raises AssertionError, with the output, if it fails or takes too long."""
        process = self.popen(host, command, env)
        try:
            output = process.communicate(timeout=timeout_s)[0].decode()
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"no end within {timeout_s:g} s:\n{process.communicate()[0].decode()}") from None
        assert process.returncode == 0, f"status {process.returncode}:\n{output}"
        return output

    def start_worker(
        self,
        host: str,
        *options: str,
        port: int = PORT,
        env: Mapping[str, str] | None = None,
        wait_s: float = 60,
    ) -> subprocess.Popen[bytes]:
        """Starts `ownloop worker` and waits until it listens. By default on `tcp://<host>:<port>`, without TLS.

        One that follows another takes the next port. Its output goes to `log(host)`.
        """
        options = options or ("--listen", f"tcp://{host}:{port}", "--insecure")
        worker = [sys.executable, "-m", "controller.commands.cli", "worker", *options]
        self._workers[host] = process = self.popen(host, worker, env, self.log(host))
        end = time.monotonic() + wait_s
        while not any(self._listens(host, each) for each in range(port, port + 10)):
            assert process.poll() is None, self.log(host).read_text()
            assert time.monotonic() < end, self.log(host).read_text()
            time.sleep(0.05)
        return process

    def log(self, host: str) -> Path:
        """The output of a host's workers."""
        return self.folder / f"worker-{host}.log"

    def kill_worker(self, host: str) -> None:
        """Kills the host's worker (SIGKILL). What it had started ends with it, by itself."""
        pids = self.processes(host, " worker --listen ")
        assert pids, f"no worker runs on {host}"
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self._workers.pop(host).wait(timeout=_LIMIT_S)

    def cut(self, host: str) -> None:
        """Takes a host off the bridge: from now on, packets in either direction are lost without a word."""
        self._on_hub("link", "set", f"v{host}", "nomaster")

    def heal(self, host: str) -> None:
        """Undoes `cut`."""
        self._on_hub("link", "set", f"v{host}", "master", "br0")

    def bytes_sent(self, host: str) -> int:
        """Bytes that a host has sent over its interface since it was made, with their headers."""
        return json.loads(self._on_hub("-s", "-j", "link", "show", f"v{host}"))[0]["stats64"]["rx"]["bytes"]

    def processes(self, host: str, words: str = "") -> list[int]:
        """The processes in a host whose command line contains `words`, by the ids that they have here."""
        namespace = Path(f"/proc/{self._inits[host]}/ns/pid").readlink()
        return [
            pid
            for pid, command in _command_lines()
            if pid != self._inits[host] and words in command
            if _namespace(pid) == namespace
        ]

    def signal(self, host: str, number: signal.Signals, words: str = "") -> None:
        """Sends a signal to those processes: SIGSTOP makes a host that hangs."""
        for pid in self.processes(host, words):
            with suppress(ProcessLookupError):  # it may end because of another that got the signal
                os.kill(pid, number)

    def continue_processes(self) -> None:
        """Undoes SIGSTOP. A host with a stopped process cannot end: `nsenter` stops too, and would not wait for it."""
        for process in self._processes:
            process.send_signal(signal.SIGCONT)

    def end_processes(self) -> None:
        """Waits for the processes that were started here, which have ended with their hosts."""
        for process in self._processes:
            process.wait(timeout=_LIMIT_S)
            if process.stdout is not None:
                process.stdout.close()

    def _listens(self, host: str, port: int) -> bool:
        tables = [Path(f"/proc/{self._inits[host]}/net/{name}").read_text() for name in ("tcp", "tcp6")]
        return any(
            f":{port:04X} " in line and line.split()[3] == "0A" for table in tables for line in table.splitlines()
        )

    def _on_hub(self, *arguments: str) -> str:
        command = ["nsenter", "-t", str(self._hub), "--net", "ip", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextmanager
def simulated_hosts(*names: str, own_folders: Sequence[Path] = ()) -> Generator[Hosts]:
    """Hosts of these names, at most eight letters each, on one bridge.

    At each of the `own_folders`, which exist, every host has an empty folder of its own. Raises RuntimeError where
    namespaces cannot be made.
    """
    if (reason := why_not()) is not None:
        raise RuntimeError(f"hosts cannot be simulated here: {reason}")
    with tempfile.TemporaryDirectory(prefix="ownloop-hosts-") as temporary:
        folder, hosts = Path(temporary), None
        table = folder / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{_address(index)} {name}" for index, name in enumerate(names))]
        table.write_text("\n".join(lines) + "\n")
        try:
            with ExitStack() as stack:
                hub = stack.enter_context(_namespaces(["--net"], ["bash", "-c", "echo ready; read"]))
                bridge = "ip link set lo up; ip link add br0 type bridge forward_delay 0; ip link set br0 up"
                subprocess.run(["nsenter", "-t", str(hub), "--net", "bash", "-ec", bridge], check=True)
                inits: dict[str, int] = {}
                for index, name in enumerate(names):
                    mounts = [str(path) for each in own_folders for path in (_made(folder / name, each), each)]
                    inside = ["bash", "-ec", _INIT, "bash", name, str(table), *mounts]
                    kinds = ["--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
                    inits[name] = stack.enter_context(_namespaces(kinds, inside))
                    _connect(hub, inits[name], name, _address(index))
                hosts = Hosts(hub, inits, folder)
                stack.callback(hosts.continue_processes)
                yield hosts
        finally:
            if hosts is not None:
                hosts.end_processes()


@contextmanager
def _namespaces(kinds: Sequence[str], command: Sequence[str]) -> Generator[int]:
    """A process in new namespaces. It prints a line, and ends when its input does, with this process at the latest."""
    pipe = subprocess.PIPE
    with subprocess.Popen(["unshare", *kinds, *command], stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], _LIMIT_S)[0], f"no namespace was made within {_LIMIT_S:g} s"
        assert process.stdout.readline() == b"ready\n", "a namespace was not made"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield int(children[0]) if "--fork" in kinds else process.pid
        process.stdin.close()


def _connect(hub: int, init: int, name: str, address: str) -> None:
    """Gives a host its interface `eth0`, which is on the bridge."""
    inside = f"ip link set lo up; ip addr add {address}/24 dev eth0; ip link set eth0 up"
    pair = f"ip link add v{name} type veth peer name eth0 netns {init}; ip link set v{name} master br0 up"
    for pid, script in ((hub, pair), (init, inside)):
        subprocess.run(["nsenter", "-t", str(pid), "--net", "bash", "-ec", script], check=True)


def _address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def _made(parent: Path, like: Path) -> Path:
    """A new folder below `parent`."""
    path = parent / like.relative_to("/")
    path.mkdir(parents=True)
    return path


def _command_lines() -> Iterator[tuple[int, str]]:
    """Every process that this one sees, and its command line."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                yield int(entry.name), (entry / "cmdline").read_text(errors="replace").replace("\0", " ")


def _namespace(pid: int) -> Path | None:
    with suppress(OSError):
        return Path(f"/proc/{pid}/ns/pid").readlink()
    return None
