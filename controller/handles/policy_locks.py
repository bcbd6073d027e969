"""`PolicyLocks`: one lock for each policy that something is being done to, and none for all others."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager

from rl.lora import Policy


class PolicyLocks:
    """Iterating yields the policies whose lock is held. A server makes frozen versions for ever, so no lock is kept."""

    def __init__(self) -> None:
        self._locks: dict[Policy, asyncio.Lock] = {}
        self._num_users: Counter[Policy] = Counter()  # those that hold the lock or wait for it

    def __iter__(self) -> Iterator[Policy]:
        return iter(self._locks)

    def __contains__(self, policy: Policy) -> bool:
        return policy in self._locks

    @asynccontextmanager
    async def hold(self, policy: Policy) -> AsyncGenerator[None]:
        """Holds the lock of a policy while inside; those who wait get it in the order in which they came."""
        lock = self._locks.setdefault(policy, asyncio.Lock())
        self._num_users[policy] += 1
        try:
            async with lock:
                yield
        finally:
            self._num_users[policy] -= 1
            if not self._num_users[policy]:
                del self._num_users[policy], self._locks[policy]
