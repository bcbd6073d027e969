"""What a router knows of each of its generators.

`PrefixAffinity` remembers which replica computed the beginning of which prompts: its prefix cache may still hold them.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from controller.processes.errors import HostLostError, HostsOverError, MeshError, PolicyLostError
from rl.lora import Policy
from rl.protocols import Generator

ReplicaState = Literal["serving", "pulling", "outdated", "down"]
"""What a replica does for the model itself. `outdated`: it was restarted, but could not pull the current version any
more; it serves after the next pull."""


class Stoppable(Protocol):
    """A handle whose processes a launcher ends."""

    async def stop(self) -> None:
        """Ends its processes. May be called again, and after they died."""
        ...


class StoppableGenerator(Generator, Stoppable, Protocol):
    """A generator with processes of its own, such as `GeneratorHandle`."""

    @property
    def name(self) -> str:
        """The name of its mesh, which is `MeshError.mesh` if it died."""
        ...


@dataclass(slots=True, eq=False)
class Replica:
    """One of the router's generators. After a restart it is another generator in the same place."""

    generator: StoppableGenerator
    up: bool = True
    num_samples: int = 0
    """Samples in progress."""
    pulling: set[Policy] = field(default_factory=set[Policy])
    """The policies of which it is pulling a version."""
    missing: set[Policy] = field(default_factory=set[Policy])
    """The policies that it could not pull any more after a restart."""
    error: BaseException | None = None
    """Why nobody shall wait for it: it is down for good, or what it pulls from is dead."""
    restart: asyncio.Task[None] | None = None

    @property
    def state(self) -> ReplicaState:
        """The state of this replica for requests of the model itself."""
        if not self.up:
            return "down"
        return "pulling" if None in self.pulling else "outdated" if None in self.missing else "serving"

    def can_pull(self) -> bool:
        """Whether a version can be pulled now."""
        return self.state in ("serving", "outdated")

    def serves(self, policy: Policy) -> bool:
        """Whether it can answer requests for a policy now. Without the right model no adapter of it is right."""
        return self.up and not {None, policy} & (self.pulling | self.missing)


class ReplicaSet(list[Replica]):
    """All replicas of a router. Some may be down."""

    def __init__(self, generators: Iterable[StoppableGenerator]) -> None:
        """Starts with a replica for each generator."""
        super().__init__(Replica(generator) for generator in generators)
        self._states_changed = asyncio.Condition()

    def is_final(self, error: BaseException) -> bool:
        """Whether a replica that could not be restarted is not tried again.

        A host may come back, and that is waited for as long as others serve. Where none does, the run has to hear that
        its hosts are lost, and begins again by its own rules.
        """
        nobody_serves = not any(replica.up for replica in self)
        return isinstance(error, HostsOverError) or (isinstance(error, HostLostError) and nobody_serves)

    def is_of_others(self, error: BaseException) -> bool:
        """Whether a generator could not be restarted because another mesh failed: the trainer, or the weight store."""
        ours = {replica.generator.name for replica in self}
        return isinstance(error, MeshError) and not isinstance(error, HostLostError) and error.mesh not in ours

    async def wait_for(self, fits: Callable[[Replica], bool], policy: Policy = None) -> list[Replica]:
        """The replicas that fit. Waits until there is one.

        Raises `MeshError` if all are down for good, or for as long as the trainer or the store is dead, whose error it
        then is; and `PolicyLostError` if none that is up can have the policy again.
        """
        async with self._states_changed:
            while not (found := [replica for replica in self if fits(replica)]):
                up = [replica for replica in self if replica.up]
                if isinstance(policy, tuple) and up and all(policy in replica.missing for replica in up):
                    raise PolicyLostError(f"policy is {policy!r}; a restarted generator found it no longer published")
                errors = [replica.error for replica in self]
                if all(error is not None for error in errors):
                    if isinstance(why := errors[0], MeshError) and self.is_of_others(why):
                        raise why.again()
                    raise MeshError("generator", f"no replica is left: {errors[0]}") from errors[0]
                await self._states_changed.wait()
        return found

    async def notify(self) -> None:
        """Wakes those who wait. To be called after a replica's state has changed."""
        async with self._states_changed:
            self._states_changed.notify_all()


_BLOCK_TOKENS = 32  # vLLM shares whole blocks only: of 16 tokens on a GPU, of 32 here on the CPU
_NUM_REMEMBERED = 65_536  # blocks; 2 million tokens


class PrefixAffinity:
    """The blocks of tokens that each replica has seen, each with all the tokens before it.

    `weights` names the weights under which tokens were computed: a prefix under others is of no use.
    """

    def __init__(self, num_replicas: int) -> None:
        """Starts without blocks. Of one replica there is nothing to remember."""
        self._is_useful = num_replicas > 1
        self._owners: OrderedDict[int, set[int]] = OrderedDict()  # replicas of a block, least recently used first

    def remember(self, tokens: Sequence[int], replica: int, weights: Hashable = None) -> None:
        """Notes that a replica computes these tokens."""
        if not self._is_useful:
            return
        for block in _blocks(tokens, weights):
            self._owners.setdefault(block, set()).add(replica)
            self._owners.move_to_end(block)
        while len(self._owners) > _NUM_REMEMBERED:
            self._owners.popitem(last=False)

    def owners(self, tokens: Sequence[int], weights: Hashable = None) -> set[int]:
        """The replicas that know the longest beginning of `tokens`, if that is at least half of its blocks.

        A shorter match, such as a system prompt that all prompts begin with, saves too little to say where to go.
        """
        longest: set[int] = set()
        num_blocks = num_known = 0
        for num_blocks, block in enumerate(_blocks(tokens, weights), start=1):
            known = self._owners.get(block)
            if known and num_known == num_blocks - 1:
                longest, num_known = known, num_blocks
        return set(longest) if 2 * num_known >= num_blocks else set()

    def forget(self, replica: int) -> None:
        """Notes that a replica has lost its cache."""
        for owners in self._owners.values():
            owners.discard(replica)

    def clear(self) -> None:
        """Notes that all replicas have lost their caches."""
        self._owners.clear()


def _blocks(tokens: Sequence[int], weights: Hashable) -> Iterator[int]:
    """For each whole block of tokens, a hash of it and of all blocks before it."""
    block = hash(weights)
    for start in range(0, len(tokens) - _BLOCK_TOKENS + 1, _BLOCK_TOKENS):
        block = hash((block, tuple(tokens[start : start + _BLOCK_TOKENS])))
        yield block
