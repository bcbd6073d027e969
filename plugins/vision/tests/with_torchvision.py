"""Runs a check in a process of its own, where torchvision is loaded before anything of transformers."""

import multiprocessing
from pathlib import Path
from pkgutil import resolve_name

from ownloop_vision.image_prompts import prepare_process


def run(check: str, architecture: str, *folders: Path) -> None:
    """Calls the function `check`, "module:function", with these folders. Fails if it fails."""
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(check, architecture, folders))
    process.start()
    process.join()
    assert process.exitcode == 0


def _run(check: str, architecture: str, folders: tuple[Path, ...]) -> None:
    prepare_process(architecture)
    resolve_name(check)(*folders)
