"""A browser that a test drives: Chrome's DevTools protocol over two pipes, which needs no package.

See https://chromedevtools.github.io/devtools-protocol/.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")


class Tab:
    """One page of a browser, whose events are kept until `errors` and `requests` are read."""

    def __init__(self, to: int, of: int) -> None:
        self._to, self._of, self._rest, self._number, self._session = to, of, b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a method. Raises RuntimeError for an error of the protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        os.write(
            self._to, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, url: str, width: int) -> None:
        """Loads a page in a window of this width, and waits until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def value(self, expression: str) -> Any:
        """What JavaScript gives, awaited. Raises RuntimeError for an exception."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def errors(self) -> list[str]:
        """Exceptions, errors that the page wrote to the console, and files that were not found, since `open`."""
        found: list[str] = []
        for event in self.events:
            params = event.get("params", {})
            levels = (params.get("type"), params.get("entry", {}).get("level"))
            if event.get("method") == "Runtime.exceptionThrown" or "error" in levels:
                found.append(json.dumps(params))
        return found

    def requests(self) -> list[str]:
        """The addresses that were asked for since `open`."""
        sent = (event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return [params["request"]["url"] for params in sent]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._of, 1 << 16)
            if not part:
                raise RuntimeError("the browser has ended")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser(profile: Path) -> Generator[Tab]:
    """Starts the browser, which ends with the block. Chrome reads from descriptor 3 and writes to 4."""
    (of_chrome, to), (of, to_us) = os.pipe(), os.pipe()
    shell = f'exec "$0" "$@" 3<&{of_chrome} 4>&{to_us}'
    command = ["bash", "-c", shell, str(BROWSER), *_OPTIONS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(command, pass_fds=(of_chrome, to_us), stderr=subprocess.DEVNULL)
    os.close(of_chrome)
    os.close(to_us)
    try:
        tab = Tab(to, of)
        yield tab
        tab.call("Page.close")
    finally:
        os.close(to)
        process.terminate()
        process.wait()
        os.close(of)
