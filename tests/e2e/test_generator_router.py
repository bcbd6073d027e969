"""Two real generators behind a router, and a process of one of them killed while both sample."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from controller.generator_handle import GeneratorHandle
from controller.generator_router import GeneratorRouter
from generator.config import GeneratorConfig
from rl.types import SamplingParams
from tests.e2e.weight_meshes import GREEDY, PROMPTS, publish, running_publisher, running_store
from tests.generator.served_models import served_llama

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_killed_replica_is_replaced_and_no_request_is_lost(tmp_path: Path) -> None:
    directory, logs = served_llama(tmp_path / "model", tied=True), tmp_path / "logs"
    config = GeneratorConfig(model=directory, dtype="float32", max_model_len=128, max_num_seqs=8)
    handles: list[GeneratorHandle] = []

    async def start(index: int) -> GeneratorHandle:
        handle = await GeneratorHandle.launch(config, logs / f"generator-{index}-{len(handles)}")
        handles.append(handle)
        return handle

    async def main() -> None:
        router = await GeneratorRouter.launch(start, 2, deadline_s=120)
        try:
            async with running_store(logs), running_publisher(directory, "float32", "shared_memory", logs) as publisher:
                await publish(publisher, 4, seed=4)
                await router.pull_model_state_dict(4)
                expected = [(await router.generate(prompt, GREEDY))[0].tokens for prompt in PROMPTS]
                sampling = SamplingParams(max_tokens=80, seed=1)
                requests = [asyncio.create_task(router.generate(prompt, sampling, 32)) for prompt in PROMPTS]
                await asyncio.sleep(0.2)
                os.kill(handles[0].mesh.pids[0], signal.SIGKILL)
                groups = await asyncio.gather(*requests)
                assert [len(group) for group in groups] == [32] * len(PROMPTS)
                assert {v for group in groups for c in group for v in c.versions} == {4}
                while router.states != ("serving", "serving"):
                    await asyncio.sleep(0.1)
                assert len(handles) == 3
                assert await handles[2].version() == 4
                again = await asyncio.gather(*(handles[2].generate(prompt, GREEDY) for prompt in PROMPTS))
                assert [samples[0].tokens for samples in again] == expected
        finally:
            await router.stop()
        pids = [pid for handle in handles for pid in handle.mesh.pids]
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < deadline, "processes are left"
            await asyncio.sleep(0.1)

    asyncio.run(main())
