"""The router, on fake replicas that answer when the test tells them to."""

import asyncio

import pytest

from controller.handles.generator_router import GeneratorRouter
from controller.processes.errors import MeshError, RequestTimeoutError
from rl.types import Completion
from tests.controller.handles.fake_replicas import SAMPLING, FakeReplica, Replicas, routed, send, settle
from tests.waiting import run_virtual, until

SYSTEM = tuple(range(1000, 1040))


def _prompt(number: int, num_tokens: int = 64) -> tuple[int, ...]:
    return tuple(number * 1000 + position for position in range(num_tokens))


async def test_requests_go_to_the_least_busy_replica_turns_stay_there() -> None:
    async with routed() as (router, replicas):
        tasks: list[asyncio.Task[list[Completion]]] = []
        turn = _prompt(1)
        for prompt, num_samples in ((turn, 8), (_prompt(2), 2), (_prompt(3), 2), (turn + _prompt(9, 40), 4)):
            tasks.append(send(router, *prompt, num_samples=num_samples))
            await settle()
        assert replicas[0].prompts == [turn, turn + _prompt(9, 40)]
        assert replicas[1].prompts == [_prompt(2), _prompt(3)]
        for replica in replicas:
            replica.release()
        assert [len(await task) for task in tasks] == [8, 2, 2, 4]
        replicas[1].answer_tokens = _prompt(5, 96)  # a completion is part of the next turn's prompt
        (completion,) = await router.generate(_prompt(2), SAMPLING)
        await router.generate(_prompt(2) + completion.tokens + _prompt(8, 40), SAMPLING)
        assert len(replicas[1].prompts) == 4
        await router.generate(_prompt(7), SAMPLING)  # nothing is in progress any more
        assert replicas[0].prompts[-1] == _prompt(7)


async def test_a_short_prefix_or_a_busy_replica_draws_no_request() -> None:
    async with routed() as (router, replicas):
        for number, num_samples in ((1, 2), (2, 1), (3, 1)):  # with the same system prompt
            send(router, *SYSTEM, *_prompt(number, 100), num_samples=num_samples)
            await settle()
        assert [len(replica.prompts) for replica in replicas] == [1, 2]
        for _ in range(3):  # 20 + 2 samples, 40 + 2, and then 34 more than the other replica has
            send(router, *SYSTEM, *_prompt(1, 100), num_samples=20)
            await settle()
        assert [len(replica.prompts) for replica in replicas] == [3, 3]


async def test_requests_after_a_pull_begins_have_its_version() -> None:
    async with routed() as (router, replicas):
        for replica in replicas:
            replica.may_pull.clear()
        pull = asyncio.create_task(router.pull_model_state_dict(3))
        await settle()
        assert router.states == ("pulling", "pulling")
        requests = [send(router, prompt) for prompt in range(4)]
        await settle()
        assert replicas[0].prompts == replicas[1].prompts == []
        replicas[1].may_pull.set()
        await settle()
        assert replicas[1].prompts == []  # one that has pulled waits for the others, so that all share the requests
        replicas[0].may_pull.set()
        await pull
        await settle()
        for replica in replicas:
            replica.release()
        assert {v for request in requests for c in await request for v in c.versions} == {3}
        assert len(replicas[0].prompts) == len(replicas[1].prompts) == 2


async def test_a_pull_that_is_given_up_reaches_every_replica() -> None:
    async with routed() as (router, replicas):
        replicas[1].may_pull.clear()
        pull = asyncio.create_task(router.pull_model_state_dict(3))
        await settle()
        pull.cancel()
        await settle()
        replicas[1].may_pull.set()
        await settle()
        assert [replica.version for replica in replicas] == [3, 3]
        assert router.states == ("serving", "serving")


async def test_a_version_that_none_can_pull_raises_and_restarts_none() -> None:
    async with routed() as (router, replicas):
        for replica in replicas:
            replica.pull_error = ValueError("version 9 cannot be pulled; versions that can: 1, 2")
        with pytest.raises(ValueError, match="version 9 cannot be pulled"):
            await router.pull_model_state_dict(9)
        assert router.states == ("serving", "serving")


async def test_a_replica_that_alone_fails_to_pull_is_restarted() -> None:
    async with routed() as (router, replicas):
        replicas[1].pull_error = RuntimeError("half of the weights")
        await router.pull_model_state_dict(2)
        await settle()
        assert replicas[1].stopped
        assert len(replicas) == 3
        assert (replicas[2].index, replicas[2].version) == (1, 2)
        assert router.states == ("serving", "serving")


async def test_requests_of_a_dead_replica_are_retried() -> None:
    async with routed() as (router, replicas):
        await router.pull_model_state_dict(7)
        requests = [send(router, prompt, num_samples=2) for prompt in range(8)]
        await settle()
        assert len(replicas[0].prompts) == 4
        replicas[0].kill()
        await settle()
        assert len(replicas) == 3
        assert replicas[2].version == 7
        for replica in replicas[1:]:
            replica.release()
        answers = [await request for request in requests]
        assert {v for samples in answers for c in samples for v in c.versions} == {7}
        assert [len(samples) for samples in answers] == [2] * 8
        assert router.states == ("serving", "serving")


async def test_requests_of_a_dead_replica_raise_if_retries_are_off() -> None:
    async with routed(on_failure="raise") as (router, replicas):
        requests = [send(router, prompt) for prompt in range(2)]
        await settle()
        replicas[0].kill()
        replicas[1].release()
        with pytest.raises(MeshError, match="a process died"):
            await requests[0]
        assert len(await requests[1]) == 1
        await settle()
        assert router.states == ("serving", "serving")


async def test_a_request_that_kills_replica_after_replica_raises() -> None:
    async with routed() as (router, replicas):
        request = send(router, 1)
        for _ in range(3):
            await settle()
            next(replica for replica in replicas if replica.prompts and not replica.stopped).kill()
        with pytest.raises(MeshError, match="a process died"):
            await request


async def test_a_restart_that_fails_is_tried_again_once(capsys: pytest.CaptureFixture[str]) -> None:
    async with routed(num_replicas=1) as (router, replicas):
        request = send(router, 1)
        await settle()
        replicas.start_error = MeshError("generator", "the GPU is busy")
        replicas.num_start_errors = 2
        replicas[0].kill()
        await until(lambda: len(replicas) == 2, "a successor")
        replicas[1].release()
        assert len(await request) == 1
        assert "restarted: generator: the GPU is busy; trying again in 0 s (and 1 more" in capsys.readouterr().out

        replicas.num_start_errors = 3
        replicas[1].kill()
        with pytest.raises(MeshError, match="no replica is left: generator: the GPU is busy"):
            await router.generate((1,), SAMPLING)
        with pytest.raises(MeshError, match="no replica is left"):
            await router.pull_model_state_dict(1)
        assert "generator is down for good: generator: the GPU is busy" in capsys.readouterr().out


@pytest.mark.stranger("2.B6")
@pytest.mark.parametrize("mesh", ["store", "trainer"])
async def test_requests_hear_of_the_death_of_what_a_replica_pulls_from(mesh: str) -> None:
    async with routed(num_replicas=1) as (router, replicas):
        request = send(router, 1)
        await settle()
        replicas.start_error, replicas.num_start_errors = MeshError(mesh, "rank 0 died"), 1
        replicas[0].kill()
        with pytest.raises(MeshError, match="^" + mesh + ": rank 0 died") as raised:
            await request
        assert raised.value.mesh == mesh
        await until(lambda: len(replicas) == 2, "a successor, once it lives again")
        request = send(router, 1)
        await settle()
        replicas[1].release()
        assert len(await request) == 1


async def test_a_pull_in_which_a_replica_dies_goes_to_its_successor() -> None:
    async with routed(num_replicas=1) as (router, replicas):
        await router.pull_model_state_dict(1)
        replicas[0].kill()
        await router.pull_model_state_dict(2)
        assert len(replicas) == 2
        assert replicas[1].version == 2


async def test_a_pull_from_a_dead_trainer_raises_and_restarts_none() -> None:
    async with routed() as (router, replicas):
        for replica in replicas:
            replica.pull_error = MeshError("trainer", "rank 1 died")
        with pytest.raises(MeshError, match="trainer: rank 1 died"):
            await router.pull_model_state_dict(1)
        await settle()
        assert len(replicas) == 2


async def test_a_replacement_without_a_version_serves_after_a_pull() -> None:
    async with routed(num_replicas=1) as (router, replicas):
        await router.pull_model_state_dict(1)
        request = send(router, 1)
        await settle()
        start = replicas.start

        async def start_outdated(index: int) -> FakeReplica:
            replica = await start(index)
            replica.pull_error = ValueError("version 1 is no longer kept")
            return replica

        router._start = start_outdated  # pyright: ignore[reportPrivateUsage]
        replicas[0].kill()
        await settle()
        assert router.states == ("outdated",)
        replicas[1].pull_error = None
        replicas[1].release()
        await router.pull_model_state_dict(3)
        assert {v for c in await request for v in c.versions} == {3}


async def test_a_request_that_takes_too_long_harms_no_replica() -> None:
    async with routed() as (router, replicas):
        for replica in replicas:
            replica.late = True
            replica.release()
        with pytest.raises(RequestTimeoutError, match="a request took longer than 1 s"):
            await router.generate((1,), SAMPLING)
        assert router.states == ("serving", "serving")
        assert len(replicas) == 2


async def test_no_replica_is_started_while_all_are_stopped() -> None:
    replicas, may_end, num_starts = Replicas(), asyncio.Event(), 0

    async def start(index: int) -> FakeReplica:
        nonlocal num_starts
        num_starts += 1
        if num_starts == 3:
            try:
                await asyncio.Event().wait()
            finally:
                await may_end.wait()  # as processes that have begun to start
        return await replicas.start(index)

    router = await GeneratorRouter.launch(start, 2)
    requests = [send(router, prompt) for prompt in range(2)]
    await settle()
    replicas[0].kill()
    await settle()
    assert (num_starts, router.states) == (3, ("down", "serving"))
    stop = asyncio.create_task(router.stop())
    await settle()
    replicas[1].kill()
    await settle()
    may_end.set()
    await stop
    await settle()
    assert (num_starts, router.states) == (3, ("down", "down"))
    for outcome in await asyncio.gather(*requests, return_exceptions=True):
        assert "it was stopped" in str(outcome)


async def test_a_cancelled_request_is_cancelled_at_its_replica() -> None:
    async with routed() as (router, replicas):
        request = send(router, 1)
        await settle()
        request.cancel()
        await settle()
        assert replicas[0].num_cancelled == 1


def test_started_replicas_are_stopped_when_another_cannot_start() -> None:
    replicas = Replicas()

    async def start(index: int) -> FakeReplica:
        if index == 1:
            raise ValueError("no such model")
        return await replicas.start(index)

    with pytest.raises(ValueError, match="no such model"):
        asyncio.run(GeneratorRouter.launch(start, 2))
    assert replicas[0].stopped

    async def cancelled() -> None:
        never = asyncio.Event()

        async def hanging(index: int) -> FakeReplica:
            if index == 1:
                await never.wait()
            return await replicas.start(index)

        await asyncio.wait_for(GeneratorRouter.launch(hanging, 2), 0.05)

    with pytest.raises(TimeoutError):
        run_virtual(cancelled())
    assert replicas[-1].stopped
    with pytest.raises(ValueError, match="on_failure is 'retyr', which is not known; did you mean 'retry'"):
        asyncio.run(GeneratorRouter.launch(start, 1, on_failure="retyr"))  # pyright: ignore[reportArgumentType]
