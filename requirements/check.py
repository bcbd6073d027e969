"""Imports what a set-up is for, and says in a sentence what is missing: python requirements/check.py cpu | gpu

Importing also compiles the modules that a start of the product loads. No module here needs a driver or a GPU.
"""

import contextlib
import importlib
import sys

PRODUCT = ("controller.handles.store", "trainer.engines.titan.engine", "generator.engine")
MODULES = {
    "cpu": ("torch", "torchtitan", "monarch", "vllm", *PRODUCT),
    "gpu": ("torch", "torchvision", "torchao", "flashinfer", "torchtitan", "monarch", "vllm", *PRODUCT),
}


def missing(device: str) -> list[str]:
    """A phrase for each module that cannot be imported, and for a torch that is built for another device."""
    found: list[str] = []
    for name in MODULES[device]:
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken package may raise anything
            found.append(f"{name} cannot be imported ({type(error).__name__}: {error})")
    torch = sys.modules.get("torch")
    if device == "gpu" and torch is not None and torch.version.cuda is None:
        found.append(f"torch {torch.__version__} is a build for CPUs")
    return found


if __name__ == "__main__":
    sys.path.insert(0, "")  # the checkout
    with contextlib.redirect_stdout(sys.stderr):  # packages print there, too, and set-up shows what this script prints
        wrong = missing(sys.argv[1])
    if wrong:
        print(f"error: this set-up cannot be used with DEVICE={sys.argv[1]}: {'; '.join(wrong)}")
        sys.exit(1)
