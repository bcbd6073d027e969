"""The tools of an MCP server, a child process that speaks over stdin and stdout, for `ToolEnv.tools`.

    ToolEnv(env=MathProblems(...), tools=(MCPServer(command=("python", "-m", "my_server")),))

The server starts when the first problem is made, serves all episodes of this process and ends with it. A run makes its
held-out problems before it starts trainer and generator, so it refuses there a server that does not work. A script can
start the server earlier, without holding up its event loop: `await asyncio.to_thread(server.tools)`. What one episode
changes in the server, others see. A server that has ended is started again for the next call, with a warning. Protocol:
https://modelcontextprotocol.io/specification
"""

import asyncio
import json
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from rl.configuration import Positive, Several, configuration

if TYPE_CHECKING:
    from mcp import ClientSession
    from mcp import Tool as MCPTool
    from mcp.types import CallToolResult, ContentBlock


class FunctionSchema(TypedDict):
    """What a model is told of a function."""

    name: str
    description: str
    parameters: Mapping[str, Any]


class ToolSchema(TypedDict):
    """A function in the form that chat templates take."""

    type: Literal["function"]
    function: FunctionSchema


Tool = tuple[ToolSchema, Callable[..., Any]]
"""A JSON schema for the chat template, and the function that it describes."""


@configuration
class MCPServer:
    """How to start a server of tools."""

    command: Several[str]
    """The program and its arguments. It sees this process's PATH and HOME, and no other variables, so no keys."""
    start_time_limit_s: Positive = 60.0
    """Most seconds until it has named its tools."""

    def __post_init__(self) -> None:
        """Raises ValueError if there is no such program."""
        if not self.command or shutil.which(self.command[0]) is None:
            raise ValueError(f"MCPServer.command is {self.command}; it must begin with a program that can be run")

    def tools(self) -> tuple[Tool, ...]:
        """The server's tools, in its order. The first call starts it, and waits until it has named them.

        Any thread may call this. Raises ValueError if the server names none within `start_time_limit_s`.
        """
        return tuple((schema, partial(_call, self, schema["function"]["name"])) for schema in _connected(self).schemas)


class ServerLostError(RuntimeError):
    """A server has ended and cannot be started again, which is no fault of the model that calls its tools."""


class _Connection:
    """A running server, and the thread that talks to it."""

    def __init__(self, server: MCPServer) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._session: ClientSession
        self._incoming: Any
        ready: Future[list[ToolSchema]] = Future()
        threading.Thread(target=lambda: asyncio.run(self._run(server, ready)), name="mcp", daemon=True).start()
        try:
            self.schemas = ready.result()
        except Exception as error:  # of the start, or of the protocol
            said = f"{type(error).__name__}: {error}".strip(": ")
            raise ValueError(f"MCPServer.command {' '.join(server.command)!r} named no tools: {said}") from error

    async def _run(self, server: MCPServer, ready: "Future[list[ToolSchema]]") -> None:
        from mcp import ClientSession, StdioServerParameters, stdio_client  # takes a second, which most runs need not
        from mcp.types import PaginatedRequestParams

        # A server that does not end with its input would outlive a killed controller.
        program = StdioServerParameters(command="setpriv", args=["--pdeathsig", "KILL", "--", *server.command])
        self._loop = asyncio.get_running_loop()
        try:
            async with (
                asyncio.timeout(server.start_time_limit_s) as limit,
                stdio_client(program) as streams,
                ClientSession(*streams) as self._session,
            ):
                self._incoming = streams[0]
                await self._session.initialize()
                page = await self._session.list_tools()
                schemas = [*map(_schema, page.tools)]
                while page.next_cursor:
                    page = await self._session.list_tools(params=PaginatedRequestParams(cursor=page.next_cursor))
                    schemas += map(_schema, page.tools)
                limit.reschedule(None)
                ready.set_result(schemas)
                while not self.has_ended():
                    await asyncio.sleep(1.0)
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)

    def has_ended(self) -> bool:
        """Whether the server has closed its output, as one that died has."""
        return self._incoming.statistics().open_send_streams == 0

    async def call(self, name: str, arguments: dict[str, object]) -> "CallToolResult":
        """The server's result. Raises RuntimeError if the thread that talks to the server ends before it."""
        called = asyncio.run_coroutine_threadsafe(self._session.call_tool(name, arguments), self._loop)
        calling = asyncio.wrap_future(called)
        try:
            while not calling.done() and not self._loop.is_closed():
                await asyncio.wait([calling], timeout=1.0)  # a loop that ends may never begin the call
        finally:
            calling.cancel()
        if calling.cancelled():  # by the thread: who waits here was not cancelled
            raise RuntimeError("the MCP server ended during the call")
        return calling.result()


async def _call(server: MCPServer, name: str, /, **arguments: object) -> list[dict[str, str]] | str:
    """The text that the tool answers with, behind its images.

    Raises RuntimeError if it reports an error, and `ServerLostError` if there is no server.
    A call during which the server ends is not made again: it may have had its effect.
    """
    connection = _connections.get(server)
    if connection is None or connection.has_ended():
        try:
            connection = await asyncio.to_thread(_connected, server)
        except ValueError as error:
            raise ServerLostError(f"the MCP server ended, and was not started again: {error}") from error
    result = await connection.call(name, arguments)
    parts = [_part(content) for content in result.content]
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    if result.is_error:
        raise RuntimeError(text)
    images = [part for part in parts if part["type"] == "image"]
    return [*images, {"type": "text", "text": text}] if images else text


def _part(content: "ContentBlock") -> dict[str, str]:
    """A part of a result as a part of a message. What a model cannot read is named."""
    if content.type == "text":
        return {"type": "text", "text": content.text}
    held = content.resource if content.type == "resource" else content
    data, kind = getattr(held, "data", getattr(held, "blob", "")), getattr(held, "mime_type", None) or "unknown type"
    if data and kind.startswith("image/"):
        return {"type": "image", "image": f"data:{kind};base64,{data}"}
    text = getattr(held, "text", None)
    if text is None:
        words = (getattr(held, "name", ""), getattr(held, "description", ""), f"{getattr(held, 'uri', '')}")
        text = f"[{content.type}: {' '.join(filter(None, (*words, f'({kind})')))}]"
    return {"type": "text", "text": text}


def _schema(tool: "MCPTool") -> ToolSchema:
    function = FunctionSchema(name=tool.name, description=tool.description or "", parameters=tool.input_schema)
    return ToolSchema(type="function", function=function)


def _connected(server: MCPServer) -> _Connection:
    """The running server, which is started if there is none. Any thread may call it."""
    with _starting:
        found = _connections.get(server)
        if found is None or found.has_ended():
            _connections[server] = _Connection(server)
        if found is not None and found is not _connections[server]:
            command = " ".join(server.command)
            warnings.warn(f"the MCP server {command!r} had ended, and was started again", stacklevel=2)
        return _connections[server]


_connections: dict[MCPServer, _Connection] = {}
"""One running server for each way to start one."""
_starting = threading.Lock()  # a dictionary alone would let two threads start two
