"""A Harbor environment without containers: the box of ownloop-sandbox. It runs in Harbor's own Python.

    PYTHONPATH=FOLDER_OF_THIS_FILE OWNLOOP_SANDBOX=FOLDER_OF_OWNLOOP_SANDBOX harbor trial start \\
        --env harbor_environment:BoxEnvironment ...

The host's programs are read-only. Files and processes stay from one command to the next. The task's Dockerfile is not
built, so this is for tasks that the host's programs can do. Nothing can be reached but the endpoint, at the address
that Harbor has for it.

Before a task's tests are put into their folder, every process of the agent is ended, and the tests get a box of their
own with what the agent left in the folders of `KEPT`. So no test sees a home folder, a /tmp or a verifier's log of an
agent.
"""

import asyncio
import contextlib
import importlib
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

# the package's files without its `__init__`, which imports what Harbor's Python does not have
_PACKAGE = ModuleType("ownloop_sandbox")
_PACKAGE.__path__ = [os.environ["OWNLOOP_SANDBOX"]]
sys.modules.setdefault("ownloop_sandbox", _PACKAGE)
box = importlib.import_module("ownloop_sandbox.box")
ways = importlib.import_module("ownloop_sandbox.ways")

KEPT = ("/app", "/workspace", "/logs/agent", "/logs/artifacts")
_MADE = ("/logs", "/logs/verifier", "/tests", "/solution", "/root", "/installed-agent", *KEPT)
_TESTS = "/tests"
_LIMITS = ways.Limits(memory_bytes=8 << 30, num_processes=512, scratch_bytes=4 << 30, num_files=200_000, num_open=4096)
_BASE = importlib.import_module("harbor.environments.base")
_CAPABILITIES = importlib.import_module("harbor.environments.capabilities")


class BoxEnvironment(_BASE.BaseEnvironment):
    """Implements Harbor's `BaseEnvironment`."""

    _box: Any
    _home = "/root"
    _used = False
    """Whether a command has run in the box."""

    @staticmethod
    def type() -> str:
        """The name under which Harbor knows it."""
        return "ownloop-box"

    @property
    def capabilities(self) -> Any:
        """There is no network, and nothing else is limited as a task says."""
        return _CAPABILITIES.EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        """Nothing: `HarborTasks` has tried the box."""

    async def start(self, force_build: bool) -> None:
        """Makes the box."""
        del force_build
        self._box = await self._new()
        await self._upload_environment_dir_after_start()  # Harbor calls it after the folders exist

    async def stop(self, delete: bool) -> None:
        """Ends it, with its files."""
        del delete
        await self._box.destroy()

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copies a file in."""
        source = Path(source_path)
        await self._renew(target_path)
        await self._box.put(target_path.strip("/"), source.read_bytes(), folder="/", mode=source.stat().st_mode & 0o777)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copies a folder in."""
        await self._renew(target_dir)
        for path in sorted(Path(source_dir).rglob("*")):
            if path.is_file():
                name = f"{target_dir}/{path.relative_to(source_dir)}".strip("/")
                await self._box.put(name, path.read_bytes(), folder="/", mode=path.stat().st_mode & 0o777)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copies a regular file out."""
        name = source_path.strip("/")
        with contextlib.closing(await self._box.files("/", name)) as found:
            _write(Path(target_path), found, name)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copies the regular files of a folder out."""
        with contextlib.closing(await self._box.files(source_dir)) as found:
            for name in found.names:
                with contextlib.suppress(ValueError):  # too big
                    _write(Path(target_dir, name), found, name)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> Any:
        """Runs a command. Raises TimeoutError, with its processes killed."""
        del user
        settings = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": self._home, **(self._merge_env(env) or {})}
        folder, self._used = cwd or self.task_env_config.workdir or "/app", True
        ended = await self._box.run(["bash", "-c", command], settings, timeout_sec, cwd=folder, apart=True)
        if ended.exit_code is None:
            raise TimeoutError(f"the command took longer than {timeout_sec} s")
        return _BASE.ExecResult(stdout=ended.output, stderr=ended.errors, return_code=ended.exit_code)

    async def _new(self) -> Any:
        endpoint = urlsplit(os.environ.get("OPENAI_BASE_URL", ""))
        made = (*_MADE, *filter(None, [self.task_env_config.workdir]))
        profile = ways.Profile(programs=True, port=endpoint.port or 0, makes=made)
        build = getattr(ways, os.environ.get("OWNLOOP_WAY", "namespaces"))
        connect = partial(asyncio.open_connection, endpoint.hostname, endpoint.port) if endpoint.port else None
        new = box.Box(build(_LIMITS, profile), connect=connect)
        await new.create()
        return new

    async def _renew(self, target: str) -> None:
        """Gives tests that are about to come a box of their own."""
        if self._used and f"{target}/".startswith(f"{_TESTS}/"):
            old, self._box = self._box, await self._new()
            self._home, self._used = "/home", False
            try:
                await old.stop()
                for folder in {*KEPT, self.task_env_config.workdir or KEPT[0]}:
                    with contextlib.closing(await old.files(folder)) as found:
                        for name in found.names:
                            with contextlib.suppress(ValueError):
                                content, mode = found.read(name), found.mode(name)
                                await self._box.put(name, content, folder=folder, mode=mode)
            finally:
                await old.destroy()


def _write(target: Path, found: Any, name: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(found.read(name))
