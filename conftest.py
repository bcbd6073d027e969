"""What the tests of the core and of plug-ins share: no network, the real model, engines, and a plan for the workers."""

import asyncio
import atexit
import gc
import inspect
import itertools
import os
import re
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.suite import HARDWARE, LEFT_OUT, LeftOut, end_tasks
from tests.waiting import run_virtual

if TYPE_CHECKING:  # the import would load torch and Monarch
    from tests.generator.engines import EngineFactory

# Before any test module imports transformers, which reads it once: models come from disk, never from a hub.
os.environ["HF_HUB_OFFLINE"] = "1"

# Whoever runs the tests in the background, or under nohup, has these ignored; the processes of tests need them.
for _signal in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, signal.default_int_handler if _signal == signal.SIGINT else signal.SIG_DFL)

_LONGEST_FIRST = ("vllm", "ranks", "e2e", "seconds")
"""Markers in the order in which files that have them are begun, so that no worker is left with long ones at the end."""
_TOGETHER = {
    "vllm": (
        "tests/generator/",
        "tests/controller/loops/",
        "plugins/agents/tests/",
        "plugins/bitwise/tests/test_generator.py",
        "plugins/bitwise/tests/test_runs.py",
        "plugins/doctors/tests/test_attacks.py",
        "plugins/doctors/tests/test_parity.py",
        "plugins/families/tests/test_architectures.py",
        "plugins/families/tests/test_experts_on_kinds.py",
        "plugins/families/tests/test_family_loops.py",
        "plugins/families/tests/test_family_pulls.py",
        "plugins/families/tests/test_generator_experts.py",
        "plugins/families/tests/test_generator_routes.py",
        "plugins/hosts/tests/weights/test_network_pulls.py",
        "plugins/instruments/tests/",
        "plugins/referee/tests/test_real_server.py",
        "plugins/server/tests/test_openai_serving.py",
        "plugins/shelf/tests/test_distilled_runs.py",
        "plugins/speculation/tests/test_drafted_rollouts.py",
        "plugins/tasks/tests/test_tool_calls.py",
        "plugins/tasks/tests/test_tool_loop.py",
        "plugins/vision/tests/test_image_prompts.py",
    ),
    "trainer": (
        "tests/trainer/",
        "tests/rl/weights/test_gpu.py",
        "plugins/bitwise/tests/test_trainer.py",
        "plugins/doctors/tests/test_contract_kit.py",
        "plugins/doctors/tests/test_engine_contract.py",
        "plugins/doctors/tests/test_sharded_engine.py",
        "plugins/families/tests/test_as_transformers.py",
        "plugins/families/tests/test_decoders.py",
        "plugins/families/tests/test_experts.py",
        "plugins/families/tests/test_family_ranks.py",
        "plugins/families/tests/test_gated_delta.py",
        "plugins/families/tests/test_model_families.py",
        "plugins/families/tests/test_routes.py",
        "plugins/megatron/tests/",
        "plugins/vision/tests/test_frozen_towers.py",
        "plugins/vision/tests/test_image_rows.py",
        "plugins/vision/tests/test_tensor_parallel.py",
    ),
}
"""Folders and files that one worker runs.

Importing vLLM into a test's own process takes seconds. So does the server from which ranks are forked, which imports
every engine, and a worker needs one of its own.
"""


_modules_with_runs = itertools.count(1)

# Importing the tests makes millions of objects that stay, which the collector would walk again and again.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what .ci/run asks for."""
    parser.addoption(
        "--strict-skips", action="store_true", help="fail if a test is skipped that needs no other hardware"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Begins to count what is left out."""
    left_out = LeftOut(strict=bool(config.getoption("strict_skips")))
    config.pluginmanager.register(config.stash.setdefault(LEFT_OUT, left_out))


def pytest_collection_finish() -> None:
    """Has the collector pass over all that was imported."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """Stops the collector before the summary, for which Hypothesis is imported and parsed.

    What the collector finds may tell its errors, and a traceback is parsed too. One parse within another is a
    SystemError before Python 3.11.8 (https://github.com/python/cpython/issues/106905).
    """
    gc.disable()


def pytest_unconfigure() -> None:
    """Lets the interpreter free what it can at its end, or libraries report leaks; pytest itself collects before."""
    atexit.register(gc.unfreeze)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files whose `pytestmark` deselects all their tests: importing them takes longer than a fast test."""
    expression = str(config.getoption("markexpr"))
    if collection_path.suffix != ".py" or not re.fullmatch(r"not \w+( and not \w+)*", expression):
        return None
    text = collection_path.read_text()
    marks = re.search(r"^pytestmark = (\[[^]]*\]|.*)", text, re.MULTILINE)
    of_file = set(re.findall(r"pytest\.mark\.(\w+)", marks[1])) if marks else set[str]()
    if not of_file & set(re.findall(r"not (\w+)", expression)):
        return None
    if "slow" in of_file:
        config.stash[LEFT_OUT].num_slow += len(re.findall(r"^def test_", text, re.MULTILINE))
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the files, and skips `gpu` tests where there is no CUDA device."""
    places: dict[Path, int] = {}
    for item in items:
        places[item.path] = min(_place(item), places.get(item.path, len(_LONGEST_FIRST)))
    items.sort(key=lambda item: places[item.path])
    of_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if not of_gpus or _has_gpu():
        return
    for item in of_gpus:
        item.add_marker(pytest.mark.skip(reason=f"{HARDWARE}needs a CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine: with a clock of its own, in step with its engines, or as programs do."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in arguments})
    if pyfuncitem.get_closest_marker("virtual"):
        run_virtual(test)
    elif pyfuncitem.get_closest_marker("paced"):
        from tests.generator.running import run_paced

        run_paced(test)
    else:
        asyncio.run(test)
    return True


def _has_gpu() -> bool:
    """Asks CUDA itself: files of the first GPU are missing in a container that was given another one, and in WSL."""
    import torch

    return torch.cuda.is_available()


def _place(item: pytest.Item) -> int:
    markers = [place for place, name in enumerate(_LONGEST_FIRST) if item.get_closest_marker(name)]
    return min(markers, default=len(_LONGEST_FIRST))


class _FilesStayTogether(LoadScopeScheduling):
    """Gives a worker whole files, whose tests share fixtures, and one worker all files of an entry of `_TOGETHER`.

    In place of `--dist loadgroup`, which pytest-xdist 3.8 ignores under pytest 9.2: it writes a test's group into an
    attribute that pytest no longer reads.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((name for name, files in _TOGETHER.items() if file.startswith(files)), file)


@pytest.hookimpl(optionalhook=True)  # with -p no:xdist there is nothing to schedule
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Decides which worker runs which tests."""
    return _FilesStayTogether(config, log)


@pytest.fixture(scope="module", autouse=True)
def collector_passes_over_imports() -> Generator[None]:
    """Keeps what was imported frozen while the tests of a module run, although every run unfreezes the heap at its end.

    A full collection would take a second otherwise, and the many short runs of the tests make several each. What runs
    leave is freed after every tenth module that has some.
    """
    asked: list[None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: asked.append(None))
        yield
    if asked and next(_modules_with_runs) % 10 == 0:
        gc.unfreeze()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def clients_end_with_their_module() -> Generator[None]:
    """Ends the background tasks of Tinker's clients, which would go on calling servers that have ended."""
    yield
    if (client := sys.modules.get("tinker.lib.internal_client_holder")) is not None:
        holder = client._internal_client_holder_thread_singleton
        end_tasks(holder._loop, holder._thread)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Directory of SmolLM2-135M-Instruct; converted on first use, which takes some seconds."""
    from controller.runs.models import resolve_model

    return resolve_model("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def in_process() -> Generator[None]:
    """`Mesh.spawn` starts no process, and vLLM runs in this one; for runs whose processes are not what is tested."""
    from tests.meshes_in_process import meshes_in_process, vllm_in_process

    with vllm_in_process(), meshes_in_process():
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops start no process: a trainer and a generator of tests/docs/in_process.py take their place."""
    from tests.docs.in_process import launch_in_process

    launch_in_process(monkeypatch, tmp_path / "cache")


@pytest.fixture(scope="module")
def build_engine() -> Generator["EngineFactory"]:
    """`tests.generator.engines.engine_factory` of a module."""
    from tests.generator.engines import engine_factory

    yield from engine_factory()


@pytest.fixture(autouse=True)
def process_group_ends() -> Generator[None]:
    """Ends the process group that an engine of one rank may have made in the test's own process; vLLM ends its own."""
    yield
    dist = sys.modules.get("torch.distributed")
    of_vllm = sys.modules.get("vllm.distributed.parallel_state")
    if of_vllm is not None and of_vllm.model_parallel_is_initialized():
        return
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
