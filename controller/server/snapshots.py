"""Versions of adapters that the generator keeps for sampling clients.

A sampling client is a frozen snapshot: it gives the tokens and log-probs of its version for ever. The generator has
room for a bounded number of versions, and clients do not say when they are done with one. So the version that was used
least recently makes room for a new one, and a later request of it fails with an error that says so.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from controller.processes.errors import MeshError, PolicyLostError
from rl.lora import Policy
from rl.protocols import Generator, Trainer


class Snapshots:
    """The policies that the generator holds besides the base model."""

    def __init__(self, generator: Generator, max_kept: int) -> None:
        """`max_kept` is the generator's room."""
        self._generator = generator
        self.max_kept = max_kept
        """Most versions at the same time."""
        self._kept: dict[Policy, None] = {}  # the one that was used last comes last
        self._running: Counter[Policy] = Counter()
        self._pulling = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, policy: Policy) -> bool:
        return policy in self._kept

    async def freeze(self, name: str, trainer: Trainer) -> Policy:
        """Keeps the trainer's current version. `name` is the adapter's."""

        async def pull(version: int) -> Policy:
            if (name, version) not in self._kept:
                await self._make_room()
                await self._generator.pull_model_state_dict(version, policy=name, frozen=True)
            return name, version

        return await self._publish(trainer, pull)

    async def follow(self, name: str, trainer: Trainer) -> Policy:
        """Replaces the adapter's live version by the trainer's current one, also under requests that are running."""

        async def pull(version: int) -> Policy:
            if name not in self._kept:
                await self._make_room()
            await self._generator.pull_model_state_dict(version, policy=name, mode="inflight")
            return name

        return await self._publish(trainer, pull)

    async def _publish(self, trainer: Trainer, pull: Callable[[int], Awaitable[Policy]]) -> Policy:
        """Pushes and pulls; once more if a process died meanwhile, because what it pushed is gone with a trainer."""
        for is_last in (False, True):
            version = await trainer.push_model_state_dict()
            try:
                async with self._pulling:
                    policy = await pull(version)
                    self._note_use(policy)
                    return policy
            except MeshError:
                if is_last:
                    raise
        raise AssertionError("the last attempt returns or raises")

    @asynccontextmanager
    async def use(self, policy: Policy) -> AsyncGenerator[None]:
        """Keeps a policy while a request of it runs. Raises ValueError if it had to make room."""
        if policy is None:
            yield
            return
        if policy not in self._kept:
            raise ValueError(
                f"this sampling client's weights are no longer kept: the server holds {self.max_kept} versions and "
                "gives up the one that was used least recently; make a new sampling client, or sample from a saved path"
            )
        self._note_use(policy)
        self._running[policy] += 1
        try:
            yield
        except PolicyLostError:
            await self.drop(policy)
            raise ValueError(
                "this sampling client's weights were lost when the generator died; make a new sampling client, or "
                "sample from a saved path"
            ) from None
        finally:
            self._running[policy] -= 1
            self._running += Counter()  # forgets those that are 0

    async def drop(self, policy: Policy) -> None:
        """Gives a policy up, if it is kept."""
        if policy in self._kept:
            del self._kept[policy]
            await self._generator.drop_policy(policy)

    async def drop_adapter(self, name: str) -> None:
        """Gives up all versions of an adapter."""
        for policy in [p for p in self._kept if p == name or (isinstance(p, tuple) and p[0] == name)]:
            await self.drop(policy)

    def _note_use(self, policy: Policy) -> None:
        self._kept.pop(policy, None)
        self._kept[policy] = None

    async def _make_room(self) -> None:
        if len(self._kept) < self.max_kept:
            return
        idle = next((policy for policy in self._kept if self._running[policy] == 0), None)
        if idle is None:
            raise ValueError(
                f"all {self.max_kept} versions that the server can hold are being sampled from; wait, or start it "
                "with a larger --max-snapshots"
            )
        await self.drop(idle)
