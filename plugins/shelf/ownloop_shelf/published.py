"""What recipes find by name: an entry point of `ownloop.algorithms` names this row."""

from ownloop_shelf.published_advantages import ADVANTAGES
from ownloop_shelf.published_losses import LOSSES
from rl.algorithms import Algorithms

ALGORITHMS = Algorithms(losses=LOSSES, advantages=ADVANTAGES)
