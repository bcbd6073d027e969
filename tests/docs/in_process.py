"""A trainer and a generator that run in the test's own process, in place of the processes that `launch` starts.

The mathematics is real: the trainer is an engine on a tiny model, and the generator samples from the weights that the
trainer pushed. Only the processes, the transport and vLLM are missing, so that a block of a page runs in a second.
"""

import asyncio
import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from controller.handles.adapters import POLICY, BoundGenerator
from controller.launching.launcher import Launcher
from generator.config import GeneratorConfig
from rl.lora import LivePolicy, Policy
from rl.system.timeline import gauge
from rl.tiny_models import tiny_llama
from rl.types import AdamParams, Completion, Datum, ForwardBackwardOutput, OptimStepOutput, PullMode, SamplingParams
from tests.trainer.engine_trainer import EngineTrainer
from trainer.config import TrainerConfig

_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
_Weights = dict[tuple[LivePolicy, int], dict[str, torch.Tensor]]


def tiny_chat_model(path: Path) -> Path:
    """Writes a random Llama of 64 words whose tokenizer has a chat template."""
    tiny_llama(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    return path


class InProcessTrainer(EngineTrainer):
    """Pushes into a dictionary: policy and version -> weights by Hugging Face name. Those of an adapter are merged."""

    def __init__(self, config: TrainerConfig, published: _Weights) -> None:
        options = {each.name: getattr(config, each.name) for each in fields(config) if each.name != "compute_dtype"}
        super().__init__(options.pop("model"), **options)
        self._published = published

    async def forward_backward(
        self, batch: Sequence[Datum], loss: Any, loss_config: Mapping[str, object] | None = None
    ) -> ForwardBackwardOutput:
        """See `rl.protocols.Trainer`. The device can do a thousand million operations a second."""
        output = await super().forward_backward(batch, loss, loss_config)
        peak = {"peak_flops": 1e9 * output.metrics["seconds_engine_max"]}
        return replace(output, metrics={**output.metrics, **peak})

    async def optim_step(self, params: AdamParams, grad_scale: float = 1.0) -> OptimStepOutput:
        """See `rl.protocols.Trainer`. Pushes a thousand million bytes a second."""
        output = await super().optim_step(params, grad_scale)
        rate = {"push_bytes_per_s": 1e9} if any(name == (self._name or None) for name, _ in self._published) else {}
        return replace(output, metrics={**output.metrics, **rate})

    async def push_model_state_dict(self) -> int:
        if self.engine is self._base:
            weights = {name: weight.detach().clone() for name, weight in self.engine.hf_parameters()}
        else:
            with tempfile.TemporaryDirectory() as folder:
                self.engine.export_hf(Path(folder) / "merged", torch.float32)
                weights = load_file(Path(folder) / "merged" / "model.safetensors")
        self._published[self._name or None, self.engine.policy_version] = weights
        return self.engine.policy_version


class InProcessGenerator:
    """Samples with transformers: one token of all samples of a prompt at a time, without a cache."""

    def __init__(self, model: Path, published: _Weights) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model)
        self._model.lm_head.weight = torch.nn.Parameter(self._model.lm_head.weight.detach().clone())
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._published = published
        weights = {name: weight.clone() for name, weight in self._model.state_dict().items()}
        self._served: dict[Policy, tuple[int, dict[str, torch.Tensor]]] = {None: (0, weights)}

    async def pull_model_state_dict(
        self,
        version: int,
        *,
        policy: LivePolicy = None,
        frozen: bool = False,
        mode: PullMode = "drain",
        keep_prefix_cache: bool = False,
    ) -> None:
        weights = self._published[policy, version]
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])  # the embedding's, where it is tied
        self._served[(policy, version) if frozen else policy] = version, {**weights, "lm_head.weight": head}
        names = ("engine_running_max", "engine_waiting_max", "engine_kv_use_max", "engine_prefix_hits")
        gauge("generator", dict.fromkeys(names, 0.5))

    async def drop_policy(self, policy: Policy) -> None:
        del self._served[policy]

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1, *, policy: Policy = None
    ) -> list[Completion]:
        """See `rl.protocols.Generator`. Knows temperature, `max_tokens` and `seed`."""
        await asyncio.sleep(0)
        version, weights = self._served[policy]
        self._model.load_state_dict(weights)
        seeds = [((sampling.seed or 0) + index) % (1 << 63) for index in range(num_samples)]
        sequences = self._sample(prompt_tokens, sampling, [torch.Generator().manual_seed(seed) for seed in seeds])
        return [self._completion(sequence, version) for sequence in sequences]

    @torch.no_grad()
    def _sample(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, randoms: Sequence[torch.Generator]
    ) -> list[list[tuple[int, float]]]:
        """Tokens with their log-probs, one sequence for each source of randomness, `max_tokens` long."""
        rows = torch.tensor([prompt_tokens] * len(randoms))
        sequences: list[list[tuple[int, float]]] = [[] for _ in randoms]
        for _ in range(sampling.max_tokens):
            logits = self._model(rows).logits[:, -1] / (sampling.temperature or 1.0)
            distributions = torch.log_softmax(logits, dim=-1)
            new: list[int] = []
            for sequence, distribution, random in zip(sequences, distributions, randoms, strict=True):
                greedy = sampling.temperature == 0
                token = int(distribution.argmax() if greedy else distribution.exp().multinomial(1, generator=random))
                sequence.append((token, float(distribution[token])))
                new.append(token)
            rows = torch.cat([rows, torch.tensor(new)[:, None]], dim=1)
        return sequences

    def _completion(self, sequence: Sequence[tuple[int, float]], version: int) -> Completion:
        """A sequence up to the end token, if it has one."""
        tokens = tuple(token for token, _ in sequence)
        ended = self._tokenizer.eos_token_id in tokens
        tokens = tokens[: tokens.index(self._tokenizer.eos_token_id) + 1] if ended else tokens
        return Completion(
            tokens=tokens,
            logprobs=tuple(logprob for _, logprob in sequence[: len(tokens)]),
            versions=(version,) * len(tokens),
            text=self._tokenizer.decode(tokens, skip_special_tokens=True),
            finish_reason="stop" if ended else "length",
        )


def launch_in_process(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Makes `Launcher` and `launch` start no processes, and `smollm2-135m-instruct` a tiny model in `folder`.

    Curves are not drawn.
    """
    tiny_chat_model(folder / "models" / "smollm2-135m-instruct")
    monkeypatch.setenv("OWNLOOP_CACHE", str(folder))
    published: _Weights = {}
    bases: list[tuple[TrainerConfig, InProcessTrainer]] = []

    def trainer(self: Launcher, model: Path, config: TrainerConfig, **options: Any) -> asyncio.Task[Any]:
        base = InProcessTrainer(replace(config, model=model), published)
        bases.append((config, base))
        return asyncio.create_task(_made(base) if config.lora is None else base.adapter(POLICY, config.lora))

    def reference(self: Launcher, model: Path, config: TrainerConfig, **options: Any) -> asyncio.Task[Any]:
        if config.lora is None:
            return trainer(self, model, config)
        return asyncio.create_task(_made([base for trained, base in bases if trained == config][-1]))

    def generator(self: Launcher, model: Path, config: GeneratorConfig, **options: Any) -> asyncio.Task[Any]:
        made = InProcessGenerator(model, published)
        return asyncio.create_task(_made(made if config.lora is None else BoundGenerator(made, POLICY)))

    monkeypatch.setattr(Launcher, "trainer", trainer)
    monkeypatch.setattr(Launcher, "reference", reference)
    monkeypatch.setattr(Launcher, "generator", generator)
    draw_no_curves(monkeypatch)


def draw_no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With so small a model they would take most of a run's time."""
    if importlib.util.find_spec("ownloop_report"):
        monkeypatch.setattr("ownloop_report.plot.plot_curve", lambda *_, **__: None)


async def _made(made: Any) -> Any:
    return made
