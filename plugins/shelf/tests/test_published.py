"""The core's table of our plug-ins, which it has without importing them, names what this one brings."""

from ownloop_shelf.published import ALGORITHMS
from rl.system.plugins import OURS


def test_the_core_knows_the_losses_and_advantages() -> None:
    assert OURS["shelf"]["losses"].split() == sorted(ALGORITHMS.losses)
    assert OURS["shelf"]["advantages"].split() == sorted(ALGORITHMS.advantages)
