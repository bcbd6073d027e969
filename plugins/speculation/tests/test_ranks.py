"""Two tensor-parallel ranks in real processes draft the same, and pulls bring what drafts did into the metrics."""

import asyncio
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from generator.config import Speculation
from rl.system.timeline import collect_gauges
from rl.types import Completion, SamplingParams
from tests.e2e.weight_meshes import publish, running_generator, running_publisher, running_store
from tests.generator.served_models import served_llama
from tests.made_up_plugin import write_plugin

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_two_ranks_sample_with_drafts_what_they_sample_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"generators.always": "plugins.speculation.tests.drafting:AlwaysDrafts"}
    write_plugin(tmp_path / "site", entries)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}")
    directory, logs = served_llama(tmp_path / "model", tied=True), tmp_path / "logs"
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt, sampling = list(range(3, 20)), SamplingParams(max_tokens=60, seed=4, ignore_eos=True)

    async def main() -> None:
        take, found = collect_gauges(), list[list[Completion]]()
        async with (
            running_store(logs) as store,
            running_publisher(store, directory, "float32", "auto", logs) as weights,
        ):
            for speculation in (None, Speculation(source="always", min_chance=0.0)):
                layout = {"tensor_parallel": 2, "speculation": speculation}
                async with running_generator(directory, "float32", logs, store, **layout) as generator:
                    for _ in range(3):
                        found.append(await generator.generate(prompt, sampling, 2))
                    await publish(weights, 2, seed=2)
                    await generator.pull_model_state_dict(2)
        load = take()
        assert load["engine_accepted_tokens"] > 30
        assert load["engine_tokens_per_step"] > 1.2
        for group in found[1:]:
            for one, other in zip(group, found[0], strict=True):
                assert one.tokens == other.tokens
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        for each in found[-1]:
            with torch.no_grad():
                logits = reference(torch.tensor([[*prompt, *each.tokens]])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1)[range(60), each.tokens]
            assert each.logprobs == pytest.approx(expected.tolist(), abs=1e-4)

    asyncio.run(main())
