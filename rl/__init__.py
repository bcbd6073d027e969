"""What RL is made of: types, protocols, losses, advantages, rollouts, environments. Knows no actor and no engine.

The names of a plain loop can be imported from here. Each comes from its module when it is first used.
"""

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from rl.advantages import group_mean_std
    from rl.losses import token_mean
    from rl.rollouts.episodes import group_to_data, rollout_groups
    from rl.rollouts.evaluation import evaluate
    from rl.rollouts.rendering import Renderer
    from rl.types import Datum

__all__ = ["Datum", "Renderer", "evaluate", "group_mean_std", "group_to_data", "rollout_groups", "token_mean"]
_MODULES = {
    "Datum": "rl.types",
    "Renderer": "rl.rollouts.rendering",
    "evaluate": "rl.rollouts.evaluation",
    "group_mean_std": "rl.advantages",
    "group_to_data": "rl.rollouts.episodes",
    "rollout_groups": "rl.rollouts.episodes",
    "token_mean": "rl.losses",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
