"""What an adapter holds in the memory of a trainer's process, and that dropping it gives the memory back."""

import gc
from pathlib import Path

import psutil
import pytest

from rl.lora import LoRAConfig
from rl.losses import get_loss
from rl.system.hardware import hand_back_memory
from rl.tiny_models import random_batch, tiny_llama
from rl.types import AdamParams
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine

BATCH = random_batch((1, 17, 5, 40))
WIDE = LoRAConfig(rank=512)  # so that the adapter, and not the allocator, is what is measured


def _resident_bytes() -> int:
    gc.collect()
    hand_back_memory()
    return psutil.Process().memory_info().rss


def _trained(frozen: Engine, name: str) -> Engine:
    """An adapter after a step, with the gradient of the next one: everything that it ever holds between calls."""
    adapter = frozen.adapter(name, WIDE)
    adapter.forward_backward([BATCH], get_loss("cross_entropy"))
    adapter.optim_step(AdamParams(learning_rate=1e-3))
    adapter.forward_backward([BATCH], get_loss("cross_entropy"))
    return adapter


@pytest.mark.seconds
@pytest.mark.parametrize("engine", ["torchtitan", "fsdp2"])
def test_an_adapter_takes_16_bytes_a_parameter_until_dropped(engine: str, tmp_path: Path) -> None:
    model, names = tiny_llama(tmp_path / "model"), ("a", "b", "c", "d")
    frozen = load_engine(TrainerConfig(model=model, engine=engine, compute_dtype="float32", lora=WIDE))
    num_parameters = sum(parameter.numel() for _, parameter in _trained(frozen, "first").hf_parameters())
    before = _resident_bytes()
    for name in names:
        _trained(frozen, name)
    assert 14 < (_resident_bytes() - before) / (len(names) * num_parameters) <= 20
    for name in names:
        frozen.drop_adapter(name)
    assert (_resident_bytes() - before) / (len(names) * num_parameters) < 2
