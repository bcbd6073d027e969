"""What every loop needs around its algorithm: configuration, rollouts, metrics, checkpoints, models.

A loop's page imports all of it from here.
"""

from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.loop_config import GroupLoopConfig, Loop, LoopConfig, LossConfig, RolloutLoopConfig
from controller.runs.models import resolve_model
from controller.runs.rollout_source import RolloutSource, check_texts_fit
from controller.runs.training_run import Run
from trainer.config import TrainerConfig

__all__ = [
    "Console",
    "GroupLoopConfig",
    "Loop",
    "LoopConfig",
    "LossConfig",
    "RolloutLoopConfig",
    "RolloutSource",
    "Run",
    "RunFolder",
    "TrainerConfig",
    "check_texts_fit",
    "resolve_model",
]
