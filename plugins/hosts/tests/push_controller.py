"""A controller with trainer and generator on h1 and h2.

    python -m plugins.hosts.tests.push_controller MODEL LOGS TRANSPORT

It kills the receiving process between two pushes. Each line that it prints is a word and values.
"""

# pyright: reportPrivateUsage=false

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from ownloop_hosts.connections import SETTINGS, apply

apply(SETTINGS)

from controller.handles.store import WeightStore  # noqa: E402
from controller.launching.launcher import Launcher  # noqa: E402
from generator.config import GeneratorConfig  # noqa: E402
from ownloop_hosts.host_groups import WorkerHosts  # noqa: E402
from ownloop_hosts.weights.receivers import WeightReceivers  # noqa: E402
from rl.types import SamplingParams  # noqa: E402
from trainer.config import TrainerConfig  # noqa: E402


async def main(model: Path, logs: Path, transport: str) -> None:
    """Pushes and pulls twice, and a third time after the kill."""
    hosts = WorkerHosts({"trainer": ("tcp://h1:26600",), "generator": ("tcp://h2:26600",)})
    generating = GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=4, weight_transport=transport)
    if transport == "nccl":  # on GPUs
        options = {"enforce_eager": True, "gpu_memory_utilization": 0.3}
        generating = replace(generating, dtype="bfloat16", engine_args=options)
    async with Launcher(logs, hosts) as launcher:
        trainer, generator = await asyncio.gather(
            launcher.trainer(model, TrainerConfig(compute_dtype="float32"), generator=generating),
            launcher.generator(model, generating),
        )
        receivers = next(each._receivers for each in launcher._running if isinstance(each, WeightStore))
        assert isinstance(receivers, WeightReceivers)
        for _ in range(2):
            await generator.pull_model_state_dict(await trainer.push_model_state_dict())
        (running,) = receivers._running.values()
        running.mesh.kill()
        await generator.pull_model_state_dict(await trainer.push_model_state_dict())
        record = launcher._version_records.find(0)
        assert record is not None
        (replaced,) = receivers._running.values()
        print("pushed", record.transport, record.push_index, replaced is not running, flush=True)
        completions = await generator.generate([3, 4, 5], SamplingParams(max_tokens=3))
        print("sampled", *completions[0].versions, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
