"""Rounds are told as they come, the first does not count, and the time of a call is that of other processes too."""

import asyncio
import sys

import pytest

from benchmarks.rounds import Rounds, timed

BUSY = "import time\nwhile time.process_time() < 0.3: pass"


def test_medians_are_of_the_rounds_after_the_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = Rounds("decoding", 3, shown=["speed"])
    for turn, speed in enumerate((50.0, 1.0, 3.0, 2.0)):
        rounds.add(turn, {"speed": speed, "other": -speed})
    assert rounds.medians() == {"speed": 2.0, "other": -2.0}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["decoding", "warm-up", "speed", "50.000"],
        ["decoding", "1/3", "speed", "1.000"],
        ["decoding", "2/3", "speed", "3.000"],
        ["decoding", "3/3", "speed", "2.000"],
    ]


async def test_cpu_time_is_that_of_the_processes_that_were_started() -> None:
    async def waiting_process() -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", f"{BUSY}\nprint(flush=True)\ninput()", stdin=-1, stdout=-1
        )
        assert process.stdout is not None
        await process.stdout.readline()  # it has computed, and lives on as a mesh does
        ends.append(process)
        return "done"

    ends: list[asyncio.subprocess.Process] = []

    took = await timed(waiting_process())
    assert took.result == "done"
    assert took.cpu > 0.25
    assert took.wall > 0.25
    assert (await timed(asyncio.sleep(0))).cpu < 0.25  # what the process has used before does not count again
    await ends[0].communicate(b"\n")


async def test_cpu_time_of_processes_that_have_ended_is_kept() -> None:
    async def runs() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", BUSY)
        assert await process.wait() == 0

    assert (await timed(runs())).cpu > 0.25
