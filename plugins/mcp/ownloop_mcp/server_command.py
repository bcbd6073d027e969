"""`ownloop mcp`: the Model Context Protocol (https://modelcontextprotocol.io) over standard input and output.

Without `--allow-runs` a client can read runs, and compute what saves nothing, of recipes that are installed. It can
name no file, no module and no folder, for a recipe is a program and some fields name one.
"""

import asyncio
import contextlib
import math
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

from controller.commands.command import OfRuns, folder_named
from controller.commands.recipes import recipe_files
from controller.commands.saved_recipe import find_run
from controller.runs.folder import CONFIG_FILE, METRICS, ROLLOUTS, read_json, read_metrics, state_of
from ownloop_report.warnings_in_words import warnings_of

_PROGRAM = (sys.executable, "-m", "controller.commands.cli")
_MAX_POINTS = 50
_BEGIN_S = 20.0
"""A run that ends earlier has failed, and what it printed is the answer."""
_READS = ToolAnnotations(read_only_hint=True)


@dataclass(frozen=True, kw_only=True)
class MCP(OfRuns):
    """Serves runs, reports, plans and parity to an assistant, by the Model Context Protocol on stdin and stdout."""

    allow_runs: bool = False
    """Also lets the assistant start runs, stop those that it started, and name any recipe and any value of a field."""

    def run(self) -> int:
        """Serves until the input ends."""
        server = MCPServer("ownloop", log_level="ERROR")
        tools = Tools(self.runs, self.allow_runs)
        for tool in (tools.list_runs, tools.read_report, tools.plan, tools.parity):
            server.add_tool(tool, annotations=_READS)
        for tool in (tools.start_run, tools.stop_run) if self.allow_runs else ():
            server.add_tool(tool)
        server.run("stdio")
        return 0


class Tools:
    """What a client can call. A docstring is what the client reads. A mistake raises ToolError with its text."""

    def __init__(self, runs: Path, any_recipe: bool) -> None:
        """`runs` is the folder of runs."""
        self._runs, self._any_recipe = runs, any_recipe
        self._started: dict[str, subprocess.Popen[Any]] = {}

    async def list_runs(self) -> str:
        """Lists all runs: state, step, rewards in training and held out, and when they began."""
        return await _ownloop("runs", "--runs", str(self._runs))

    def read_report(
        self, run: str, metrics: Sequence[str] = ("reward_mean", "eval_reward", "loss")
    ) -> dict[str, object]:
        """Reads a run: state, configuration, warnings in words, and metrics as [step, value] pairs, at most 50 of each.

        Names of all its metrics are in `names`. Those that begin with eval_ are of held-out data.
        """
        with _mistakes():
            folder = find_run(str(folder_named(self._runs, run)), self._runs)
            rows = read_metrics(folder / METRICS)
            return {
                "state": state_of(folder),
                "config": read_json(folder / CONFIG_FILE),
                "warnings": [warned.text for warned in warnings_of(rows, folder / ROLLOUTS)],
                "names": sorted({name for row in rows for name in row}),
                "metrics": {name: _points(rows, name) for name in metrics},
            }

    async def plan(self, recipe: str, options: Sequence[str] = ()) -> str:
        """Computes whether a recipe fits its GPUs, how long a step takes and which layouts are faster.

        `options` are words of a command line, such as ["--gpu", "h100", "--search", "16", "--num-steps", "100"].
        """
        return await _ownloop("plan", self._recipe(recipe, options), *options)

    async def parity(self, recipe: str, options: Sequence[str] = ()) -> str:
        """Compares log-probs of a recipe's trainer and generator. It takes minutes and saves nothing."""
        return await _ownloop("parity", self._recipe(recipe, options), *options)

    async def start_run(self, recipe: str, name: str, options: Sequence[str] = ()) -> str:
        """Starts a run of a recipe under a new name. It goes on when this server ends; read_report follows it."""
        with _mistakes():
            folder = folder_named(self._runs, name)
        words = ("run", self._recipe(recipe, options), "--runs", str(self._runs), "--name", name, *options)
        with tempfile.TemporaryFile() as output:
            files: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            process = subprocess.Popen([*_PROGRAM, *words], start_new_session=True, **files)
            self._started[name] = process
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, _BEGIN_S)
                output.seek(0)
                raise ToolError(f"it ended with status {process.returncode}: {output.read().decode()[-2000:]}")
        return f"started, in {folder}"

    async def stop_run(self, name: str) -> str:
        """Stops a run that start_run has started, as Ctrl-C does: it can be resumed."""
        if name not in self._started:
            raise ToolError(f"name is {name!r}; this server started {sorted(self._started)}")
        process = self._started.pop(name)
        process.send_signal(signal.SIGINT)
        return f"ended with status {await asyncio.to_thread(process.wait)}"

    def _recipe(self, recipe: str, options: Sequence[str]) -> str:
        """The recipe. Raises ToolError where it or an option could name code or a file, unless that is allowed."""
        names = [*recipe_files()]
        if not self._any_recipe and recipe not in names:
            raise ToolError(f"recipe is {recipe!r}; the recipes are {', '.join(names)}")
        for option in () if self._any_recipe else options:
            value = option.partition("=")[2] if option.startswith("-") else option
            if any(sign in option for sign in ":/\\") or option.endswith(".py") or (value and Path(value).exists()):
                raise ToolError(f"options has {option!r}; what names code or files needs `ownloop mcp --allow-runs`")
        if recipe.startswith("-"):
            raise ToolError(f"recipe is {recipe!r}; it must be a name or a path")
        return recipe


@contextlib.contextmanager
def _mistakes() -> Any:
    try:
        yield
    except (ValueError, OSError) as error:
        raise ToolError(str(error)) from error


async def _ownloop(*words: str) -> str:
    """What a command prints. Raises ToolError with it if the command fails; a client that gives up ends the command."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *_PROGRAM, *words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        await process.communicate()  # it may have more to print than its pipe holds
        raise
    text = output.decode(errors="replace")
    if process.returncode:
        raise ToolError(f"it ended with status {process.returncode}: {text[-4000:]}")
    return text


def _points(rows: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float | None]]:
    """The metric's values at their steps, every n-th and the last, so that there are at most `_MAX_POINTS`."""
    points = [(row["step"], row[name] if math.isfinite(row[name]) else None) for row in rows if name in row]
    every = -(-len(points) // _MAX_POINTS)
    return points[::-1][::every][::-1] if points else []
