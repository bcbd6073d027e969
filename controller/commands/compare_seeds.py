"""The part of `ownloop compare` that judges over seeds: a table of final rewards, and what can be claimed."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from controller.runs.comparison import (
    Configuration,
    FinalReward,
    final_reward,
    named_differences,
    same_configuration,
    welch,
)

_SIGNIFICANT = 0.05


def configurations_of(runs: Sequence[Path]) -> list[Configuration]:
    """The runs, put together where they differ in their seeds only, in the order given.

    Each configuration is named by its values of all fields in which they differ; a single one has the name of its first
    run. Raises ValueError for a run without an evaluation, and for two runs of one configuration with the same seed:
    they say no more than one.
    """
    from controller.runs.folder import read_metrics

    configs: list[Mapping[str, Any]] = []
    members: list[list[FinalReward]] = []
    for run in runs:
        config = _config(run)
        place = next((i for i, known in enumerate(configs) if same_configuration(known, config)), len(configs))
        if place == len(configs):
            configs.append(config)
            members.append([])
        result = final_reward(str(run), config, read_metrics(run / "metrics.jsonl"))
        if same := [other.run for other in members[place] if other.seed == result.seed]:
            raise ValueError(
                f"{run} and {same[0]} have the same configuration and the same seed, {result.seed}; a comparison over "
                "seeds needs different ones"
            )
        members[place].append(result)
    names = _names(configs) or [Path(members[0][0].run).name]
    return [Configuration(name=name, runs=tuple(results)) for name, results in zip(names, members, strict=True)]


def are_repeats(one: Path, other: Path) -> bool:
    """Whether two runs have the same configuration and the same seed."""
    ours, theirs = _config(one), _config(other)
    return same_configuration(ours, theirs) and ours.get("seed") == theirs.get("seed")


def _config(run: Path) -> Mapping[str, Any]:
    from controller.runs.folder import CONFIG_FILE
    from rl.system.disk import read_json

    return read_json(run / CONFIG_FILE)


def _names(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The values that each configuration has of the fields in which they differ; none for a single configuration."""
    found = [named_differences(configs[0], config) for config in configs[1:]]
    fields = {field: pair[0] for differing in found for field, pair in differing.items()}
    of_each = [fields, *({**fields, **{field: pair[1] for field, pair in d.items()}} for d in found)]
    return [", ".join(f"{field} {value!r}" for field, value in values.items()) for values in of_each if fields]


def judgement(configurations: Sequence[Configuration]) -> Iterable[str]:
    """The lines to print: each configuration's final rewards, and how each differs from the first."""
    yield "final held-out reward:"
    for letter, configuration in zip(_letters(), configurations, strict=False):
        rewards = configuration.rewards
        values = ", ".join(f"{run.reward:.3f} (seed {run.seed}, step {run.step})" for run in configuration.runs)
        yield f"{letter}  {configuration.name}: mean {sum(rewards) / len(rewards):.3f}, n = {len(rewards)}: {values}"
    steps = {run.step for configuration in configurations for run in configuration.runs}
    if len(steps) > 1:
        yield f"The last evaluations are after different numbers of steps, {min(steps)} to {max(steps)}."
    first, *others = configurations
    for letter, other in zip(_letters()[1:], others, strict=False):
        yield _claim(letter, other, first)


def _letters() -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _claim(letter: str, other: Configuration, first: Configuration) -> str:
    """What can be said about the difference between a configuration and the first."""
    counts = len(other.runs), len(first.runs)
    if min(counts) < 2:
        return (
            f"{letter} - A: nothing can be claimed from {counts[0]} and {counts[1]} seeds, since each side needs at "
            "least two; `ownloop sweep RECIPE --seed 0 1 2` runs several."
        )
    difference = welch(other.rewards, first.rewards)
    interval = difference.interval
    significant = "significant" if difference.p_value < _SIGNIFICANT else "not significant"
    return (
        f"{letter} - A: {interval.mean:+.3f}, 95 % interval [{interval.low:+.3f}, {interval.high:+.3f}], "
        f"p = {difference.p_value:.3g} (Welch's t-test over {counts[0]} and {counts[1]} seeds): {significant} at 5 %."
    )
