"""A run's folder as ownloop wrote it before `schema_version`: other module, field and metric names."""

import json
from pathlib import Path

_RECIPE = """
from controller.grpo import GRPOConfig

def recipe() -> GRPOConfig:
    return GRPOConfig(model="m", samples_per_prompt=2)
"""


def old_run(path: Path) -> Path:
    """Writes the files of a run of two steps, each of one group of two rollouts."""
    (path / "logs").mkdir(parents=True)
    config = {"seed": 0, "num_heldout": 4, "samples_per_prompt": 2, "generator": {"on_death": "resend"}}
    recipe = {"file": "mine.py", "options": [[]], "replay": None, "source": _RECIPE}
    for name, value in (("config.json", config), ("recipe.json", recipe)):
        (path / name).write_text(json.dumps(value))
    metrics = [
        {"step": 0.0, "heldout_reward": 0.25, "heldout_reward_low": 0.0, "heldout_reward_high": 0.5},
        *({"step": step, "reward_mean": 0.5, "logprob_gap_mean": 0.125, "lag_max": 1.0} for step in (1.0, 2.0)),
    ]
    rollouts = [
        _rollout(step, split, sample)
        for step, split in ((0, "heldout"), (1, "train"), (2, "train"))
        for sample in (0, 1)
    ]
    for name, rows in (("metrics.jsonl", metrics), ("rollouts.jsonl", rollouts)):
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _rollout(step: int, split: str, sample: int) -> dict[str, object]:
    text, tokens = ("w10 w11", [10, 11]) if sample == 0 else ("w12", [12])
    turn = {
        "prompt_tokens": [20, 21],
        "tokens": tokens,
        "logprobs": [-0.5] * len(tokens),
        "versions": [step] * len(tokens),
        "text": text,
        "finish_reason": "stop",
    }
    return {
        "step": step,
        "split": split,
        "problem_id": f"{split} {step}",
        "sample": sample,
        "reward": float(sample),
        "prompt": "w20 w21",
        "completion": text,
        "truncated": False,
        "group_failures": [],
        "metrics": {},
        "timings": {"seconds_environment": 0.0},
        "turns": [turn],
    }
