"""GRPO on a tiny random model of each family: it learns, both sides agree, and a killed run continues to the same end.

Covers: trainer/families/, controller/loops/grpo.py
"""

from pathlib import Path

import pytest

from tests.e2e.cli_runs import finished, killed_and_resumed, metric_rows, model_hash

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RECIPE = str(Path(__file__).with_name("tiny_families.py"))
FAMILIES = {
    "gpt_oss,torchtitan": 1e-5,
    "gpt_oss,fsdp2": 1e-5,
    "deepseek_v3,torchtitan": 1e-5,
    "deepseek_v3,fsdp2": 1e-5,
    "glm4_moe,torchtitan": 1e-5,
    "glm4_moe,fsdp2": 1e-5,
    "gemma2,fsdp2": 1e-5,
    "gemma4,fsdp2": 1e-5,
    "olmo3,fsdp2": 1e-5,
    "seed_oss,fsdp2": 1e-5,
    "smollm3,fsdp2": 1e-5,
    "qwen3_5,fsdp2": 5e-2,
    "qwen3_5_moe,fsdp2": 5e-2,
}
"""Family and engine, and the most that trainer and generator may differ in the mean log-prob of a token."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_learns_and_resumes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWNLOOP_TINY_FAMILY", name)
    whole = finished(tmp_path, RECIPE)
    rows = metric_rows(whole)
    evaluations = [row for row in rows if "eval_reward" in row]
    assert evaluations[-1]["eval_reward"] > evaluations[0]["eval_reward_high"]
    mismatches = [row["logprob_mismatch_mean"] for row in rows if "logprob_mismatch_mean" in row]
    assert len(mismatches) == 20
    assert max(mismatches) < FAMILIES[name]
    resumed = killed_and_resumed(tmp_path, RECIPE)
    assert metric_rows(resumed) == rows
    assert model_hash(resumed) == model_hash(whole)
