"""Stands in for TRL in `benchmarks.trl_trainer`: steps through its data and learns nothing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

__version__ = "fake"


class GRPOConfig:
    """Keeps its arguments."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments


class GRPOTrainer:
    """Calls the reward function and the callbacks as TRL's trainer does."""

    def __init__(
        self,
        *,
        model: str,
        args: GRPOConfig,
        reward_funcs: Any,
        train_dataset: dict[str, list[str]],
        processing_class: Any,
        callbacks: list[Any],
    ) -> None:
        assert Path(model).is_dir()
        self.processing_class = processing_class
        self._arguments = args.arguments
        self._rewards = reward_funcs
        self._data = train_dataset
        (self._callback,) = callbacks

    def train(self) -> None:
        """Does all steps."""
        group_size, num_steps = self._arguments["num_generations"], self._arguments["max_steps"]
        prompts_per_step = self._arguments["generation_batch_size"] // group_size
        assert len(self._data["prompt"]) == num_steps * prompts_per_step
        self._callback.on_train_begin()
        for step in range(num_steps):
            problems = self._data["problem"][step * prompts_per_step : (step + 1) * prompts_per_step]
            rewards = [self._rewards(completions=["1"] * group_size, problem=[p] * group_size) for p in problems]
            assert all(reward == 0 for group in rewards for reward in group)  # no problem has a number that small
            self._callback.on_log(logs={"reward": 0.0})
            state = SimpleNamespace(global_step=step + 1, max_steps=num_steps)
            self._callback.on_step_end(None, state)

    def save_model(self, path: str) -> None:
        """Has nothing to save."""
        Path(path).mkdir()
