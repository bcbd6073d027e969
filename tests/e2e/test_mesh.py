"""Real processes: what they are given, how their errors arrive, and that none of them stays."""

import asyncio
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from controller.launching.launcher import Launcher
from controller.processes.errors import DeadlineError, MeshError
from controller.processes.mesh import Mesh
from controller.processes.rank import how_it_died
from rl.deadlines import Deadlines
from tests.e2e.toy_actor import Toy
from tests.waiting import LIMIT_S, wait_for_end, wait_for_ends, wait_for_line, wait_until

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]

CONTROLLER = """
import asyncio, atexit, pathlib, sys
import monarch.actor
from monarch._src.actor import actor_mesh
from controller.processes.mesh import Mesh
from rl.deadlines import Deadlines
from tests.e2e.toy_actor import Toy

async def main():
    env = {"TOY_GREETING": "hello"}
    num_ranks = int(sys.argv[2])
    monarch.actor.this_host()  # registers Monarch's own handler, which runs after the next one
    atexit.register(lambda: print("shut down:", actor_mesh._shutdown_claimed))
    mesh = await Mesh.spawn("toy", Toy, 5, num_ranks=num_ranks, env=env, log_dir=pathlib.Path(sys.argv[1]))
    await mesh.call("add", [(1,)])
    hanging = asyncio.create_task(mesh.call("hang", [*[None] * (num_ranks - 1), (600,)]))
    print(*mesh.pids, flush=True)
    if "stop" in sys.argv:
        await mesh.stop()
    else:
        await hanging

asyncio.run(main())
"""


def _with_mesh(
    tmp_path: Path, body: Callable[[Mesh], Awaitable[None]], num_ranks: int = 1, deadlines: Deadlines | None = None
) -> tuple[int, ...]:
    async def main() -> tuple[int, ...]:
        env = {"TOY_GREETING": "hello"}
        mesh = await Mesh.spawn(
            "toy", Toy, 5, num_ranks=num_ranks, env=env, log_dir=tmp_path / "logs", deadlines=deadlines
        )
        try:
            await body(mesh)
        finally:
            await mesh.stop()
            await mesh.stop()
        return mesh.pids

    return asyncio.run(main())


def test_ranks_answer_log_and_end(tmp_path: Path) -> None:
    async def body(mesh: Mesh) -> None:
        assert [(await mesh.call("add", [*[None] * r, (r,)]))[0] for r in range(2)] == [5, 6]
        with pytest.raises(ValueError, match="value is 3; it must be even") as caught:
            await mesh.call("complain", [None, (3,)])
        assert "toy_actor.py" in "".join(caught.value.__notes__)
        assert (await mesh.call("add", [None, (1,)]))[0] == 6

    pids = _with_mesh(tmp_path, body, num_ranks=2)
    assert len(set(pids)) == 2
    wait_for_ends(pids, "the ranks")
    for rank in range(2):
        assert f"toy rank {rank} of 2 says hello" in (tmp_path / "logs" / f"toy-{rank}.log").read_text()


@pytest.mark.slow
def test_calls_keep_no_memory(tmp_path: Path) -> None:
    """Monarch's own calls keep 1.1 KB each."""

    async def body(mesh: Mesh) -> None:
        process = psutil.Process()
        for num_calls in (6000, 6000):
            before = process.memory_info().rss
            for value in range(num_calls):
                assert await mesh.call("add", [(value,)]) == [5 + value]
        assert process.memory_info().rss - before < 300 * 6000

    _with_mesh(tmp_path, body)


IDLE = """
import asyncio, ctypes, itertools, pathlib, statistics, sys
import controller.processes.mesh as product
from tests.e2e.toy_actor import Toy

class Mallinfo2(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo2

def bytes_in_use():  # what glibc has given out
    info = mallinfo2()
    return info.uordblks + info.hblkhd

async def main():
    env = {"TOY_GREETING": "hello"}
    mesh = await product.Mesh.spawn("toy", Toy, 5, num_ranks=1, env=env, log_dir=pathlib.Path(sys.argv[1]))
    await mesh.call("add", [(1,)])
    await asyncio.sleep(6)
    kept = [bytes_in_use()]
    for _ in range(40):
        await asyncio.sleep(1)
        kept.append(bytes_in_use())
    print(statistics.median(after - before for before, after in itertools.pairwise(kept)), flush=True)
    await mesh.stop()

if "forwarding" in sys.argv:
    product.forward_no_output = lambda: None
asyncio.run(main())
"""


@pytest.mark.slow
def test_an_idle_mesh_keeps_less_than_monarchs_own(tmp_path: Path) -> None:
    """Monarch keeps memory each time that it polls an actor, so a mesh must have no actors but its own.

    It polls 20 times as often as in a run. What it keeps depends on what else the process does and on how often it gets
    to poll: so two fresh processes run at a time. Tables of its own double now and then, by 600 KB within 2 s, and not
    in both processes at the same moment: so the median second counts.
    """
    often = {**os.environ, "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "100ms"}
    running = [
        subprocess.Popen([sys.executable, "-c", IDLE, str(tmp_path / mode), mode], env=often, stdout=subprocess.PIPE)
        for mode in ("as it is", "forwarding")
    ]
    ours, monarchs = (float(process.communicate(timeout=LIMIT_S)[0].split()[-1]) for process in running)
    assert ours < 0.85 * monarchs  # 33 and 50 KB


async def test_a_mesh_that_was_stopped_says_so(tmp_path: Path) -> None:
    env = {"TOY_GREETING": "hello"}
    mesh = await Mesh.spawn("toy", Toy, 5, num_ranks=1, env=env, log_dir=tmp_path / "logs")
    under_way = asyncio.create_task(mesh.call("hang", [(600,)]))
    (log,) = mesh.processes.log_files
    await asyncio.to_thread(wait_until, lambda: "hangs for" in log.read_text(), "the call that hangs")
    await mesh.stop()
    for call in (under_way, mesh.call("add", [(1,)]), mesh.call("add", lambda: [(1,)])):
        with pytest.raises(MeshError, match=r"^toy: it was stopped, and takes no more calls$"):
            await call


def test_a_stop_that_is_interrupted_ends_the_processes(tmp_path: Path) -> None:
    async def main() -> tuple[int, ...]:
        env = {"TOY_GREETING": "hello"}
        mesh = await Mesh.spawn("toy", Toy, 5, num_ranks=1, env=env, log_dir=tmp_path / "logs")
        mesh.tell("hang", 600)
        stopping = asyncio.create_task(mesh.stop())
        await asyncio.sleep(0)  # it has begun
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        await mesh.stop()
        return mesh.pids

    wait_for_ends(asyncio.run(main()), "the ranks")


def test_calls_of_a_later_event_loop_are_answered(tmp_path: Path) -> None:
    async def start() -> Mesh:
        env = {"TOY_GREETING": "hello"}
        return await Mesh.spawn("toy", Toy, 5, num_ranks=1, env=env, log_dir=tmp_path / "logs")

    mesh = asyncio.run(start())
    assert [asyncio.run(mesh.call("add", [(value,)])) for value in (1, 2)] == [[6], [7]]
    with pytest.raises(MeshError, match=r"toy: rank 0 \(process \d+\) died in die"):
        asyncio.run(mesh.call("die", [()]))
    asyncio.run(mesh.stop())


@pytest.mark.stranger("2.B7")
def test_a_fork_after_a_launch_is_told_so_and_leaves_the_processes_alone(tmp_path: Path) -> None:
    def in_fork(mesh: Mesh) -> None:
        for call in (start(), mesh.call("add", [(1,)])):
            with pytest.raises(ValueError, match=rf"is a fork of process {os.getppid()}, .*\"spawn\""):
                asyncio.run(call)
        asyncio.run(mesh.stop())
        sys.exit(17)

    async def start() -> Mesh:
        env = {"TOY_GREETING": "hello"}
        return await Mesh.spawn("toy", Toy, 5, num_ranks=1, env=env, log_dir=tmp_path / "logs")

    mesh = asyncio.run(start())
    fork = multiprocessing.get_context("fork").Process(target=in_fork, args=(mesh,))
    fork.start()
    fork.join(LIMIT_S)
    assert fork.exitcode == 17
    assert asyncio.run(mesh.call("add", [(1,)])) == [6]
    asyncio.run(mesh.stop())


@pytest.mark.stranger("2.B7")
@pytest.mark.parametrize(
    ("report", "said"),
    [
        (
            "Endpoint call toy.live() failed, The actor <root>.<Toy toy{}> failed:\n  failed: Killed(sig=9)",
            "SIGKILL, as",
        ),
        ("The actor <root>.<Toy toy{}> and all its descendants have failed: Killed(sig=11)", "killed by SIGSEGV"),
        ("The actor <root>.<Toy toy{}> failed:\n the process failed: Stopped(3)", "ended with status 3"),
        ("error creating proc: no such file", "error creating proc: no such file"),
    ],
)
def test_a_death_is_told_without_the_insides_of_monarch(report: str, said: str) -> None:
    assert said in how_it_died(report)
    assert "root" not in how_it_died(report)


@pytest.mark.stranger("2.B7")
def test_launches_in_one_process_leave_no_thread_and_few_descriptors(tmp_path: Path) -> None:
    async def launch() -> None:
        async with Launcher(tmp_path / "logs") as launcher:
            await launcher._weight_store()  # pyright: ignore[reportPrivateUsage]

    process, found = psutil.Process(), list[tuple[int, int]]()
    for _ in range(3):
        asyncio.run(launch())
        gc.collect()
        found.append((process.num_threads(), process.num_fds()))
    assert found[2][0] <= found[0][0]
    assert found[2][1] <= found[0][1] + 4  # ten a launch, were the directory a new one each time


async def test_a_process_that_does_not_start_is_no_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="toy: rank 0 died in start: error creating proc"):
        await Mesh.spawn("toy", Toy, 5, num_ranks=1, env={"PYTHONHOME": str(tmp_path / "none")}, log_dir=tmp_path)


@pytest.mark.parametrize(
    ("temporary", "message"),
    [
        ("none", "TMPDIR is '.*none', which is no folder that can be written; name another, or unset it"),
        ("d" * 90, "TMPDIR is '.*d', of [0-9]+ bytes; it may have 80, for sockets' names"),
    ],
)
def test_surroundings_in_which_nothing_starts_are_refused(
    temporary: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / temporary))
    (tmp_path / ("d" * 90)).mkdir()
    with pytest.raises(ValueError, match=message):
        asyncio.run(Mesh.spawn("toy", Toy, 5, num_ranks=1, env={}, log_dir=tmp_path))


def test_the_longest_tmpdir_and_an_odd_script_folder_will_do(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="d" * (80 - len("/tmp/") - 8)) as temporary:
        assert len(temporary) == 80
        folder = tmp_path / os.fsdecode(b"a:b\xff c")
        folder.mkdir()
        (folder / "of_the_script.py").write_text("from tests.e2e.toy_actor import Toy as Own\n")
        (folder / "script.py").write_text(CONTROLLER.replace('"toy", Toy', '"toy", "of_the_script:Own"'))
        env = {**os.environ, "TMPDIR": temporary, "PYTHONPATH": str(ROOT)}
        arguments = [sys.executable, str(folder / "script.py"), str(tmp_path / "logs"), "1", "stop"]
        done = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr


def test_a_process_that_dies_is_named_with_its_log(tmp_path: Path) -> None:
    async def body(mesh: Mesh) -> None:
        dozing = asyncio.create_task(mesh.call("doze", [(600,)]))
        await asyncio.sleep(0.1)
        with pytest.raises(MeshError, match=r"(?s)toy: rank 0 \(process \d+\) died in \w+[:;].*toy-0\.log") as caught:
            await mesh.call("die", [()])
        assert "says hello" in str(caught.value)
        assert (caught.value.mesh, caught.value.rank) == ("toy", 0)
        for other in (dozing, mesh.call("add", [(1,)])):
            with pytest.raises(MeshError, match=r"toy: rank 0 \(process \d+\) died in"):
                await other

    _with_mesh(tmp_path, body)


def test_a_process_that_hangs_meets_the_deadline_and_is_ended(tmp_path: Path) -> None:
    async def body(mesh: Mesh) -> None:
        await mesh.call("add", [(1,)])  # the actor is there
        mesh.deadlines = Deadlines(first_s=2)
        with pytest.raises(DeadlineError, match=r"did not answer hang within its deadline of 2 s") as caught:
            await mesh.call("hang", [(600,)])
        stack = str(caught.value).split("--- Python stack of rank 0 ---")[1]
        assert re.search(r"toy_actor.py\", line \d+ in hang", stack)
        with pytest.raises(DeadlineError, match="did not answer hang"):  # the mesh has ended
            await mesh.call("add", [(1,)])

    start = time.monotonic()
    (pid,) = _with_mesh(tmp_path, body)
    assert time.monotonic() - start < LIMIT_S
    wait_for_ends([pid], "the rank")
    assert "[the controller] rank 0" in (tmp_path / "logs" / "toy-0.log").read_text()


def test_a_stopped_rank_is_found_whatever_the_deadline(tmp_path: Path) -> None:
    async def body(mesh: Mesh) -> None:
        start = time.monotonic()
        with pytest.raises(DeadlineError, match=r"rank 1 \(process \d+\) has been stopped \(SIGSTOP\) for ") as caught:
            await mesh.call("freeze", [(1,)] * 2)
        assert time.monotonic() - start < LIMIT_S
        assert re.search(r"the controller has waited \d+ s for freeze; rank 0 .*, rank 1 .* did not", str(caught.value))
        assert re.search(r"(?s)rank 0 ---.* in freeze.*rank 1 ---.* in freeze", str(caught.value))
        assert (caught.value.rank, caught.value.verb) == (1, "freeze")

    _with_mesh(tmp_path, body, num_ranks=2, deadlines=Deadlines(stopped_s=3))


@pytest.mark.slow
def test_a_process_that_does_not_run_for_a_while_is_not_dead(tmp_path: Path) -> None:
    """Monarch's own limit is 30 s."""

    async def body(mesh: Mesh) -> None:
        await mesh.call("add", [(1,)])
        os.kill(mesh.pids[0], signal.SIGSTOP)
        call = asyncio.create_task(mesh.call("add", [(1,)]))
        await asyncio.sleep(40)
        os.kill(mesh.pids[0], signal.SIGCONT)
        assert await call == [6]

    _with_mesh(tmp_path, body, deadlines=Deadlines(stopped_s=300))


def test_one_ranks_failure_ends_the_call_and_the_cause_wins(tmp_path: Path) -> None:
    async def lone_failure(mesh: Mesh) -> None:
        assert await mesh.call("reduce", [((), False)] * 2) == [1.0, 1.0]
        with pytest.raises(OSError, match="no space left on the toy"):  # every rank raises, so the mesh is whole
            await mesh.call("reduce", [((0, 1), True)] * 2)
        mesh.grace_s = 1.0
        with pytest.raises(MeshError, match=r"rank 1 \(process \d+\) raised OSError in reduce: .*no space") as caught:
            await mesh.call("reduce", [((1,), False)] * 2)
        assert isinstance(caught.value.__cause__, OSError)
        assert re.search(r"rank 0 \(process \d+\) did not answer", str(caught.value))
        assert re.search(r"(?s)rank 0 ---.* in reduce", str(caught.value))

    async def death(mesh: Mesh) -> None:
        mesh.grace_s = 1.0
        await mesh.call("reduce", [((), False)] * 2)
        with pytest.raises(MeshError, match=r"toy: rank 1 \(process \d+\) died in leave"):
            await mesh.call("leave", [(1,)] * 2)

    _with_mesh(tmp_path, lone_failure, num_ranks=2)
    _with_mesh(tmp_path, death, num_ranks=2)


def test_no_process_outlives_a_killed_controller(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", CONTROLLER, str(tmp_path / "logs"), "2"]
    controller = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    with controller:
        pids = [int(pid) for pid in wait_for_line(controller.stdout, "the ranks' processes").split()]
        assert len(pids) == 2
        controller.kill()
    wait_for_ends(pids, "the ranks of a killed controller")


def test_ctrl_c_while_processes_start_ends_all_quietly(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import os, time\nprint('importing', flush=True)\ntime.sleep(600)\n")
    logs = tmp_path / "logs"
    code = CONTROLLER.replace('"toy", Toy', '"toy", "tests.e2e.toy_actor:Toy"').replace(
        "env=env", "env=env, loads=['endless']"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    arguments, pipe = [sys.executable, "-c", code, str(logs), "1"], subprocess.PIPE
    with subprocess.Popen(arguments, env=env, stdout=pipe, stderr=pipe, text=True) as controller:
        log = logs / "toy-0.log"
        wait_until(lambda: log.exists() and "importing" in log.read_text(), "the import in the rank")
        ranks = psutil.Process(controller.pid).children(recursive=True)
        controller.send_signal(signal.SIGINT)
        status, output, errors = wait_for_end(controller, "the controller")
    assert (status, output) == (-signal.SIGINT, "shut down: True\n"), errors
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    wait_for_ends(ranks, "the ranks")


def test_a_controller_hears_of_deaths_that_it_caused(tmp_path: Path) -> None:
    """Monarch ends an interpreter that is being finalized with status 1 if it still has a death to tell of."""
    log = tmp_path / "logs" / "controller.log"
    arguments = [sys.executable, "-c", CONTROLLER, str(log.parent), "1", "stop"]
    for _ in range(5):  # a controller may have ended before Monarch told it of the death
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr
        assert "descendants have failed" not in done.stdout + done.stderr
        assert "shut down: True" in done.stdout, "Monarch's own handler would give it a second, and show a traceback"
        if log.exists():
            break
    # Of a process that is killed while it answers, Monarch tells either the signal or what could not be delivered.
    assert "all its descendants have failed" in log.read_text()
