"""What a step costs the controller itself, with a trainer and a generator that answer at once.

    python -m benchmarks.controller_scale [--quick | --smoke]

Steps of 0.5, 2 and 8 million sampled tokens go through the real code: rollouts, datums, the checks and the plan of a
batch, metrics and the recording. Answers arrive as pickled bytes, and batches leave as such, as they do through
Monarch. `us_per_token` is CPU time of the process a token, for the largest step; `growth` is the largest step's over
the smallest one's. A task that wakes every millisecond says how long the loop was blocked: `blocked_ms` is
the longest time in which the loop's own thread ran without it, so that other processes on the cores do not count.
"""

import asyncio
import io
import pickle
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Bar, parser, print_result
from controller.handles.generator_handle import VersionRecords
from controller.handles.trainer_handle import TrainerHandle
from controller.processes.mesh import Mesh
from controller.processes.rank import unpickled
from controller.processes.rank_processes import RankProcesses
from controller.runs import Console, LoopConfig, Run, RunFolder
from rl.advantages import group_mean_std
from rl.algorithms.metrics import num_completion_tokens
from rl.protocols import Done, Episode
from rl.rollouts.episodes import groups_to_data, rollout_groups
from rl.rollouts.rendering import Renderer
from rl.system.hardware import without_walking_what_exists
from rl.tiny_models import VOCAB_SIZE, tiny_llama
from rl.types import AdamParams, Completion, Datum, ForwardBackwardOutput, Group, OptimStepOutput, SamplingParams
from trainer.config import TrainerConfig
from trainer.engines.model_check import ModelLimits

GROUP_SIZE = 16
LENGTH = 2048
"""Tokens of a completion."""
US = 1e6


@dataclass(frozen=True, slots=True)
class RandomReward:
    """A problem whose attempts are worth 0 or 1 at random."""

    id: str
    prompt: str = "w4 w5 w6"

    async def start(self) -> Episode:
        """See `rl.protocols.Problem`."""
        return self

    async def reply(self, completion: str) -> Done:
        """See `rl.protocols.Episode`."""
        return Done(reward=float(hash((self.id, len(completion), time.perf_counter_ns())) % 2))


class CannedGenerator:
    """Answers every request with the same completions, unpickled anew."""

    def __init__(self, length: int) -> None:
        rng = np.random.default_rng(0)
        completions = [
            Completion(
                tokens=tuple(rng.integers(3, VOCAB_SIZE, length).tolist()),
                logprobs=tuple(rng.normal(-4.0, 0.5, length).tolist()),
                versions=(0,) * length,
                text="w4 " * length,
                finish_reason="stop",
            )
            for _ in range(GROUP_SIZE)
        ]
        self._answer = pickle.dumps(completions)
        self._reading = asyncio.Lock()

    async def generate(self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1) -> Any:
        """See `rl.protocols.Generator`."""
        del prompt_tokens, sampling
        async with self._reading:  # as one task reads all answers of a process, one after the other
            await asyncio.sleep(0)
            return pickle.loads(self._answer)[:num_samples]


class CannedRank:
    """A trainer's rank that takes batches as bytes and answers with log-probs of the right shape."""

    def packed(self, name: str, arguments: tuple[Any, ...]) -> tuple[bytes, tuple[Any, ...]]:
        """As `Rank.packed`, with the arguments themselves."""
        del name
        return pickle.dumps(arguments), arguments

    def send(self, name: str, arguments: tuple[bytes, tuple[Any, ...]]) -> "asyncio.Future[Any]":
        """As `Rank.send`."""
        return asyncio.ensure_future(self._answer(name, *arguments))

    async def _answer(self, name: str, sent: bytes, arguments: tuple[Any, ...]) -> Any:
        assert sent
        if name == "optim_step":
            return OptimStepOutput(policy_version=1, learning_rate=1e-5, grad_norm=1.0, skipped=False)
        return await unpickled(await asyncio.to_thread(self._output, arguments[1]))

    def _output(self, microbatches: Sequence[Sequence[Datum]]) -> bytes:
        """The work of a rank's own process."""
        datums = [datum for microbatch in microbatches for datum in microbatch]
        output = ForwardBackwardOutput(
            logprobs=tuple(datum.loss_inputs["logprobs"] for datum in datums),
            entropy=None,
            metrics={"loss": 1.0, "num_loss_tokens": float(sum(datum.weights.sum() for datum in datums))},
        )
        return pickle.dumps(output)


class CannedMesh(Mesh):
    """One such rank, without processes."""

    def __init__(self) -> None:
        super().__init__("trainer", None, None, RankProcesses((), (Path("trainer-0.log"),)))
        self._rank = CannedRank()

    def rank(self, index: int) -> Any:
        """See `Mesh.rank`."""
        del index
        return self._rank


@dataclass(slots=True)
class Cost:
    """What a step cost the controller."""

    num_tokens: int
    phases: dict[str, float]
    """CPU seconds by phase."""
    blocked_s: float
    """Longest CPU time of the thread without a turn for other tasks."""

    @property
    def us_per_token(self) -> float:
        """CPU microseconds a sampled token."""
        return US * sum(self.phases.values()) / self.num_tokens


class Heartbeat:
    """Measures how long the event loop's thread runs without a turn for others."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def beat(self) -> None:
        """Runs until it is cancelled."""
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            self.longest_s, last = max(self.longest_s, now - last), now


async def cost_of_a_step(run: Run, handle: TrainerHandle, renderer: Renderer, num_tokens: int, length: int) -> Cost:
    """One step of `grpo` with so many sampled tokens."""
    problems = [RandomReward(id=f"p{index}") for index in range(max(1, num_tokens // length // GROUP_SIZE))]
    generator: Any = CannedGenerator(length)
    heart, phases = Heartbeat(), dict[str, float]()
    await run.before_step(1)
    beating = asyncio.create_task(heart.beat())
    start = time.process_time()

    def lap(name: str) -> None:
        nonlocal start
        phases[name] = time.process_time() - start
        start = time.process_time()

    async with run.clock("generate"):
        groups: list[Group] = await rollout_groups(
            generator, renderer, problems, SamplingParams(max_tokens=length), GROUP_SIZE
        )
    lap("rollouts")
    batch = await groups_to_data(groups, group_mean_std)
    lap("datums")
    async with run.clock("forward_backward"):
        output = await handle.forward_backward(batch, "importance_sampling")
    lap("forward_backward")
    async with run.clock("optim_step"):
        update = await handle.optim_step(AdamParams(learning_rate=1e-5))
    run.end_step(groups, batch, output, update)
    lap("metrics_and_recording")
    await asyncio.sleep(0.01)
    beating.cancel()
    return Cost(num_completion_tokens(groups), phases, heart.longest_s)


def main() -> None:
    """Runs the benchmark and prints its result."""
    options = parser(__doc__, quick="0.5 and 2 million tokens").parse_args()
    length = 64 if options.smoke else LENGTH
    sizes = [2**12, 2**13] if options.smoke else [2**19, 2**21] if options.quick else [2**19, 2**21, 2**23]
    # As around the steps of a run: the garbage collector passes over what exists before them.
    with tempfile.TemporaryDirectory() as scratch, without_walking_what_exists():
        costs = [asyncio.run(_measure(Path(scratch), size, length)) for size in sizes]
    first, last = costs[0], costs[-1]
    for cost in costs:
        shares = ", ".join(f"{name} {US * s / cost.num_tokens:.3f}" for name, s in cost.phases.items())
        print(
            f"{cost.num_tokens} tokens: {cost.us_per_token:.3f} us a token ({shares}), blocked {cost.blocked_s:.3f} s"
        )
    print_result(
        "controller_scale",
        [
            Bar(name="us_per_token", value=last.us_per_token, limit=1.0),
            Bar(name="growth", value=last.us_per_token / first.us_per_token, limit=1.5),
            Bar(name="blocked_ms", value=1e3 * max(cost.blocked_s for cost in costs), limit=50.0),
        ],
        {
            "tokens": last.num_tokens,
            **{f"{name}_us_per_token": US * s / last.num_tokens for name, s in last.phases.items()},
        },
    )


async def _measure(scratch: Path, num_tokens: int, length: int) -> Cost:
    model = scratch / "model"
    if not model.exists():
        tiny_llama(model, max_position_embeddings=4096)
    trainer = TrainerConfig(model=model, max_tokens_per_microbatch=16_384)
    config = LoopConfig(model=str(model), trainer=trainer, num_steps=1, learning_rate=1e-5)
    folder = RunFolder(scratch / f"run-{num_tokens}", {}, min_free_bytes=0)
    handle = TrainerHandle(
        mesh=CannedMesh(),
        config=trainer,
        limits=ModelLimits(vocab_size=VOCAB_SIZE, max_seq_len=4096),
        version_records=VersionRecords(),
        share_prefixes=True,
        pushes=False,
    )
    run = Run(config, folder, Console(io.StringIO()))
    cost = await cost_of_a_step(run, handle, Renderer(model), num_tokens, length)
    folder.close()
    return cost


if __name__ == "__main__":
    main()
