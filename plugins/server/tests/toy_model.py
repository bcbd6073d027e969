"""A trainer and a generator of a toy model, small enough to run a whole Tinker script in milliseconds.

The model is a table of next-token logits per token, so its log-probs can be computed by hand. Losses are the real ones.
"""

import asyncio
import itertools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from controller.processes.errors import MeshError
from controller.runs.restarts import RestartLimit
from ownloop_server.recovery import RecoveringAdapter, RestartingTrainer, Snapshots
from ownloop_server.served_models import ServedModel
from rl.data.batching import validate_batch
from rl.lora import LivePolicy, LoRAConfig, Policy
from rl.losses import LossInputs, get_loss
from rl.protocols import Trainer
from rl.types import AdamParams, Completion, Datum, ForwardBackwardOutput, OptimStepOutput, PullMode, SamplingParams

VOCAB = 16
END = 1
CONTEXT = 64


class ToyTrainer:
    """An adapter: a table that is added to the base's, which is zero. Implements `Trainer`."""

    def __init__(self, name: str, config: LoRAConfig, host: "ToyHost") -> None:
        """A new one changes nothing."""
        self.name, self.config, self.host = name, config, host
        self.life = host.life
        self.table = torch.zeros(VOCAB, VOCAB, dtype=torch.float64, requires_grad=True)
        self.version = 0
        self.moments = [torch.zeros_like(self.table), torch.zeros_like(self.table)]

    async def policy_version(self) -> int:
        self.host.check_alive(self)
        return self.version

    def _logprobs(self, datum: Datum) -> torch.Tensor:
        logits = self.table[torch.from_numpy(datum.tokens)] / datum.temperature
        if (kept := datum.kept) is not None:
            cut_off = np.tile(kept.counts[:, None] > 0, VOCAB)
            cut_off[np.repeat(np.arange(len(kept)), kept.counts), kept.ids] = False
            logits = logits.masked_fill(torch.from_numpy(cut_off), -1e30)
        logprobs = torch.log_softmax(logits, -1)
        return logprobs.gather(-1, torch.from_numpy(datum.loss_inputs["target_tokens"])[:, None])[:, 0]

    async def forward_backward(
        self, batch: Sequence[Datum], loss: str | Callable[..., Any], loss_config: Mapping[str, object] | None = None
    ) -> ForwardBackwardOutput:
        await self.host.work(self, "forward_backward")
        checked = get_loss(loss, loss_config)
        validate_batch(batch, required_inputs=checked.required_inputs, vocab_size=VOCAB, max_seq_len=CONTEXT)
        logprobs = torch.cat([self._logprobs(datum) for datum in batch])
        arrays = {n: torch.from_numpy(np.concatenate([d.loss_inputs[n] for d in batch])) for n in batch[0].loss_inputs}
        lengths = [len(datum.tokens) for datum in batch]
        index = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
        value, metrics = checked(logprobs, None, LossInputs(arrays=arrays, datum_index=index, num_datums=len(lengths)))
        value.backward()
        return ForwardBackwardOutput(
            logprobs=tuple(
                np.where(d.scored, p.detach().float().numpy(), 0)  # as `ForwardBackwardOutput` says
                for d, p in zip(batch, logprobs.split(lengths), strict=True)
            ),
            entropy=None,
            metrics={"loss": value.item(), **{name: metric.item() for name, metric in metrics.items()}},
        )

    async def forward(self, batch: Sequence[Datum], *, entropy: bool = False) -> ForwardBackwardOutput:
        await self.host.work(self, "forward")
        validate_batch(batch, vocab_size=VOCAB, max_seq_len=CONTEXT)
        logprobs = tuple(np.where(d.scored, self._logprobs(d).detach().float().numpy(), 0) for d in batch)
        return ForwardBackwardOutput(logprobs=logprobs, entropy=None, metrics={})

    async def optim_step(self, params: AdamParams, grad_scale: float = 1.0) -> OptimStepOutput:
        await self.host.work(self, "optim_step")
        self.host.steps.append(params)
        # tests of the order of calls step without a gradient, which a real trainer refuses
        gradient = self.table.grad if self.table.grad is not None else torch.zeros_like(self.table)
        norm = float(gradient.norm())
        if params.grad_clip_norm > 0:
            gradient = gradient * min(1.0, params.grad_clip_norm / (norm + 1e-6))
        self.version += 1
        first, second = self.moments
        first.mul_(params.beta1).add_(gradient, alpha=1 - params.beta1)
        second.mul_(params.beta2).addcmul_(gradient, gradient, value=1 - params.beta2)
        update = first / (1 - params.beta1**self.version)
        update = update / ((second / (1 - params.beta2**self.version)).sqrt() + params.eps)
        with torch.no_grad():
            self.table.mul_(1 - params.learning_rate * params.weight_decay).sub_(params.learning_rate * update)
        self.table.grad = None
        return OptimStepOutput(
            policy_version=self.version, learning_rate=params.learning_rate, grad_norm=norm, skipped=False
        )

    async def zero_grad(self) -> None:
        self.table.grad = None

    async def to(self, device: str, *, model: bool = False, gradients: bool = False, optimizer: bool = False) -> None:
        raise NotImplementedError

    async def push_model_state_dict(self) -> int:
        self.host.check_alive(self)
        self.host.pushed[self.name, self.version] = self.table.detach().clone()
        return self.version

    async def save_checkpoint(self, path: Path, *, asynchronous: bool = False, keep_last: int | None = None) -> None:
        self.host.check_alive(self)
        shutil.rmtree(path, ignore_errors=True)  # a checkpoint of ours may be replaced
        path.mkdir(parents=True)
        state = {"table": self.table.tolist(), "moments": [m.tolist() for m in self.moments], "version": self.version}
        (path / "state.json").write_text(json.dumps(state))

    async def wait_for_checkpoint(self) -> None:
        return

    async def load_checkpoint(self, path: Path, *, weights_only: bool = False) -> int:
        self.host.check_alive(self)
        state = json.loads((path / "state.json").read_text())
        with torch.no_grad():
            self.table.copy_(torch.tensor(state["table"]))
        self.table.grad = None
        saved = [torch.tensor(moment, dtype=torch.float64) for moment in state["moments"]]
        self.moments = [torch.zeros_like(moment) for moment in saved] if weights_only else saved
        self.version = 0 if weights_only else state["version"]
        return self.version

    async def export_hf(self, path: Path) -> None:
        raise NotImplementedError

    async def adapter(self, name: str, config: LoRAConfig) -> "ToyTrainer":
        return await self.host.adapter(name, config)

    async def export_peft(self, path: Path) -> None:
        (path / "inner").mkdir(parents=True)
        (path / "adapter_config.json").write_text("{}")
        (path / "inner" / "table.json").write_text(json.dumps(self.table.tolist()))

    async def drop(self) -> None:
        self.host.check_alive(self)
        del self.host.adapters[self.name]


class ToyGenerator:
    """Samples from the tables that were pulled. Implements `Generator`."""

    def __init__(self, host: "ToyHost") -> None:
        """Knows only the base."""
        self.host = host
        self.tables: dict[Policy, torch.Tensor] = {None: torch.zeros(VOCAB, VOCAB, dtype=torch.float64)}

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1, *, policy: Policy = None
    ) -> list[Completion]:
        await asyncio.sleep(0)
        if policy not in self.tables:
            raise ValueError(f"policy is {policy!r}, which is not known")
        logprobs = torch.log_softmax(self.tables[policy], -1)
        random = np.random.default_rng(sampling.seed)
        pairs = list(itertools.pairwise(prompt_tokens))
        scored = tuple(float(logprobs[a, b]) for a, b in pairs) if sampling.prompt_logprobs else None
        best = [logprobs[a].topk(sampling.topk_prompt_logprobs) for a, _ in pairs]
        topk = tuple(tuple(zip(row.indices.tolist(), row.values.tolist(), strict=True)) for row in best)
        samples = [self._sample(logprobs, prompt_tokens[-1], sampling, random, scored) for _ in range(num_samples)]
        return [replace(sample, topk_prompt_logprobs=topk) for sample in samples]

    def _sample(
        self,
        logprobs: torch.Tensor,
        token: int,
        sampling: SamplingParams,
        random: np.random.Generator,
        scored: tuple[float, ...] | None,
    ) -> Completion:
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (END,))}
        tokens: list[int] = []
        while len(tokens) < sampling.max_tokens and not (tokens and tokens[-1] in ends):
            row = logprobs[tokens[-1] if tokens else token].exp().numpy()
            tokens.append(int(random.choice(VOCAB, p=row / row.sum())))
        rows = itertools.pairwise([token, *tokens])
        return Completion(
            tokens=tuple(tokens),
            logprobs=tuple(float(logprobs[a, b]) for a, b in rows),
            versions=(0,) * len(tokens),
            text="",
            finish_reason="stop" if tokens[-1] in ends else "length",
            prompt_logprobs=scored,
        )

    async def pull_model_state_dict(
        self,
        version: int,
        *,
        policy: LivePolicy = None,
        frozen: bool = False,
        mode: PullMode = "drain",
        keep_prefix_cache: bool = False,
    ) -> None:
        assert policy is not None, "the base never changes"
        self.tables[(policy, version) if frozen else policy] = self.host.pushed[policy, version]

    async def drop_policy(self, policy: Policy) -> None:
        del self.tables[policy]


class ToyProcess:
    """A trainer's process, of which another takes the place when it dies."""

    def __init__(self, host: "ToyHost") -> None:
        """The process that runs now."""
        self._host, self._life = host, host.life

    async def adapter(self, name: str, config: LoRAConfig) -> ToyTrainer:
        """Makes an adapter."""
        if self._life != self._host.life:
            raise MeshError("trainer", "rank 0 died", rank=0)
        return await self._host.adapter(name, config)


class ToyHost:
    """All adapters of the toy model, and what happened to them."""

    def __init__(self) -> None:
        """No adapters."""
        self.adapters: dict[str, ToyTrainer] = {}
        self.pushed: dict[tuple[str, int], torch.Tensor] = {}
        self.generator = ToyGenerator(self)
        self.calls: list[tuple[str, str]] = []
        self.steps: list[AdamParams] = []
        self.asked: list[str] = []  # the trainers of all calls, in the order in which they came
        self.holds = False  # while it is set, no call is executed
        self.life = 1
        self.dies_in: list[int] = []
        """After how many more calls of trainers their process dies, for each of its lives."""
        self._turn = asyncio.Lock()

    async def work(self, trainer: ToyTrainer, verb: str) -> None:
        """Notes a call; one call runs at a time."""
        self.asked.append(trainer.name)
        async with self._turn:
            while self.holds:
                await asyncio.sleep(0.01)
            self.check_alive(trainer)
            self.calls.append((trainer.name, verb))
            await asyncio.sleep(0)

    def check_alive(self, trainer: ToyTrainer | None) -> None:
        """Raises `MeshError` if the process that holds a trainer has died, or dies now."""
        if self.dies_in and self.life > 0:
            self.dies_in[0] -= 1
            if self.dies_in[0] < 0:
                del self.dies_in[0]
                self.life = -self.life
        if self.life < 0 or (trainer is not None and trainer.life != self.life):
            raise MeshError("trainer", "rank 0 died", rank=0)

    async def start_again(self) -> "ToyProcess":
        """Another process takes the place of one that died; it has no adapters."""
        assert self.life < 0, "it runs"
        self.life = 1 - self.life
        self.adapters.clear()
        return ToyProcess(self)

    async def adapter(self, name: str, config: LoRAConfig) -> ToyTrainer:
        """Makes an adapter."""
        self.check_alive(None)
        assert name not in self.adapters, "names are not used twice"
        self.adapters[name] = ToyTrainer(name, config, self)
        return self.adapters[name]

    def restarting(self, max_restarts: int = 100) -> RestartingTrainer:
        """The trainer, started again whenever it has died."""
        limit = RestartLimit(SimpleNamespace(max_restarts=max_restarts, restart_window_minutes=1.0))
        return RestartingTrainer(ToyProcess(self), self.start_again, limit, lambda _: None)

    def served(self, folder: Path, max_snapshots: int = 8) -> ServedModel:
        """The model as the gateway sees it. `folder` is for recovery points."""
        trainer = self.restarting()

        async def adapter(name: str, config: LoRAConfig) -> Trainer:
            return await RecoveringAdapter.make(trainer, name, config, folder / name)

        return ServedModel(
            names=("toy", "toy/alias"),
            tokenizer="toy",
            adapter=adapter,
            generator=self.generator,
            max_rank=32,
            max_context=CONTEXT,
            vocab_size=VOCAB,
            snapshots=Snapshots(self.generator, max_snapshots),
        )
