"""`ownloop check-engine` passes an engine that keeps the contract, and names what a broken one does wrong."""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from controller.commands.cli import main
from ownloop_doctors.check_parts import parse_layout
from ownloop_doctors.comparisons import ContractError
from ownloop_doctors.kit import Finding, check_engine
from ownloop_doctors.one_rank import MODEL_CHECKS, STATE_CHECKS, Subject
from rl.losses import Loss
from rl.tiny_models import tiny_llama
from rl.types import AdamParams, ForwardBackwardOutput, OptimStepOutput
from tests.made_up_plugin import write_plugin
from trainer.config import TrainerConfig
from trainer.engine_table import ENGINES, find_engine
from trainer.engines import load_engine
from trainer.engines.base import Engine, Microbatch
from trainer.engines.hf.fsdp2 import Fsdp2Engine


class Averages(Fsdp2Engine):
    """Divides by the number of micro-batches, as many trainers do."""

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss) -> ForwardBackwardOutput:
        output = super().forward_backward(microbatches, loss)
        for _, parameter in self.hf_parameters():
            if parameter.grad is not None:
                parameter.grad /= len(microbatches)
        return output


class Forgets(Fsdp2Engine):
    """Drops the gradient of earlier calls."""

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss) -> ForwardBackwardOutput:
        self.zero_grad()
        return super().forward_backward(microbatches, loss)


class Misses(Fsdp2Engine):
    """Yields all parameters but the last."""

    def hf_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from list(super().hf_parameters())[:-1]


class NeverClips(Fsdp2Engine):
    """Ignores a value that comes with the step."""

    def optim_step(self, params: AdamParams, grad_scale: float = 1.0) -> OptimStepOutput:
        return super().optim_step(replace(params, grad_clip_norm=0.0), grad_scale)


class LosesMoments(Fsdp2Engine):
    """Loads the weights of a checkpoint only."""

    def load_checkpoint(self, path: Path, *, weights_only: bool = False) -> int:
        super().load_checkpoint(path, weights_only=True)
        self._version = 1
        return 1


@pytest.mark.parametrize(
    ("engine", "check", "message"),
    [
        (Averages, "gradients", r"gradients: .* differs by 6.7e-01; at most 1e-05"),
        (Averages, "calls of one row", "gradients: .* differ, the first is"),
        (Forgets, "accumulate", "gradients of two calls: .* differs"),
        (Forgets, "failure", "gradients after the failure: missing are"),
        (Misses, "parameters by name", r"parameters: missing are \['model.norm.weight'\]"),
        (Misses, "push", "published parameters: missing are"),
        (NeverClips, "three steps", "parameters after step 1: .* differs"),
        (LosesMoments, "checkpoint", "parameters after the next step: .* differ"),
    ],
)
def test_a_broken_engine_is_found_out(engine: type[Fsdp2Engine], check: str, message: str, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    subject = Subject(lambda: engine(TrainerConfig(model=model, compute_dtype="float32")), model, tmp_path)
    with pytest.raises(ContractError, match=message):
        {**MODEL_CHECKS, **STATE_CHECKS}[check](subject)


@pytest.mark.seconds
def test_the_kit_reports_every_check_and_refused_layouts(tmp_path: Path) -> None:
    findings: list[Finding] = []
    assert check_engine("fsdp2", ["tensor_parallel=2"], tmp_path, findings.append)
    assert [finding.check for finding in findings] == [*MODEL_CHECKS, *STATE_CHECKS] * 2 + ["start"]
    assert {finding.outcome for finding in findings[:-1]} == {"passed"}
    assert findings[-1].outcome == "refused"
    assert "engine 'fsdp2' only shards data" in findings[-1].detail


@pytest.mark.slow
def test_the_kit_runs_two_ranks_of_an_engine_out_of_the_tree(tmp_path: Path) -> None:
    findings: list[Finding] = []
    name = f"{Misses.__module__}:Misses"
    assert not check_engine(name, ["data_parallel_shard=2", "data_parallel_shard=3"], tmp_path, findings.append)
    two = {finding.check: finding for finding in findings if finding.subject == "data_parallel_shard=2"}
    assert two["gradients"].outcome == two["three steps"].outcome == "passed"
    assert two["forward"].outcome == "failed"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fsdp3", "engine is 'fsdp3', .* did you mean 'fsdp2'"),
        ("no_such_module:Engine", "engine 'no_such_module:Engine' cannot be loaded: No module named"),
        ("trainer.config:TrainerConfig", "a subclass of trainer.engines.base.Engine is needed"),
    ],
)
def test_a_name_without_engine_is_a_mistake(name: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["check-engine", name])
    assert re.search(message, capfd.readouterr().err)


def test_an_engine_without_its_package_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="'megatron', which is not installed: `pip install ownloop-megatron`"):
        check_engine("megatron", [], tmp_path, print)


def test_layouts_are_fields() -> None:
    assert parse_layout("tensor_parallel=2,sequence_parallel=False") == {
        "tensor_parallel": 2,
        "sequence_parallel": False,
    }
    with pytest.raises(ValueError, match="layout is 'tp=2'; it must be like tensor_parallel=2, with fields data_para"):
        parse_layout("tp=2")


def test_an_engine_of_an_installed_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "from trainer.engine_table import ENGINES\nENTRY = ENGINES['fsdp2']\nBAD = 'fsdp2'\n"
    write_plugin(tmp_path, {"engines.mine": "mine_entry:ENTRY", "engines.bad": "mine_entry:BAD"}, mine_entry=module)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_engine("mine") is ENGINES["fsdp2"]
    config = TrainerConfig(engine="mine", model=tiny_llama(tmp_path / "model"), compute_dtype="float32")
    assert isinstance(load_engine(config), Engine)
    with pytest.raises(ValueError, match=r"mine 1\.0 .*'bad' of ownloop\.engines .*'fsdp2'.*EngineEntry"):
        find_engine("bad")
    with pytest.raises(ValueError, match=r"engine is 'min': .* did you mean 'mine'"):
        TrainerConfig(engine="min")
