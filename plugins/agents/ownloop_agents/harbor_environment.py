"""A Harbor environment without containers: bubblewrap over the host's own file system. It runs in Harbor's own Python.

    PYTHONPATH=controller/frameworks harbor trial start --env harbor_environment:BubblewrapEnvironment ...

The host's programs are read-only; the folders of `KEPT` are the task's own and stay from one command to the next. The
task's Dockerfile is not built, so this is for tasks that the host's programs can do. A process that outlives its
command, such as a terminal's server, ends with the episode: `ownloop_sandbox/sandboxes.py` finds it by its mark.
"""

import asyncio
import importlib
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# the folders that tasks and agents write to
KEPT = ("app", "logs", "tests", "solution", "workspace", "tmp", "root", "installed-agent")
SYSTEM = ("usr", "bin", "lib", "lib32", "lib64", "sbin", "etc", "opt")  # read-only in the sandbox
MARK = "OWNLOOP_SESSION"  # as in `ownloop_sandbox/sandboxes.py`, which this Python cannot import
_BASE: Any = importlib.import_module("harbor.environments.base")
_CAPABILITIES: Any = importlib.import_module("harbor.environments.capabilities")


class BubblewrapEnvironment(_BASE.BaseEnvironment):
    """Implements Harbor's `BaseEnvironment`."""

    root: Path
    """The folder of the host that has the task's folders."""

    @staticmethod
    def type() -> str:
        """Its name."""
        return "bubblewrap"

    @property
    def capabilities(self) -> Any:
        """It can switch the network off, and limits nothing else."""
        return _CAPABILITIES.EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        if shutil.which("bwrap") is None:
            raise FileNotFoundError("bwrap is not installed; install bubblewrap, or name another environment of Harbor")

    async def start(self, force_build: bool) -> None:
        """Makes the folders."""
        del force_build
        self.root = Path(tempfile.mkdtemp(prefix="ownloop-harbor-"))
        for name in (*KEPT, "logs/agent", "logs/verifier", "logs/artifacts"):
            (self.root / name).mkdir()
        await self._upload_environment_dir_after_start()  # Harbor calls it after the folders exist

    async def stop(self, delete: bool) -> None:
        """Removes the folders."""
        if delete:
            shutil.rmtree(self.root, ignore_errors=True)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copies a file in."""
        self._host(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._host(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copies a folder in."""
        shutil.copytree(source_dir, self._host(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copies a file out."""
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self._host(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copies a folder out."""
        shutil.copytree(self._host(source_dir), target_dir, dirs_exist_ok=True)

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
        argv = self._command(command, cwd or self.task_env_config.workdir or "/app", self._merge_env(env) or {})
        pipe = asyncio.subprocess.PIPE
        # a group of its own: commands start servers
        process = await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=pipe, start_new_session=True)
        try:
            output, errors = await asyncio.wait_for(process.communicate(), timeout_sec)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # also when Harbor's own limit cancels the call
            await process.wait()
            raise
        return _BASE.ExecResult(
            stdout=output.decode(errors="replace"),
            stderr=errors.decode(errors="replace"),
            return_code=process.returncode,
        )

    def _command(self, command: str, folder: str, env: Mapping[str, str]) -> list[str]:
        settings = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", **env}
        if MARK in os.environ:  # marks what a task leaves running
            settings[MARK] = os.environ[MARK]
        system = [word for name in SYSTEM if Path("/", name).exists() for word in ("--ro-bind", f"/{name}", f"/{name}")]
        kept = [word for name in KEPT for word in ("--bind", str(self.root / name), f"/{name}")]
        network = ["--unshare-net"] if self._network_disabled else []
        return [
            *("bwrap", "--tmpfs", "/", *system, "--dev", "/dev", "--proc", "/proc", *kept, *network),
            *("--unshare-ipc", "--clearenv"),
            *(word for name, value in settings.items() for word in ("--setenv", name, value)),
            *("--chdir", folder, "bash", "-c", command),
        ]

    def _host(self, path: str) -> Path:
        return self.root / path.lstrip("/")
