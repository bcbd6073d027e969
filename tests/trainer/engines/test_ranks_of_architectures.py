"""Ranks of a model of transformers compute what one does, and an adapter's export is what was scored."""

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


def gradients(rank: int, model: Path, ranks: int, result: Path) -> None:
    config = TrainerConfig(model=model, engine="fsdp2", compute_dtype="float32", data_parallel_shard=ranks)
    engine, batch = load_engine(config), random_batch(LENGTHS)
    local = plan(config, batch).split(batch)[config.data_parallel_rank(rank)]
    engine.forward_backward(local, get_loss("importance_sampling"))
    found = whole(engine, gradients=True)
    if rank == 0:
        torch.save(found, result)


def assert_two_ranks_as_one(model: Path, folder: Path, *, unbounded: tuple[str, ...] = ()) -> None:
    """`unbounded` ends the names of parameters whose gradients may differ by 1e-4."""
    gradients(0, model, 1, folder / "one")
    spawn(2, gradients, model, 2, folder / "two")
    one, two = (torch.load(folder / which) for which in ("one", "two"))
    assert one.keys() == two.keys()
    errors = {key: relative_error(two[key], one[key]) for key in one}
    decays = {key: error for key, error in errors.items() if key.endswith(unbounded)}
    assert max(error for key, error in errors.items() if key not in decays) < 1e-5
    assert max(decays.values(), default=0) < 1e-4


def assert_adapter_is_exported_merged(model: Path, engine: str, folder: Path, *, train_mlp: bool) -> None:
    """The merged export scores as the adapter does, and otherwise than its model."""
    lora = LoRAConfig(rank=4, train_mlp=train_mlp)
    config = TrainerConfig(model=model, engine=engine, compute_dtype="float32", lora=lora)
    adapter = load_engine(config).adapter("a", lora)
    batch = random_batch((9, 17, 5))
    adapter.forward_backward([batch], get_loss("cross_entropy"))
    adapter.optim_step(AdamParams(learning_rate=1e-2))
    adapter.export_hf(folder / "merged", torch.float32)
    reference = ReferencePolicy(folder / "merged")
    changed = ReferencePolicy(config.model).logprobs(batch[0]) - reference.logprobs(batch[0])
    assert float(changed.detach().abs().max()) > 1e-2
    for logprobs, datum in zip(adapter.forward([batch]).logprobs, batch, strict=True):
        scored = datum.weights > 0
        assert logprobs[scored] == pytest.approx(reference.logprobs(datum).detach().numpy()[scored], abs=5e-5)


@pytest.mark.ranks
def test_two_ranks_have_the_gradients_of_one(tmp_path: Path) -> None:
    assert_two_ranks_as_one(MODELS["gemma2"][1](tmp_path / "model"), tmp_path)


def test_an_adapter_is_trained_and_exported_merged(tmp_path: Path) -> None:
    assert_adapter_is_exported_merged(MODELS["gemma2"][1](tmp_path / "model"), "fsdp2", tmp_path, train_mlp=True)
