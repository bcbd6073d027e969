"""The tools of an MCP server, a child process that speaks over stdin and stdout, for `ToolEnv.tools`.

    ToolEnv(env=MathProblems(...), tools=(MCPServer(command=("python", "-m", "my_server")),))

The server starts when the first problem is made, serves all episodes of this process and ends with it. A run makes its
held-out problems before it starts trainer and generator, so it refuses there a server that does not work. A script can
start the server earlier, without holding up its event loop: `await asyncio.to_thread(server.tools)`. What one episode
changes in the server, others see. Protocol: https://modelcontextprotocol.io/specification
"""

import asyncio
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from rl.checks import check_types

if TYPE_CHECKING:
    from mcp import ClientSession
    from mcp import Tool as MCPTool

Tool = tuple[dict[str, Any], Callable[..., Any]]
"""A JSON schema for the chat template, and the function that it describes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MCPServer:
    """How to start a server of tools."""

    command: tuple[str, ...]
    """The program and its arguments. It sees this process's PATH and HOME, and no other variables, so no keys."""
    start_time_limit_s: float = 60.0
    """Most seconds until it has named its tools."""

    def __post_init__(self) -> None:
        """Raises ValueError if there is no such program."""
        check_types(self)
        if not self.command or shutil.which(self.command[0]) is None:
            raise ValueError(f"MCPServer.command is {self.command}; it must begin with a program that can be run")

    def tools(self) -> tuple[Tool, ...]:
        """The server's tools, in its order. The first call starts it, and waits until it has named them.

        Any thread may call this. Raises ValueError if the server names none within `start_time_limit_s`.
        """
        with _starting:
            return _connected(self).tools


class _Connection:
    """A running server, and the thread that talks to it."""

    def __init__(self, server: MCPServer) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._session: ClientSession
        ready: Future[tuple[Tool, ...]] = Future()
        threading.Thread(target=lambda: asyncio.run(self._run(server, ready)), name="mcp", daemon=True).start()
        try:
            self.tools = ready.result()
        except Exception as error:  # of the start, or of the protocol
            said = f"{type(error).__name__}: {error}".strip(": ")
            raise ValueError(f"MCPServer.command {' '.join(server.command)!r} named no tools: {said}") from error

    async def _run(self, server: MCPServer, ready: "Future[tuple[Tool, ...]]") -> None:
        from mcp import ClientSession, StdioServerParameters, stdio_client  # takes a second, which most runs need not

        # A server that does not end with its input would outlive a killed controller.
        program = StdioServerParameters(command="setpriv", args=["--pdeathsig", "KILL", "--", *server.command])
        self._loop = asyncio.get_running_loop()
        try:
            async with (
                asyncio.timeout(server.start_time_limit_s) as limit,
                stdio_client(program) as streams,
                ClientSession(*streams) as self._session,
            ):
                await self._session.initialize()
                tools = (await self._session.list_tools()).tools
                limit.reschedule(None)
                ready.set_result(tuple((_schema(tool), partial(self._call, tool.name)) for tool in tools))
                await asyncio.Event().wait()  # until this process ends
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)

    async def _call(self, name: str, /, **arguments: Any) -> Any:
        """The text that the tool answers with, behind its images. Raises RuntimeError if it reports an error."""
        calling = asyncio.run_coroutine_threadsafe(self._session.call_tool(name, arguments), self._loop)
        result = await asyncio.wrap_future(calling)
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise RuntimeError(text)
        images = [f"data:{part.mime_type};base64,{part.data}" for part in result.content if part.type == "image"]
        parts = [{"type": "image", "image": image} for image in images]
        return [*parts, {"type": "text", "text": text}] if parts else text


def _schema(tool: "MCPTool") -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


_connected = cache(_Connection)
"""One running server for each way to start one."""
_starting = threading.Lock()  # a cache alone would let two threads start two
