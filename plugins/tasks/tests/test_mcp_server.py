"""Tools of MCP servers, child processes: one that is written out, and the package's own, which is slow to start."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import psutil
import pytest

from ownloop_tasks.mcp_server import MCPServer
from ownloop_tasks.tools import ToolEnv
from plugins.tasks.tests.test_tools import CALCULATE, Sums
from rl.protocols import Done, Observation
from rl.rollouts.guard import EnvironmentFailedError
from tests.waiting import LIMIT_S, wait_for_line, wait_until

WORDS = str(Path(__file__).with_name("mcp_words.py"))
PLAIN = str(Path(__file__).with_name("plain_words.py"))


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize("script", [PLAIN, pytest.param(WORDS, marks=pytest.mark.slow)], ids=["plain", "package"])
async def test_an_episode_uses_the_tools_of_a_server_and_functions(script: str) -> None:
    env = ToolEnv(env=Sums(), tools=(CALCULATE, MCPServer(command=(sys.executable, script))))
    assert env.name == f"sums with calculate, {sys.executable} {script}"
    (problem,) = env.train_problems(0, 0, 1)
    assert [tool["function"]["name"] for tool in problem.tools] == ["calculate", "count_letters", "fail"]
    assert problem.tools[1]["function"]["parameters"]["required"] == ["word"]

    episode = await problem.start()
    text = call("count_letters", word="seven") + call("fail", reason="no luck") + call("count_letters", worm="x")
    observed = await episode.reply(text)
    assert isinstance(observed, Observation)
    done = await episode.reply("42")
    assert isinstance(done, Done)
    assert not isinstance(observed.messages, str)
    counted, failed, misnamed = (str(message["content"]) for message in observed.messages)
    assert counted.startswith("5 letters, says ")
    assert failed.startswith("Error: ")
    assert "no luck" in failed
    assert misnamed.startswith("Error: ")
    assert "word" in misnamed
    assert (done.reward, done.metrics["tool_calls"], done.metrics["tool_errors"]) == (1.0, 3.0, 2.0)


def test_a_server_may_answer_with_an_image() -> None:
    (count, _) = MCPServer(command=(sys.executable, PLAIN)).tools()
    image, text = asyncio.run(count[1](word="hi"))
    assert image == {"type": "image", "image": "data:image/png;base64,aGk="}
    assert text["text"].startswith("2 letters")


RESOURCE = {"uri": "file:///a.txt", "mimeType": "text/plain"}
LINK = {"type": "resource_link", "name": "a", "description": "all", **RESOURCE}
RESULTS = [
    ({"content": [{"type": "resource", "resource": {**RESOURCE, "text": "five"}}]}, "five"),
    ({"content": [], "structuredContent": {"number": 5, "word": "fünf"}}, '{"number": 5, "word": "fünf"}'),
    ({"content": [{"type": "text", "text": "5"}], "structuredContent": {"number": 5}}, "5"),
    ({"content": [LINK]}, "[resource_link: a all file:///a.txt (text/plain)]"),
    ({"content": [{"type": "audio", "data": "aGk=", "mimeType": "audio/wav"}]}, "[audio: (audio/wav)]"),
    ({"content": [{"type": "resource", "resource": {"uri": "a:b", "blob": "aGk="}}]}, "[resource: a:b (unknown type)]"),
    ({"content": []}, ""),
]


@pytest.mark.stranger("2.B4")
def test_tools_of_all_pages_and_results_of_all_kinds_are_shown() -> None:
    tools = {tool["function"]["name"]: f for tool, f in MCPServer(command=(sys.executable, PLAIN, "pages")).tools()}
    assert [*tools] == ["count_letters", "fail", "say", "end"]
    for result, text in RESULTS:
        assert asyncio.run(tools["say"](result=json.dumps(result))) == text
    blob = {"uri": "a:b", "blob": "aGk=", "mimeType": "image/png"}
    shown = asyncio.run(tools["say"](result=json.dumps({"content": [{"type": "resource", "resource": blob}]})))
    assert shown[0] == {"type": "image", "image": "data:image/png;base64,aGk="}
    failed = json.dumps({"content": [], "structuredContent": {"why": "no luck"}, "isError": True})
    with pytest.raises(RuntimeError, match="no luck"):
        asyncio.run(tools["say"](result=failed))


@pytest.mark.stranger("2.B3")
@pytest.mark.parametrize("when", ["in a call", "between two calls"])
def test_a_server_that_ended_is_started_again(when: str) -> None:
    tools = {tool["function"]["name"]: f for tool, f in MCPServer(command=(sys.executable, PLAIN, when)).tools()}
    first = asyncio.run(tools["count_letters"](word="seven")).rpartition(" ")[2]
    with catch_warnings(record=True, action="always") as warned:
        if when == "in a call":
            with pytest.raises(Exception, match="Connection closed"):
                asyncio.run(tools["end"](word=""))
        else:
            os.kill(int(first), signal.SIGKILL)
            wait_until(lambda: not psutil.pid_exists(int(first)), "the server to end")
            with suppress(Exception):  # the news may not have come yet
                asyncio.run(tools["fail"](reason="no luck"))
        again = asyncio.run(tools["count_letters"](word="seven"))
    ours = [each for each in warned if each.category is UserWarning]  # and not of what the collector finds meanwhile
    assert [str(each.message).partition("' ")[2] for each in ours] == ["had ended, and was started again"]
    assert again.startswith("5 letters, says ")
    assert again.rpartition(" ")[2] != first


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_call_that_begins_as_its_server_ends_fails(monkeypatch: pytest.MonkeyPatch, is_cancelled: bool) -> None:
    (count, *_) = MCPServer(command=(sys.executable, PLAIN, f"cancels: {is_cancelled}")).tools()
    pid = int(asyncio.run(count[1](word="seven")).rpartition(" ")[2])

    def drop(call: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Future[Any]:
        """As a loop does that ends after it was asked whether it runs: it cancels the call, or never begins it."""
        os.kill(pid, signal.SIGKILL)
        wait_until(loop.is_closed, "the thread that talks to the server to end")
        call.close()
        dropped = Future[Any]()
        if is_cancelled:
            dropped.cancel()
        return dropped

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", drop)
    with pytest.raises(RuntimeError, match="the MCP server ended during the call"):
        asyncio.run(asyncio.wait_for(count[1](word="seven"), LIMIT_S))


@pytest.mark.stranger("2.B3")
def test_an_episode_fails_whose_server_cannot_be_started_again(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(Path(PLAIN).read_text())
    env = ToolEnv(env=Sums(), tools=(MCPServer(command=(sys.executable, str(script), "pages")),))
    (problem,) = env.train_problems(0, 0, 1)
    script.write_text("no server")

    async def play() -> None:
        episode = await problem.start()
        with suppress(EnvironmentFailedError):
            await episode.reply(call("end", word=""))
        await episode.reply(call("count_letters", word="five"))

    with pytest.raises(EnvironmentFailedError, match="the MCP server ended, and was not started again: "):
        asyncio.run(play())


@pytest.mark.slow  # it starts two processes that import mcp
def test_a_server_dies_with_its_parent() -> None:
    script = f"""
import time
from ownloop_tasks.mcp_server import MCPServer
MCPServer(command=({sys.executable!r}, {WORDS!r})).tools()
print("ready", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert wait_for_line(parent.stdout, "the server") == "ready"
        (child,) = psutil.Process(parent.pid).children()
        parent.send_signal(signal.SIGKILL)
        child.wait(LIMIT_S)


@pytest.mark.seconds
def test_what_is_no_server_is_refused() -> None:
    with pytest.raises(ValueError, match=r"MCPServer\.command is \('nowhere',\); it must begin with a program"):
        MCPServer(command=("nowhere",))
    with pytest.raises(ValueError, match=r"MCPServer\.command 'true' named no tools: "):
        MCPServer(command=("true",)).tools()
    silent = MCPServer(command=("sleep", "600.25"), start_time_limit_s=0.2)
    with pytest.raises(ValueError, match=r"'sleep 600.25' named no tools: TimeoutError"):
        silent.tools()
    children = psutil.Process(os.getpid()).children
    wait_until(lambda: not any("600.25" in _command_line(child) for child in children()), "the server to end")


def _command_line(process: psutil.Process) -> list[str]:
    """Nothing if it has ended, waited for or not."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_two_tools_of_one_name_are_refused() -> None:
    server = MCPServer(command=(sys.executable, PLAIN))
    env = ToolEnv(env=Sums(), tools=(server, server))
    with pytest.raises(ValueError, match=r"ToolEnv\.tools has two functions of one name: count_letters, fail, count"):
        env.train_problems(0, 0, 1)
