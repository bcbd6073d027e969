"""A trainer's ranks that answer from a table: no processes, no model."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from controller.handles.trainer_handle import TrainerHandle
from controller.processes.mesh import Mesh
from controller.processes.rank_processes import RankProcesses
from rl.tiny_models import tiny_llama
from rl.types import Datum, ForwardBackwardOutput, OptimStepOutput
from rl.weights.version import VersionRecords
from trainer.config import TrainerConfig
from trainer.engines.model_check import check_model


class FakeRank:
    """Answers with each datum's own tokens, and records its calls in order."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.calls: list[str] = []
        self.policies: list[str | None] = []
        self.microbatches: list[list[list[Datum]]] = []
        self.arguments: tuple[Any, ...] = ()
        self.error: Exception | None = None

    def packed(self, verb: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments as they are."""
        del verb
        return args

    def send(self, verb: str, arguments: tuple[Any, ...]) -> "asyncio.Future[Any]":
        """Notes the call and answers it."""
        self.calls.append(verb)
        self.policies.append(arguments[0])
        return asyncio.ensure_future(self._answer(verb, *arguments[1:]))

    async def _answer(self, name: str, *args: Any) -> Any:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        if name not in ("optim_step", "forward_backward", "forward"):
            return None
        if name == "optim_step":
            return OptimStepOutput(policy_version=7, learning_rate=args[0].learning_rate, grad_norm=1.0, skipped=False)
        self.microbatches.append(args[0])
        self.arguments = args[1:]
        arrays = tuple(d.tokens.astype(np.float32) for microbatch in args[0] for d in microbatch)
        metrics = {"loss": float(sum(map(len, arrays))), "ratio_max": float(self.index)}
        entropy = arrays if name == "forward" and args[1] else None
        return ForwardBackwardOutput(logprobs=arrays, entropy=entropy, metrics=metrics)


class FakeMesh(Mesh):
    """A mesh without processes."""

    is_free = True

    def __init__(self, num_ranks: int) -> None:
        super().__init__("trainer", None, None, RankProcesses((), ()))
        self.ranks = [FakeRank(index) for index in range(num_ranks)]

    def rank(self, index: int) -> FakeRank:
        return self.ranks[index]

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_calls(self) -> int:
        return sum(len(rank.calls) for rank in self.ranks)


def make(tmp_path: Path, **layout: int) -> tuple[TrainerHandle, FakeMesh]:
    config = TrainerConfig(model=tiny_llama(tmp_path / "model"), max_tokens_per_microbatch=20, **layout)  # pyright: ignore[reportArgumentType]
    mesh = FakeMesh(config.num_ranks)
    return handle_of(mesh, config), mesh


def handle_of(mesh: FakeMesh, config: TrainerConfig) -> TrainerHandle:
    return TrainerHandle(
        mesh=mesh,
        config=config,
        limits=check_model(config),
        version_records=VersionRecords(),
        share_prefixes=False,
        pushes=True,
        max_lora_rank=32,
    )


def random_batch(lengths: Sequence[int]) -> list[Datum]:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 64, length) for length in lengths]
    ones = [np.ones(length, np.float32) for length in lengths]
    return [
        Datum(tokens=a, loss_inputs={"target_tokens": a, "logprobs": -o, "advantages": o})
        for a, o in zip(arrays, ones, strict=True)
    ]
