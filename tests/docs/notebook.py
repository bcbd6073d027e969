"""Runs `docs/notebook.ipynb` in a real kernel. `python -m tests.docs.notebook` writes the outputs into it.

Needs ipykernel and nbclient, of the extra `dev`.
"""

import importlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def code_cells(notebook: Path = NOTEBOOK) -> list[dict[str, Any]]:
    """The cells of code, in order, as the format has them: https://nbformat.readthedocs.io."""
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def source(cell: dict[str, Any]) -> str:
    """The text of a cell."""
    return "".join(cell["source"])


def printed(cell: dict[str, Any]) -> str:
    """What a cell wrote to standard output, without colours, and the name of the error that ended it."""
    texts = [
        "".join(output["text"]) if output["output_type"] == "stream" else output.get("ename", "")
        for output in cell["outputs"]
        if output.get("name") != "stderr"
    ]
    return re.sub(r"\x1b\[[\d;]*m", "", "".join(texts))


def execute(folder: Path) -> Path:
    """Runs the notebook in `folder` and returns it with its outputs, without its warnings.

    Raises `nbclient.exceptions.CellExecutionError` if a cell fails that may not.
    """
    nbclient: Any = importlib.import_module("nbclient")  # in this way, type checks do not need the packages
    nbformat: Any = importlib.import_module("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    os.environ["PYTHONPATH"] = str(ROOT)  # the kernel's
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran
        if "outputs" in cell:  # standard error names files of this machine, and so do tracebacks
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "traceback" in output:
                    output.traceback = [f"{output.ename}: {output.evalue}"]
    executed = folder / NOTEBOOK.name
    executed.write_text(nbformat.writes(notebook).replace(f"{folder}/", "") + "\n")
    return executed


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        NOTEBOOK.write_text(execute(Path(scratch)).read_text())
