"""ownloop's `grpo` against TRL's `GRPOTrainer`: seconds per optimizer step, and the reward after equally many steps.

    python -m benchmarks.vs_trl [--quick | --smoke] [--steps N] [--prompts N] [--block N] [--trl JSON]
        [--trl-python PYTHON]

Both sides use the default recipe for the CPU: the same model, problems in the same order, reward, prompts per step,
group size, lengths, sampling temperature, optimizer, dtype and threads. TRL runs in an environment of its own, made
from `requirements/trl.lock`, with the settings of `benchmarks/trl_trainer.py`; `--trl` overrides any argument of its
`GRPOConfig`. Both sides stay alive and take turns, a block of steps each. A step lasts from the end of the previous
step to its own end. The first block of each side is not counted.

Two things differ. TRL divides an advantage by the sample standard deviation of its group plus 1e-4, ownloop by the
population's, so TRL's advantages are 1.07 times smaller. And the random numbers of sampling are not the same.

The final models answer the same held-out problems greedily, both by transformers in float32. Bars: a step takes at most
0.15 of TRL's time; the 95 % interval of the difference in held-out reward is not below 0.

`--smoke` uses the real model, because TRL's side needs a chat template.
"""

import asyncio
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import REPOSITORY, Bar, parser, print_result
from benchmarks.locked_environment import locked_python
from benchmarks.trl_trainer import Settings
from controller.commands.output import CapturedOutput
from controller.commands.recipes import find_recipe, load_recipe
from controller.loops.grpo import GRPOConfig, train
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.models import resolve_model
from rl.envs.largest_number import LargestNumber
from rl.envs.procedural import TextProblem
from rl.rollouts.evaluation import bootstrap
from rl.rollouts.rendering import Renderer
from rl.types import AdamParams
from trainer.config import trainer_env

_RESULTS = REPOSITORY / "benchmarks" / "results"
_EVALUATION_BATCH = 32


class TRLProcess:
    """TRL's trainer in its own process and environment."""

    def __init__(self, python: Path, settings: Settings, log: Path) -> None:
        """Waits until TRL is ready for its first command. All that the process prints goes to `log`."""
        # TRL gets the allocator settings that make ownloop's trainer faster. Its threads may spin: it computes alone.
        env = {**os.environ, **trainer_env(_recipe().trainer), "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
        del env["OMP_WAIT_POLICY"], env["GOMP_SPINCOUNT"]
        self.events: list[dict[str, Any]] = []
        self._log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.trl_trainer", json.dumps(dataclasses.asdict(settings))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=env,
                cwd=REPOSITORY,
            )
        self.ready = self._next("ready")

    def steps(self, count: int) -> list[float]:
        """Does `count` optimizer steps; returns the seconds of each."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return [self._next("step")["seconds"] for _ in range(count)]

    def finish(self) -> None:
        """Waits until the model is saved, after the last step."""
        self._next("saved")
        self._process.wait()

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()
        self._process.wait()

    def _next(self, kind: str) -> dict[str, Any]:
        """Waits for an event of this kind and keeps all events. Raises RuntimeError with the log's end if TRL ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            self.events.append(event)
            if event["event"] == kind:
                return event
        raise RuntimeError(f"TRL ended with status {self._process.wait()}:\n{self._log.read_text()[-3000:]}")


class Turns(Console):
    """A console that gives TRL its turn after each block of ownloop's steps, and times the steps of both."""

    def __init__(self, stream: TextIO, trl: TRLProcess, block: int) -> None:
        """Each side does `block` steps in its turn."""
        super().__init__(stream)
        self._stream = stream
        self.seconds: dict[str, list[float]] = {"ownloop": [], "trl": []}
        self._trl = trl
        self._block = block
        self._start = perf_counter()

    def step(self, metrics: Any, total_steps: int) -> None:
        self.seconds["ownloop"].append(perf_counter() - self._start)
        super().step(metrics, total_steps)
        done = len(self.seconds["ownloop"])
        behind = done - len(self.seconds["trl"])
        if behind == self._block or done == total_steps:
            self.seconds["trl"] += self._trl.steps(behind)
            self._show_block(behind)
        self._start = perf_counter()

    def _show_block(self, count: int) -> None:
        ours, theirs = (" ".join(f"{s:.2f}" for s in self.seconds[side][-count:]) for side in ("ownloop", "trl"))
        print(f"seconds of {count} steps: ownloop {ours}, TRL {theirs}", file=self._stream, flush=True)


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="2 steps of 4 problems, turn by turn; time only")
    options_parser.add_argument("--steps", type=int, default=24, help="optimizer steps of each side")
    options_parser.add_argument("--block", type=int, default=3, help="steps of one side before the other's turn")
    options_parser.add_argument("--prompts", type=int, default=_recipe().prompts_per_step, help="problems per step")
    options_parser.add_argument(
        "--trl", type=json.loads, default={}, metavar="JSON", help="arguments of trl.GRPOConfig"
    )
    options_parser.add_argument("--trl-python", type=Path, help="an interpreter with TRL; default: installs one, once")
    options = options_parser.parse_args()
    num_steps, prompts, block = options.steps, options.prompts, options.block
    if options.quick or options.smoke:
        num_steps, prompts, block = 2, 1 if options.smoke else 4, 1
    if num_steps <= block:
        options_parser.error(f"--steps is {num_steps}; it must exceed --block {block}: the first block is not counted")

    sizes = {"num_steps": num_steps, "prompts_per_step": prompts}
    config = dataclasses.replace(_recipe(), **sizes, num_eval=1, evaluate_every=num_steps)
    evaluated = not options.quick and not options.smoke
    with tempfile.TemporaryDirectory() as folder:
        python = options.trl_python or locked_python(REPOSITORY / "requirements" / "trl.lock")
        seconds, trl, rewards = _compare(config, block, python, options.trl, Path(folder), evaluated=evaluated)

    medians = {side: statistics.median(times[block:]) for side, times in seconds.items()}
    bars = [Bar(name="step_time_ratio", value=medians["ownloop"] / medians["trl"], limit=0.15)]
    figures: dict[str, object] = {
        "steps": num_steps,
        "prompts_per_step": prompts,
        "group_size": config.group_size,
        "dtype": config.trainer.compute_dtype,
        **{f"seconds_step_{side}": median for side, median in medians.items()},
        **{f"seconds_{side}": [round(s, 3) for s in times] for side, times in seconds.items()},
        **{f"version_{name}": version for name, version in trl.ready["versions"].items()},
        "trl_options": json.dumps(options.trl),
    }
    if rewards:
        difference = bootstrap(rewards["ownloop"] - rewards["trl"])
        bars.append(Bar(name="eval_reward_difference", value=difference.high, limit=0.0, at_most=False))
        figures |= {f"eval_reward_{side}": float(values.mean()) for side, values in rewards.items()}
        figures |= {f"eval_reward_difference_{name}": v for name, v in dataclasses.asdict(difference).items()}
    print_result("vs_trl", bars, figures)


def _recipe() -> GRPOConfig:
    recipe = load_recipe(find_recipe("grpo_smollm2_cpu"))
    assert isinstance(recipe, GRPOConfig)
    assert recipe.env == LargestNumber(), "TRL's side knows no other environment"
    return recipe


def _compare(
    config: GRPOConfig, block: int, python: Path, grpo_config: dict[str, Any], folder: Path, *, evaluated: bool
) -> tuple[dict[str, list[float]], TRLProcess, dict[str, NDArray[np.float64]]]:
    """Trains both sides. Returns the seconds of every step and, if `evaluated`, the held-out rewards [P] by problem."""
    model = resolve_model(config.model)
    settings = _settings(config, model, folder / "trl", grpo_config)
    run_folder = RunFolder(folder / "ownloop", config)
    trl = TRLProcess(python, settings, folder / "trl.log")
    try:
        first = config.env.train_problems(config.seed, 0, 1)[0]
        assert trl.ready["first_prompt"] == list(Renderer(model).encode(first.prompt)), "the prompts differ"
        with CapturedOutput() as output:
            output.move_to(run_folder.logs / "controller.log")
            turns = Turns(sys.stderr if sys.stderr.isatty() else output.terminal, trl, block)
            asyncio.run(train(config, run_folder, turns))
        trl.finish()
    finally:
        trl.kill()
    rewards: dict[str, NDArray[np.float64]] = {}
    if evaluated:
        _keep("ownloop", run_folder.metrics())
        _keep("trl", trl.events)
        eval_data = LargestNumber().eval_problems(_recipe().num_eval)
        directories = {"ownloop": run_folder.path / "model", "trl": Path(settings.output)}
        rewards = {side: eval_rewards(path, eval_data, config) for side, path in directories.items()}
    return turns.seconds, trl, rewards


def _settings(config: GRPOConfig, model: Path, output: Path, grpo_config: dict[str, Any]) -> Settings:
    adam = AdamParams(learning_rate=config.learning_rate)
    return Settings(
        model=str(model),
        output=str(output),
        num_steps=config.num_steps,
        prompts_per_step=config.prompts_per_step,
        group_size=config.group_size,
        max_tokens=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        learning_rate=config.learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        eps=adam.eps,
        grad_clip_norm=config.grad_clip_norm,
        num_threads=config.trainer.num_threads,
        seed=config.seed,
        grpo_config={"bf16": config.trainer.compute_dtype == "bfloat16", **grpo_config},
    )


def eval_rewards(model: Path, problems: Sequence[TextProblem], config: GRPOConfig) -> NDArray[np.float64]:
    """[P] rewards of greedy answers, by transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    renderer = Renderer(model)
    torch.set_num_threads(config.trainer.num_threads)
    rewards: list[float] = []
    for start in range(0, len(problems), _EVALUATION_BATCH):
        batch = problems[start : start + _EVALUATION_BATCH]
        inputs = tokenizer.pad({"input_ids": [list(renderer.encode(p.prompt)) for p in batch]}, return_tensors="pt")
        with torch.no_grad():
            answers = network.generate(**inputs, do_sample=False, max_new_tokens=config.sampling.max_tokens)
        texts = tokenizer.batch_decode(answers[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        rewards += [problem.score(text) for problem, text in zip(batch, texts, strict=True)]
    return np.array(rewards)


def _keep(side: str, rows: Sequence[dict[str, Any]]) -> None:
    """Keeps one side's metrics of every step in `benchmarks/results`."""
    _RESULTS.mkdir(exist_ok=True)
    (_RESULTS / f"vs_trl_{side}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main()
