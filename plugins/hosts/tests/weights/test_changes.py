"""Changes turn the old bytes into the new ones exactly, and are few."""

import pytest
import torch

from ownloop_hosts.weights.changes import apply_changes, changes_of


@pytest.mark.parametrize(("share", "most"), [(0.0, 0.01), (0.01, 0.022), (0.1, 0.21), (0.9, None), (1.0, None)])
@pytest.mark.parametrize("num_elements", [3000 * 400, 300 * 401, 131_074, 70_001])
def test_changes_are_exact_and_few_bytes(share: float, most: float | None, num_elements: int) -> None:
    random = torch.Generator().manual_seed(7)

    def bits() -> torch.Tensor:  # of all numbers, not-a-numbers of every kind among them
        return torch.randint(-(1 << 15), 1 << 15, (num_elements,), generator=random, dtype=torch.int16)

    old = bits()
    new = torch.where(torch.rand(num_elements, generator=random) < share, bits(), old)
    changes = changes_of(new.view(torch.uint8), old.view(torch.uint8))
    assert (changes is None) == (most is None)
    if changes is not None and most is not None:
        assert len(changes) <= most * 2 * num_elements
        apply_changes(changes, old.view(torch.uint8))
        assert torch.equal(old, new)


def test_changes_of_other_memory_are_refused() -> None:
    changes = changes_of(torch.ones(1 << 10, dtype=torch.uint8), torch.ones(1 << 10, dtype=torch.uint8))
    assert changes is not None
    with pytest.raises(ValueError, match="5 bytes of changes are no changes of 1024 bytes"):
        apply_changes(torch.zeros(5, dtype=torch.uint8), torch.ones(1 << 10, dtype=torch.uint8))
    odd = torch.zeros(3, dtype=torch.uint8)
    assert changes_of(odd, odd) is None
