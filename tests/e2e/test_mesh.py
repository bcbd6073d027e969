"""Real processes: what they are given, how their errors arrive, and that none of them stays."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from controller.meshes.errors import DeadlineError, MeshError
from controller.meshes.mesh import Mesh
from tests.e2e.toy_actor import Toy

pytestmark = pytest.mark.e2e

CONTROLLER = """
import asyncio, pathlib, sys
from controller.meshes.mesh import Mesh
from tests.e2e.toy_actor import Toy

async def main():
    env = {"TOY_GREETING": "hello"}
    mesh = await Mesh.spawn("toy", Toy, 5, num_ranks=2, env=env, log_dir=pathlib.Path(sys.argv[1]))
    await mesh.answer(mesh.rank(0).add.call_one(1))
    hanging = mesh.rank(1).hang.call_one(600)
    print(*mesh.pids, flush=True)
    await hanging

asyncio.run(main())
"""


def _with_mesh(tmp_path: Path, body: Callable[[Mesh], Awaitable[None]], num_ranks: int = 1) -> tuple[int, ...]:
    async def main() -> tuple[int, ...]:
        env = {"TOY_GREETING": "hello"}
        mesh = await Mesh.spawn("toy", Toy, 5, num_ranks=num_ranks, env=env, log_dir=tmp_path / "logs")
        try:
            await body(mesh)
        finally:
            await mesh.stop()
            await mesh.stop()
        return mesh.pids

    return asyncio.run(main())


def test_ranks_answer_log_and_end(tmp_path: Path) -> None:
    async def body(mesh: Mesh) -> None:
        assert [await mesh.answer(mesh.rank(r).add.call_one(r)) for r in range(2)] == [5, 6]
        with pytest.raises(ValueError, match="value is 3; it must be even") as caught:
            await mesh.answer(mesh.rank(1).complain.call_one(3))
        assert "toy_actor.py" in "".join(caught.value.__notes__)
        assert await mesh.answer(mesh.rank(1).add.call_one(1)) == 6

    pids = _with_mesh(tmp_path, body, num_ranks=2)
    assert len(set(pids)) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    for rank in range(2):
        assert f"toy rank {rank} of 2 says hello" in (tmp_path / "logs" / f"toy-{rank}.log").read_text()


def test_a_process_that_dies_is_named_with_its_log(tmp_path: Path) -> None:
    async def body(mesh: Mesh) -> None:
        with pytest.raises(MeshError, match=r"(?s)toy: a process died.*toy-0\.log") as caught:
            await mesh.answer(mesh.rank(0).die.call_one())
        assert "says hello" in str(caught.value)

    _with_mesh(tmp_path, body)


def test_a_process_that_hangs_meets_the_deadline_and_is_ended(tmp_path: Path) -> None:
    async def body(mesh: Mesh) -> None:
        with pytest.raises(DeadlineError, match=r"no answer within 0\.5 s"):
            await mesh.answer(mesh.rank(0).hang.call_one(600), timeout_s=0.5)

    start = time.monotonic()
    (pid,) = _with_mesh(tmp_path, body)
    assert time.monotonic() - start < 30
    assert not Path(f"/proc/{pid}").exists()


def test_no_process_outlives_a_killed_controller(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", CONTROLLER, str(tmp_path / "logs")]
    controller = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    with controller:
        pids = controller.stdout.readline().split()
        assert len(pids) == 2
        controller.kill()
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process outlived its controller"
        time.sleep(0.05)


def _runs(pid: str) -> bool:
    """Whether a process is there and no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
