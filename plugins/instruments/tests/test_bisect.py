"""What differs between two trainings is named: ten planted differences, computed with plain PyTorch or by runs."""

import importlib
import json
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from controller.commands.recipes import configuration
from controller.commands.resume import replayed
from controller.commands.saved_recipe import save_recipe
from controller.runs.folder import RunFolder
from controller.runs.recording import read_recording, recording_of, write_rollouts
from ownloop_instruments.bisect_command import Bisect
from ownloop_instruments.capsule import Capsule, trainer_json, write_capsule
from ownloop_instruments.computation import compute
from ownloop_instruments.one_process import lone_engine
from rl.losses import get_loss
from rl.tiny_models import random_batch, tiny_llama
from tests.controller.commands.finished_runs import finished_run, in_this_process, to_the_end
from trainer.config import TrainerConfig

END, PROMPT = 2, 4


def _batch() -> dict[str, Tensor]:
    """As TRL has it: two groups of three with a signal and one without, completions of different lengths."""
    random = np.random.default_rng(0)
    lengths = random.integers(3, 9, 9)
    completions = np.zeros((9, 8), np.int64)
    mask = np.zeros((9, 8), np.int64)
    for row, length in enumerate(lengths):
        completions[row, :length] = [*random.integers(3, 60, length - 1), END if row % 3 else 7]
        mask[row, :length] = 1
    prompts = np.repeat(random.integers(3, 60, (3, PROMPT)), 3, axis=0)
    rewards = random.uniform(-1, 1, (3, 3))
    rewards[2] = 0.5
    arrays = {
        "prompt_ids": prompts,
        "prompt_mask": np.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": mask,
        "advantages": (rewards - rewards.mean(1, keepdims=True)).reshape(-1).astype(np.float32),
    }
    return {name: torch.from_numpy(each) for name, each in arrays.items()} | {
        "num_items_in_batch": torch.tensor(mask.sum())
    }


def _logprobs(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """[B, C] of the completion's tokens, by plain transformers; padding is behind and changes nothing before it."""
    tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    logits = model(tokens).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(2, batch["completion_ids"][..., None])[..., 0]


def _plain_step(path: Path, batch: dict[str, Tensor], planted: str) -> dict[str, Tensor]:
    """The batch with what a plain step computes of it, in which one thing is other than in ours."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    p = _logprobs(model, batch)
    ratio, advantages = torch.exp(p - batch["old_per_token_logps"]), batch["advantages"][:, None]
    low, high = (0.0, 1.2) if planted == "clip side" else (0.8, 1.2)
    terms = -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    mask = batch["completion_mask"].clone()
    if planted == "mask shifted by one":
        mask[:, 0] = 0  # the mask of what is read, not of what is predicted
    if planted == "end token dropped":
        mask = mask * (batch["completion_ids"] != END)
    if planted == "loss denominator":
        loss = ((terms * mask).sum(1) / mask.sum(1)).mean()
    else:
        counted = mask * (advantages != 0) if planted == "dead groups in the denominator" else mask
        loss = (terms * mask).sum() / counted.sum()
    loss.backward()
    norm = torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None]).norm()
    found = {**batch, "per_token_logps": p.detach(), "loss": loss.detach(), "grad_norm": norm}
    return (
        {name: each.flip(0) if each.dim() else each for name, each in found.items()}
        if planted == "data order"
        else found
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("bisect") / "model", rms_norm_eps=1e-5)


@pytest.fixture(scope="module")
def batch(model: Path) -> dict[str, Tensor]:
    batch = _batch()
    with torch.no_grad():
        p = _logprobs(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), batch)
    noise = 0.4 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    return {**batch, "old_per_token_logps": p + noise}


def _changed_model(model: Path, folder: Path, name: str, value: float) -> Path:
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    holder = config["rope_parameters"] if name in config.get("rope_parameters", {}) else config
    assert holder[name] != value
    holder[name] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _told(capfd: pytest.CaptureFixture[str], a: str, b: str, **options: Any) -> tuple[int, list[str]]:
    status = Bisect(a=a, b=b, **options).run()
    return status, capfd.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("planted", "verb"),
    [
        ("", ""),
        ("data order", ""),
        ("loss denominator", "forward_backward: loss"),
        ("clip side", "forward_backward: loss"),
        ("mask shifted by one", "forward_backward: loss"),
        ("end token dropped", "forward_backward: loss"),
        ("dead groups in the denominator", "forward_backward: loss"),
        ("rope base", "forward: log-probs"),
        ("norm's eps", "forward: log-probs"),
    ],
)
def test_a_planted_difference_of_a_step_is_named(
    planted: str, verb: str, model: Path, batch: dict[str, Tensor], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"rope base": ("rope_theta", 500000.0), "norm's eps": ("rms_norm_eps", 1e-6)}
    theirs = _changed_model(model, tmp_path / "theirs", *settings[planted]) if planted in settings else model
    torch.save(_plain_step(theirs, batch, planted), tmp_path / "theirs.pt")
    torch.save(_plain_step(model, batch, ""), tmp_path / "a.pt")
    a = str(tmp_path / "a.pt") if planted == "data order" else "ours"
    status, told = _told(capfd, a, str(tmp_path / "theirs.pt"), model=model)
    assert status == bool(planted)
    if planted in ("", "data order"):
        assert told[-1] == "equal but for rounding"
        assert ["data order"] * bool(planted) == [line.partition(":")[0] for line in told if " order" in line]
        return
    assert any(line.startswith(verb) for line in told), told
    fits = [line for line in told if "makes A's step B's" in line]
    assert [line.partition(":")[0] for line in fits] == [planted], told


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """The working directory, with runs of two steps."""
    folder = tmp_path_factory.mktemp("trainings")
    with pytest.MonkeyPatch.context() as patch:
        in_this_process(patch, folder)
        finished_run("a")
        yield folder


def test_runs_of_other_seeds_data_orders_and_normalisers_are_named(
    runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    finished_run("same")
    assert _told(capfd, "a", "same") == (0, ["equal but for rounding: 2 steps"])
    finished_run("seeded", "--seed", "5")
    status, told = _told(capfd, "a", "seeded")
    assert (status, told[1]) == (1, "seed: 5 in place of 0 gives A's environment B's problems")
    assert told[0].startswith("step 1, generate: problem ")
    steps = read_recording(Path("runs/a/rollouts"))
    for step in steps:  # each step has the other's groups
        write_rollouts(recording_of(Path("swapped"), 3 - step, "step"), steps[step], step=3 - step, split="train")
    shutil.copytree("runs/a", "runs/ordered")
    shutil.rmtree("runs/ordered/rollouts")
    shutil.move("swapped", "runs/ordered/rollouts")
    assert _told(capfd, "a", "ordered")[1][1].startswith("data order: ")


def test_a_run_with_one_other_field_is_explained_by_it(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = replayed(configuration("mine.py", ("--normaliser", "sequences"), "run"), Path("runs/a/rollouts"))
    folder = RunFolder(Path("runs/sequences"), config)
    save_recipe(folder.path, Path("mine.py"), ("--normaliser", "sequences"), Path("runs/a/rollouts").absolute())
    to_the_end(config, folder)
    status, told = _told(capfd, "a", "sequences")
    assert status == 1
    assert told[0].startswith("step 1, forward_backward: loss_per_token ") or told[0].startswith(
        "step 1, optim_step: grad_norm "
    )
    assert told[-1] == "A and B have other values of env, normaliser"
    assert {line.partition(":")[0] for line in told if "makes A's step B's" in line} == {
        "normaliser",
        "loss denominator",
    }


def test_the_dtype_of_the_head_is_named(tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loss, data = get_loss("importance_sampling"), random_batch((9, 12, 20))
    configs = {"a": TrainerConfig(engine="fsdp2"), "b": TrainerConfig(engine="fsdp2", head_dtype="float32")}
    for name, config in configs.items():
        found = compute(lone_engine(config, model, None), data, loss, layers=True)
        capsule = Capsule(
            data=tuple(data), loss="importance_sampling", loss_config={}, trainer=trainer_json(config), facts={},
            weights={"model": str(model), "checkpoint": "", "model_digest": ""}, computed=found,
            random_state=torch.get_rng_state().numpy(),
        )  # fmt: skip
        write_capsule(capsule, tmp_path / f"{name}.capsule")
    status, told = _told(capfd, str(tmp_path / "a.capsule"), str(tmp_path / "b.capsule"))
    assert status == 1
    assert told[0].startswith("forward: output of ") or told[0].startswith("forward: log-probs of datum 0")
    assert told[-1].startswith("head's dtype: float32 in place of bfloat16 makes A's step B's")
    status, told = _told(capfd, str(tmp_path / "a.capsule"), f"{tmp_path / 'a.capsule'},compute_dtype=float32")
    assert told[-1].startswith("compute dtype: float32 in place of bfloat16 makes A's step B's")
    told = _told(capfd, f"{tmp_path / 'a.capsule'},rope_theta=500000", str(tmp_path / "a.capsule"))[1]
    assert told[0].startswith("forward: output of ")
    assert "rotary" in told[1]
    assert told[-1].startswith("rope base: rope_theta 10000 in place of 500000 makes A's step B's")


def _dumped_by_trl(model: Path, folder: Path, batch: dict[str, Tensor]) -> Path:
    """A step of TRL's own trainer on the batch's completions, dumped as the page says."""
    trl: Any = pytest.importorskip("trl")
    datasets: Any = importlib.import_module("datasets")

    class Dumping(trl.GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
            loss = super()._compute_loss(model, inputs)
            torch.save({**inputs, "loss": loss.detach()}, f"{folder}/step-{self.state.global_step + 1}.pt")
            return loss

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    lengths = batch["completion_mask"].sum(1)
    said = [row[:length].tolist() for row, length in zip(batch["completion_ids"], lengths, strict=True)]
    recorded = {
        "prompt_ids": batch["prompt_ids"].tolist(),
        "completion_ids": said,
        "logprobs": [[0.0] * len(s) for s in said],
    }
    config = trl.GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=9, num_generations=3, max_completion_length=8,
        max_steps=1, shuffle_dataset=False, gradient_checkpointing=False, use_cpu=True, dataloader_pin_memory=False,
        model_init_kwargs={"dtype": "float32"}, save_strategy="no", report_to="none", bf16=False, disable_tqdm=True,
        loss_type="dapo",
    )  # fmt: skip
    rewards = [0.1, 0.9, 0.4, 1.0, 0.0, 0.3, 0.5, 0.5, 0.5]
    dataset = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"]})
    Dumping(
        model=str(model), args=config, reward_funcs=lambda completions, **_: rewards, train_dataset=dataset,
        processing_class=tokenizer, rollout_func=lambda prompts, trainer: recorded,
    ).train()  # fmt: skip
    return folder / "step-1.pt"


@pytest.mark.slow
def test_the_denominator_of_trls_trainer_counts_dead_groups(
    model: Path,
    batch: dict[str, Tensor],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    first = _dumped_by_trl(model, tmp_path, batch)
    capfd.readouterr()
    status, told = _told(capfd, "ours", str(first), model=model)
    assert (status, told[-1]) == (0, "equal but for rounding")
    status, told = _told(capfd, "ours,dead_groups=left_out", str(first), model=model)
    assert status == 1
    assert told[-1].startswith("dead groups in the denominator: 3 sequences of ")


def test_a_term_that_is_none_is_refused(model: Path, batch: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(batch, tmp_path / "batch.pt")
    for text, said in (("denominator=token", "denominator is 'token'"), ("dead_group=left_out", "could not convert")):
        with pytest.raises(ValueError, match=said):
            Bisect(a=f"ours,{text}", b=str(tmp_path / "batch.pt"), model=model).run()
