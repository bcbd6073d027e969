"""What `ownloop run` refuses, and that it then changes nothing."""

import fcntl
import re
from pathlib import Path

import pytest

from controller.commands.cli import main
from controller.commands.recipes import find_recipe, load_recipe
from controller.commands.saved_recipe import save_recipe
from controller.runs.folder import RunFolder
from tests.controller.commands.test_cli import RECIPE, add_checkpoint, ownloop

REFUSING = """
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True)
class RefusingConfig:
    seed: int = 0

    def loop(self):
        return train

async def train(config, folder, console):
    (folder.path / "reference.json").write_text("[]")
    if config.seed:
        (folder.logs / "trainer-0.log").write_text("why")
    raise ValueError("no such model")

def recipe():
    return RefusingConfig()
"""


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that is refused says, in this process."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    output = capfd.readouterr()
    assert (stop.value.code, output.out) == (2, "")
    return output.err


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Every file below a folder, with its bytes and the time of its last change."""
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.rglob("*") if file.is_file()}


def test_a_run_that_its_loop_refuses_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REFUSING)
    result = ownloop(tmp_path, "run", "mine.py")
    assert (result.returncode, result.stderr) == (2, "error: no such model\n")
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"mine.py"}

    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "other").mkdir()
    result = ownloop(tmp_path, "run", "mine.py", "--name", "mine")
    assert (result.returncode, result.stderr) == (2, "error: no such model\n")
    left = [path.name for path in tmp_path.rglob("*") if "__pycache__" not in path.parts]
    assert sorted(left) == ["mine", "mine.py", "other", "runs"]


def test_logs_of_processes_outlive_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REFUSING)
    result = ownloop(tmp_path, "run", "mine.py", "--name", "mine", "--seed", "1")
    logs = tmp_path / "runs" / "mine" / "logs"
    assert (result.returncode, result.stderr) == (2, f"error: no such model\ndetails in {logs}\n")
    assert (logs / "trainer-0.log").read_text() == "why"
    assert "Traceback" in (logs / "controller.log").read_text()


@pytest.mark.stranger("2.F7")
def test_a_run_that_is_running_is_not_resumed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert ownloop(tmp_path, "run", str(RECIPE), "--name", "a").returncode == 0
    with (tmp_path / "runs" / "a" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "runs/a is running" in refused(capfd, "run", "--resume", str(tmp_path / "runs" / "a"))


def test_a_run_without_a_checkpoint_is_not_resumed(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert ownloop(here, "run", str(RECIPE), "--name", "a b", "--optimizer.learning-rate", "0.5").returncode == 0
    before = contents(here)
    told = refused(capfd, "run", "--resume", "a b")
    assert told == (
        "error: runs/a b has no checkpoint to continue from; its content stays as it is. Start a new run: ownloop run "
        f"{RECIPE} --optimizer.learning-rate 0.5\n"
    )
    assert contents(here) == before


def test_the_name_of_a_recipe_is_enough_to_start_it_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = find_recipe("grpo_smollm2_cpu")
    folder = RunFolder(tmp_path / "a", load_recipe(file))
    save_recipe(folder.path, file, ["--seed", "3"], Path("/other run/rollouts"))
    folder.close()
    told = refused(capfd, "run", "--resume", str(folder.path))
    assert told.endswith(": ownloop run grpo_smollm2_cpu --replay '/other run/rollouts' --seed 3\n")


def test_a_recipe_for_gpus_needs_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_needs_a_gpu("run", tmp_path, capfd, monkeypatch)


def assert_needs_a_gpu(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command refuses recipes for GPUs where there is none, and leaves nothing behind."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    told = refused(capfd, command, "grpo_async_qwen3_gpu")
    assert told == (
        "error: recipe grpo_async_qwen3_gpu is for GPUs, and no GPU is visible here; run grpo_async_smollm2_cpu "
        "instead\n"
    )
    (tmp_path / "mine_gpu.py").write_text(REFUSING)
    assert "run a recipe whose name ends in _cpu instead" in refused(capfd, command, "mine_gpu.py")
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"mine_gpu.py"}


def test_a_run_of_a_recipe_for_gpus_needs_one_to_go_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = find_recipe("grpo_smollm2_gpu")
    folder = RunFolder(tmp_path / "a", load_recipe(file)).path
    save_recipe(folder, file, [])
    add_checkpoint(folder)
    before = contents(tmp_path)
    told = refused(capfd, "run", "--resume", str(folder))
    assert told.startswith("error: recipe grpo_smollm2_gpu is for GPUs, and no GPU is visible here; run grpo_smollm2")
    assert contents(tmp_path) == before


def help_of(*words: str, capfd: pytest.CaptureFixture[str]) -> str:
    """What a command that is asked for its help prints."""
    with pytest.raises(SystemExit) as stop:
        main(words)
    output = capfd.readouterr()
    assert (stop.value.code, output.err) == (0, "")
    assert output.out.startswith(f"usage: ownloop {words[0]} ")
    return output.out


@pytest.mark.parametrize("command", ["run", "show", "list"])
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_every_command_has_a_help(command: str, option: str, capfd: pytest.CaptureFixture[str]) -> None:
    shown = help_of(command, option, capfd=capfd)
    for expected in ("--resume RUN", "--replay RUN", "--name STR", "--runs PATH") if command == "run" else ():
        assert f"  {expected}" in shown


@pytest.mark.parametrize("command", ["run", "show"])
def test_after_a_recipe_help_lists_its_fields(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert "--optimizer.learning-rate" in help_of(command, str(RECIPE), "--help", capfd=capfd)


OUTSIDE = ("../../x", "a/b", "..", ".", "", "/tmp/x", "a\nb", "a/")
"""Names that are none of a folder."""


@pytest.mark.stranger("F4")
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_stays_within_the_folder_of_runs(name: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "must be the name of a folder" in refused(capfd, "run", str(RECIPE), "--name", name)
    assert not contents(here)


@pytest.mark.stranger("F4")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\ndef recipe(:\n", r"error: recipe mine\.py: .*mine\.py, line 2: invalid syntax\n"),
        (
            "import no_such",
            r"error: recipe mine\.py: ModuleNotFoundError: No module named 'no_such' \(.*mine\.py, line 1\)\n",
        ),
        ("def recipe():\n    return 1 / 0", r"error: recipe mine\.py: ZeroDivisionError: .* \(.*mine\.py, line 2\)\n"),
        ("\0", r"error: recipe mine\.py: .*null bytes\n"),
        ("def recipe():\n    return 'é'", r"error: recipe mine\.py: .*utf-8.*\n"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_faulty_recipe_is_one_sentence(source: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(source, encoding="latin-1")
    for command in ("run", "show"):
        assert re.fullmatch(message, refused(capfd, command, "mine.py"))


@pytest.mark.stranger("F4")
@pytest.mark.usefixtures("here")
def test_a_damaged_file_of_a_run_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    write_runs("ac")
    for damage in DAMAGES:
        Path("runs/a/metrics.jsonl").write_bytes(b'{"step": 1, "schema_version": 4}\n' + damage)
        Path("runs/c/config.json").write_bytes(damage)
        main_prints = listed(capfd)
        assert "runs/a/metrics.jsonl, line 2, is damaged" in main_prints
        assert "runs/c/config.json is damaged" in main_prints


DAMAGES = (b"\0\n", b"[1]\n", b"{\n", b"\xff\n")
"""Lines that are no row of metrics."""


def write_runs(names: str) -> None:
    """A run of one step for each letter, in the working directory's `runs`."""
    for seed, name in enumerate(names):
        folder = RunFolder(Path("runs") / name, {"seed": seed})
        folder.log_metrics({"step": 1.0, "eval_reward": 0.5})
        folder.close()


def refused_after(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """As `refused`, of a command that has printed something before."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    return capfd.readouterr().err


def listed(capfd: pytest.CaptureFixture[str]) -> str:
    """What `ownloop runs` prints."""
    with pytest.raises(SystemExit) as stop:
        main(["runs"])
    assert stop.value.code == 0
    return capfd.readouterr().out


@pytest.mark.stranger("F3")
def test_a_finished_run_is_not_begun_again(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert ownloop(here, "run", str(RECIPE), "--name", "a").returncode == 0
    add_checkpoint(here / "runs" / "a")
    assert "finished" in listed(capfd)
    before = contents(here / "runs")
    with pytest.raises(SystemExit) as stop:
        main(["run", "--resume", "a"])
    assert (stop.value.code, capfd.readouterr().out) == (0, "runs/a is finished; --num-steps N continues it\n")
    assert contents(here / "runs") == before
    RunFolder(here / "runs" / "a", {"num_steps": 3}, resume=True).close()
    assert "stopped, saved at" in listed(capfd)


@pytest.mark.stranger("2.F7")
@pytest.mark.parametrize(
    ("option", "known"), [("--lr", "learning-rate"), ("--gs", "group-size"), ("--learning-rte", "learning-rate")]
)
def test_an_option_is_found_by_its_initials(option: str, known: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert f"did you mean '--{known}'" in refused(capfd, "run", "grpo_smollm2_cpu", option, "1e-4")
