"""Package indexes in folders, of tiny wheels, for tests of installations without a network."""

import io
import os
import subprocess
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from importlib.metadata import distribution
from pathlib import Path

from uv import find_uv_bin

_BUILD_TOOLS = (
    "hatchling",
    "editables",
    "packaging",
    "pathspec",
    "pluggy",
    "tomlkit",
    "trove-classifiers",
    "setuptools",
)
_EXTENSION = """
#include <Python.h>
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{name}", NULL, -1, NULL}};
PyMODINIT_FUNC PyInit_{name}(void) {{ return PyModule_Create(&module); }}
"""


def add_wheel(
    folder: Path, name: str, version: str, files: Mapping[str, bytes | str] | None = None, requires: Iterable[str] = ()
) -> None:
    """Adds a wheel of pure Python with these files."""
    distribution_name = name.replace("-", "_")
    info = f"{distribution_name}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{distribution_name}-{version}-py3-none-any.whl", "w") as archive:
        for path, content in (files or {}).items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = 0o100755 << 16  # a file that may be executed, as scripts are
            archive.writestr(entry, content)
        archive.writestr(f"{info}/METADATA", _metadata(name, version, requires))
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in archive.namelist()))


def add_source(folder: Path, name: str, version: str) -> None:
    """Adds the source of an extension in C, which is compiled to be installed."""
    module = name.replace("-", "_")
    extension = f"Extension({module!r}, ['m.c'])"
    setup = f"from setuptools import *\nsetup(name={name!r}, version={version!r}, ext_modules=[{extension}])"
    texts = {"setup.py": setup, "m.c": _EXTENSION.format(name=module), "PKG-INFO": _metadata(name, version)}
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / f"{module}-{version}.tar.gz", "w:gz") as archive:
        for path, text in texts.items():
            entry = tarfile.TarInfo(f"{module}-{version}/{path}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))


def add_build_tools(folder: Path) -> list[str]:
    """Adds what builds ownloop, as it is installed here, and a uv that runs the one here. Returns their pins."""
    pins = [f"uv=={distribution('uv').version}"]
    script = f'#!/bin/sh\n[ -z "$UV_STAND_IN" ] || eval "$UV_STAND_IN"\nexec "{find_uv_bin()}" "$@"\n'
    add_wheel(folder, "uv", distribution("uv").version, {f"uv-{distribution('uv').version}.data/scripts/uv": script})
    for name in _BUILD_TOOLS:
        found = distribution(name)
        files = [file for file in found.files or () if ".." not in file.parts and file.suffix != ".pyc"]
        kept = [file for file in files if ".dist-info" not in file.parts[0] or file.name == "entry_points.txt"]
        requires = [each for each in found.requires or () if ";" not in each]
        add_wheel(folder, name, found.version, {str(file): file.read_binary() for file in kept}, requires)
        pins.append(f"{name}=={found.version}")
    return pins


def make_index(folder: Path, wheels: Iterable[Path]) -> str:
    """The address of a simple index of these wheels."""
    for wheel in wheels:
        page = folder / wheel.name.partition("-")[0].replace("_", "-") / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        with page.open("a") as lines:
            lines.write(f'<a href="{wheel.as_uri()}">{wheel.name}</a><br>\n')
    return folder.as_uri()


def only_index(address: str, cache: Path) -> dict[str, str]:
    """The environment of a process for which pip and uv know one index, and nothing of this machine's configuration."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "OWNLOOP_TORCH"))}
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": address, "PIP_NO_CACHE_DIR": "1", "PIP_RETRIES": "1"}
    uv = {"UV_CACHE_DIR": str(cache), "UV_NO_CONFIG": "1", "UV_HTTP_RETRIES": "0"}
    return kept | pip | uv


def installed(python: Path) -> set[str]:
    """The packages that an interpreter finds, as `name==version`."""
    code = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd=python.parent)
    return set(done.stdout.split())


def _metadata(name: str, version: str, requires: Iterable[str] = ()) -> str:
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
