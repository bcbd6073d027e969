"""`ownloop sweep`: runs one after the other, in processes of their own."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from controller.commands.recipes import find_recipe, load_recipe
from controller.runs.folder import RunFolder
from ownloop_doctors.sweep import Sweep, combinations_of, takes_several_words
from tests.controller.commands.test_cli import ROOT, add_checkpoint, command, ownloop
from tests.controller.commands.test_run import refused
from tests.waiting import wait_for_end, wait_until

pytestmark = pytest.mark.seconds

RECIPE = """
import asyncio, os
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True)
class SweptConfig:
    learning_rate: float = 1e-3
    seed: int = 0
    num_steps: int = 1

    def loop(self):
        return train

async def train(config, folder, console):
    with open("order", "a") as order:
        order.write(f"{config.seed} {config.learning_rate:g} {folder.resumed}\\n")
    if os.path.exists(f"fails-{config.seed}"):
        raise RuntimeError("boom")
    if os.path.exists("sleeps"):
        await asyncio.sleep(600)
    folder.log_metrics({"step": 1.0, "reward_mean": config.seed / 4, "seconds_step": 1.0})
    (folder.path / "model").mkdir(exist_ok=True)
    (folder.path / "model" / "config.json").write_text("{}")

def recipe():
    return SweptConfig()
"""
OPTIONS = ("mine.py", "--seed", "0", "1", "--learning-rate", "1e-2")


def order(folder: Path) -> list[str]:
    """The runs that were started: seed, learning rate, and whether the run was resumed."""
    return (folder / "order").read_text().splitlines()


def test_two_runs_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two runs of the sweep would have the name model=a_b"):
        combinations_of(["--model", "a/b", "a_b"])


def test_every_combination_has_a_run() -> None:
    found = combinations_of(["--seed", "0", "1", "--learning-rate=1e-5", "--learning-rate=2e-5", "--num-steps", "3"])
    assert list(found) == [f"seed={seed},learning-rate={rate}" for seed in (0, 1) for rate in ("1e-5", "2e-5")]
    assert found["seed=1,learning-rate=2e-5"] == ["--seed", "1", "--learning-rate", "2e-5", "--num-steps", "3"]
    hosts = ["--hosts", "trainer=n1:1", "generator=n2:1", "--log", "wandb", "tensorboard"]
    assert combinations_of(["--seed", "0", "1", *hosts]) == {f"seed={n}": ["--seed", n, *hosts] for n in "01"}
    for wrong, said in ((["--seed", "1"], "needs an option with several values"), (["0"], "unexpected argument 0")):
        with pytest.raises(ValueError, match=said):
            combinations_of(wrong)


@pytest.mark.stranger("2.C8")
@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--loss-config", "clip_high_threshold", "1.3"], [["clip_high_threshold", "1.3"]]),
        (["--loss-config", "clip_high_threshold", "1.3", "entropy_coef", "0.01"], None),
        (
            ["--loss-config", "entropy_coef 0.01", "entropy_coef 0.02"],
            [["entropy_coef", "0.01"], ["entropy_coef", "0.02"]],
        ),
        (["--generator.engine-args", "enforce_eager", "True"], [["enforce_eager", "True"]]),
        (["--trainer.gpus", "0", "1"], [["0", "1"]]),
        (["--log", "wandb", "tensorboard"], [["wandb", "tensorboard"]]),
        (["--learning-rate", "1e-5", "2e-5"], [["1e-5"], ["2e-5"]]),
        (["--loss", "ppo", "cispo"], [["ppo"], ["cispo"]]),
    ],
)
def test_an_option_of_several_words_is_one_value(words: list[str], values: list[list[str]] | None) -> None:
    config = load_recipe(find_recipe("grpo_smollm2_cpu"))
    found = combinations_of(["--seed", "0", "1", *words], lambda option: takes_several_words(config, option))
    expected = [["--seed", seed, words[0], *value] for seed in "01" for value in values or [words[1:]]]
    assert [*found.values()] == expected
    if not words[0].count("."):
        assert combinations_of(["--seed", "0", "1", *words]) == found


def test_gpus_are_asked_of_the_hosts_that_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    started: list[object] = []
    monkeypatch.setattr("ownloop_doctors.sweep._run", lambda *run: started.append(run) or 0)
    Path("mine_gpu.py").write_text(RECIPE)
    assert "is for GPUs, and no GPU is visible here" in refused(capfd, "sweep", "mine_gpu.py", *OPTIONS[1:])
    Path("theirs_gpu.py").write_text(RECIPE.replace("    seed: int", '    hosts: str | None = "n1"\n    seed: int'))
    sweep = Sweep(recipe="theirs_gpu.py", runs=tmp_path / "runs", name=None, fields=OPTIONS[1:])
    assert (sweep.run(), len(started)) == (0, 2)


def test_a_wrong_value_is_refused_before_any_run(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "mine.py").write_text(RECIPE)
    assert "unknown option --sed; did you mean '--seed'" in refused(capfd, "sweep", "mine.py", "--sed", "0", "1")
    assert "--seed takes INT" in refused(capfd, "sweep", "mine.py", "--seed", "0", "x")
    assert not (here / "runs").exists()


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RECIPE)
    (tmp_path / "fails-0").touch()
    result = ownloop(tmp_path, "sweep", *OPTIONS)
    assert result.returncode == 1
    assert order(tmp_path) == ["0 0.01 False", "1 0.01 False"], "a run that fails does not end the sweep"
    assert "RuntimeError: boom" in result.stderr
    table = result.stdout.splitlines()[-2:]
    assert [line.split()[:3] for line in table] == [["seed=0", "stopped,", "nothing"], ["seed=1", "finished", "1/1"]]
    assert "reward 0.250" in table[1]

    (tmp_path / "fails-0").unlink()
    assert ownloop(tmp_path, "sweep", *OPTIONS).returncode == 0
    assert order(tmp_path)[2:] == ["0 0.01 False"], "only what is left is run, and anew without a checkpoint"
    folder = tmp_path / "runs" / "mine-sweep"
    assert sorted(path.name for path in folder.iterdir()) == ["seed=0", "seed=0.stopped-1", "seed=1"]

    (folder / "seed=1" / "finished.json").unlink()
    add_checkpoint(folder / "seed=1")
    assert ownloop(tmp_path, "sweep", *OPTIONS).returncode == 0
    assert order(tmp_path)[3:] == ["1 0.01 True"], "a run with a checkpoint is resumed"


@pytest.mark.slow
def test_results_of_other_options_are_not_taken_for_this_sweeps(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RECIPE)
    assert ownloop(tmp_path, "sweep", *OPTIONS).returncode == 0
    result = ownloop(tmp_path, "sweep", *OPTIONS[:-1], "5e-1")
    assert result.returncode == 2
    assert "seed=0 was started with --seed 0 --learning-rate 1e-2, and this sweep has" in result.stderr
    assert ownloop(tmp_path, "sweep", *OPTIONS[:-1], "5e-1", "--name", "other").returncode == 0
    assert order(tmp_path) == ["0 0.01 False", "1 0.01 False", "0 0.5 False", "1 0.5 False"]


def test_a_second_sweep_leaves_a_run_that_is_running_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RECIPE)
    running = RunFolder(tmp_path / "runs" / "mine-sweep" / "seed=1", {})
    result = ownloop(tmp_path, "sweep", *OPTIONS)
    running.close()
    assert result.returncode == 2
    assert "seed=1 is running; wait for its end, or choose another --name" in result.stderr
    assert not (tmp_path / "order").exists()
    assert [path.name for path in running.path.parent.iterdir()] == ["seed=1"]


def is_in_group(group: int) -> bool:
    """Whether a process of this group is there."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_the_sweep(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "mine.py").write_text(RECIPE)
    (tmp_path / "sleeps").touch()
    pipe = subprocess.PIPE
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = command("sweep", *OPTIONS)
    process = subprocess.Popen(arguments, cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, start_new_session=True)
    wait_until((tmp_path / "order").exists, "the first run")
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    status, _, errors = wait_for_end(process, "the sweep")
    assert status == 128 + number
    assert "interrupted; saved" in errors
    assert len(order(tmp_path)) == 1
    wait_until(lambda: not is_in_group(process.pid), "the end of every process")
