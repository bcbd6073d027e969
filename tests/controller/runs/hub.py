"""A Hugging Face Hub on loopback, with the part of its API that fetching a model uses."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.waiting import LIMIT_S, join


class Hub:
    """What the server serves, and what it was asked for."""

    def __init__(self) -> None:
        """An empty hub."""
        self.url = ""
        self.models: dict[str, dict[str, Mapping[str, bytes]]] = {}
        """ORG/NAME -> branch or commit -> file -> contents."""
        self.gated: set[str] = set()
        self.may_complete = threading.Event()
        """Unless it is set, the server sends the first half of a large file and then waits for it."""
        self.may_complete.set()
        self.fetched: Counter[str] = Counter()
        """Files that were asked for, and how often."""
        self.half_sent = threading.Event()
        """It is set once the server has sent half of a file and waits."""
        self.tokens: set[str] = set()

    def add(self, name: str, files: Mapping[str, bytes]) -> str:
        """Commits files to a model's main branch. Returns the commit."""
        commit = hashlib.sha1(json.dumps({file: text.hex() for file, text in files.items()}).encode()).hexdigest()
        self.models.setdefault(name, {}).update({commit: files, "main": files})
        return commit

    def commit_of(self, name: str, revision: str) -> str | None:
        """The commit that a branch or a commit of a model names."""
        files = self.models[name].get(revision)
        commits = [commit for commit, tree in self.models[name].items() if tree is files and commit != "main"]
        return commits[0] if commits else None


@contextmanager
def running_hub() -> Generator[Hub]:
    """Serves a hub while the block lasts."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.may_complete.set()
        server.shutdown()
        join(thread)
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, the name of the base
        """Stays silent."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        if token := self.headers.get("authorization"):
            self.hub.tokens.add(token.removeprefix("Bearer "))
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        name, rest = ("/".join(parts[2:4]), parts[4:]) if is_api else ("/".join(parts[:2]), parts[2:])
        verb, revision, *rest = rest or ["revision", "main"]
        if name not in self.hub.models:
            return self._send(401, b"Invalid username or password.", {"X-Error-Code": "RepoNotFound"}, body)
        if name in self.hub.gated and not is_api:
            return self._send(403, b"gated", {"X-Error-Code": "GatedRepo"}, body)
        commit = self.hub.commit_of(name, revision)
        if commit is None:
            return self._send(404, b"no revision", {"X-Error-Code": "RevisionNotFound"}, body)
        files = self.hub.models[name][commit]
        if verb == "revision":
            siblings = [{"rfilename": file} for file in files]
            return self._json({"id": name, "modelId": name, "sha": commit, "siblings": siblings}, body)
        if verb == "tree":
            tree = [{"type": "file", "path": f, "size": len(c), "oid": _etag(c)} for f, c in files.items()]
            return self._json(tree, body)
        return self._file("/".join(rest), files, commit, body)

    def _file(self, name: str, files: Mapping[str, bytes], commit: str, body: bool) -> None:
        content = files[name]
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": commit}
        if body:
            self.hub.fetched[name] += 1
            if not self.hub.may_complete.is_set() and name.endswith(".safetensors"):
                self._begin(200, len(content), headers)
                self.wfile.write(content[: len(content) // 2])
                self.wfile.flush()
                self.hub.half_sent.set()
                self.hub.may_complete.wait(LIMIT_S)
                self.close_connection = True
                return None
        return self._send(200, content, headers, body)

    def _json(self, value: Any, body: bool) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, body)

    def _begin(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(header, value)
        self.end_headers()

    def _send(self, status: int, content: bytes, headers: Mapping[str, str], body: bool) -> None:
        self._begin(status, len(content), headers)
        if body:
            self.wfile.write(content)


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
