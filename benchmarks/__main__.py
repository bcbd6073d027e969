"""Runs benchmarks of the core and of plug-ins, one after the other, keeps their results, and rewrites RESULTS.md."""

import json
import subprocess
import sys
from typing import Any

from benchmarks import results_page
from benchmarks.harness import REPOSITORY, module_of, parser

BENCHMARKS = (
    "startup",
    "step",
    "checkpoint_cost",
    "evaluation_beside",
    "weight_sync",
    "weight_growth",
    "changed_weights",
    "pull_mixture",
    "generation_throughput",
    "cut_sampling",
    "drafts",
    "bitwise_step",
    "inflight_updates",
    "lora",
    "gateway",
    "attention",
    "delta_rule",
    "mfu",
    "growth",
    "trainer_throughput",
    "layouts",
    "layouts_of_families",
    "layouts_of_megatron",
    "split_invariance",
    "async_speedup",
    "recording",
    "controller_scale",
    "sandbox",
)
"""Modules of this package, or of a plug-in's folder `benchmarks`, in the order in which they run by default."""
ON_REQUEST = (
    *("hosts", "host_failures", "kill_matrix", "gateway_load", "memory_growth", "plan"),
    *("published_shapes", "vs_trl"),
)
"""Modules that run only when named, since they take most of an hour, need root (hosts, host_failures) or a GPU
(published_shapes), or install another environment (vs_trl)."""


def main() -> None:
    """Results of full runs are kept as they come. Exits with 1 if a benchmark fails, or outside of `--smoke` a bar."""
    known = (*BENCHMARKS, *ON_REQUEST)
    options_parser = parser(__doc__, quick="under a minute each; keeps no results")
    options_parser.add_argument("names", nargs="*", default=list(BENCHMARKS), help=f"known: {', '.join(known)}")
    options = options_parser.parse_args()
    unknown = sorted(set(options.names) - set(known))
    if unknown:
        options_parser.error(f"no benchmark {unknown[0]!r}; known: {', '.join(known)}")
    form = ["--quick"] if options.quick else ["--smoke"] if options.smoke else []
    results: list[dict[str, Any]] = []
    for name in options.names:
        results.append(_run(name, form))
        if not form:
            results_page.save(results[-1])
            results_page.PAGE.write_text(results_page.page(known))
    missed = [bar["name"] for result in results for bar in result["bars"] if not bar["ok"]]
    if missed and not options.smoke:
        raise SystemExit(f"bars not met: {', '.join(missed)}")


def _run(name: str, form: list[str]) -> dict[str, Any]:
    """Runs one benchmark, passes on its output, and returns the result on its last line."""
    command = [sys.executable, "-m", module_of(name), *form]
    print(f"== {' '.join(command[1:])}", flush=True)
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line
    if process.wait() != 0:
        raise SystemExit(f"benchmark {name} failed with status {process.returncode}")
    return json.loads(last)


if __name__ == "__main__":
    main()
