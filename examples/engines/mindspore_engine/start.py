"""Starts the MindSpore process in its own environment."""

import os
from pathlib import Path

from examples.engines.mindspore_engine.child import Child
from examples.engines.mindspore_engine.messages import Shape
from rl.system.decoders import DecoderConfig
from trainer.config import TrainerConfig

PYTHON = "MINDSPORE_PYTHON"
"""Environment variable: the Python of MindSpore's environment; without it, that of `.venv-mindspore` in the root."""
_FOLDER = Path(__file__).parent
_ROOT = _FOLDER.parents[2]
_START_TIMEOUT_S = 180.0  # importing MindSpore takes 4 s, and a minute where its files are read for the first time


def mindspore_python() -> Path:
    """The Python of MindSpore's environment. Raises ValueError if it is not there."""
    python = Path(os.environ.get(PYTHON) or _ROOT / ".venv-mindspore" / "bin" / "python")
    if not python.is_file():
        raise ValueError(
            f"{python} does not exist; the MindSpore engine needs an environment of its own, which "
            f"{_FOLDER / 'README.md'} says how to make. {PYTHON} names its Python if it is elsewhere"
        )
    return python


def start_mindspore(python: Path, config: TrainerConfig, decoder: DecoderConfig) -> Child:
    """A MindSpore process with a model that has no parameters yet."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(_ROOT),
        "OMP_NUM_THREADS": str(config.num_threads),
        "GLOG_v": "3",  # MindSpore logs errors only
    }
    child = Child([str(python), "-m", "examples.engines.mindspore_engine.child_main"], environment, _START_TIMEOUT_S)
    shape = Shape(
        num_layers=decoder.num_layers,
        num_heads=decoder.num_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        norm_eps=decoder.norm_eps,
    )
    child.call("set_shape", shape)
    return child
