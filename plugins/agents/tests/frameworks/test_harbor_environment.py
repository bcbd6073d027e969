"""Harbor's tasks run in a box, and their tests in a fresh one: what an agent leaves there is not paid.

Harbor's own classes are stand-ins; test_harbor_tasks.py has a test with Harbor itself.
"""

import asyncio
import importlib.util
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ownloop_agents import harbor_tasks
from ownloop_sandbox import ways
from ownloop_sandbox.sandboxes import check_sandbox
from plugins.sandbox.tests.here import need_box
from plugins.sandbox.tests.test_run import is_running
from tests.waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.seconds
TEST = (
    '[ "$(cat /app/answer.txt)" = yes ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n'
)


class Base:
    """Stands in for Harbor's `BaseEnvironment`."""

    task_env_config = SimpleNamespace(workdir=None)

    def _merge_env(self, env: dict[str, str] | None) -> dict[str, str] | None:
        return env

    async def _upload_environment_dir_after_start(self) -> None: ...


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    need_box("auto")
    base, capabilities = ModuleType("base"), ModuleType("capabilities")
    vars(base).update(BaseEnvironment=Base, ExecResult=SimpleNamespace)
    vars(capabilities).update(EnvironmentCapabilities=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "harbor.environments.base", base)
    monkeypatch.setitem(sys.modules, "harbor.environments.capabilities", capabilities)
    monkeypatch.setenv("OWNLOOP_SANDBOX", str(Path(ways.__file__).parent))
    monkeypatch.setenv("OWNLOOP_WAY", check_sandbox("auto"))
    monkeypatch.setenv("OWNLOOP_TEST_SECRET", "secret")
    spec = importlib.util.spec_from_file_location(
        "harbor_environment", Path(harbor_tasks.__file__).with_name("harbor_environment.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.BoxEnvironment()


def within(environment: Any, use: Callable[[Any], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        await environment.start(force_build=False)
        try:
            return await use(environment)
        finally:
            await environment.stop(delete=True)

    return asyncio.run(main())


def verified(environment: Any, agent: str, folder: Path) -> str:
    """The reward's file after an agent that runs this command, as Harbor has the tests run."""
    (folder / "tests").mkdir()
    (folder / "tests" / "test.sh").write_text(TEST)

    async def use(made: Any) -> str:
        await made.exec(agent, timeout_sec=LIMIT_S)
        await made.upload_dir(folder / "tests", "/tests")
        await made.exec("chmod +x /tests/test.sh", user="root")
        await made.exec("(/tests/test.sh) > /logs/verifier/test-stdout.txt 2>&1")
        await made.download_dir("/logs/verifier", folder / "found")
        return (folder / "found" / "reward.txt").read_text()

    return within(environment, use)


CHEATS = {
    "the reward's file": "echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "a process that writes it": "(setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done' &)",
    "a process that waits for the tests": '(setsid sh -c \'while :; do echo "echo 1 > /logs/verifier/reward.txt" > '
    "/tests/test.sh; sleep 0.01; done' > /dev/null 2>&1 &)",
    "its own tests": "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 555 /tests/test.sh",
    "a program at home": "mkdir -p ~/.local/bin ~/bin; "
    "printf '#!/bin/sh\\necho yes' | tee ~/.local/bin/cat > ~/bin/cat; chmod +x ~/.local/bin/cat ~/bin/cat",
    "a profile at home": "for f in .bashrc .profile .bash_profile; do echo 'cat() { echo yes; }' > ~/$f; done",
    "a folder for the logs": "mv /logs/verifier /logs/v; ln -s /app /logs/verifier; echo 1 > /app/reward.txt",
    "a link to the answer": "echo yes > /tmp/yes; ln -s /tmp/yes answer.txt",
    "a fifo for the answer": "mkfifo answer.txt; (setsid sh -c 'echo yes > answer.txt' > /dev/null 2>&1 &)",
    "a folder for the answer": "mkdir -p answer.txt/yes",
    "another name of the test": "mkdir -p /app/tests; echo 'exit 0' > /app/tests/test.sh; echo 1 > reward.txt",
}


@pytest.mark.stranger("2.A4")
@pytest.mark.parametrize("cheat", CHEATS)
def test_an_agent_that_solves_nothing_is_not_paid(environment: Any, tmp_path: Path, cheat: str) -> None:
    assert verified(environment, CHEATS[cheat], tmp_path) == "0\n"


@pytest.mark.stranger("2.A4")
def test_an_agent_that_solves_the_task_is_paid(environment: Any, tmp_path: Path) -> None:
    assert verified(environment, "echo yes > answer.txt", tmp_path) == "1\n"


@pytest.mark.stranger("2.A6")
def test_a_task_has_no_rights_and_sees_no_one(environment: Any) -> None:
    async def use(made: Any) -> str:
        said = await made.exec(
            "cat /etc/shadow; grep -h Cap /proc/self/status | sort -u -k2; id -u; ls -d /proc/[0-9]* | wc -l;"
            f"kill -0 {os.getpid()}; cat /proc/{os.getpid()}/environ; echo $OWNLOOP_TEST_SECRET"
        )
        return said.stdout

    *caps, user, processes, secret = within(environment, use).splitlines()
    assert [line.split()[1] for line in caps] == ["0000000000000000"]
    assert (user, secret) == ("65534", "")
    assert int(processes) < 8


@pytest.mark.stranger("2.A6")
def test_processes_stay_until_the_end_and_errors_are_apart(environment: Any) -> None:
    seconds = f"600{time.time_ns()}"

    async def use(made: Any) -> None:
        await made.exec(f"(setsid sleep {seconds} > /dev/null 2>&1 &)")
        said = await made.exec("pgrep -f 'slee[p]' | wc -l; echo wrong >&2; exit 3", env={"A": "b"}, cwd="/tmp")
        assert (said.stdout, said.stderr, said.return_code) == ("1\n", "wrong\n", 3)
        with pytest.raises(TimeoutError, match="longer than 1 s"):
            await made.exec("sleep 600", timeout_sec=1)
        assert (await made.exec("echo on")).stdout == "on\n"

    within(environment, use)
    wait_until(lambda: not is_running(seconds), "the end of what a task left")
