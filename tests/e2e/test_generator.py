"""A generator behind its handle: many calls at once, mistakes, cancelled calls, and a process that hangs."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from controller.handles.generator_handle import GeneratorHandle
from controller.processes.errors import DeadlineError
from generator.config import GeneratorConfig
from rl.deadlines import Deadlines
from rl.types import SamplingParams
from tests.e2e.weight_meshes import GREEDY, PROMPTS, running_generator, working
from tests.generator.served_models import served_llama
from tests.waiting import LIMIT_S, wait_for_ends

pytestmark = pytest.mark.e2e


def test_a_model_that_cannot_be_served_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        asyncio.run(GeneratorHandle.launch(GeneratorConfig(model=tmp_path), tmp_path / "logs"))
    assert not (tmp_path / "logs").exists()


async def test_calls_mistakes_cancellation_and_death(tmp_path: Path) -> None:
    directory = served_llama(tmp_path / "model", tied=True)

    async with running_generator(
        directory, "float32", tmp_path / "logs", deadlines=Deadlines(stopped_s=3)
    ) as generator:
        (pid,) = generator.mesh.pids

        async def in_progress() -> int:
            return (await generator.mesh.call("num_unfinished", [()]))[0]

        sampling = SamplingParams(max_tokens=12, seed=5)
        groups = await asyncio.gather(*(generator.generate(prompt, sampling, 4) for prompt in PROMPTS))
        assert [len(group) for group in groups] == [4] * len(PROMPTS)
        again = await generator.generate(PROMPTS[2], sampling, 4)
        assert [c.tokens for c in again] == [c.tokens for c in groups[2]]

        with pytest.raises(ValueError, match="a prompt of 126 tokens and max_tokens=24 need 150 tokens"):
            await generator.generate([5] * 126, GREEDY)
        with pytest.raises(ValueError, match="Token id 9999 is out of vocabulary"):
            await generator.generate([5, 9999], GREEDY)

        sampling = SamplingParams(max_tokens=90, seed=1)
        calls = [asyncio.create_task(generator.generate(PROMPTS[0], sampling, 8)) for _ in range(40)]
        async with asyncio.timeout(LIMIT_S):  # by themselves they would take longer
            while await in_progress() < 160:
                await asyncio.sleep(0.01)
            for call in calls:
                call.cancel()
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert sum(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes) > 20
            while await in_progress() > 0:
                await asyncio.sleep(0.01)
        assert len(await generator.generate(PROMPTS[0], GREEDY)) == 1

        running = asyncio.create_task(generator.generate(PROMPTS[0], SamplingParams(max_tokens=60, seed=1), 640))
        await working(generator)
        os.kill(pid, signal.SIGSTOP)
        message = r"rank 0 \(process \d+\) has been stopped \(SIGSTOP\) for \d+ s; .* waited \d+ s for generate"
        with pytest.raises(DeadlineError, match=message) as caught:
            await asyncio.wait_for(running, LIMIT_S)
        # A thread that is entering a generator has only the frames within it.
        assert "--- Python stack of rank 0 ---" in str(caught.value)
        assert "(most recent call first)" in str(caught.value)
        with pytest.raises(DeadlineError, match="has been stopped"):
            await asyncio.wait_for(generator.generate(PROMPTS[0], GREEDY), LIMIT_S)
    wait_for_ends(generator.mesh.pids, "the rank")
