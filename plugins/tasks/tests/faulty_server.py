"""A server that speaks OpenAI's chat completions, and misbehaves as it is told."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.waiting import LIMIT_S, join

Behaviour = str | tuple[str, str] | int | float


@dataclass
class FaultyServer:
    """`behave(question, attempt)` returns the text to answer with, a status, or -1.0 for no answer at all.

    A text may have the reason why it ends before it. One that ends in "..." was cut off by the limit of tokens.
    """

    behave: Callable[[str, int], Behaviour]
    url: str = ""
    attempts: Counter[str] = field(default_factory=Counter[str])
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    authorization: str | None = None
    running: int = 0
    most_running: int = 0


@contextmanager
def faulty_server(behave: Callable[[str, int], Behaviour]) -> Generator[FaultyServer]:
    """Listens on loopback until the block ends."""
    state, lock, over = FaultyServer(behave), threading.Lock(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # headers and content in one packet; the client's kernel would delay its ACK of the first

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            question = body["messages"][0]["content"]
            with lock:
                state.requests.append(body)
                state.attempts[question] += 1
                state.running += 1
                state.most_running = max(state.running, state.most_running)
                state.authorization = self.headers["Authorization"]
                attempt = state.attempts[question]
            behaviour = behave(question, attempt)
            with lock:
                state.running -= 1
            self._answer(behaviour)

        def _answer(self, behaviour: Behaviour) -> None:
            if isinstance(behaviour, float):
                over.wait(LIMIT_S)
                return
            status, content = (behaviour, b"{}") if isinstance(behaviour, int) else (200, _completion(behaviour))
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Retry-After-Ms", "20")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield state
    finally:
        over.set()
        server.shutdown()
        join(thread)
        server.server_close()


def _completion(said: str | tuple[str, str]) -> bytes:
    reason, text = ("length" if said.endswith("...") else "stop", said) if isinstance(said, str) else said
    choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": text}}
    usage = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
    answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return json.dumps(answer).encode()
