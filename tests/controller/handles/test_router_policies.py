"""The router's adapters: who serves them, who waits for them, and what a restarted replica has of them."""

import asyncio

import pytest

from controller.handles.adapters import BoundGenerator
from controller.handles.generator_router import GeneratorRouter, evaluator_of
from controller.processes.errors import MeshError
from rl.lora import Policy
from rl.weights.version import PublisherGoneError
from tests.controller.handles.fake_replicas import SAMPLING, FakeReplica, routed, settle
from tests.waiting import until

PROMPT = tuple(range(64))


def _send(router: GeneratorRouter, policy: Policy, prompt: tuple[int, ...] = (1,)) -> asyncio.Task[set[int]]:
    async def versions() -> set[int]:
        completions = await router.generate(prompt, SAMPLING, policy=policy)
        return {version for completion in completions for version in completion.versions}

    return asyncio.create_task(versions())


async def test_a_pull_of_an_adapter_holds_back_its_own_requests_alone() -> None:
    async with routed() as (router, replicas):
        await router.pull_model_state_dict(1, policy="b")
        for replica in replicas:
            replica.may_pull.clear()
            replica.release()
        pull = asyncio.create_task(router.pull_model_state_dict(7, policy="a"))
        await settle()
        waiting, other, model = _send(router, "a"), _send(router, "b"), _send(router, None)
        assert (await other, await model) == ({1}, {0})
        assert router.states == ("serving", "serving")
        assert not waiting.done()
        for replica in replicas:
            replica.may_pull.set()
        await pull
        assert await waiting == {7}


async def test_a_prefix_counts_under_its_own_weights_only() -> None:
    async with routed() as (router, replicas):
        for name in ("a", "b"):
            await router.pull_model_state_dict(1, policy=name)
        _send(router, "a", PROMPT)
        await settle()
        _send(router, "b", PROMPT)  # to the least busy one, though the first has seen these tokens
        await settle()
        assert [len(replica.prompts) for replica in replicas] == [1, 1]
        _send(router, None, (1,))
        await settle()
        _send(router, "a", PROMPT + (1,) * 32)  # both are as busy, but the first has computed the prefix
        await settle()
        _send(router, "a", PROMPT + (2,) * 32)
        await settle()
        assert [len(replica.prompts) for replica in replicas] == [4, 1]
        await router.pull_model_state_dict(2, policy="a")
        _send(router, "a", PROMPT)
        await settle()
        assert [len(replica.prompts) for replica in replicas] == [4, 2]


async def test_a_restarted_replica_has_every_policy_that_was_pulled() -> None:
    async with routed(num_replicas=1) as (router, replicas):
        await router.pull_model_state_dict(3)
        for version in (1, 2):
            await router.pull_model_state_dict(version, policy="a")
        await router.pull_model_state_dict(1, policy="a", frozen=True)
        await router.pull_model_state_dict(9, policy="b")
        await router.drop_policy("b")
        request = _send(router, ("a", 1))
        await settle()
        replicas[0].kill()
        await until(lambda: len(replicas) == 2, "a successor")
        replicas[1].release()
        assert await request == {1}
        assert replicas[1].versions == {None: 3, "a": 2, ("a", 1): 1}


async def test_pulls_of_several_policies_do_not_wait_for_each_other() -> None:
    async with routed(num_replicas=1) as (router, replicas):
        replicas[0].may_pull.clear()
        replicas[0].quick = {"b"}
        slow = asyncio.create_task(router.pull_model_state_dict(1, policy="a"))
        await settle()
        await router.pull_model_state_dict(1, policy="b")
        assert not slow.done()
        replicas[0].may_pull.set()
        await slow
        replicas[0].may_pull.clear()
        newer = asyncio.create_task(router.pull_model_state_dict(2, policy="a"))
        await settle()
        replicas[0].kill()  # while "a" is pulled; its successor waits for the outcome
        await settle()
        replicas[0].may_pull.set()
        await newer
        await until(lambda: router.states == ("serving",), "a replica that serves")
        assert replicas[1].versions == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    "error", [ValueError("this version is no longer kept"), PublisherGoneError("the trainer that published it is gone")]
)
async def test_policies_no_longer_published_are_missed_by_name(error: Exception) -> None:
    async with routed(num_replicas=1) as (router, replicas):
        await router.pull_model_state_dict(2, policy="a")
        await router.pull_model_state_dict(1, policy="a", frozen=True)
        start = replicas.start

        async def start_forgetful(index: int) -> FakeReplica:
            replica = await start(index)
            replica.pull_error = error
            return replica

        router._start = start_forgetful  # pyright: ignore[reportPrivateUsage]
        request = _send(router, None)
        await settle()
        replicas[0].kill()
        await until(lambda: len(replicas) == 2, "a successor")
        replicas[1].release()
        assert await request == {0}
        with pytest.raises(
            ValueError, match=r"policy is \('a', 1\); a restarted generator found it no longer published"
        ):
            await _send(router, ("a", 1))
        waiting = _send(router, "a")
        await settle()
        assert not waiting.done()
        replicas[1].pull_error = None
        await router.pull_model_state_dict(3, policy="a")
        assert await waiting == {3}


async def test_a_policy_that_no_replica_knows_cannot_be_dropped() -> None:
    async with routed() as (router, replicas):
        del replicas
        with pytest.raises(ValueError, match="policy is 'a'"):
            await router.drop_policy("a")


async def test_dropped_frozen_versions_leave_nothing_in_a_server() -> None:
    async with routed() as (router, replicas):
        for replica in replicas:
            replica.release()

        async def come_and_go(version: int) -> None:
            await router.pull_model_state_dict(version, policy="a", frozen=True)
            await _send(router, ("a", version))
            await router.drop_policy(("a", version))

        await asyncio.gather(*(come_and_go(version) for version in range(3)))
        before = _num_objects(router)
        for version in range(3, 60):
            await come_and_go(version)
        assert _num_objects(router) <= before


def _num_objects(router: GeneratorRouter) -> int:
    """How many objects the router's own containers hold."""
    parts = vars(router)
    return len([*parts["_pulls"]]) + sum(len(each) for each in parts.values() if isinstance(each, dict | set | list))


async def test_an_evaluator_pulls_what_its_generator_serves() -> None:
    async with routed() as (router, replicas):
        bound = BoundGenerator(router, "a")
        assert (await evaluator_of(router), await evaluator_of(bound)) == (router, bound)
        router.evaluator = evaluator = FakeReplica(2)
        await router.pull_model_state_dict(3)
        await bound.pull_model_state_dict(5)
        assert await evaluator_of(router) is evaluator
        measured = await evaluator_of(bound)
        assert evaluator.versions == {None: 3, "a": 5}
        evaluator.release()
        (completion,) = await measured.generate((1,), SAMPLING)
        assert set(completion.versions) == {5}
        assert [replica.prompts for replica in (*replicas, evaluator)] == [[], [], [(1,)]]
        evaluator.kill()
        with pytest.raises(MeshError):
            await evaluator_of(router)
