"""A server of two tools, which does not end when its input does."""

import asyncio
import os
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("words", log_level="ERROR")


@server.tool()
def count_letters(word: str) -> str:
    """Counts the letters of a word."""
    return f"{len(word)} letters, says {os.getpid()}"


@server.tool()
def fail(reason: str) -> str:
    """Fails."""
    raise ToolError(reason)  # the words of other exceptions are kept from the model


if __name__ == "__main__":
    asyncio.run(server.run_stdio_async())
    time.sleep(600)
