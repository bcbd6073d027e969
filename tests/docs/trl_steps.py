"""TRL's side of `test_from_trl.py`, in TRL's environment: two steps of GRPOTrainer on recorded completions.

    python tests/docs/trl_steps.py SETTINGS.json

Prints a JSON line with the losses of the two steps for each dictionary of `GRPOConfig` arguments in the settings.
"""

import contextlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "max_steps": 2,
    "num_iterations": 2,  # both steps learn from the same completions
    "shuffle_dataset": False,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "use_cpu": True,
    "dataloader_pin_memory": False,
    "pad_to_multiple_of": None,
    "model_init_kwargs": {"dtype": "float32"},
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "bf16": False,
}


def losses(settings: dict[str, Any], arguments: dict[str, Any]) -> list[float]:
    """The loss of each step, with the given arguments of `GRPOConfig` beside the common ones."""
    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    transformers: Any = importlib.import_module("transformers")
    found: list[float] = []

    class Trainer(trl.GRPOTrainer):
        def compute_loss(self, *positional: Any, **named: Any) -> Any:
            loss = super().compute_loss(*positional, **named)
            found.append(float(loss))
            return loss

    tokenizer = transformers.AutoTokenizer.from_pretrained(settings["model"])
    tokenizer.pad_token = tokenizer.eos_token
    size, group_size = len(settings["prompts"]), settings["group_size"]
    config = trl.GRPOConfig(
        output_dir=settings["output"],
        per_device_train_batch_size=size,
        num_generations=group_size,
        max_completion_length=settings["max_tokens"],
        **_COMMON,
        **settings["adam"],
        **arguments,
    )
    recorded = {
        "prompt_ids": settings["prompts"],
        "completion_ids": settings["completions"],
        "logprobs": [[0.0] * len(tokens) for tokens in settings["completions"]],  # used with vLLM only
    }
    Trainer(
        model=settings["model"],
        args=config,
        reward_funcs=lambda completions, **_: settings["rewards"],
        train_dataset=datasets.Dataset.from_dict({"prompt": [str(i) for i in range(size // group_size)]}),
        processing_class=tokenizer,
        rollout_func=lambda prompts, trainer: recorded,
    ).train()
    return found


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    with contextlib.redirect_stdout(sys.stderr):
        results = [losses(given, arguments) for arguments in given["arguments"]]
    print(json.dumps(results))
