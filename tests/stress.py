"""Runs the tests that start processes many times, beside busy loops and as on lesser CPUs: `make stress N=10`.

It prints how often each test failed under which condition, and exits with 1 if any did.
"""

import argparse
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import pytest

from controller.commands.processes import adopt_orphans, end_descendants

MARKERS = "(e2e or ranks or vllm or seconds) and not slow"
_ROUND_LIMIT_S = 2 * 3600.0
_INTERRUPTED_S = 30.0  # for pytest to end after a Ctrl-C
_BUSY_LOOP = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(100_000))"
_CAPS: Mapping[str, frozenset[str]] = {
    "AVX2": frozenset({"avx2"}),
    "AVX512_CORE": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    "AVX512_CORE_BF16": frozenset({"avx512f", "avx512_bf16"}),
    "AVX512_CORE_AMX": frozenset({"avx512f", "amx_tile", "amx_bf16"}),
}
"""The values of ONEDNN_MAX_CPU_ISA, and which flags a CPU has that can pretend to be of this kind."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What makes a round harder than a plain run."""

    name: str
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    num_busy_loops: int = 0


BUSY = Condition("2 busy loops", num_busy_loops=2)


def conditions(cpu_flags: Collection[str]) -> Generator[Condition]:
    """The conditions of all rounds: every second one is `BUSY`, the others are the caps that the CPU has, in turns."""
    capped = [
        Condition(cap, {"ONEDNN_MAX_CPU_ISA": cap} | ({"ATEN_CPU_CAPABILITY": "avx2"} if cap == "AVX2" else {}))
        for cap, needed in _CAPS.items()
        if needed <= set(cpu_flags)
    ]
    for other in itertools.cycle(capped or [Condition("nothing else")]):
        yield BUSY
        yield other


def _cpu_flags() -> list[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split()


def run_round(condition: Condition, pytest_args: Sequence[str], results: Path, log: Path) -> Mapping[str, str]:
    """Runs the tests once. Returns the tests that failed, and the first line that each failure says.

    Raises ValueError, with the end of the log, if pytest found no tests or refused its arguments.
    """
    command = [sys.executable, "-m", "pytest", "-m", MARKERS, *pytest_args, f"--junitxml={results}"]
    with log.open("wb") as output:
        for _ in range(condition.num_busy_loops):
            subprocess.Popen([sys.executable, "-c", _BUSY_LOOP, str(os.getpid())])
        process = subprocess.Popen(
            command, env=os.environ | condition.env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(_ROUND_LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"pytest itself": f"it did not end within {_ROUND_LIMIT_S:g} s; see {log}"}
        except BaseException:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_INTERRUPTED_S)
            raise
        finally:
            end_descendants(1.0)
    if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise ValueError(f"pytest ended with {code}:\n" + "\n".join(log.read_text().splitlines()[-20:]))
    failed = dict(_failures(results)) if results.exists() else {}
    return failed if failed or code == 0 else {"pytest itself": f"it ended with {code}; see {log}"}


def _failures(results: Path) -> Generator[tuple[str, str]]:
    for case in ElementTree.parse(results).iter("testcase"):
        for problem in (*case.findall("failure"), *case.findall("error")):
            message = problem.get("message") or problem.text or "it says nothing"
            yield f"{case.get('classname')}::{case.get('name')}", message.strip().partition("\n")[0]


def table(results: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """Two lines for each test and condition, the most frequent first. A result is a condition and its failures."""
    rounds = Counter(condition for condition, _ in results)
    failed = Counter((condition, test) for condition, failures in results for test in failures)
    messages = {(condition, test): says for condition, failures in results for test, says in failures.items()}
    rows = [
        f"{number:>4} of {rounds[condition]:<4} {condition:<17} {test}\n{'':30}{messages[condition, test]}"
        for (condition, test), number in failed.most_common()
    ]
    return "\n".join([*rows, f"{failed.total()} failures in {len(results)} rounds"])


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="make stress", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rounds", type=int, help="how often the tests run")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="gets a folder of this run")
    options, pytest_args = parser.parse_known_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="ownloop-stress-", dir=options.folder))
    print(f"logs and results: {folder}", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    adopt_orphans()
    results: list[tuple[str, Mapping[str, str]]] = []
    interrupted = False
    try:
        for index, condition in enumerate(itertools.islice(conditions(_cpu_flags()), options.rounds), 1):
            begin = time.monotonic()
            failures = run_round(condition, pytest_args, folder / f"{index}.xml", folder / f"{index}.log")
            seconds = time.monotonic() - begin
            print(f"round {index}, {condition.name}: {len(failures)} failed, {seconds:.0f} s", flush=True)
            results.append((condition.name, failures))
    except KeyboardInterrupt:
        interrupted = True
    print(f"{table(results)}; logs and results: {folder}")
    return 130 if interrupted else int(any(failures for _, failures in results))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(str(error))
