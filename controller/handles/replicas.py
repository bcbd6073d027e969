"""What a router knows of each of its generators, and a pull that it asks all of them for."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from controller.processes.errors import HostLostError, HostsOverError, MeshError, PolicyLostError
from rl.lora import LivePolicy, Policy
from rl.protocols import Generator
from rl.types import PullMode

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
    """Why it is down for good; None while it may still be restarted."""
    restart: asyncio.Task[None] | None = None

    @property
    def state(self) -> ReplicaState:
        """What it does for the model itself."""
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

    async def wait_for(self, fits: Callable[[Replica], bool], policy: Policy = None) -> list[Replica]:
        """The replicas that fit. Waits until there is one.

        Raises `MeshError` if all are down for good, and `PolicyLostError` if none that is up can have the policy again.
        """
        async with self._states_changed:
            while not (found := [replica for replica in self if fits(replica)]):
                up = [replica for replica in self if replica.up]
                if isinstance(policy, tuple) and up and all(policy in replica.missing for replica in up):
                    raise PolicyLostError(f"policy is {policy!r}; a restarted generator found it no longer published")
                errors = [replica.error for replica in self]
                if all(error is not None for error in errors):
                    raise MeshError("generator", f"no replica is left: {errors[0]}") from errors[0]
                await self._states_changed.wait()
        return found

    async def notify(self) -> None:
        """Wakes those who wait. To be called after a replica's state has changed."""
        async with self._states_changed:
            self._states_changed.notify_all()


@dataclass(frozen=True, slots=True)
class Pull:
    """One call of `pull_model_state_dict`."""

    version: int
    policy: LivePolicy
    frozen: bool
    mode: PullMode
    keep_prefix_cache: bool

    @property
    def key(self) -> Policy:
        """What the pulled version is known as."""
        return (self.policy, self.version) if self.frozen else self.policy

    async def ask(self, generator: Generator) -> None:
        """Has one replica pull."""
        await generator.pull_model_state_dict(
            self.version,
            policy=self.policy,
            frozen=self.frozen,
            mode=self.mode,
            keep_prefix_cache=self.keep_prefix_cache,
        )
