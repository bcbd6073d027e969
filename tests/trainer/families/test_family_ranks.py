"""Two ranks that shard a model of a family compute what one does, and an adapter's export is what was scored.

Covers: trainer/engines/hf/fsdp2.py, trainer/families/
"""

from pathlib import Path

import pytest
import torch

from rl.lora import LoRAConfig
from rl.losses import get_loss
from rl.tiny_models import random_batch
from rl.types import AdamParams
from tests.architectures import MODELS
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.plain_ranks import LENGTHS, plan, relative_error, spawn, whole
from trainer.engines.contract.reference import ReferencePolicy

NAMES = ("gpt_oss", "qwen3_5", "qwen3_5_moe", "glm4_moe", "deepseek_v3", "gemma4", "gemma2")


def gradients(rank: int, model: Path, ranks: int, result: Path) -> None:
    config = TrainerConfig(model=model, engine="fsdp2", compute_dtype="float32", data_parallel_shard=ranks)
    engine, batch = load_engine(config), random_batch(LENGTHS)
    local = plan(config, batch).split(batch)[config.data_parallel_rank(rank)]
    engine.forward_backward(local, get_loss("importance_sampling"))
    found = whole(engine, gradients=True)
    if rank == 0:
        torch.save(found, result)


@pytest.mark.ranks
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_have_the_gradients_of_one(tmp_path: Path, name: str) -> None:
    model = MODELS[name][1](tmp_path / "model")
    gradients(0, model, 1, tmp_path / "one")
    spawn(2, gradients, model, 2, tmp_path / "two")
    one, two = (torch.load(tmp_path / which) for which in ("one", "two"))
    assert one.keys() == two.keys()
    errors = {key: relative_error(two[key], one[key]) for key in one}
    decays = {key: error for key, error in errors.items() if key.endswith(("A_log", "dt_bias"))}
    assert max(error for key, error in errors.items() if key not in decays) < 1e-5
    assert max(decays.values(), default=0) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_is_trained_and_exported_merged(tmp_path: Path, name: str) -> None:
    lora = LoRAConfig(rank=4, train_mlp=name in ("gemma2", "gemma4", "qwen3_5"))
    config = TrainerConfig(
        model=MODELS[name][1](tmp_path / "model"), engine="fsdp2", compute_dtype="float32", lora=lora
    )
    adapter = load_engine(config).adapter("a", lora)
    batch = random_batch((9, 17, 5))
    adapter.forward_backward([batch], get_loss("cross_entropy"))
    adapter.optim_step(AdamParams(learning_rate=1e-2))
    adapter.export_hf(tmp_path / "merged", torch.float32)
    reference = ReferencePolicy(tmp_path / "merged")
    changed = ReferencePolicy(config.model).logprobs(batch[0]) - reference.logprobs(batch[0])
    assert float(changed.detach().abs().max()) > 1e-2
    for logprobs, datum in zip(adapter.forward([batch]).logprobs, batch, strict=True):
        scored = datum.weights > 0
        assert logprobs[scored] == pytest.approx(reference.logprobs(datum).detach().numpy()[scored], abs=5e-5)
