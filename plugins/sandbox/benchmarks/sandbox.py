"""What a call of a sandbox costs: milliseconds one at a time, and calls per second with eight at a time.

    python -m plugins.sandbox.benchmarks.sandbox [--quick | --smoke]

Each call runs `print(6 * 7)` in a sandbox of its own, by every way that works on this host: bubblewrap, namespaces, and
`none`, which starts Python with limits alone. The ways alternate, so that other load on the machine meets all of them.
Bars: the way that `auto` takes here needs at most 150 ms a call on a host with a free core, and at most 6 times as long
as `none`. `--quick` makes fewer calls.
"""

import asyncio
import statistics
import time

from benchmarks.harness import Bar, parser, print_result
from ownloop_sandbox import Sandbox, find_way, run_python

WAYS: tuple[Sandbox, ...] = ("bubblewrap", "namespaces", "none")
AT_A_TIME = 8


def main() -> None:
    """Runs the benchmark and prints its result. Raises ValueError if this host has no sandbox."""
    options = parser(__doc__, quick="a fifth of the calls").parse_args()
    rounds = 2 if options.smoke else 10 if options.quick else 50
    chosen = find_way("auto").name
    ways: list[Sandbox] = [way for way in WAYS if _works(way)]
    seconds, rates = asyncio.run(measure(ways, rounds))
    medians = {way: statistics.median(seconds[way]) for way in ways}
    for way in ways:
        print(f"{way:12} {1e3 * medians[way]:6.1f} ms a call, {rates[way]:6.1f} calls/s with {AT_A_TIME} at a time")
    print_result(
        "sandbox",
        [
            Bar(name="ms_a_call", value=1e3 * medians[chosen], limit=150),
            Bar(name="ratio_to_no_sandbox", value=medians[chosen] / medians["none"], limit=6),
        ],
        {
            "auto_takes": chosen,
            "rounds": rounds,
            **{f"ms_a_call_{way}": 1e3 * medians[way] for way in ways},
            **{f"calls_per_second_{AT_A_TIME}_at_a_time_{way}": rates[way] for way in ways},
        },
    )


def _works(way: Sandbox) -> bool:
    try:
        find_way(way)
    except ValueError as error:
        print(error)
        return False
    return True


async def measure(ways: list[Sandbox], rounds: int) -> tuple[dict[Sandbox, list[float]], dict[Sandbox, float]]:
    """Seconds of each single call, and calls per second with `AT_A_TIME` at a time, for each way."""
    singles: dict[Sandbox, list[float]] = {way: [] for way in ways}
    together: dict[Sandbox, float] = dict.fromkeys(ways, 0.0)
    for _ in range(rounds):
        for way in ways:
            singles[way].append(await _seconds(way, 1))
            together[way] += await _seconds(way, AT_A_TIME)
    return singles, {way: rounds * AT_A_TIME / total for way, total in together.items()}


async def _seconds(way: Sandbox, count: int) -> float:
    """Seconds until `count` calls, made at once, have all returned the right output."""
    start = time.perf_counter()
    results = await asyncio.gather(*(run_python("print(6 * 7)", sandbox=way, time_limit_s=60) for _ in range(count)))
    elapsed = time.perf_counter() - start
    assert all(result.output == "42" for result in results), results
    return elapsed


if __name__ == "__main__":
    main()
