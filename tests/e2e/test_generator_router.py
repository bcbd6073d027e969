"""Two real replicas as a recipe starts them, one of them killed and one stopped while both sample."""

import asyncio
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from controller.commands.processes import descendants
from controller.handles.generator_handle import GeneratorHandle
from controller.handles.generator_router import GeneratorRouter
from controller.launching.launcher import launch
from controller.processes.errors import RequestTimeoutError
from generator.config import GeneratorConfig
from rl.types import Completion, SamplingParams
from tests.e2e.weight_meshes import GREEDY, PROMPTS, working
from tests.generator.served_models import served_llama
from tests.waiting import LIMIT_S, until, wait_until
from trainer.config import TrainerConfig

pytestmark = pytest.mark.e2e


def _handles(router: GeneratorRouter) -> list[GeneratorHandle]:
    """The replicas that are there now."""
    handles = [replica.generator for replica in router._replicas]  # pyright: ignore[reportPrivateUsage]
    assert all(isinstance(handle, GeneratorHandle) for handle in handles)
    return handles  # pyright: ignore[reportReturnType]


async def _all(router: GeneratorRouter, sampling: SamplingParams, num_samples: int = 1) -> list[list[Completion]]:
    return list(await asyncio.gather(*(router.generate(prompt, sampling, num_samples) for prompt in PROMPTS)))


def _assert_no_process_is_left(before: list[int]) -> None:
    """Those of earlier tests aside; the kernel may take a moment."""
    wait_until(lambda: not set(descendants()) - set(before), "the processes to end")


@pytest.mark.slow
async def test_dead_replicas_are_replaced_and_no_request_is_lost(tmp_path: Path) -> None:
    model, logs = served_llama(tmp_path / "model", tied=True), tmp_path / "logs"
    config = GeneratorConfig(dtype="float32", max_model_len=128, max_num_seqs=32, num_replicas=2)
    before = descendants()

    async with launch(model, TrainerConfig(compute_dtype="float32"), config, logs) as (trainer, router):
        assert isinstance(router, GeneratorRouter)
        assert await router.version() == 0
        await router.pull_model_state_dict(await trainer.push_model_state_dict())
        expected = [samples[0].tokens for samples in await _all(router, GREEDY)]
        first, second = _handles(router)
        assert (first.mesh.name, second.mesh.name) == ("generator-0", "generator-1")

        requests = asyncio.create_task(_all(router, SamplingParams(max_tokens=80, seed=1), 32))
        await working(first)
        os.kill(first.mesh.pids[0], signal.SIGKILL)
        assert [len(group) for group in await requests] == [32] * len(PROMPTS)
        await until(lambda: router.states == ("serving", "serving"), "both replicas to serve")

        requests = asyncio.create_task(_all(router, SamplingParams(max_tokens=80, seed=1), 32))
        await working(second)
        os.kill(second.mesh.pids[0], signal.SIGSTOP)
        assert [len(group) for group in await requests] == [32] * len(PROMPTS)
        await until(lambda: router.states == ("serving", "serving"), "both replicas to serve")

        successors = _handles(router)
        assert not {first, second} & set(successors)
        for successor in successors:  # they hold the version that was pulled before they were there
            again = await asyncio.gather(*(successor.generate(prompt, GREEDY) for prompt in PROMPTS))
            assert [samples[0].tokens for samples in again] == expected
        for successor in successors:
            successor.config = replace(config, request_timeout_s=0.05)  # less than 180,000 tokens take
        with pytest.raises(RequestTimeoutError, match=r"a request took longer than 0.05 s \(request_timeout_s\)"):
            await router.generate(PROMPTS[0], SamplingParams(max_tokens=90), 2000)
        for successor in successors:
            successor.config = config
        assert len((await asyncio.wait_for(router.generate(PROMPTS[0], GREEDY), LIMIT_S))[0].tokens) > 0
    _assert_no_process_is_left(before)
    names = {re.sub(r"-\d+\.log$", "", file.name) for file in logs.glob("*-*.log")}
    assert names == {"trainer", "store", "generator-0", "generator-1"}
