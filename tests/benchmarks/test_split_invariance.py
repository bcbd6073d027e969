"""The gradient does not depend on how a batch is cut: `benchmarks.split_invariance`, one model each time."""

import pytest

from benchmarks.split_invariance import CUTS, LIMIT, measure

pytestmark = pytest.mark.ranks


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_any_cut_of_a_batch_gives_the_same_gradient(model: str) -> None:
    errors = measure([model])
    assert len(errors) == len(CUTS)
    assert max(errors.values()) <= LIMIT, errors
