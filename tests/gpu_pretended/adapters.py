"""Adapters in a generator as GPUs get it, on a pretended GPU: two and the model itself in every batch.

    python -m tests.gpu_pretended.adapters [mixture]

As `generator.py`, whose numbers it prints: an adapter is pulled again while requests of all policies are running,
prompts are scored beside samples of other policies, and another model is pulled under the adapters. Expected are
transformers' models with the adapters' products added to their weights.
"""

import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from generator.config import LoRALimits
from rl.lora import LoRAConfig
from rl.types import Completion, SamplingParams
from rl.weights.version import VersionRecord
from tests.gpu_pretended.generator import PROMPT, Trainer, difference, start, tell, tiny_models
from trainer.engines.contract.reference import LocalStore

MIXTURE = "mixture" in sys.argv
"""Of experts, which no adapter changes. Fewer situations are tried then."""
LORA = LoRAConfig(rank=8, alpha=8.0, train_mlp=not MIXTURE)
Completions = Mapping[str | None, list[Completion]]
"""By policies: the model itself, a and b."""


class Expected:
    """What transformers computes for each policy and version."""

    def __init__(self, model: Path) -> None:
        self._adapters: dict[str, dict[int, dict[str, torch.Tensor]]] = {"a": {}, "b": {}}
        self.use(0, model)

    def use(self, version: int, model: Path) -> None:
        """Puts the adapters over another model, which is `version` of it."""
        self._model = model
        self._models: dict[str | None, dict[int, Any]] = {None: {version: AutoModelForCausalLM.from_pretrained(model)}}
        for name, versions in self._adapters.items():
            self._models[name] = {version: self._merged(adapter) for version, adapter in versions.items()}

    def add(self, name: str, version: int) -> Path:
        """Makes an adapter, in a file."""
        from tests.generator.adapted import random_adapter  # loads vLLM

        seed = len(self._adapters["a"]) + len(self._adapters["b"])
        adapter = {key: x.bfloat16().float() for key, x in random_adapter(self._model, seed, LORA).items()}
        self._adapters[name][version] = adapter
        self._models[name][version] = self._merged(adapter)
        save_file(adapter, file := self._model.with_name(f"{name}-{version}.safetensors"))
        return file

    def differences(self, completions: Completions) -> list[float]:
        """Of each completion."""
        return [difference(self._models[name], PROMPT, each) for name, found in completions.items() for each in found]

    def difference_of_prompts(self, completions: Completions) -> float:
        """The largest mean difference of a prompt's log-probs."""
        largest, tokens = 0.0, torch.tensor([PROMPT])
        for name, (completion, *_) in completions.items():
            model = self._models[name][completion.versions[0]]
            with torch.no_grad():
                expected = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
            largest = max(largest, float((expected - torch.tensor(completion.prompt_logprobs)).abs().mean()))
        return largest

    def _merged(self, adapter: dict[str, torch.Tensor]) -> Any:
        from tests.generator.adapted import merged

        return merged(self._model, adapter, LORA)


async def rehearse(engine: Any, trainer: Trainer, models: Sequence[Path]) -> Mapping[str, float]:
    """The situations, one after the other."""
    found: dict[str, float] = {}
    expected = Expected(models[0])

    async def sampled(num_tokens: int = 12, **options: Any) -> Completions:
        sampling = SamplingParams(max_tokens=num_tokens, seed=1, ignore_eos=True, **options)
        policies = (None, "a", "b")
        answers = await asyncio.gather(*(engine.generate(PROMPT, sampling, 2, policy=name) for name in policies))
        return dict(zip(policies, answers, strict=True))

    async def pull(record: VersionRecord) -> None:
        await engine.update_weights(record, LocalStore(), mode="inflight")

    def compare(situation: str, completions: Completions, *versions: set[int]) -> None:
        found[situation] = max(expected.differences(completions))
        found[f"versions_wrong_{situation}"] = sum(
            {*each.versions} != wanted
            for wanted, of_policy in zip(versions, completions.values(), strict=True)
            for each in of_policy
        )

    for name in ("a", "b"):
        await pull(trainer.push(1, expected.add(name, 1), name))
    compare("in_one_batch", await sampled(), {0}, {1}, {1})
    if MIXTURE:
        await pull(trainer.push(1, models[1] / "model.safetensors"))
        expected.use(1, models[1])
        compare("over_another_model", await sampled(), {1}, {1}, {1})
        return found
    others = asyncio.create_task(sampled())
    found["prompts"] = expected.difference_of_prompts(await sampled(2, prompt_logprobs=True))
    compare("beside_scored_prompts", await others, {0}, {1}, {1})

    record, running = trainer.push(2, expected.add("a", 2), "a"), asyncio.create_task(sampled(40))
    while engine.num_unfinished < 3:
        await asyncio.sleep(0.01)
    await pull(record)
    compare("in_flight", await running, {0}, {1, 2}, {1})

    await pull(trainer.push(1, models[1] / "model.safetensors"))
    expected.use(1, models[1])
    compare("over_another_model", await sampled(), {1}, {2}, {1})
    await engine.sleep()
    await engine.wake_up()
    compare("after_sleep", await sampled(), {1}, {2}, {1})
    return found


def main() -> int:
    """Starts both processes."""
    with tempfile.TemporaryDirectory() as folder:
        models = tiny_models(folder, mixture=MIXTURE)
        trainer = Trainer(LORA)
        engine = start(models[0], lora=LoRALimits(max_rank=LORA.rank, max_adapters=2, max_loaded=4))
        found = dict(asyncio.run(rehearse(engine, trainer, models)))
        found["not_v2"] = float(not engine.llm.vllm_config.use_v2_model_runner)
        trainer.end()
        engine.close()
    return tell(found)


if __name__ == "__main__":
    sys.exit(main())
