"""What every loop needs around its algorithm: configuration, rollouts, metrics, checkpoints, models.

A loop's page, a recipe and a script import all of it from here.
"""

from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.loop_config import GroupLoopConfig, HeldOut, Loop, LoopConfig, LossConfig, RolloutLoopConfig
from controller.runs.models import resolve_model
from controller.runs.rollout_source import RolloutSource, check_texts_fit
from controller.runs.training_run import Run

__all__ = [
    "Console",
    "GroupLoopConfig",
    "HeldOut",
    "Loop",
    "LoopConfig",
    "LossConfig",
    "RolloutLoopConfig",
    "RolloutSource",
    "Run",
    "RunFolder",
    "check_texts_fit",
    "resolve_model",
]
