"""Fake generators for the router's tests. They answer when the test tells them to."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from controller.handles.generator_router import GeneratorRouter
from controller.processes.errors import MeshError, RequestTimeoutError
from rl.lora import LivePolicy, Policy
from rl.types import Completion, PullMode, SamplingParams
from tests.rl.fakes import completion

SAMPLING = SamplingParams(max_tokens=4)


class FakeReplica:
    """Holds its requests until `release`. After `kill` all of its calls raise."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = "generator"
        self.versions: dict[Policy, int] = {}
        self.prompts: list[tuple[int, ...]] = []
        self.num_cancelled = 0
        self.stopped = False
        self.late = False
        self.answer_tokens: tuple[int, ...] = ()
        self.pull_error: Exception | None = None
        self.quick: set[Policy] = set()  # pulls of these wait for nothing
        self.may_pull = asyncio.Event()
        self.may_pull.set()
        self._may_answer = asyncio.Event()
        self._dead = False

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1, *, policy: Policy = None
    ) -> list[Completion]:
        self.prompts.append(tuple(prompt_tokens))
        try:
            await self._may_answer.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self._dead:
            raise MeshError("generator", "a process died")
        if self.late:
            raise RequestTimeoutError("a request took longer than 1 s")
        answer = completion(str(self.index), self.versions.get(policy, 0))
        if self.answer_tokens:
            zeros = (0.0,) * len(self.answer_tokens)
            versions = (self.versions.get(policy, 0),) * len(zeros)
            answer = replace(answer, tokens=self.answer_tokens, logprobs=zeros, versions=versions)
        return [answer] * num_samples

    async def pull_model_state_dict(
        self,
        version: int,
        *,
        policy: LivePolicy = None,
        frozen: bool = False,
        mode: PullMode = "drain",
        keep_prefix_cache: bool = False,
    ) -> None:
        if policy not in self.quick:
            await self.may_pull.wait()
        if self._dead:
            raise MeshError("generator", "a process died")
        if self.pull_error is not None:
            raise self.pull_error
        self.versions[(policy, version) if frozen else policy] = version

    @property
    def version(self) -> int:
        return self.versions.get(None, 0)

    async def drop_policy(self, policy: Policy) -> None:
        if policy not in self.versions:
            raise ValueError(f"policy is {policy!r}, which this generator does not have")
        del self.versions[policy]

    async def stop(self) -> None:
        self.stopped = True

    def release(self) -> None:
        self._may_answer.set()

    def kill(self) -> None:
        self._dead = True
        self._may_answer.set()


class Replicas(list[FakeReplica]):
    """The replicas in the order in which they were started."""

    start_error: Exception | None = None
    num_start_errors = 10**9

    async def start(self, index: int) -> FakeReplica:
        if self.start_error is not None and self.num_start_errors > 0:
            self.num_start_errors -= 1
            raise self.start_error
        self.append(FakeReplica(index))
        return self[-1]


@contextlib.asynccontextmanager
async def routed(num_replicas: int = 2, **options: Any) -> AsyncGenerator[tuple[GeneratorRouter, Replicas]]:
    replicas = Replicas()
    router = await GeneratorRouter.launch(replicas.start, num_replicas, pauses_s=(0.0, 0.0), **options)
    yield router, replicas
    await router.stop()
    assert all(replica.stopped for replica in replicas)


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def send(router: GeneratorRouter, *prompt: int, num_samples: int = 1) -> "asyncio.Task[list[Completion]]":
    return asyncio.create_task(router.generate(prompt, SAMPLING, num_samples))
