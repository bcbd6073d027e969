"""The notebook of docs/, and what becomes of processes when its kernel is interrupted, restarted or killed."""

import ast
import asyncio
import inspect
import os
import re
import signal
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.docs.in_process import launch_in_process
from tests.docs.notebook import code_cells, execute, printed, source
from tests.docs.pages import ROOT
from tests.waiting import wait_for_ends

STARTED = """
import asyncio
from pathlib import Path
from controller.launching.launcher import launch
from generator.config import GeneratorConfig
from rl.tiny_models import SERVABLE, tiny_llama
from rl.types import SamplingParams
from trainer.config import TrainerConfig

model = tiny_llama(Path("tiny-model"), **SERVABLE)
generating = GeneratorConfig(dtype="float32", max_model_len=64)
async with launch(model, TrainerConfig(compute_dtype="float32"), generating, Path("logs")) as (trainer, generator):
    await generator.pull_model_state_dict(await trainer.push_model_state_dict())
    print("sampling", flush=True)
    while True:
        await generator.generate([3, 4], SamplingParams(max_tokens=40, ignore_eos=True), 8)
"""


@pytest.mark.seconds
def test_its_cells_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel and without processes. The cell that is interrupted and the whole loop's are left out."""
    launch_in_process(monkeypatch, here / "cache")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for cell in code_cells():
            text = re.sub(r"^%.*$", "", source(cell), flags=re.MULTILINE)
            if "raises-exception" in cell["metadata"].get("tags", ()) or text.startswith("await train("):
                continue
            result = eval(compile(text, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), namespace)
            if inspect.iscoroutine(result):
                runner.run(result)
    curve = namespace["curve"]
    assert len(curve) == 10
    assert curve[-1] > curve[0] + 0.1
    assert namespace["config"].num_steps == 3


def test_its_outputs_are_committed() -> None:
    _check_outputs(code_cells())
    text = (ROOT / "docs" / "notebook.ipynb").read_text()
    assert not re.search(r"/(?:home|root|tmp|Users|work)/", text), "outputs name files of a machine"
    assert len(text) < 60_000


@pytest.mark.slow  # two launches
def test_it_runs_in_a_kernel(tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="needs nbclient, of the extra dev")
    pytest.importorskip("ipykernel", reason="needs ipykernel, of the extra dev")
    _check_outputs(code_cells(execute(tmp_path)))


def _check_outputs(cells: list[dict[str, Any]]) -> None:
    """Checks what the notebook's cells say."""
    text = "\n".join(printed(cell) for cell in cells)
    before, after = re.findall(r"reward (0\.\d+) in the first step, (0\.\d+) in the last", text)[0]
    assert float(after) > float(before) + 0.1
    assert re.findall(r"^(\d) processes", text, re.MULTILINE) == ["3", "0", "0"]
    (interrupted,) = [cell for cell in cells if "raises-exception" in cell["metadata"].get("tags", ())]
    assert printed(interrupted) == "CancelledError"
    assert re.search(r"3/3  reward 0\.\d+", text)
    assert re.search(r"held-out reward after 3 steps: 0\.\d+", text)
    pictures = [
        output["data"] for cell in cells for output in cell["outputs"] if output["output_type"] == "display_data"
    ]
    assert ["image/png" in picture for picture in pictures] == [True]


@pytest.fixture
def kernel(tmp_path: Path) -> Generator[Any]:
    """The manager of a running kernel."""
    pytest.importorskip("ipykernel", reason="needs ipykernel, of the extra dev")
    manager = pytest.importorskip("jupyter_client").KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path), env={**os.environ, "PYTHONPATH": str(ROOT)})
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interrupt", "restart", "kill"])
def test_no_process_is_left(kernel: Any, how: str) -> None:
    client = kernel.client()
    client.start_channels()
    client.wait_for_ready(timeout=120)
    client.execute(STARTED)
    _await_output(client, "sampling")
    process = psutil.Process(kernel.provisioner.pid)
    children = process.children(recursive=True)
    assert len(children) >= 3
    match how:
        case "interrupt":
            kernel.interrupt_kernel()
            _await_idle(client)
            assert not process.children(recursive=True)
            assert process.is_running()
        case "restart":
            kernel.restart_kernel(now=False)
        case _:
            process.send_signal(signal.SIGKILL)
    wait_for_ends(children, "the notebook's processes")
    client.stop_channels()


def _messages(client: Any) -> Generator[dict[str, Any]]:
    """What the kernel publishes, for two minutes."""
    deadline = time.monotonic() + 120
    while (remaining_s := deadline - time.monotonic()) > 0:
        yield client.get_iopub_msg(timeout=remaining_s)
    raise TimeoutError


def _await_output(client: Any, text: str) -> None:
    for message in _messages(client):
        assert message["msg_type"] != "error", message["content"]["evalue"]
        if message["msg_type"] == "stream" and text in message["content"]["text"]:
            return


def _await_idle(client: Any) -> None:
    for message in _messages(client):
        if message["content"].get("execution_state") == "idle":
            return
