"""How long a run takes to begin: from the command to the first sampled answer, and the first step beside later ones.

    python -m benchmarks.startup [--quick | --smoke] [--steps N] [--recipe NAME]

Runs the recipe twice as a user does, with `ownloop run`. The first run has one held-out problem, whose answer of a few
tokens is the first that is sampled; the second one is the recipe's own. CPU seconds are those of all processes: on a
machine with few cores, which they share, these are what the wait consists of. Bars: the first answer is there 15 s
after the command, and the first step takes at most 1.5 times the median of the later ones.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks.harness import Bar, benchmark_model, parser, print_result
from controller.runs.folder import METRICS, read_metrics
from rl.system.timeline import TIMELINE

_LOOK_S = 0.1
"""Between two looks at the processes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """The CPU seconds that each process of a run had taken at one time."""

    at: float
    """Seconds since 1970."""
    cpu_s: Mapping[int, float]
    """Process id -> CPU seconds."""


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="3 steps")
    options_parser.add_argument("--recipe", default="grpo_smollm2_cpu", help="a recipe of the grpo loop")
    options_parser.add_argument("--steps", type=int, default=6, help="steps of the run")
    options = options_parser.parse_args()
    num_steps = 3 if options.smoke or options.quick else options.steps
    with tempfile.TemporaryDirectory() as folder, benchmark_model(smoke=options.smoke) as model:
        recipe = str(smoke_recipe(Path(folder), model)) if options.smoke else options.recipe
        runs = Path(folder) / "runs"
        steps = runs / "steps"
        if options.smoke:  # one run shows both
            wait_s, by_process = first_answer(recipe, steps, num_steps)
        else:
            wait_s, by_process = first_answer(recipe, runs / "first-answer", 1)
            watch_run([recipe, "--num-steps", str(num_steps), "--checkpoint-every", "0"], steps)
        step_s = [row["seconds_step"] for row in read_metrics(steps / METRICS) if "seconds_push" in row]
    later_s = statistics.median(step_s[1:])

    print(f"{'process':<24}{'CPU seconds to the first answer':>32}")
    for name, seconds in by_process.items():
        print(f"{name:<24}{seconds:32.2f}")
    print(f"{'first answer':<24}{wait_s:8.2f} s, {sum(by_process.values()):.2f} CPU s")
    print(f"{'first step':<24}{step_s[0]:8.2f} s; median of the later ones {later_s:.2f} s")
    print_result(
        "startup",
        [
            Bar(name="first_answer_s", value=wait_s, limit=15.0),
            Bar(name="first_step_ratio", value=step_s[0] / later_s, limit=1.5),
        ],
        {
            "recipe": options.recipe,
            "steps": len(step_s),
            "cpu_s_to_first_answer": sum(by_process.values()),
            **{f"cpu_s_{name}": seconds for name, seconds in by_process.items()},
            "seconds_first_step": step_s[0],
            "seconds_later_steps": later_s,
        },
    )


def first_answer(recipe: str, run: Path, num_steps: int) -> tuple[float, dict[str, float]]:
    """Seconds from the command to the answer to the only held-out problem, and CPU seconds until then by process."""
    options = ["--num-steps", str(num_steps), "--num-eval", "1", "--checkpoint-every", "0"]
    began, looks, names = watch_run([recipe, *options], run)
    calls = [event for event in json.loads((run / TIMELINE).read_text()) if event["name"] == "generate"]
    answered = min(event["ts"] + event["dur"] for event in calls) / 1e6
    return answered - began, cpu_until(looks, answered, names)


def watch_run(arguments: Sequence[str], run: Path) -> tuple[float, list[Look], Mapping[int, str]]:
    """Runs a recipe to its end. When it began, looks at its processes, and what each of these processes is."""
    command = [sys.executable, "-m", "controller.commands.cli", "run", *arguments]
    command += ["--runs", str(run.parent), "--name", run.name]
    looks: list[Look] = []
    names: dict[int, str] = {}
    began = time.time()
    # As `make` and an installed command do, it uses the bytecode of earlier runs.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    while process.poll() is None:
        looks.append(look(psutil.Process(process.pid), names))
        time.sleep(_LOOK_S)
    assert process.stdout is not None
    said = process.stdout.read()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}:\n{said[-4000:]}")
    return began, looks, names


def look(controller: psutil.Process, names: dict[int, str]) -> Look:
    """The CPU seconds of a run's processes now. Adds the names of those that are new to `names`."""
    cpu_s: dict[int, float] = {}
    at = time.time()
    try:
        processes = [controller, *controller.children(recursive=True)]
    except psutil.NoSuchProcess:
        processes = []
    for process in processes:
        try:
            times = process.cpu_times()
            if process.pid not in names or names[process.pid] == "other":
                names[process.pid] = "controller" if process.pid == controller.pid else _mesh(process)
        except psutil.Error:
            continue
        cpu_s[process.pid] = times.user + times.system
    return Look(at, cpu_s)


def _mesh(process: psutil.Process) -> str:
    """The name of the log that a process of a mesh writes to, such as "trainer-0"; "other" for other processes."""
    return Path(process.environ().get("OWNLOOP_LOG_FILE", "other")).stem


def cpu_until(looks: Sequence[Look], until: float, names: Mapping[int, str]) -> dict[str, float]:
    """The CPU seconds of each process up to a time, by name, the most first. Of a process that ended, its last."""
    last: dict[int, float] = {}
    for each in looks:
        if each.at <= until:
            last |= each.cpu_s
    total: dict[str, float] = {}
    for pid, seconds in last.items():
        total[names[pid]] = total.get(names[pid], 0.0) + seconds
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def smoke_recipe(folder: Path, model: Path) -> Path:
    """The default recipe with a tiny model and few problems, as a recipe file."""
    file = folder / "smoke_startup.py"
    file.write_text(_SMOKE_RECIPE.format(model=str(model)))
    return file


_SMOKE_RECIPE = '''"""Any CPU: shows that the benchmark works."""

import dataclasses

from configs import grpo_smollm2_cpu
from rl.tiny_tasks import EvenWords


def recipe():
    return dataclasses.replace(
        grpo_smollm2_cpu.recipe(), model={model!r}, env=EvenWords(), prompts_per_step=2, num_eval=1, checkpoint_every=0
    )
'''


if __name__ == "__main__":
    main()
