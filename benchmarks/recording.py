"""What recording a step's rollouts costs the loop, the disk and the writer: 256 rollouts of 2048 tokens.

    python -m benchmarks.recording [--quick | --smoke]

The text is Python's standard library, cut into words and pieces of words; log-probs are random, which is the worst case
for a compressor. A step takes CPU time from the loop's thread to hand the rollouts over, and at most the CPU time of
their conversion by the writer's thread, which holds the interpreter's lock for most of it; compression does not.
Bars: 0.2 us of the loop's thread and 12 bytes on disk a token, of which the text is one part.

The loop's thread is never idle meanwhile: it runs turns of the event loop, each with a little Python. The kernel says
how long the thread was blocked, which is how long it waited for the lock: in all, and in the turn in which it waited
longest. Time in which other processes had its core is not in that; it is in the longest turn by the clock.

For comparison the same rollouts as JSON lines, with gzip and with zstd, in CPU time under the lock and without it. At
last the checkpoint of a `grpo_async` queue that holds these rollouts.
"""

import asyncio
import gzip
import itertools
import json
import os
import re
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Bar, parser, print_result
from controller.runs.folder import RunFolder
from controller.runs.recording import write_rollouts
from rl.rollouts.columns import groups_to_table, parquet_bytes, read_groups
from rl.rollouts.queue import RolloutQueue
from rl.types import Completion, Group, Rollout, Turn

GROUP_SIZE = 8
US = 1e6
T = TypeVar("T")


def main() -> None:
    """Runs the benchmark and prints its result."""
    options = parser(__doc__, quick="two repeats in place of seven").parse_args()
    num_rollouts, length = (16, 32) if options.smoke else (256, 2048)
    repeats = 1 if options.smoke else 2 if options.quick else 7
    groups, num_tokens = random_groups(num_rollouts, length), num_rollouts * length
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder(Path(scratch) / "run", {}, min_free_bytes=0)
        num_turns = 200 if options.smoke else 60_000
        costs = [asyncio.run(cost_of_a_step(folder, step, groups, num_turns)) for step in range(repeats + 1)][1:]
        cost = {name: statistics.median(measured[name] for measured in costs) for name in costs[0]}
        in_formats = formats(groups, num_tokens, repeats)
        locked = US * cost["handing_over"] / num_tokens + in_formats["parquet_zstd_locked_us_per_token"]
        (file, *_) = folder.rollouts.iterdir()
        bytes_per_token, text = file.stat().st_size / num_tokens, column_bytes(file, "text") / num_tokens
        assert read_groups(file) == groups
        queue = asyncio.run(cost_of_a_queue(folder, groups))
    print_result(
        "recording",
        [
            Bar(name="loop_us_per_token", value=locked, limit=0.2),
            Bar(name="bytes_per_token", value=bytes_per_token, limit=12.0),
        ],
        {
            "tokens": num_tokens,
            "handing_over_us": US * cost["handing_over"],
            "blocked_us_per_token": US * cost["blocked"] / num_tokens,
            "event_loop_blocked_ms": 1e3 * cost["most_blocked"],
            "event_loop_delay_ms": 1e3 * cost["delay"],
            "event_loop_delay_alone_ms": 1e3 * cost["delay_alone"],
            "writer_seconds": cost["writer"],
            "text_bytes_per_token": text,
            **in_formats,
            **queue,
        },
    )


def random_groups(num_rollouts: int, length: int) -> list[Group]:
    """Groups of `GROUP_SIZE` rollouts, each `length` tokens of text that no other has."""
    texts = (path.read_text(errors="ignore") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    words = itertools.chain.from_iterable(re.findall(r" ?\w{1,8}|\s+|[^\w\s]", text) for text in texts)
    ids: dict[str, int] = {}
    generator = np.random.default_rng(0)

    def rollout() -> Rollout:
        pieces = list(itertools.islice(words, length))
        assert len(pieces) == length, "the standard library is shorter than that"
        completion = Completion(
            tokens=tuple(ids.setdefault(piece, len(ids)) for piece in pieces),
            logprobs=tuple((-generator.exponential(1, length)).astype(np.float32).tolist()),
            versions=(3,) * length,
            text="".join(pieces),
            finish_reason="length",
        )
        turn = Turn(prompt_tokens=tuple(range(100)), completion=completion, prompt="Go on. " * 20)
        return Rollout(turns=(turn,), reward=float(generator.integers(2)), metrics={"lines": 3.0}, environment_s=0.5)

    return [
        Group(problem_id=f"problem {n}", prompt="Go on. " * 20, rollouts=tuple(rollout() for _ in range(GROUP_SIZE)))
        for n in range(num_rollouts // GROUP_SIZE)
    ]


async def cost_of_a_step(folder: RunFolder, step: int, groups: Sequence[Group], num_turns: int) -> dict[str, float]:
    """Seconds: of CPU to hand over, in which the loop was blocked, of its longest turn, and until all was on disk."""
    alone = await _turns(num_turns)
    start, cpu = time.perf_counter(), time.thread_time()
    folder.log_rollouts(step, groups)
    handing_over = time.thread_time() - cpu
    folder.in_background(partial(_note_time, finished := list[float]()))
    beside = await _turns(num_turns)
    ended = time.perf_counter()
    await folder.sync()
    # A loop that ends before the writer has lost less than it would have. The first step loads code and is left out.
    assert step == 0 or num_turns < 1000 or finished[0] < ended, "the turns were over before the recording"
    return {
        "handing_over": handing_over,
        "blocked": max(0.0, beside["blocked"] - alone["blocked"]),
        "most_blocked": beside["most_blocked"],
        "delay": beside["longest"],
        "delay_alone": alone["longest"],
        "writer": finished[0] - start,
    }


async def _turns(count: int) -> dict[str, float]:
    """Turns of the event loop: seconds in which the thread was blocked, in all and most in a turn; the longest turn."""
    descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    longest = most = blocked = 0.0
    try:
        before = _thread_seconds(descriptor)
        for _ in range(count):
            sum(range(1000))
            await asyncio.sleep(0)
            after = _thread_seconds(descriptor)
            wall, running, waiting_for_a_core = (end - start for start, end in zip(before, after, strict=True))
            blocked += (waited := wall - running - waiting_for_a_core)
            longest, most, before = max(longest, wall), max(most, waited), after
    finally:
        os.close(descriptor)
    return {"blocked": blocked, "most_blocked": most, "longest": longest}


def _thread_seconds(descriptor: int) -> tuple[float, float, float]:
    """By the clock, on a core, and waiting for a core: the thread's seconds so far."""
    running, waiting, _ = os.pread(descriptor, 100, 0).split()
    return time.perf_counter(), int(running) / 1e9, int(waiting) / 1e9


def _note_time(times: list[float]) -> None:
    times.append(time.perf_counter())


def column_bytes(file: Path, name: str) -> int:
    """Compressed bytes of a field of the turns."""
    group = pq.ParquetFile(file).metadata.row_group(0)
    columns = [group.column(place) for place in range(group.num_columns)]
    return sum(c.total_compressed_size for c in columns if c.path_in_schema == f"turns.list.element.{name}")


def formats(groups: Sequence[Group], num_tokens: int, repeats: int) -> dict[str, float]:
    """Bytes, CPU us under the interpreter's lock and CPU us of compression, each a token, of every format."""
    figures: dict[str, float] = {}
    table, locked = _cpu_seconds(lambda: groups_to_table(groups), repeats)
    contents, compressing = _cpu_seconds(lambda: parquet_bytes(table), repeats)
    measured = {"parquet_zstd": (contents.size, locked, compressing)}
    lines, locked = _cpu_seconds(lambda: _json_lines(groups))
    for name, compress in (
        ("json_gzip", gzip.compress),
        ("json_zstd", lambda data: pa.compress(data, codec="zstd", asbytes=True)),
    ):
        compressed, compressing = _cpu_seconds(partial(compress, lines))
        measured[name] = (len(compressed), locked, compressing)
    for name, (size, locked, compressing) in measured.items():
        figures[f"{name}_bytes_per_token"] = size / num_tokens
        figures[f"{name}_locked_us_per_token"] = US * locked / num_tokens
        figures[f"{name}_compression_us_per_token"] = US * compressing / num_tokens
    return figures


def _json_lines(groups: Sequence[Group]) -> bytes:
    """One object per rollout."""
    fields = ("tokens", "logprobs", "versions", "text", "finish_reason")
    rows = (
        {
            "problem_id": group.problem_id,
            "prompt": group.prompt,
            "reward": rollout.reward,
            "metrics": dict(rollout.metrics),
            "turns": [
                {"prompt_tokens": turn.prompt_tokens} | {name: getattr(turn.completion, name) for name in fields}
                for turn in rollout.turns
            ],
        }
        for group in groups
        for rollout in group.rollouts
    )
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _cpu_seconds(work: Callable[[], T], repeats: int = 1) -> tuple[T, float]:
    """A result, and the median of the CPU seconds of this thread that it took."""
    seconds: list[float] = []
    while True:
        start = time.thread_time()
        result = work()
        seconds.append(time.thread_time() - start)
        if len(seconds) >= repeats:
            return result, statistics.median(seconds)


async def cost_of_a_queue(folder: RunFolder, groups: Sequence[Group]) -> dict[str, float]:
    """What the checkpoint of a queue costs that holds all these groups, finished."""
    per_step = len(groups)

    async def sample_group(number: int) -> Group:
        return groups[number % per_step]

    async with RolloutQueue(sample_group, range(1, 3), per_step, max_staleness=1) as rollouts:
        await rollouts.take()
        rollouts.advance()
        while len((state := rollouts.state())["finished"]) < per_step:
            await asyncio.sleep(0)
        start = time.perf_counter()
        state = rollouts.state()
        asked = time.perf_counter() - start
        file = folder.path / "queue.parquet"
        start = time.perf_counter()
        folder.in_background(partial(write_rollouts, file, state["finished_groups"]))
        await folder.sync()
        saved = time.perf_counter() - start
        start = time.perf_counter()
        assert read_groups(file) == state["finished_groups"]
        await rollouts.take()
        return {
            "queue_state_us": US * asked,
            "queue_save_seconds": saved,
            "queue_restore_seconds": time.perf_counter() - start,
            "queue_bytes": file.stat().st_size,
        }


if __name__ == "__main__":
    main()
