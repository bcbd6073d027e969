"""Families: after a step, a push and a pull, vLLM's log-probs are the trainer's."""

from pathlib import Path

import pytest

from ownloop_families.tiny import TINY_FAMILIES as MODELS
from tests.generator.engines import EngineFactory
from tests.generator.test_architectures import assert_logprobs_are_the_trainers

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


# Mixtures come first, because the first engine decides whether vLLM has a group for experts. Qwen3.5 needs a process
# of its own, as in `test_family_pulls`.
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "gemma4"])
def test_a_pulled_step_has_the_trainers_logprobs(
    tmp_path: Path, build_engine: EngineFactory, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_logprobs_are_the_trainers(MODELS[name][1](tmp_path / "model"), build_engine, monkeypatch)
