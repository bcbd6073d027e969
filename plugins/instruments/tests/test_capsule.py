"""A micro-batch as a file: it is the run's, it is computed again to the last bit, and what differs is named."""

import shutil
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from controller.commands.command_line import FAILED
from controller.runs.folder import read_metrics
from ownloop_instruments.capsule import read_capsule, replay, verdict, write_capsule
from ownloop_instruments.capsule_command import CapsuleCommand
from ownloop_instruments.computation import Summary, compute
from ownloop_instruments.one_process import lone_engine
from rl.losses import get_loss
from rl.sampling import KeptSets
from rl.tiny_models import random_batch, tiny_llama
from tests.controller.commands.finished_runs import finished_run, in_this_process
from tests.e2e.cli_runs import ownloop
from tests.waiting import LIMIT_S
from trainer.config import TrainerConfig
from trainer.engines.contract.reference import ReferencePolicy, importance_sampling

BROKEN = '''"""A loss with a mistake: a negative advantage has no logarithm."""


def broken(logprobs, entropy, inputs):
    ratio = (logprobs - inputs["logprobs"]).exp()
    return -(ratio * inputs["advantages"].log()).sum(), {}
'''


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """The working directory, with runs of two steps that have a checkpoint of each."""
    folder = tmp_path_factory.mktemp("capsules")
    with pytest.MonkeyPatch.context() as patch:
        in_this_process(patch, folder)
        patch.syspath_prepend(str(folder))
        (folder / "broken_loss.py").write_text(BROKEN)
        finished_run("a", "--trainer.max-tokens-per-microbatch", "64")
        finished_run("adapted", "--lora.rank", "4")
        finished_run("nan", "--loss", "broken_loss:broken", "--trainer.max-tokens-per-microbatch", "64")
        yield folder


def _made(capfd: pytest.CaptureFixture[str], **options: Any) -> list[str]:
    assert CapsuleCommand(**options).run() == 0
    return capfd.readouterr().out.splitlines()


def test_its_step_is_that_of_the_run_and_its_gradient_that_of_plain_autograd(
    runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = _made(capfd, source="a", step=2, out=Path("two.capsule"))
    here, recorded = (float(line.split()[i]) for line in told if "of the step" in line for i in (5, 7))
    assert here == pytest.approx(recorded, rel=1e-5)
    rows = read_metrics(runs / "runs" / "a" / "metrics.jsonl")
    assert recorded == pytest.approx(
        next(r["grad_norm"] for r in rows if r["step"] == 2 and "grad_norm" in r), rel=1e-5
    )
    norms = [float(line.rpartition(" ")[2]) for line in told if line.startswith("rank ")]
    capsule = read_capsule(Path("two.capsule"))
    assert len(norms) > 1
    assert capsule.computed.grad_norm == pytest.approx(max(norms), rel=1e-5)
    weights = Path("weights")
    shutil.copytree(capsule.weights["model"], weights)
    engine = lone_engine(capsule.trainer_config(), weights, Path(capsule.weights["checkpoint"]))
    save_file(
        {n: p.detach().contiguous() for n, p in engine.hf_parameters()}, weights / "model.safetensors", {"format": "pt"}
    )
    reference = ReferencePolicy(weights)
    reference.backward(capsule.data, importance_sampling)
    for name, gradient in reference.gradients().items():
        assert capsule.computed.values[f"gradient of {name}"].norm == pytest.approx(float(gradient.norm()), rel=1e-4)
    assert Path("two.capsule").stat().st_size < 1e6


@pytest.mark.parametrize("run", ["a", "adapted"])
def test_a_replay_is_equal_to_the_last_bit(run: str, runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _made(capfd, source=run, step=2, datum=1, layers=True, out=Path(f"{run}.capsule"))
    capsule = read_capsule(Path(f"{run}.capsule"))
    assert 1 in capsule.facts["datums"]
    assert any(name.startswith("output of ") for name in capsule.computed.values)
    told = _made(capfd, source=f"{run}.capsule")
    assert told[-1] == f"equal: all {len(capsule.computed.values)} values, to the last bit"


def test_from_a_layer_on_it_needs_no_weights(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _made(capfd, source="a", step=2, datum=0, layers=True, out=Path("whole.capsule"))
    told = _made(capfd, source="a", step=2, datum=0, from_layer=1, out=Path("cut.capsule"))
    assert told[-1].endswith("weights: in the file, from layer 1 on")
    whole, cut = read_capsule(Path("whole.capsule")), read_capsule(Path("cut.capsule"))
    assert not any(cut.weights.values())
    assert not any("layers.0" in name or "embed" in name for name in cut.computed.values if "output of" in name)
    for name, value in cut.computed.values.items():
        if "layers.1" in name or "log-probs" in name or name == "loss" or "model.norm" in name:
            assert whole.computed.values[name].digest == value.digest, name
    shutil.move("cache", "moved")
    try:
        assert _made(capfd, source="cut.capsule")[-1].startswith(f"equal: all {len(cut.computed.values)} values")
    finally:
        shutil.move("moved", "cache")
    with pytest.raises(ValueError, match="--engine is fsdp2; the kept input is laid out for torchtitan"):
        CapsuleCommand(source="cut.capsule", engine="fsdp2").run()
    with pytest.raises(ValueError, match="--from-layer is 2; the model has layers 0 to 1"):
        CapsuleCommand(source="a", step=2, from_layer=2).run()
    with pytest.raises(ValueError, match="--from-layer is for dense models that are trained whole"):
        CapsuleCommand(source="adapted", step=2, from_layer=1).run()


def test_another_engine_is_equal_but_for_rounding(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _made(capfd, source="a", step=1, datum=0, out=Path("engines.capsule"))
    told = _made(capfd, source="engines.capsule", engine="fsdp2")
    assert told[1] == "engine is 'fsdp2' here"
    assert told[-1].startswith("equal but for rounding: ")


@pytest.mark.parametrize("place", [0, 20, 90, 2000, -1])
def test_a_changed_byte_is_refused(place: int, runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _made(capfd, source="a", step=1, datum=0, out=Path("bytes.capsule"))
    content = bytearray(Path("bytes.capsule").read_bytes())
    content[place] ^= 1
    Path("changed.capsule").write_bytes(content)
    with pytest.raises(ValueError, match=r"changed\.capsule (has changed since it was written|is no capsule)"):
        CapsuleCommand(source="changed.capsule").run()


def test_other_weights_are_refused(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _made(capfd, source="a", step=2, datum=0, out=Path("w.capsule"))
    other = runs / "runs" / "a" / "checkpoints" / "step-00002" / "policy"
    with pytest.raises(
        ValueError, match=r"step-00002/policy has the digest \w+, and the capsule's checkpoint \w+: other"
    ):
        CapsuleCommand(source="w.capsule", checkpoint=other).run()
    with pytest.raises(ValueError, match="--step is 3; the run has recorded steps 1 to 2"):
        CapsuleCommand(source="a", step=3).run()
    with pytest.raises(ValueError, match="--datum is 99; step 1 has datums 0 to"):
        CapsuleCommand(source="a", step=1, datum=99).run()
    with pytest.raises(ValueError, match="--engine is for a capsule, and a is a run"):
        CapsuleCommand(source="a", step=1, engine="fsdp2")


def test_what_is_not_finite_is_found_and_what_was_mended_is_named(
    runs: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = _made(capfd, source="nan", step=1, out=Path("nan.capsule"))
    assert told[-2] == "not finite, and first so: loss (1 numbers)"
    capsule = read_capsule(Path("nan.capsule"))
    assert np.isnan(capsule.computed.loss)
    assert "output of lm_head" in " ".join(capsule.computed.values), "it looked at every module"
    told = _made(capfd, source="nan.capsule")
    assert told[-1].startswith("equal: all ")
    import broken_loss  # pyright: ignore[reportMissingImports] - written by the fixture

    def mended(logprobs: Any, entropy: Any, inputs: Any) -> Any:
        return -((logprobs - inputs["logprobs"]).exp() * inputs["advantages"]).sum(), {}

    monkeypatch.setattr(broken_loss, "broken", mended)
    assert CapsuleCommand(source="nan.capsule").run() == FAILED
    told = capfd.readouterr().out.splitlines()
    assert told[1] == "the source of the loss broken_loss:broken has changed"
    assert told[2].endswith("values by more than rounding, first loss")


def test_the_first_module_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", tied=False)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.inf
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    engine = lone_engine(TrainerConfig(compute_dtype="float32", engine="fsdp2"), model, None)
    found = compute(engine, random_batch((9, 12)), get_loss("cross_entropy"), layers=True)
    assert found.first_fault() == "output of model.model.layers.1.mlp.down_proj (21 numbers)"  # one of each token


@pytest.mark.parametrize("size", [1, 1000, 200_000])
def test_a_difference_is_that_of_the_tensors(size: int) -> None:
    drawn = torch.Generator().manual_seed(size)
    one = torch.randn(size, generator=drawn) + 0.5
    for other in (one * 1.01, one + 0.01 * torch.randn(size, generator=drawn), one.abs()):
        true = float((one - other).norm()) / max(float(one.norm()), float(other.norm()))
        assert Summary.of(one).difference(Summary.of(other)) == pytest.approx(true, rel=0.5, abs=1e-9)
    assert Summary.of(one).difference(Summary.of(one.clone())) == 0.0
    broken = one.clone()
    broken[0] = torch.nan
    assert Summary.of(one).difference(Summary.of(broken)) == float("inf")
    assert Summary.of(broken).difference(Summary.of(broken.clone())) == 0.0


def test_kept_sets_and_temperatures_come_back(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _made(capfd, source="a", step=1, datum=0, out=Path("kept.capsule"))
    capsule = read_capsule(Path("kept.capsule"))
    first, *rest = capsule.data
    sets = KeptSets.of([[1, 2, int(target)] if target > 2 else [] for target in first.loss_inputs["target_tokens"]])
    changed = replace(capsule, data=(replace(first, kept=sets, temperature=0.5), *rest))
    write_capsule(changed, Path("kept.capsule"))
    again = read_capsule(Path("kept.capsule")).data[0]
    assert (again.kept, again.temperature) == (sets, 0.5)
    equal, told = verdict(capsule, *replay(changed))
    assert not equal
    assert told[0].startswith("differs: ")


@pytest.mark.slow
@pytest.mark.e2e
def test_a_step_of_four_ranks_with_nan_is_replayed_in_one_process(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Path(__file__).parents[3] / "tests" / "e2e" / "tiny_recipe.py"
    (here / "broken_loss.py").write_text(BROKEN)
    options = (
        "--num-steps",
        "1",
        "--loss",
        "broken_loss:broken",
        "--trainer.data-parallel-shard",
        "4",
        "--name",
        "four",
    )
    run = ownloop(here, str(recipe), *options)
    assert run.wait(4 * LIMIT_S) == 0, run.communicate()[0]
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.setenv("OWNLOOP_TINY_MODEL", str(here / "model"))
    told = _made(capfd, source="four", step=1, out=Path("four.capsule"))
    assert {line.split(",")[0] for line in told if line.startswith("rank ")} == {f"rank {n}" for n in range(4)}
    assert told[-2] == "not finite, and first so: loss (1 numbers)"
    assert _made(capfd, source="four.capsule")[-1].startswith("equal: all ")
