"""`GeneratorRouter`: generators of one model as the one `Generator` that a controller script sees.

A request goes to a replica that knows the beginning of its prompt, such as the earlier turns of a conversation, because
the replica's prefix cache may still hold it; otherwise, or if that replica has 32 samples more in progress than the
least busy one, to the replica with the fewest samples in progress. A replica that is pulling or down gets no requests.
A replica that died is restarted, and serves again once it has pulled the current version of the model and every adapter
that the router has pulled. If the restart fails, it is tried again after growing pauses, for some 10 minutes. If it
fails because the trainer or the weight store is dead, requests that wait for it raise that error.

Errors tell the router what happened: a `MeshError` means that the replica died or was killed because it hung, a
`RequestTimeoutError` that it is slow, and every other error that the caller made a mistake.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from types import CoroutineType
from typing import Any, ParamSpec, get_args

from controller.handles.adapters import BoundGenerator
from controller.handles.replicas import PrefixAffinity, Replica, ReplicaSet, ReplicaState, StoppableGenerator
from controller.processes.errors import MeshError
from generator.config import OnFailure
from rl.checks import check_at_least, check_known
from rl.images import join_tokens
from rl.lora import LivePolicy, Policy
from rl.protocols import Generator
from rl.types import Completion, PullMode, SamplingParams

P = ParamSpec("P")

_MAX_LEAD = 32  # samples in progress; a computed prefix is not worth waiting for more of them
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, *(60.0,) * 9)
_MAX_FAILURES = 3  # a request whose replicas died so many times is taken for the cause, and not retried again


def shielded(method: Callable[P, Awaitable[None]]) -> "Callable[P, CoroutineType[Any, Any, None]]":
    """A method whose call is brought to its end when its caller is cancelled."""
    running: set[asyncio.Future[None]] = set()  # asyncio itself keeps no task alive

    @wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> None:
        task = asyncio.ensure_future(method(*args, **kwargs))
        running.add(task)
        task.add_done_callback(running.discard)
        await asyncio.shield(task)

    return call


class GeneratorRouter:
    """Implements `rl.protocols.Generator`. To be used from one event loop."""

    def __init__(
        self,
        generators: Sequence[StoppableGenerator],
        start: Callable[[int], Awaitable[StoppableGenerator]],
        *,
        on_failure: OnFailure = "retry",
        pauses_s: Sequence[float] = _PAUSES_S,
    ) -> None:
        """Use `launch`."""
        self._replicas = ReplicaSet(generators)
        self._start = start
        self._on_failure: OnFailure = on_failure
        self._pauses_s = tuple(pauses_s)
        self._versions: dict[Policy, int] = {}  # what a restarted replica has to pull
        self._cache_resets: dict[Policy, int] = {}  # the number of the reset that last emptied its prefix cache
        self._resets = itertools.count()
        self._affinity = PrefixAffinity(len(generators))
        self._pulls = PolicyLocks()
        self.evaluator: StoppableGenerator | None = None
        """A further copy that answers no request of this generator. It is not restarted."""

    @classmethod
    async def launch(
        cls,
        start: Callable[[int], Awaitable[StoppableGenerator]],
        num_replicas: int,
        *,
        on_failure: OnFailure = "retry",
        pauses_s: Sequence[float] = _PAUSES_S,
    ) -> "GeneratorRouter":
        """Starts the replicas side by side. `start(index)` starts one, now and again whenever that replica died.

        `on_failure` says what happens to requests in progress when their replica dies: "retry" sends them to another
        replica, or to its successor, and "raise" raises `MeshError`. `pauses_s` are the pauses between attempts to
        restart a replica, which is down for good after the last of them.
        """
        check_at_least(1, num_replicas=num_replicas)
        check_known("on_failure", on_failure, get_args(OnFailure))
        starts = [asyncio.ensure_future(start(index)) for index in range(num_replicas)]
        try:
            return cls(await asyncio.gather(*starts), start, on_failure=on_failure, pauses_s=pauses_s)
        except BaseException:
            for each in starts:
                each.cancel()
            outcomes = await asyncio.gather(*starts, return_exceptions=True)
            await asyncio.gather(*(started.stop() for started in outcomes if not isinstance(started, BaseException)))
            raise

    @property
    def states(self) -> tuple[ReplicaState, ...]:
        """The state of each replica."""
        return tuple(replica.state for replica in self._replicas)

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1, *, policy: Policy = None
    ) -> list[Completion]:
        """Samples `num_samples` completions of one prompt, all on one replica. Waits while every replica is pulling.

        Raises `MeshError` if no replica is left, or if the replica died and requests are not retried, and any error
        that the replica raises.
        """
        prompt, num_failures = join_tokens(prompt_tokens), 0
        while True:
            try:
                async with self.replica(prompt, num_samples, policy) as replica:
                    completions = await replica.generator.generate(prompt, sampling, num_samples, policy=policy)
                    weights = self._weights(policy)
                    for completion in completions:
                        self._affinity.remember(prompt + completion.tokens, self._replicas.index(replica), weights)
                    return completions
            except MeshError:
                num_failures += 1
                if self._on_failure == "raise" or num_failures == _MAX_FAILURES:
                    raise

    @asynccontextmanager
    async def replica(self, prompt: tuple[int, ...], num_samples: int, policy: Policy) -> AsyncGenerator[Replica]:
        """A replica for one request, which is made within the block. If it dies there, it is restarted."""
        replica = await self._choose(prompt, policy)
        generator = replica.generator
        replica.num_samples += num_samples
        try:
            yield replica
        except MeshError as error:
            # Only the first request that notices restarts it. Later, another generator may be in its place.
            if replica.generator is generator and replica.up:
                self._restart(replica, error)
            raise
        finally:
            if replica.generator is generator:
                replica.num_samples -= num_samples

    @shielded
    async def pull_model_state_dict(
        self,
        version: int,
        *,
        policy: LivePolicy = None,
        frozen: bool = False,
        mode: PullMode = "drain",
        keep_prefix_cache: bool = False,
    ) -> None:
        """Every replica loads this version. Requests made from now on are answered under it.

        If only some replicas cannot load it, they are restarted. If none can, raises their error, and replicas that
        are alive continue under the old weights. If all died, the pull goes to their successors, unless requests are
        not retried either. A pull that was begun is brought to its end also if its caller is cancelled: versions would
        differ otherwise.
        """
        pulled: Policy = (policy, version) if frozen else policy
        num_failures = 0
        while True:
            await self._replicas.wait_for(Replica.can_pull)
            async with self._pulls.hold(pulled):  # versions of one policy come in order
                replicas = [replica for replica in self._replicas if replica.can_pull()]
                generators = [replica.generator for replica in replicas]
                for replica in replicas:
                    replica.pulling.add(pulled)
                pulls = (
                    each.pull_model_state_dict(
                        version, policy=policy, frozen=frozen, mode=mode, keep_prefix_cache=keep_prefix_cache
                    )
                    for each in generators
                )
                outcomes = await asyncio.gather(*pulls, return_exceptions=True)
                if is_loaded := None in outcomes:
                    self._versions[pulled] = version
                    if not keep_prefix_cache:
                        self._cache_resets[pulled] = next(self._resets)
                others: list[BaseException] = []
                for replica, generator, error in zip(replicas, generators, outcomes, strict=True):
                    has_died = isinstance(error, MeshError) and error.mesh == generator.name
                    others += [] if error is None or has_died else [error]
                    self._end_pull(replica, pulled, error, restarts=has_died or is_loaded)
                await self._replicas.notify()
            if is_loaded:
                return
            if others:  # a mistake of the caller, or a failed trainer, explains more than the death of a replica
                raise others[0]
            num_failures += bool(replicas)  # there is none if the last one died between the wait and the lock
            if replicas and (self._on_failure == "raise" or num_failures == _MAX_FAILURES):
                raise next(error for error in outcomes if error is not None)

    def _end_pull(self, replica: Replica, pulled: Policy, error: BaseException | None, *, restarts: bool) -> None:
        replica.pulling.discard(pulled)
        if error is None:
            replica.missing.discard(pulled)
        elif replica.up and restarts:  # no request noticed it during the pull
            self._restart(replica, error)

    async def drop_policy(self, policy: Policy) -> None:
        """Every replica forgets an adapter, or a frozen version of one. Raises ValueError if no replica has it."""
        async with self._pulls.hold(policy):
            replicas = [each for each in self._replicas if each.up and policy not in each.missing]
            outcomes = await asyncio.gather(
                *(replica.generator.drop_policy(policy) for replica in replicas), return_exceptions=True
            )
            self._versions.pop(policy, None)
            self._cache_resets.pop(policy, None)
            for replica in self._replicas:
                replica.missing.discard(policy)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        others = [error for error in errors if not isinstance(error, MeshError)]  # a dead replica has none any more
        if others and len(errors) == len(outcomes):
            raise others[0]

    async def version(self, policy: Policy = None) -> int:
        """The policy version in use. Before the model's first pull it is 0: the weights in the model's directory."""
        return self._versions.get(policy, 0)

    async def stop(self) -> None:
        """Ends every replica. May be called again."""
        for replica in self._replicas:  # at once, so that no request has one started while others end
            replica.up, replica.error = False, replica.error or MeshError("generator", "it was stopped")
        restarts = [replica.restart for replica in self._replicas if replica.restart is not None]
        for restart in restarts:
            restart.cancel()
        await asyncio.gather(*restarts, return_exceptions=True)
        await asyncio.gather(*(replica.generator.stop() for replica in self._replicas))
        await self._replicas.notify()

    async def _choose(self, prompt: tuple[int, ...], policy: Policy) -> Replica:
        """The replica to send a prompt to. Waits until one is serving this policy."""
        serving = await self._replicas.wait_for(lambda replica: replica.serves(policy), policy)
        weights = self._weights(policy)
        least = min(replica.num_samples for replica in serving)
        owners = self._affinity.owners(prompt, weights)
        near = [
            replica
            for index, replica in enumerate(self._replicas)
            if index in owners and replica in serving and replica.num_samples <= least + _MAX_LEAD
        ]
        replica = min(near or serving, key=lambda each: each.num_samples)
        self._affinity.remember(prompt, self._replicas.index(replica), weights)
        return replica

    def _weights(self, policy: Policy) -> Hashable:
        """Another value whenever prefixes that were computed for this policy have become useless."""
        return policy, self._cache_resets.get(policy), self._cache_resets.get(None)

    def _restart(self, replica: Replica, why: BaseException) -> None:
        """Sends a replica no more requests, and starts another generator in its place."""
        print(f"{replica.generator.name} is started again: {str(why).partition(chr(10))[0]}", flush=True)
        replica.up = False
        replica.restart = asyncio.create_task(self._start_replacement(replica))

    async def _start_replacement(self, replica: Replica) -> None:
        self._affinity.forget(self._replicas.index(replica))
        for num_failures in range(1, len(self._pauses_s) + 2):
            try:
                await self._replace(replica)
                break
            except Exception as error:
                replica.up = False
                if num_failures > len(self._pauses_s) or self._replicas.is_final(error):
                    replica.error = error
                    print(f"{replica.generator.name} is down for good: {error}", flush=True)
                    break
                if self._replicas.is_of_others(error):
                    replica.error = error
                    await self._replicas.notify()
                pause_s, left = self._pauses_s[num_failures - 1], len(self._pauses_s) - num_failures
                again = f"trying again in {pause_s:g} s (and {left} more times)"
                print(f"{replica.generator.name} could not be restarted: {error}; {again}", flush=True)
                await asyncio.sleep(pause_s)
        await self._replicas.notify()

    async def _replace(self, replica: Replica) -> None:
        """Starts another generator in a replica's place, with the current version of every policy."""
        await replica.generator.stop()
        generator = await self._start(self._replicas.index(replica))
        replica.generator, replica.num_samples = generator, 0
        replica.missing.clear()
        replica.pulling = {None}
        replica.up = True
        await self._catch_up(replica)
        replica.error = None

    async def _catch_up(self, replica: Replica) -> None:
        """Has a new generator pull what the other replicas have pulled, until it has all and no pull is in progress."""
        from rl.weights.version import PublisherGoneError  # loads torch

        pulled: dict[Policy, int | None] = {}
        while behind := [
            policy
            for policy in dict.fromkeys((*self._versions, *pulled, *self._pulls))  # in the order of first pulls
            if policy in self._pulls or pulled.get(policy) != self._versions.get(policy)
        ]:
            for policy in behind:
                async with self._pulls.hold(policy):  # a pull in progress ends first
                    version, before = self._versions.get(policy), pulled.get(policy)
                    pulled[policy] = version
                    try:
                        if version is None and before is not None:
                            await replica.generator.drop_policy(policy)
                        elif version is not None and version != before:
                            name, frozen = (policy[0], True) if isinstance(policy, tuple) else (policy, False)
                            await replica.generator.pull_model_state_dict(version, policy=name, frozen=frozen)
                            replica.missing.discard(policy)
                    except (ValueError, PublisherGoneError):  # the version is gone; the next pull brings a newer one
                        replica.missing.add(policy)
        replica.pulling.clear()


class PolicyLocks:
    """Iterating yields the policies whose lock is held. Locks are not kept: frozen versions have no end."""

    def __init__(self) -> None:
        self._locks: dict[Policy, asyncio.Lock] = {}
        self._num_users: Counter[Policy] = Counter()  # holders of the lock, and tasks that wait for it

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


async def evaluator_of(generator: Generator) -> Generator:
    """What measures the version that a generator serves: its evaluator, once that has pulled it, or else itself.

    Raises `MeshError` if the evaluator has died.
    """
    router, policy = (generator.unbound, generator.name) if isinstance(generator, BoundGenerator) else (generator, None)
    if not isinstance(router, GeneratorRouter) or router.evaluator is None:
        return generator
    await router.evaluator.pull_model_state_dict(await router.version(policy), policy=policy)
    return router.evaluator if policy is None else BoundGenerator(router.evaluator, policy)
