"""`ownloop mcp` as a client of the official SDK sees it, over standard input and output."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ownloop_mcp.server_command import Tools
from plugins.report.tests.reported_runs import reported_run

if TYPE_CHECKING:  # the import takes a second
    from mcp import ClientSession

READ_ONLY = ["list_runs", "parity", "plan", "read_report"]
Play = Callable[["ClientSession"], Awaitable[None]]


def served(runs: Path, play: Play, *options: str) -> None:
    """Lets a client play with a server of these runs."""
    from mcp import ClientSession, StdioServerParameters, stdio_client

    words = ["-m", "controller.commands.cli", "mcp", "--runs", str(runs), *options]

    async def main() -> None:
        server = StdioServerParameters(command=sys.executable, args=words)
        async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            await play(session)

    asyncio.run(main())


async def called(session: "ClientSession", tool: str, **arguments: Any) -> tuple[bool, str]:
    """Whether a call failed, and its text."""
    result = await session.call_tool(tool, arguments)
    return bool(result.is_error), "".join(getattr(part, "text", "") for part in result.content)


@pytest.mark.seconds
def test_a_client_reads_runs_and_plans_and_can_do_no_more(tmp_path: Path) -> None:
    folder = reported_run(tmp_path / "runs" / "one", 120)
    folder.log_metrics({"step": 121, "loss": float("nan")})
    folder.close()

    async def play(session: "ClientSession") -> None:
        tools = (await session.list_tools()).tools
        assert sorted(tool.name for tool in tools) == READ_ONLY
        assert all(tool.annotations and tool.annotations.read_only_hint for tool in tools)
        failed, text = await called(session, "list_runs")
        assert (failed, "121/40" in text) == (False, True), text
        failed, text = await called(session, "read_report", run="one", metrics=["reward_mean", "nothing"])
        report = json.loads(text)
        assert report["config"]["seed"] == 3
        points = report["metrics"]["reward_mean"]
        assert (len(points), points[-1], report["metrics"]["nothing"]) == (40, [120, 6.0], [])
        assert {"loss", "eval_reward"} <= set(report["names"])
        failed, text = await called(session, "read_report", run="one", metrics=["loss"])
        assert json.loads(text)["metrics"]["loss"][-1] == [121, None]
        failed, text = await called(session, "plan", recipe="gsm8k_grpo_qwen3_gpu", options=["--gpu", "h100"])
        assert (failed, "GiB" in text) == (False, True), text
        for tool, arguments, says in (
            ("read_report", {"run": "../one"}, "must be the name of a folder"),
            ("read_report", {"run": "two"}, "there is no run"),
            ("plan", {"recipe": str(tmp_path / "mine.py")}, "the recipes are"),
            ("plan", {"recipe": "grpo_smollm2_cpu", "options": ["--env", "os:system"]}, "'os:system'"),
            ("plan", {"recipe": "grpo_smollm2_cpu", "options": ["--model", ".."]}, "'..'"),
            ("parity", {"recipe": "grpo_smollm2_cpu", "options": ["--model=.."]}, "'--model=..'"),
            ("parity", {"recipe": "grpo_smollm2_cpu", "options": ["--no-such", "1"]}, "no-such"),
            ("start_run", {"recipe": "grpo_smollm2_cpu", "name": "three"}, "start_run"),
        ):
            failed, text = await called(session, tool, **arguments)
            assert (failed, says in text) == (True, True), text

    served(tmp_path / "runs", play)


@pytest.mark.slow  # it starts a run
def test_a_client_that_may_starts_and_stops_a_run(tmp_path: Path) -> None:
    async def play(session: "ClientSession") -> None:
        tools = (await session.list_tools()).tools
        assert sorted(tool.name for tool in tools) == [*READ_ONLY, "start_run", "stop_run"]
        begun = {"recipe": "grpo_smollm2_cpu", "name": "a", "options": ["--no-such", "1"]}
        failed, text = await called(session, "start_run", **begun)
        assert (failed, "no-such" in text) == (True, True), text
        failed, text = await called(session, "start_run", recipe="grpo_smollm2_cpu", name="b")
        assert not failed, text
        failed, text = await called(session, "stop_run", name="c")
        assert (failed, "['a', 'b']" in text) == (True, True), text
        failed, text = await called(session, "stop_run", name="b")
        assert (failed, text.startswith("ended with status")) == (False, True), text

    served(tmp_path / "runs", play, "--allow-runs")


def test_a_path_is_a_recipe_where_runs_are_allowed(tmp_path: Path) -> None:
    assert Tools(tmp_path, True)._recipe("mine.py", ["--env", "mine:Env"]) == "mine.py"  # pyright: ignore[reportPrivateUsage]
