"""TRL's side of `benchmarks.vs_trl`: `GRPOTrainer`, stepped on command. Runs in TRL's environment, not in ownloop's.

    python -m benchmarks.trl_trainer SETTINGS

SETTINGS is the JSON of a `Settings`. Each line on the standard input is a number of optimizer steps to do. A JSON line
on the standard output reports each step. After the last step the model is saved.
"""

import functools
import importlib
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any, TextIO

from rl.envs.largest_number import LargestNumber
from rl.envs.procedural import TextProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that both sides share, and where TRL saves its model."""

    model: str
    output: str
    num_steps: int
    prompts_per_step: int
    group_size: int
    max_tokens: int
    temperature: float
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    grad_clip_norm: float
    num_threads: int
    seed: int
    grpo_config: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of `trl.GRPOConfig` that override those of `_arguments`."""


def main() -> None:
    """Trains, one command at a time."""
    settings = Settings(**json.loads(sys.argv[1]))
    events, sys.stdout = sys.stdout, sys.stderr  # libraries print to the standard output too

    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(settings.num_threads)
    trainer, prompts = _trainer(settings, events)
    trl, transformers = (importlib.import_module(name).__version__ for name in ("trl", "transformers"))
    versions = {"trl": trl, "transformers": transformers, "torch": torch.__version__}
    _emit(events, event="ready", versions=versions, first_prompt=trainer.processing_class(prompts[0])["input_ids"])
    trainer.train()
    trainer.save_model(settings.output)
    _emit(events, event="saved")


def _trainer(settings: Settings, events: TextIO) -> tuple[Any, list[str]]:
    """TRL's trainer and its prompts."""
    trl: Any = importlib.import_module("trl")
    transformers: Any = importlib.import_module("transformers")
    datasets: Any = importlib.import_module("datasets")

    tokenizer = transformers.AutoTokenizer.from_pretrained(settings.model)
    problems = LargestNumber().train_problems(settings.seed, 0, settings.num_steps * settings.prompts_per_step)
    # As text, because TRL would begin a new message after a chat whose last message is the assistant's.
    prompts = [
        tokenizer.apply_chat_template(problem.prompt, tokenize=False, continue_final_message=True)
        for problem in problems
    ]
    trainer = trl.GRPOTrainer(
        model=settings.model,
        args=trl.GRPOConfig(**_arguments(settings)),
        reward_funcs=functools.partial(_rewards, {problem.id: problem for problem in problems}),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts, "problem": [problem.id for problem in problems]}),
        processing_class=tokenizer,
        callbacks=[_turns(transformers.TrainerCallback, events)],
    )
    return trainer, prompts


def _arguments(settings: Settings) -> dict[str, Any]:
    """Arguments of `trl.GRPOConfig` for the same algorithm, set for speed on a CPU.

    The algorithm is on-policy, without KL, and averages over the tokens of the step. There is one optimizer step per
    generation, so that TRL does not compute old log-probs. All completions of a step are sampled at once, and trained
    on in pieces that fit into memory: the CPU recipe's step in one piece took 21 GB. TRL samples without vLLM: its
    server mode sends weights by NCCL and refuses any device but CUDA, and vLLM's CPU build does not support the calls
    by which its colocate mode loads weights.
    """
    batch_size = settings.prompts_per_step * settings.group_size
    arguments: dict[str, Any] = {
        "output_dir": settings.output,
        "max_steps": settings.num_steps,
        "per_device_train_batch_size": 16,
        "generation_batch_size": batch_size,
        "num_generations": settings.group_size,
        "shuffle_dataset": False,
        "max_completion_length": settings.max_tokens,
        "temperature": settings.temperature,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": settings.beta1,
        "adam_beta2": settings.beta2,
        "adam_epsilon": settings.eps,
        "weight_decay": 0.0,
        "max_grad_norm": settings.grad_clip_norm,
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "gradient_checkpointing": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "model_init_kwargs": {"dtype": "float32"},
        "seed": settings.seed,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **settings.grpo_config,
    }
    arguments["gradient_accumulation_steps"] = batch_size // arguments["per_device_train_batch_size"]
    return arguments


def _rewards(
    problems: dict[str, TextProblem], completions: list[str], problem: list[str], **_others: Any
) -> list[float]:
    """The environment's reward, as a reward function of TRL's."""
    return [problems[name].score(completion) for completion, name in zip(completions, problem, strict=True)]


def _turns(base: Any, events: TextIO) -> Any:
    """A callback that waits for a command before the first step and whenever a command's steps are done."""

    class Turns(base):
        def __init__(self) -> None:
            self._steps_left = 0
            self._start = 0.0

        def on_train_begin(self, *_others: Any, **_named: Any) -> None:
            self._wait()

        def on_step_end(self, _args: Any, state: Any, *_others: Any, **_named: Any) -> None:
            seconds, self._start = time.perf_counter() - self._start, time.perf_counter()
            _emit(events, event="step", step=state.global_step, seconds=seconds)
            self._steps_left -= 1
            if self._steps_left == 0 and state.global_step < state.max_steps:
                self._wait()

        def on_log(self, *_others: Any, logs: dict[str, Any], **_named: Any) -> None:
            _emit(events, event="log", **logs)

        def _wait(self) -> None:
            line = sys.stdin.readline()
            if not line:
                raise SystemExit("no further command")
            self._steps_left = int(line)
            self._start = time.perf_counter()

    return Turns()


def _emit(events: TextIO, **event: Any) -> None:
    events.write(json.dumps(event, default=float) + "\n")
    events.flush()


if __name__ == "__main__":
    main()
