"""Layers that keep a packed copy of their weight."""

from torch import Tensor, nn

from ownloop_bitwise.ops import Packed


class Packs(nn.Module):
    """A layer whose weight is packed before it is multiplied with."""

    keeps_packed = False
    """Whether the copy stays until `drop_packed`. Without this each use packs anew: FSDP gathers a weight for each."""
    _copy: Packed | None = None

    def packed(self, weight: Tensor) -> Packed:
        """The packed copy of the layer's weight."""
        packed = self._copy or Packed.of(weight)
        self._copy = packed if self.keeps_packed else None
        return packed

    def drop_packed(self) -> None:
        """The weight has changed."""
        self._copy = None


def packing_layers(model: nn.Module) -> list[Packs]:
    """All of a model."""
    return [layer for layer in model.modules() if isinstance(layer, Packs)]
