"""Two replicas in processes of their own sample with drafts what one engine samples without, seed by seed."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from controller.launching.launcher import Launcher
from generator.config import GeneratorConfig, Speculation
from rl.types import Completion, SamplingParams
from tests.generator.served_models import served_llama
from tests.made_up_plugin import write_plugin

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_two_replicas_sample_with_drafts_what_one_samples_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plugin(tmp_path / "site", {"generators.always": "plugins.speculation.tests.drafting:AlwaysDrafts"})
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}")
    model, sampling = served_llama(tmp_path / "model", tied=True), SamplingParams(max_tokens=60, ignore_eos=True)
    plain = GeneratorConfig(dtype="float32", max_model_len=128)
    drafting = replace(plain, num_replicas=2, speculation=Speculation(source="always", min_chance=0.0))

    async def main(config: GeneratorConfig) -> list[list[Completion]]:
        async with Launcher(tmp_path / "logs") as launcher:
            generator = await launcher.generator(model, config)
            requests = [(list(range(3 + i % 4, 20)), replace(sampling, seed=i // 4)) for i in range(8)]
            await asyncio.gather(*(generator.generate(*request, 2) for request in requests))
            return await asyncio.gather(*(generator.generate(*request, 2) for request in requests))  # known by now

    expected, found = asyncio.run(main(plain)), asyncio.run(main(drafting))
    for group, others in zip(found, expected, strict=True):
        for one, other in zip(group, others, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            assert replace(one, logprobs=other.logprobs) == other
