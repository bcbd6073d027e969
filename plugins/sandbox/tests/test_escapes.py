"""What a model wrote cannot get out of any box, of either profile: all of attempts.py, by every way of this host."""

import asyncio
import os
import socket
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from ownloop_sandbox import Sandbox, SandboxResult, run_python
from ownloop_sandbox.inner_run import refused_calls
from ownloop_sandbox.sandboxes import BoxConfig, Ended, SandboxName
from plugins.sandbox.tests.attempts import ALLOWED_TO_PROGRAMS, ATTEMPTS, ENDLESS, HARMLESS
from plugins.sandbox.tests.here import BOXES, REAL, in_a_box, need, need_box
from plugins.sandbox.tests.test_run import is_running
from tests.waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.seconds
WRONG = ("NameError", "SyntaxError", "ImportError", "ModuleNotFound")
AT_A_TIME = 4
CONFIG = BoxConfig(memory_bytes=256 << 20, disk_bytes=16 << 20, num_processes=8, num_files=4096)


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
        "calls": refused_calls(os.uname().machine),
        "name_space": Path("/proc/self/ns/uts").readlink(),
    }
    for server in servers:
        server.close()


def attempt(sandbox: Sandbox, code: str, time_limit_s: float = LIMIT_S) -> SandboxResult:
    return asyncio.run(run_python(code, sandbox=sandbox, time_limit_s=time_limit_s, memory_bytes=256 << 20))


async def as_code(sandbox: Sandbox, name: str, code: str) -> str:
    """What an attempt said, if it came to its end."""
    limit_s = 1.5 if name in ENDLESS else LIMIT_S
    result = await run_python(code, sandbox=sandbox, time_limit_s=limit_s, memory_bytes=256 << 20)
    return result.output if result.ok else f"failed: {result.output}"


async def as_program(box: SandboxName, name: str, code: str) -> str:
    """The same of a program. Its box still serves afterwards."""

    async def use(made: Any) -> Ended:
        ended = await made.run(["python3", "-c", code], {}, 1.5 if name in ENDLESS else LIMIT_S)
        await made.stop()
        assert (await made.run(["echo", "on"], {}, LIMIT_S)).output == "on\n"
        return ended

    ended = await in_a_box(box, CONFIG, use)
    last = ended.output.strip().rpartition("\n")[2]
    return ended.output if ended.exit_code == 0 else f"failed: {last}"


@pytest.mark.stranger("2.A5")
@pytest.mark.parametrize(
    "profile",
    [
        ("code", "namespaces"),
        *(pytest.param(("code", way), marks=pytest.mark.slow) for way in REAL if way != "namespaces"),
        *(pytest.param(("programs", way), marks=pytest.mark.slow) for way in BOXES),
    ],
)
async def test_no_way_leads_out(profile: tuple[str, Any], values: dict[str, object]) -> None:
    kind, way = profile
    (need if kind == "code" else need_box)(way)
    before = sorted(Path(str(values["folder"])).iterdir())

    limit = asyncio.Semaphore(AT_A_TIME)

    async def one(name: str, code: str) -> str:
        async with limit:
            return await (as_code if kind == "code" else as_program)(way, name, code.format(**values))

    said = dict(zip(ATTEMPTS, await asyncio.gather(*(one(*each) for each in ATTEMPTS.items())), strict=True))
    assert len(said) >= 100
    allowed = ("leave a process behind", *(ALLOWED_TO_PROGRAMS if kind == "programs" else ()))
    out = {name: each for name, each in said.items() if not each.startswith("failed: ") and name not in allowed}
    assert out == {}
    assert {name: each for name, each in said.items() if each.removeprefix("failed: ").startswith(WRONG)} == {}
    assert sorted(Path(str(values["folder"])).iterdir()) == before
    wait_until(lambda: not is_running(str(values["seconds"])), "the process that was left behind to end")


ROWS = {
    "files of the host that it does not show": "read a secret file",
    "writing files of the host": "call the C library",
    "servers of the host, by TCP": "connect to a TCP server of the host",
    "abstract Unix sockets of the host": "connect to an abstract socket",
    "other address families, such as `AF_VSOCK`": "open a netlink socket",
    "processes of the host": "signal the controller",
    "memory that no limit counts": "keep memory in System V",
}


def test_the_page_says_what_attempts_find(values: dict[str, object]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "safety.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page if line.startswith("| ")]
    table = {name: said for name, *said in cells if name in ROWS}
    ways: tuple[Sandbox, ...] = ("namespaces", "bubblewrap", "none")
    for place, way in zip((0, 1, 3), ways, strict=True):
        need(way)
        found = {row: attempt(way, HARMLESS[name].format(**values)).ok for row, name in ROWS.items()}
        for path in Path(str(values["folder"])).glob("planted"):
            path.unlink()
        assert {row: said[place] for row, said in table.items()} == {
            r: "open" if o else "kept" for r, o in found.items()
        }


@pytest.mark.parametrize("sandbox", REAL)
def test_the_machine_has_another_name_in_a_sandbox(sandbox: Sandbox) -> None:
    need(sandbox)
    assert attempt(sandbox, "import socket\nprint(socket.gethostname())") == SandboxResult(output="sandbox", ok=True)


@pytest.mark.parametrize("name", sorted(HARMLESS.keys() - {"read an environment variable", "leave a process behind"}))
def test_without_a_sandbox_the_same_code_gets_out(name: str, values: dict[str, object]) -> None:
    result = attempt("none", HARMLESS[name].format(**values))
    assert result.ok, result
    assert result.output.split("\n")[-1] == "out"
