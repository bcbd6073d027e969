"""The torchtitan engine is built without torchtitan's own loop."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rl.tiny_models import tiny_llama
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.plain_ranks import spawn
from trainer.engines.titan._compat import without_torchtitans_loop
from trainer.engines.titan.model.attention import choose_inner_attention


@pytest.mark.ranks
def test_ranks_are_built_without_torchtitans_loop(tmp_path: Path) -> None:
    spawn(2, _build_two_ranks, tiny_llama(tmp_path / "model"))


def _build_two_ranks(_: int, model: Path) -> None:
    load_engine(TrainerConfig(model=model, data_parallel_shard=2))
    assert not {"torchtitan.trainer", "datasets"} & sys.modules.keys()


def test_what_imports_torchtitans_loop_later_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name, loop = "torchtitan.trainer", ModuleType("torchtitan.trainer")
    monkeypatch.delitem(sys.modules, name, raising=False)
    with without_torchtitans_loop():
        from torchtitan.trainer import Trainer
    assert not isinstance(TrainerConfig(model=Path("model")), Trainer.Config)
    assert name not in sys.modules
    monkeypatch.setitem(sys.modules, name, loop)
    with without_torchtitans_loop():
        assert sys.modules[name] is loop
    assert sys.modules[name] is loop


def test_gpu_logic_flex_attention_is_compiled_and_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchtitan.models.common.attention as attention

    flex: Any = attention.FlexAttention
    for name in ("inductor_configs", "_compiled_flex_attn"):  # both are set again after the test
        monkeypatch.setattr(flex, name, vars(flex)[name])
    monkeypatch.setattr(attention, "_compiled_create_block_mask", None)
    compiled: list[bool] = []
    monkeypatch.setattr(torch, "compile", lambda _, dynamic, options=None: compiled.append(dynamic) or options)
    choose_inner_attention(torch.device("cuda"))
    assert compiled == [True, True], "attention and mask, for rows of any length"
    for options in (flex.inductor_configs, flex._compiled_flex_attn):
        assert options["wrap_inductor_compiled_regions"]
        assert not options["max_autotune"]
        assert not options["coordinate_descent_tuning"]
