"""Sandboxes: a folder, a way to the endpoint, nothing else, and no process that outlives them."""

import asyncio
import os
import shutil
import socket
import stat
import sys
from pathlib import Path

import psutil
import pytest

from ownloop_sandbox.sandboxes import BubblewrapSandbox, LocalSandbox, Place, SandboxName, make_sandbox
from tests.waiting import until

pytestmark = pytest.mark.seconds
PYTHON = (sys.executable, "-c")
SLEEP = f"time.sleep({2000 + os.getpid()})"  # of no other test's process
ENV = {"SAID": "hello"}


def _has_bubblewrap() -> bool:
    try:
        make_sandbox("bubblewrap", Place(work=Path(), url="", socket=None))
    except ValueError:
        return False
    return True


bubblewrap = pytest.param("bubblewrap", marks=pytest.mark.skipif(not _has_bubblewrap(), reason="needs bubblewrap"))


async def _pong(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"pong")
    await writer.drain()
    writer.close()


@pytest.mark.parametrize("name", ["local", bubblewrap])
def test_a_program_has_a_folder_and_reaches_the_endpoint(tmp_path: Path, name: SandboxName) -> None:
    path = tmp_path / "s"
    code = (
        "import os, socket, sys\n"
        "host, port = sys.argv[1].removeprefix('http://').split(':')\n"
        "said = socket.create_connection((host, int(port))).recv(9).decode()\n"
        "open('out.txt', 'w').write(open('in.txt').read() + said + os.environ['SAID'])\n"
        "print('done'); sys.exit(3)"
    )

    async def main() -> None:
        servers = [await asyncio.start_server(_pong, "127.0.0.1", 0), await asyncio.start_unix_server(_pong, path)]
        port = servers[0].sockets[0].getsockname()[1]
        sandbox = make_sandbox(name, Place(work=tmp_path / "work", url=f"http://127.0.0.1:{port}", socket=path))
        await sandbox.create()
        sandbox.put("in.txt", "in ")
        ended = await sandbox.run([*PYTHON, code, sandbox.reach()], ENV, 60)
        assert (ended.exit_code, ended.output) == (3, "done\n")
        assert sandbox.get("out.txt") == b"in ponghello"
        await sandbox.destroy()
        for server in servers:
            server.close()

    asyncio.run(main())


@pytest.mark.parametrize("name", [bubblewrap])
def test_a_program_sees_nothing_else(tmp_path: Path, name: SandboxName) -> None:
    (tmp_path / "secret").write_text("secret")
    code = (
        "import os, socket\n"
        f"print(os.path.exists({str(tmp_path / 'secret')!r}), 'CONTROLLER_SECRET' in os.environ)\n"
        "print(len([p for p in os.listdir('/proc') if p.isdigit()]) < 8)\n"
        "for path in ('/usr/x', '/etc/passwd'):\n"
        "    try: open(path, 'a'); print('written')\n"
        "    except OSError: pass\n"
        "try: socket.create_connection(('127.0.0.1', int(os.environ['PORT'])), 2); print('connected')\n"
        "except OSError: print('refused')"
    )

    async def main() -> None:
        os.environ["CONTROLLER_SECRET"] = "1"
        with socket.create_server(("127.0.0.1", 0)) as other:  # another service of the host
            sandbox = make_sandbox(name, Place(work=tmp_path / "work", url="", socket=None))
            await sandbox.create()
            env = {"PORT": str(other.getsockname()[1])}
            ended = await sandbox.run([*PYTHON, code], env, 60)
        del os.environ["CONTROLLER_SECRET"]
        assert ended.output == "False False\nTrue\nrefused\n"

    asyncio.run(main())


@pytest.mark.parametrize("name", ["local", bubblewrap])
def test_no_process_outlives_a_sandbox(tmp_path: Path, name: SandboxName) -> None:
    # A child that leaves the session and its group, and writes that it lives.
    child = f"import os, time; os.setsid(); open('alive', 'w').write('x'); {SLEEP}"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); {SLEEP}"

    async def main() -> None:
        sandbox = make_sandbox(name, Place(work=tmp_path / "work", url="", socket=None))
        await sandbox.create()
        running = asyncio.create_task(sandbox.run([*PYTHON, code], {}, 600))
        await until((tmp_path / "work" / "alive").exists, "the child")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await sandbox.destroy()
        await until(lambda: not _sleepers(), "the end of the child")

    asyncio.run(main())


def _sleepers() -> list[psutil.Process]:
    found = list(psutil.process_iter(["cmdline", "status"]))
    return [p for p in found if SLEEP in " ".join(p.info["cmdline"] or ()) and p.info["status"] != "zombie"]


@pytest.mark.parametrize("name", ["local", bubblewrap])
def test_a_command_is_killed_at_its_limit(tmp_path: Path, name: SandboxName) -> None:
    async def main() -> None:
        sandbox = make_sandbox(name, Place(work=tmp_path / "work", url="", socket=None))
        await sandbox.create()
        ended = await sandbox.run([*PYTHON, "print('x' * 200_000, flush=True); import time; time.sleep(600)"], {}, 2)
        assert ended.exit_code is None
        assert (len(ended.output), set(ended.output)) == (1 << 16, {"x", "\n"})
        missing = await sandbox.run(["no-such-program"], {}, 60) if name == "bubblewrap" else None
        assert missing is None or missing.exit_code == 127

    asyncio.run(main())


def test_memory_is_limited(tmp_path: Path) -> None:
    async def main() -> None:
        sandbox = LocalSandbox(Place(work=tmp_path / "work", url="", socket=None, memory_bytes=1 << 28))
        await sandbox.create()
        ended = await sandbox.run([*PYTHON, "bytearray(1 << 29)"], {}, 60)
        assert "MemoryError" in ended.output

    asyncio.run(main())


def test_files_stay_in_the_folder(tmp_path: Path) -> None:
    sandbox = LocalSandbox(Place(work=tmp_path / "work", url="", socket=None))
    asyncio.run(sandbox.create())
    sandbox.put("a/b.txt", b"x")
    assert sandbox.get("a/b.txt") == b"x"
    (tmp_path / "work" / "link").symlink_to(tmp_path)
    for name in ("../out", "/etc/passwd", "link/out"):
        with pytest.raises(ValueError, match="not in the program's folder"):
            sandbox.put(name, "x")


STAND_IN = """#!/bin/sh
echo "$@" >> {log}
case "$1" in
  run) [ "{fails}" = 1 ] && {{ echo "no such image"; exit 125; }}; exit 0 ;;
  exec) shift; while [ "$1" != "{marker}" ]; do shift; done; shift; exec "$@" ;;
esac
"""


@pytest.mark.parametrize("tool", ["podman", "docker"])
def test_a_container_is_started_used_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    """With a stand-in for the command, which runs what is asked for on the host."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    place = Place(work=tmp_path / "work", url="http://127.0.0.1:1", socket=None, image="tools", memory_bytes=1 << 30)

    def install(fails: int) -> None:
        (folder / tool).write_text(STAND_IN.format(log=tmp_path / "log", fails=fails, marker="--"))
        (folder / tool).chmod(stat.S_IRWXU)

    async def main() -> None:
        install(0)
        sandbox = make_sandbox(tool, place)  # pyright: ignore[reportArgumentType]
        await sandbox.create()
        ended = await sandbox.run(["--", "sh", "-c", "echo hi"], {"A": "b"}, 60)
        assert (ended.exit_code, ended.output) == (0, "hi\n")
        await sandbox.destroy()
        run, exec_, remove = (tmp_path / "log").read_text().splitlines()
        assert run.startswith("run -d --rm --network=host --name ownloop-")
        assert f"-v {place.work}:/work" in run
        assert run.endswith("--memory=1073741824 tools sleep infinity")
        assert exec_.startswith("exec -w /work -e A=b")
        assert remove.startswith("rm -f ownloop-")
        install(1)
        with pytest.raises(RuntimeError, match=f"{tool} cannot start a container of 'tools': no such image"):
            await make_sandbox(tool, place).create()  # pyright: ignore[reportArgumentType]

    asyncio.run(main())


def test_a_sandbox_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(work=Path(), url="", socket=None, image="x")
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(ValueError, match="podman is not installed"):
        make_sandbox("podman", place)
    with pytest.raises(ValueError, match="podman or docker is not installed"):
        make_sandbox("auto", place)
    with pytest.raises(ValueError, match="sandbox is 'chroot', which is not known"):
        make_sandbox("chroot", place)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr("ownloop_sandbox.sandboxes._why_no_bubblewrap", lambda: "no user namespaces")
    with pytest.raises(ValueError, match=r"does not work here: no user namespaces\. Install"):
        make_sandbox("bubblewrap", Place(work=Path(), url="", socket=None))
    assert BubblewrapSandbox(place).reach() == "http://127.0.0.1:8399"
