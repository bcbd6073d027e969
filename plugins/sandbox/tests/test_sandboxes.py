"""Boxes for programs: a folder, a way to the endpoint, limits, nothing else, and no process that outlives them."""

import asyncio
import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ownloop_sandbox import sandboxes
from ownloop_sandbox.inner_serve import remove
from ownloop_sandbox.sandboxes import Box, BoxConfig, Ended, SandboxName, Work, make_sandbox
from plugins.sandbox.tests.here import BOXES, in_a_box, need_box
from tests.waiting import LIMIT_S, children, until, wait_until

pytestmark = pytest.mark.seconds
SLEEP = f"time.sleep({2000 + os.getpid()})"  # of no other test's process
ALL: tuple[SandboxName, ...] = (*BOXES, "local")
DEFAULTS = BoxConfig()


@pytest.fixture(params=ALL)
def name(request: pytest.FixtureRequest) -> SandboxName:
    need_box(request.param)
    return request.param


def python(code: str, *more: str) -> list[str]:
    return [sys.executable, "-c", code, *more]


def ran(name: SandboxName, code: str, seconds: float = 60, place: BoxConfig = DEFAULTS) -> Ended:
    """What a program of one command says in a box with these limits."""
    return asyncio.run(in_a_box(name, place, lambda box: box.run(python(code), {}, seconds)))


def left(name: SandboxName, code: str, seconds: float = 60, place: BoxConfig = DEFAULTS) -> Work:
    """What a program of one command leaves in its folder."""

    async def use(box: Box) -> Work:
        await box.run(python(code), {}, seconds)
        await box.stop()
        return await box.files()

    return asyncio.run(in_a_box(name, place, use))


async def test_a_program_has_a_folder_and_reaches_the_endpoint(tmp_path: Path, name: SandboxName) -> None:
    code = (
        "import os, socket, sys\n"
        "endpoint = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "endpoint.sendall(b'x' * 3_000_000)\nendpoint.shutdown(socket.SHUT_WR)\nsaid = b''\n"
        "while part := endpoint.recv(1 << 16): said += part\n"
        "open('out.txt', 'w').write(open('a/in.txt').read() + said.decode() + os.environ['SAID'])\n"
        "print('done'); sys.exit(3)"
    )

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(str(len(await reader.read(-1))).encode())
        await writer.drain()
        writer.close()

    servers = [
        await asyncio.start_server(count, "127.0.0.1", 0),
        await asyncio.start_unix_server(count, tmp_path / "s"),
    ]
    port = servers[0].sockets[0].getsockname()[1]

    async def use(box: Box) -> None:
        await box.put("a/in.txt", "in ")
        ended = await box.run(python(code, str(port)), {"SAID": "hello"}, 60)
        assert (ended.exit_code, ended.output) == (3, "done\n")
        work = await box.files()
        assert (work.names, work.read("out.txt")) == (["a/in.txt", "out.txt"], b"in 3000000hello")
        with pytest.raises(RuntimeError, match="no-such-program"):
            await box.run(["no-such-program"], {}, 60)

    for path in (None, tmp_path / "s"):
        await in_a_box(name, BoxConfig(url=f"http://127.0.0.1:{port}", socket=path), use)
    for server in servers:
        server.close()


def test_no_process_outlives_a_box(tmp_path: Path, name: SandboxName) -> None:
    # A child that leaves the session and its group, and writes that it lives.
    child = f"import os, time; os.setsid(); print('alive', flush=True); {SLEEP}"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); {SLEEP}"

    async def use(box: Box) -> None:
        for end in (box.stop, box.destroy):
            running = asyncio.create_task(box.run(python(code), {}, 600))
            await until(lambda running=running: running.done() or len(_sleepers()) >= 2, "the child")
            assert not running.done(), running
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await end()
            await until(lambda: not _sleepers(), "the end of the child")

    asyncio.run(in_a_box(name, BoxConfig(), use))


def test_a_box_outlives_what_is_written_while_it_stops(name: SandboxName) -> None:
    async def use(box: Box) -> str:
        for _ in range(40):
            ended = await box.run(python("import os\nos.fork()\nwhile True: os.write(1, b'x' * 100)"), {}, 0.02)
            assert ended.exit_code is None
            running = asyncio.create_task(box.run(python("import os\nwhile True: os.write(1, b'x')"), {}, 600))
            await asyncio.sleep(0.05)
            running.cancel()
            await box.stop()
        return (await box.run(python("print(6 * 7)"), {}, 60)).output

    assert asyncio.run(in_a_box(name, DEFAULTS, use)) == "42\n"


def test_a_command_takes_as_much_of_its_input_as_it_wants(name: SandboxName) -> None:
    said = "".join(f"{i}\n" for i in range(200_000))

    async def use(box: Box) -> None:
        copies = "import shutil, sys; shutil.copyfileobj(sys.stdin, sys.stdout)"
        assert (await box.run(python(copies), {}, 60, said=said)).output == said[-(1 << 16) :]
        assert (await box.run(python("print(input())"), {}, 60, said=said)).output == "0\n"
        assert (await box.run(python("import time; time.sleep(600)"), {}, 1, said=said)).exit_code is None
        with pytest.raises(RuntimeError, match="UnicodeEncodeError"):
            await box.run(python("open('ran', 'w')"), {}, 60, said="\ud800")
        assert (await box.files()).names == []

    asyncio.run(in_a_box(name, DEFAULTS, use))


async def test_a_command_that_closes_its_output_takes_no_others(name: SandboxName) -> None:
    """The number of its pipe is then another command's, which writes while it ends."""
    wait = "import os, time\nopen({!r}, 'w'){}\nwhile not os.path.exists('go'): time.sleep(0.001)\n"
    first = wait.format("first", "; os.close(1); os.close(2)")
    second = wait.format("second", "") + "for _ in range(60_000): os.write(1, b'x')"

    async def use(box: Box) -> None:
        async def start(file: str, code: str) -> asyncio.Task[Ended]:
            running = asyncio.create_task(box.run(python(code), {}, 60))
            while file not in (await box.files()).names:
                await asyncio.sleep(0.01)
            return running

        for _ in range(5):
            started = [await start("first", first), await start("second", second)]
            await box.put("go", "")
            ended = await asyncio.gather(*started)
            assert [len(each.output) for each in ended] == [0, 60_000]
            await box.run(["rm", "first", "second", "go"], {}, 60)

    await in_a_box(name, DEFAULTS, use)


def test_a_box_ends_with_a_controller_that_is_killed(tmp_path: Path, name: SandboxName) -> None:
    code = (
        "import asyncio, os, sys\nfrom ownloop_sandbox.sandboxes import BoxConfig, make_sandbox\n"
        "async def main():\n"
        f"    box = make_sandbox({name!r}, BoxConfig())\n    await box.create()\n    print(box.work, flush=True)\n"
        f"    await box.run([sys.executable, '-c', 'import os, time; os.fork() or os.setsid(); {SLEEP}'], {{}}, 600)\n"
        "asyncio.run(main())"
    )
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        work = Path(controller.stdout.readline().strip())
        wait_until(lambda: len(_sleepers()) >= 3, "its program")
        controller.kill()
    wait_until(lambda: not _sleepers(), "the end of the program")
    wait_until(lambda: name != "local" or not work.exists(), "the end of its folder")


def _sleepers() -> list[psutil.Process]:
    found = list(psutil.process_iter(["cmdline", "status"]))
    return [p for p in found if SLEEP in " ".join(p.info["cmdline"] or ()) and p.info["status"] != "zombie"]


async def test_a_box_that_died_is_destroyed_without_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be that of another group by then."""
    signals: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _signal: signals.append(group))

    async def use(box: Box) -> None:
        (server,) = children("ownloop-program-")
        server.kill()
        with pytest.raises(RuntimeError, match="the box does not answer"):
            await box.run(python("import time; time.sleep(600)"), {}, None)

    await in_a_box("local", DEFAULTS, use)
    assert signals == []


def test_a_command_is_killed_at_its_limit(name: SandboxName) -> None:
    ended = ran(name, "print('x' * 200_000, flush=True); import time; time.sleep(600)", 2)
    assert ended.exit_code is None
    assert (len(ended.output), set(ended.output)) == (1 << 16, {"x", "\n"})


FORKS = "import os, time\nn = 0\nwhile True:\n    if os.fork() == 0: time.sleep(600)\n    n += 1; os.write(1, b'.')"
FILLS = "for i in range(9): open(str(i), 'wb').write(bytes(10 << 20))"
SHARED = "import mmap, time\nm = mmap.mmap(-1, 400 << 20)\nfor i in range(0, len(m), 4096): m[i] = 1\ntime.sleep(60)"
NAMES = "import time\nfor i in range(9000): open(str(i), 'w').close()\ntime.sleep(60)"


@pytest.mark.stranger("2.A5")
@pytest.mark.parametrize("name", BOXES)
def test_what_a_program_may_use_is_limited(name: SandboxName) -> None:
    need_box(name)
    assert ran(name, FORKS, place=BoxConfig(num_processes=20)).output.count(".") in (18, 19, 20)
    assert "No space left" in ran(name, FILLS, place=BoxConfig(disk_bytes=32 << 20)).output
    assert "MemoryError" in ran(name, "bytearray(1 << 29)", place=BoxConfig(memory_bytes=1 << 28)).output
    ended = ran(name, SHARED, place=BoxConfig(memory_bytes=1 << 28))
    assert ended.exit_code == 137
    assert ended.output.endswith("took more than 268435456 bytes of memory")
    said = ran(name, NAMES, place=BoxConfig(num_files=5000)).output
    assert "No space left" in said or "more than 5000 files" in said


LEAVES = """
import os, socket
os.mkfifo("fifo"); os.symlink("/proc/self/environ", "link"); os.symlink("/etc", "etc"); os.mkdir("folder")
os.symlink("good.txt", "inner"); socket.socket(socket.AF_UNIX).bind("socket"); open("good.txt", "w").write("good")
open("big", "wb").truncate(1 << 28)
"""


@pytest.mark.stranger("2.A3")
@pytest.mark.stranger("2.A2")
def test_only_regular_files_are_read(name: SandboxName) -> None:
    work = left(name, LEAVES)
    assert work.names == ["big", "good.txt"]
    assert ((work / "good.txt").read_text(), (work / "good.txt").is_file()) == ("good", True)
    for missing in ("fifo", "link", "etc/passwd", "folder", "inner", "socket", "../x", "/etc/passwd"):
        assert not (work / missing).exists()
        with pytest.raises(FileNotFoundError, match="the program left no regular file"):
            (work / missing).read_text()
    with pytest.raises(ValueError, match="'big' has 268435456 bytes, too many"):
        work.read("big")


@pytest.mark.stranger("2.A3")
def test_one_file_is_asked_for_by_name(name: SandboxName) -> None:
    async def use(box: Box) -> None:
        await box.run(python(LEAVES), {}, 60)
        assert (await box.files(name="good.txt")).read("good.txt") == b"good"
        for missing in ("fifo", "link", "etc/passwd", "folder", "inner", "socket", "absent"):
            with pytest.raises(RuntimeError, match="Error"):
                await box.files(name=missing)

    asyncio.run(in_a_box(name, BoxConfig(), use))


async def test_a_box_outlives_files_that_nobody_waits_for(name: SandboxName, monkeypatch: pytest.MonkeyPatch) -> None:
    add, loop = Work.add, asyncio.get_running_loop()

    async def use(box: Box) -> None:
        def cancelled_meanwhile(work: Work, header: Any, content: bytes) -> None:
            loop.call_soon_threadsafe(reading.cancel)
            wait_until(lambda: work._content.closed, "the end of the reader")  # pyright: ignore[reportPrivateUsage]
            add(work, header, content)

        await box.run(python("open('large', 'wb').write(bytes(2 << 20))"), {}, 60)
        monkeypatch.setattr(Work, "add", cancelled_meanwhile)
        reading = asyncio.create_task(box.files())
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert (await box.run(python("print(6 * 7)"), {}, 60)).output == "42\n"

    await in_a_box(name, DEFAULTS, use)


async def test_a_command_that_does_not_start_leaves_no_open_file() -> None:
    async def use(box: Box) -> None:
        for _ in range(20):
            with pytest.raises(RuntimeError, match="no-such-program"):
                await box.run(["no-such-program"], {}, 60)
        opened = "import os; print(len(os.listdir(f'/proc/{os.getppid()}/fd')))"
        assert int((await box.run(python(opened), {}, 60)).output) < 20

    await in_a_box("local", DEFAULTS, use)


def test_what_the_host_shares_by_another_name_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    assert left("local", f"import os; os.link({str(tmp_path / 'secret')!r}, 'a')").names == []


@pytest.mark.stranger("2.A10")
def test_a_file_replaces_what_is_in_its_way(name: SandboxName) -> None:
    code = (
        "import os; os.makedirs('check.py/a/b'); os.mkfifo('fifo'); os.symlink('/etc/passwd', 'link'); os.mkfifo('in')"
    )

    async def use(box: Box) -> None:
        await box.run(python(code), {}, 60)
        for each in ("check.py", "fifo", "link", "in/side"):
            await box.put(each, each)
        work = await box.files()
        assert {each: work.read(each).decode() for each in work.names} == {n: n for n in work.names}
        assert work.names == ["check.py", "fifo", "in/side", "link"]
        for outside in ("../out", "/etc/passwd", "a/../../b", ""):
            with pytest.raises(ValueError, match="not in the program's folder"):
                await box.put(outside, "x")

    asyncio.run(in_a_box(name, BoxConfig(), use))


@pytest.mark.stranger("2.A10")
def test_three_thousand_nested_folders_cost_nothing(tmp_path: Path, name: SandboxName) -> None:
    code = "import os\nopen('a', 'w').write('a')\nfor _ in range(3000): os.mkdir('x'); os.chdir('x')\nos.chmod('.', 0)"
    assert left(name, code).names == ["a"]
    nest = f"import os\nos.mkdir('{tmp_path}/top'); os.chdir('{tmp_path}/top')\n" + code.partition("\n")[2]
    subprocess.run(python(nest), check=True)
    remove(str(tmp_path / "top"))
    assert not (tmp_path / "top").exists()


async def test_many_programs_at_once_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hangs, forks, fills its disk and writes links; those beside them are served."""
    need_box("namespaces")
    bad = (
        "import os, time\nos.symlink('/', 'l')\nwith open('f', 'wb') as f:\n    try:\n"
        "        while f: f.write(bytes(1 << 20))\n    except OSError: pass\n"
        f"try:\n    while os.fork() or 1: pass\nexcept OSError: {SLEEP}"
    )
    place = BoxConfig(disk_bytes=4 << 20, num_processes=8)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def one(number: int) -> str:
        async def use(box: Box) -> str:
            ended = await box.run(python("print(6 * 7)" if number % 2 else bad), {}, LIMIT_S if number % 2 else 3)
            await box.stop()
            return ended.output if "l" not in (await box.files()).names else "a link"

        async with limit:
            return await in_a_box("namespaces", place, use)

    limit = asyncio.Semaphore(16)
    said = await asyncio.gather(*map(one, range(20)))
    assert said[1::2] == ["42\n"] * 10
    assert not _sleepers()
    assert not [*tmp_path.iterdir()]


STAND_IN = """#!/bin/sh
echo "$@" >> {log}
[ "{fails}" = 1 ] && {{ echo "no such image" >&2; exit 125; }}
while [ "$1" != tools ] && [ $# -gt 0 ]; do shift; done
[ "$1" = tools ] && {{ shift; exec {python} "$@"; }}
exit 0
"""


@pytest.mark.stranger("2.A7")
@pytest.mark.parametrize("tool", ["podman", "docker"])
def test_a_container_has_no_network_and_no_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    """With a stand-in for the command, which runs what is asked for on the host."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    place = BoxConfig(url=url, image="tools", memory_bytes=1 << 30, num_processes=64)

    def install(fails: int) -> None:
        (folder / tool).write_text(STAND_IN.format(log=tmp_path / "log", fails=fails, python=sys.executable))
        (folder / tool).chmod(stat.S_IRWXU)

    async def use(box: Box) -> None:
        # the server of a box, where the box is not: there is no /program on this host
        assert (await box.run(["sh", "-c", "echo hi"], {}, 60, cwd="/")).output == "hi\n"

    install(0)
    asyncio.run(in_a_box(tool, place, use))  # pyright: ignore[reportArgumentType]
    said = (tmp_path / "log").read_text()
    for option in (
        *("run --rm --interactive --name ownloop-", "--network=none", "--cap-drop=ALL", "--ipc=private", "--read-only"),
        *("--security-opt=no-new-privileges", "--user=65534:65534", "--pids-limit=65", "--memory=1073741824"),
        *(f"--tmpfs={path}:rw,exec,nosuid,nodev,size=1073741824,mode=1777" for path in ("/program", "/tmp", "/home")),
        *("--memory-swap=1073741824", "--entrypoint=python3 tools -I", "\nrm --force ownloop-"),
    ):
        assert option in said
    assert "network=host" not in said
    install(1)
    with pytest.raises(RuntimeError, match="no such image"):
        asyncio.run(in_a_box(tool, place, use))  # pyright: ignore[reportArgumentType]


def test_a_sandbox_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    place = BoxConfig(image="x")
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(ValueError, match="podman is not installed"):
        make_sandbox("podman", place)
    with pytest.raises(ValueError, match="podman or docker is not installed"):
        make_sandbox("auto", place)
    with pytest.raises(ValueError, match="image is empty; sandbox 'docker'"):
        make_sandbox("docker", BoxConfig())
    with pytest.raises(ValueError, match="sandbox is 'chroot', which is not known"):
        make_sandbox("chroot", place)  # pyright: ignore[reportArgumentType]
    vars(sandboxes)["_built"].cache_clear()
    monkeypatch.setattr(sandboxes, "_why_not", lambda way: f"no {way}")
    with pytest.raises(ValueError, match=r"\(namespaces: no namespaces; bubblewrap: no bubblewrap\)\. Allow user"):
        make_sandbox("auto", BoxConfig())
    with pytest.raises(ValueError, match="memory_bytes is 0"):
        BoxConfig(memory_bytes=0)
