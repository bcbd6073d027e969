"""Which of this host's GPUs belong to which mesh."""

from collections.abc import Sequence


class GPUPool:
    """Gives out a host's GPUs in the order in which they are asked for."""

    def __init__(self, num_gpus: int) -> None:
        """The GPUs are 0 to `num_gpus` - 1."""
        self._num_gpus = num_gpus
        self._next = 0
        self._num_taken: dict[str, int] = {}

    def take(self, name: str, num_ranks: int, gpus: Sequence[int] | None = None) -> tuple[int, ...] | None:
        """The GPUs that mesh `name` may use, one per rank: the next free ones, or those in `gpus`, even if taken.

        None on a host without GPUs: the mesh computes on the CPU. All meshes of one rank share a host's only GPU.
        Raises ValueError if too few GPUs are left, and for GPUs that the host does not have.
        """
        if gpus is not None:
            if len(gpus) != num_ranks or not set(gpus) <= set(range(self._num_gpus)) or len(set(gpus)) < num_ranks:
                raise ValueError(
                    f"gpus of {name!r} are {list(gpus)}; it needs {num_ranks} different ones of this host's "
                    f"{self._num_gpus}"
                )
            return tuple(gpus)
        if self._num_gpus == 0:
            return None
        if self._num_gpus == num_ranks == 1:
            return (0,)
        if self._next + num_ranks > self._num_gpus:
            others = "".join(f", after {count} for {user!r}" for user, count in self._num_taken.items())
            raise ValueError(
                f"this host has {self._num_gpus} GPUs; {name!r} needs {num_ranks}, one per rank{others}, which makes "
                f"{self._next + num_ranks}"
            )
        self._num_taken[name] = num_ranks
        self._next += num_ranks
        return tuple(range(self._next - num_ranks, self._next))


def num_gpus_here() -> int:
    """The number of this host's GPUs that the controller may use."""
    import torch  # takes seconds to load, which a mistake in a recipe should not have to wait for

    return torch.cuda.device_count()


def visible_gpus(gpus: Sequence[int] | None) -> dict[str, str]:
    """The environment of a mesh that may use these GPUs alone: rank i finds its GPU at index i. None hides nothing."""
    return {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
