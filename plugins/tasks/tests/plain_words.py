"""The server of `mcp_words.py` without the package `mcp`, which takes seconds to import: JSON-RPC in lines of text.

https://modelcontextprotocol.io/specification/2025-06-18/basic/transports
"""

import json
import os
import sys
import time
from typing import Any

VERSION = "2025-06-18"


def _tool(name: str, description: str, argument: str) -> dict[str, Any]:
    properties = {argument: {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": [argument]}
    return {"name": name, "description": description, "inputSchema": schema}


TOOLS = [_tool("count_letters", "Counts the letters of a word.", "word"), _tool("fail", "Fails.", "reason")]
MORE = [_tool("say", "Returns a result that is written as JSON.", "result"), _tool("end", "Ends the server.", "word")]
PAGES = {None: (TOOLS, "2"), "2": (MORE[:1], "3"), "3": (MORE[1:], None)}
"""By their cursors, if the server is started with an argument: tools, and the cursor of the next page."""


def _answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """The result of a request."""
    if method == "initialize":
        server = {"name": "words", "version": "1"}
        return {"protocolVersion": VERSION, "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        tools, following = PAGES[params.get("cursor")] if sys.argv[1:] else (TOOLS, None)
        return {"tools": tools} if following is None else {"tools": tools, "nextCursor": following}
    arguments = params["arguments"]
    if params["name"] == "say":
        return json.loads(arguments["result"])
    if params["name"] == "end":
        os._exit(1)
    if params["name"] == "count_letters" and "word" in arguments:
        text, is_error = f"{len(arguments['word'])} letters, says {os.getpid()}", False
    else:
        text, is_error = arguments.get("reason", "an argument is missing: word"), True
    images = [{"type": "image", "data": "aGk=", "mimeType": "image/png"}] if arguments.get("word") == "hi" else []
    return {"content": [{"type": "text", "text": text}, *images], "isError": is_error}


if __name__ == "__main__":
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:  # a notification has none
            result = _answer(message["method"], message.get("params", {}))
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
    time.sleep(600)
