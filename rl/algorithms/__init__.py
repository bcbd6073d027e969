"""Parts that belong to one algorithm (PPO, DPO, distillation, DAPO), and the metrics of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # both read the tables of plug-ins
    from rl.advantages import Rewards
    from rl.losses import Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithms:
    """Losses and advantage functions that a plug-in brings. An entry point of `ownloop.algorithms` names this row."""

    losses: Mapping[str, Loss] = field(default_factory=dict[str, Any])
    """Losses by the name that a recipe's `loss` then may have."""
    advantages: Mapping[str, Callable[..., Rewards]] = field(default_factory=dict[str, Any])
    """Functions [G] rewards of a group -> [G] advantages, by the name that a recipe's `advantage` then may have."""
