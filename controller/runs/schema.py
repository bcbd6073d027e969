"""The version of the names in a run's files, and how files of an earlier version are read.

1: up to the renaming of metrics and fields to the words used now. Rows and recipes of this version name no version.
2: `schema_version` is in every row of `metrics.jsonl` and in `recipe.json`. Rollouts are lines of `rollouts.jsonl`.
3: rollouts are Parquet files, in `rollouts/` and in checkpoints. Metrics and fields are those of version 2.
"""

from collections.abc import Mapping
from typing import Any, cast

SCHEMA_VERSION = 3

_METRICS = {
    "logprob_gap_mean": "logprob_mismatch_mean",
    "logprob_gap_max": "logprob_mismatch_max",
    "lag_mean": "staleness_mean",
    "lag_max": "staleness_max",
    "kl_sampler": "kl_generator",
}
_EVAL_PREFIXES = ("heldout_", "eval_")
_FIELDS = {
    "num_heldout": "num_eval",
    "heldout_samples": "eval_samples",
    "samples_per_prompt": "group_size",
    "max_policy_lag": "max_staleness",
    "credit": "ppo",
    "on_death": "on_failure",
}
_VALUES = {"on_failure": {"resend": "retry"}}


def schema_version(saved: Mapping[str, Any]) -> int:
    """The version that a row of `metrics.jsonl`, or `recipe.json`, was written in."""
    return int(saved.get("schema_version", 1))


def current_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `metrics.jsonl` under the names of the current version, without `schema_version`."""
    metrics = {name: value for name, value in row.items() if name != "schema_version"}
    if schema_version(row) >= 2:
        return metrics
    old, new = _EVAL_PREFIXES
    return {
        new + name.removeprefix(old) if name.startswith(old) else _METRICS.get(name, name): value
        for name, value in metrics.items()
    }


def current_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The object of a `config.json`, of any version, under the field names of the current one."""
    fields: dict[str, Any] = {}
    for old, value in config.items():
        name = _FIELDS.get(old, old)
        nested = current_fields(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else value
        fields[name] = _VALUES.get(name, {}).get(nested, nested) if isinstance(nested, str) else nested
    return fields
