"""Prompts of several adapters that are scored in one step, each compared with merged weights."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from generator.config import LoRALimits
from rl.lora import Policy
from rl.types import SamplingParams
from tests.generator.adapted import merged, pull_adapter, random_adapter
from tests.generator.engines import EngineFactory
from tests.generator.published import PROMPTS
from tests.generator.served_models import served_llama

pytestmark = pytest.mark.vllm

SCORED, PLAIN = SamplingParams(max_tokens=2, prompt_logprobs=True), SamplingParams(max_tokens=8)


async def test_a_prompt_is_scored_with_its_own_adapter(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine = build_engine(directory, "float32", lora=LoRALimits(max_rank=8, max_adapters=2, max_loaded=2))
    adapters = {"one": random_adapter(directory, 1), "two": random_adapter(directory, 2)}
    models = {None: AutoModelForCausalLM.from_pretrained(directory)}
    models |= {name: merged(directory, adapter) for name, adapter in adapters.items()}

    for name, adapter in adapters.items():
        await pull_adapter(engine, name, 1, adapter)
    calls: list[tuple[Policy, int]] = [(policy, i) for i in range(len(PROMPTS)) for policy in (None, "one", "two")]
    # Half of them sample as well, so that the samples' rows are other rows than those of the prompts.
    others = [engine.generate(PROMPTS[i], PLAIN, policy=policy) for policy, i in calls[::2]]
    scored = await asyncio.gather(*(engine.generate(PROMPTS[i], SCORED, policy=p) for p, i in calls), *others)
    for (policy, i), (completion,) in zip(calls, scored, strict=False):
        tokens = torch.tensor([[*PROMPTS[i]]])
        assert not isinstance(policy, tuple)
        with torch.no_grad():
            expected = models[policy](tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        assert completion.prompt_logprobs is not None
        assert (torch.tensor(completion.prompt_logprobs) - expected).abs().max() < 5e-5


def test_prompts_are_scored_in_the_order_of_scheduling() -> None:
    from generator._compat import patch_prompt_logprobs  # loads vLLM

    names, scored = [f"request-{index}" for index in range(50)], list[str]()
    request = SimpleNamespace(prompt_token_ids=[1, 2, 3], num_computed_tokens=0, lora_request=None)
    runner: Any = SimpleNamespace(num_prompt_logprobs=dict.fromkeys(names, 0), requests=dict.fromkeys(names, request))
    runner._set_active_loras = lambda *_: None
    runner._get_prompt_logprobs_dict = lambda *_: scored.extend(runner.num_prompt_logprobs) or {}
    patch_prompt_logprobs(runner)
    runner._get_prompt_logprobs_dict(torch.zeros(150, 4), dict.fromkeys(reversed(names[5:]), 3))
    assert scored == names[5:]


def test_gpu_logic_rows_of_prompts_have_their_own_adapters() -> None:
    """vLLM's runner for GPUs scores a step's tokens in pieces, which begin and end within prompts."""
    from generator._compat import patch_prompt_logprobs  # loads vLLM

    active, pieces = list[Any](), list[tuple[Any, ...]]()
    batch = SimpleNamespace(req_ids=["a", "b", "c"], idx_mapping_np=[4, 0, 2], num_scheduled_tokens=[3, 1, 4])

    def inputs(names: list[str], states: list[int], tokens: list[int]) -> tuple[Any, ...]:
        numbers = {4: 7, 0: 0, 2: 9}
        of_tokens = tuple(numbers[state] for state, size in zip(states, tokens, strict=True) for _ in range(size))
        return (), of_tokens, {*names}

    def scored(compute_logits: Any, hidden: torch.Tensor, *_: Any) -> dict[str, Any]:
        return {"logits": torch.cat([compute_logits(part) for part in hidden.split(3)])}

    runner: Any = SimpleNamespace(prompt_logprobs_worker=SimpleNamespace(compute_prompt_logprobs=scored))
    runner.lora_state = SimpleNamespace(make_lora_inputs=inputs)
    runner._set_active_loras = lambda *mapping: active.append(mapping)
    patch_prompt_logprobs(runner)

    def logits(rows: torch.Tensor) -> torch.Tensor:
        pieces.append(active[-1])
        return 2 * rows

    hidden = torch.arange(8.0)
    found = runner.prompt_logprobs_worker.compute_prompt_logprobs(logits, hidden, batch, None)["logits"]
    assert torch.equal(found, 2 * hidden)
    everyone = {"a", "b", "c"}
    rows = ((7, 7, 7), (0, 9, 9), (9, 9))
    assert pieces == [(row, row, everyone) for row in rows]
