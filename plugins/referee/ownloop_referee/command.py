"""`check-tinker URL`, as a command of ownloop and as a program of its own: a table, a JSON, and the exit status."""

import importlib.metadata
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import tyro

from ownloop_referee import inputs, states, training
from ownloop_referee.bench import Bench, Findings, NotApplicableError, Settings

CHECKS: Mapping[str, Callable[[Bench, Findings], None]] = {
    check.__name__.replace("_", "-"): check
    for check in (
        *(training.order, training.accumulation, training.sums, training.losses, training.custom, training.optimizer),
        *(states.samplers, states.sampling, states.resume, states.two_writers, states.isolation, states.users),
        *(inputs.logprobs, inputs.context, inputs.bad_input),
    )
}
"""Name -> check. Its docstring says what should hold."""


@dataclass(frozen=True, kw_only=True)
class CheckTinker(Settings):
    """Checks a server that speaks Tinker's protocol, through the official SDK.

    The exit status is 1 if a check failed.
    """

    only: tuple[str, ...] = ()
    """The names of some checks. The default is all."""
    json: Path | None = None
    """A file for the results."""

    def run(self) -> int:
        """Runs the checks."""
        if unknown := [name for name in self.only if name not in CHECKS]:
            raise ValueError(f"--only has {unknown[0]!r}; the checks are {', '.join(CHECKS)}")
        logging.getLogger("tinker").setLevel(logging.CRITICAL)  # some checks ask for errors
        try:
            bench = Bench(self)
        except Exception as error:
            raise ValueError(f"{self.url} cannot be checked: {type(error).__name__}: {error}") from error
        rows: list[Result] = []
        for name in self.only or CHECKS:
            rows.append(judged(bench, name))
            print("{check:13} {verdict:14} {seconds:6.1f} s  {says}".format(**rows[-1]), flush=True)
        verdicts = [row["verdict"] for row in rows]
        counts = {verdict: verdicts.count(verdict) for verdict in ("ok", "failed", "not applicable")}
        print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
        if self.json is not None:
            about = {"server": self.url, "base_model": bench.base_model, "sdk": importlib.metadata.version("tinker")}
            self.json.write_text(json.dumps({**about, **counts, "checks": rows}, indent=1) + "\n")
        return 1 if counts["failed"] else 0


class Result(TypedDict):
    """The result of a check: a row of the table, and the claim that was checked."""

    check: str
    claim: str | None
    verdict: str
    says: str
    seconds: float


def judged(bench: Bench, name: str) -> Result:
    """The result of a check, made in a session of its own."""
    found, start, verdict = Findings(bench.settings.tolerance), time.monotonic(), "ok"
    bench.service = bench.connect(bench.settings.key)
    try:
        CHECKS[name](bench, found)
    except NotApplicableError as error:
        verdict, found.right = "not applicable", [str(error)]
    except Exception as error:
        found.wrong.append(f"{type(error).__name__}: {error!s:.300}")
    finally:
        bench.sessions.close()
    return {
        "check": name,
        "claim": CHECKS[name].__doc__,
        "verdict": "failed" if found.wrong else verdict,
        "says": "; ".join(dict.fromkeys(found.wrong or found.right)),
        "seconds": time.monotonic() - start,
    }


def main() -> int:
    """The program `check-tinker`."""
    try:
        return tyro.cli(CheckTinker, prog="check-tinker").run()
    except ValueError as error:
        print(f"error: {error}")
        return 2
