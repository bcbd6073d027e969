"""The engine fsdp1: what it refuses, and what tests of the core's engines show of theirs."""

from pathlib import Path
from typing import Any

import pytest

from rl.lora import LoRAConfig
from rl.system import plugins
from rl.tiny_models import tiny_llama, tiny_qwen3_moe
from rl.types import AdamParams, MuonParams
from tests.trainer.engines.test_memory_options import check_a_frozen_model_takes_half
from tests.trainer.engines.test_moments_dtype import check_checkpoints
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.plain_ranks import spawn
from trainer.engines.model_check import check_model


def config_of(model: Path, **options: Any) -> TrainerConfig:
    return TrainerConfig(model=model, engine="fsdp1", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel is 2; engine 'fsdp1' only shards data"),
        ({"activation_checkpointing": "selective"}, "engine 'fsdp1' has 'none' and 'full'"),
        ({"compile": True}, "compile is True; engine 'fsdp1' leaves models as they are"),
        ({"engine_args": {"a": 1}}, "engine 'fsdp1' takes none"),
        ({"lora": LoRAConfig()}, "engine is 'fsdp1' and lora is given; .* 'torchtitan', 'fsdp2'"),
    ],
)
def test_what_fsdp1_cannot_do_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    model = tiny_llama(tmp_path / "model")
    assert check_model(config_of(model)).max_seq_len == 128
    with pytest.raises(ValueError, match=message):
        check_model(config_of(model, **options))


def test_gpu_logic_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layers have 4 experts; .* The engines 'fsdp2' and 'torchtitan' do"):
        check_model(config_of(tiny_qwen3_moe(tmp_path / "experts")))


def test_it_has_no_muon_step() -> None:
    config = TrainerConfig(engine="fsdp1")
    with pytest.raises(ValueError, match=r"engine 'fsdp1' has no Muon step; use AdamParams, or .* torchtitan, fsdp2"):
        config.check_optimizer(MuonParams(learning_rate=1e-3))
    config.check_optimizer(AdamParams(learning_rate=1e-3))


def test_without_the_plugin_a_user_reads_which_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda **_: ())
    monkeypatch.setattr(plugins, "is_installed", lambda _: False)
    plugins.clear()
    with pytest.raises(
        ValueError, match=r"engine is 'fsdp1': the plug-in ownloop-megatron has it and is not installed"
    ):
        TrainerConfig(engine="fsdp1")
    plugins.clear()


def test_gpu_logic_a_frozen_model_takes_two_bytes_a_parameter(tmp_path: Path) -> None:
    check_a_frozen_model_takes_half(tiny_llama(tmp_path / "model", tied=False), "fsdp1")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_goes_on_from_a_checkpoint_of_torchtitan(tmp_path: Path, dtype: Any) -> None:
    model = tiny_llama(tmp_path / "model")
    load_engine(TrainerConfig(model=model, compute_dtype="float32")).save_checkpoint(tmp_path / "titan")
    config = config_of(model, compute_dtype="float32", moments_dtype=dtype)
    load_engine(config).load_checkpoint(tmp_path / "titan")
    check_checkpoints(config, tmp_path)


def _sharded(rank: int, model: Path, folder: Path) -> None:
    del rank
    config = config_of(model, compute_dtype="float32", moments_dtype="bfloat16", data_parallel_shard=2)
    check_checkpoints(config, folder)


@pytest.mark.ranks
@pytest.mark.slow
def test_gpu_logic_sharded_moments_go_there_and_back(tmp_path: Path) -> None:
    spawn(2, _sharded, tiny_llama(tmp_path / "model"), tmp_path)
