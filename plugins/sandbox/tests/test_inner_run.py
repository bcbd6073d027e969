"""The filter of system calls refuses each call that it names, on both architectures, and lets the others through."""

import asyncio
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from ownloop_sandbox import Sandbox, run_python
from ownloop_sandbox.inner_run import filter_calls, refused_calls
from plugins.sandbox.tests.here import REAL, need
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.seconds, pytest.mark.stranger("F2")]

ROOT = Path(__file__).parents[3]
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_X86_64 and _AARCH64 of linux/audit.h
I386 = 0x40000003
ALLOWED, KILLED, REFUSED, ABSENT = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
HEADERS = {
    "x86_64": "#include <asm/unistd_64.h>",
    "aarch64": "#define __BITS_PER_LONG 64\n#define __ARCH_WANT_MEMFD_SECRET\n#include <asm-generic/unistd.h>",
}
CALLS = {  # name: number on x86-64, on aarch64, arguments, what the filter answers
    "read": (0, 63, (0,), ALLOWED),
    "execve": (59, 221, (0,), ALLOWED),
    "the newest": (449, 449, (0,), ALLOWED),
    "a newer one": (451, 451, (0,), ABSENT),
    "memfd_create": (319, 279, (0,), REFUSED),
    "clone3": (435, 435, (0,), ABSENT),
    "clone a process": (56, 220, (17,), ALLOWED),
    "clone a user namespace": (56, 220, (17 | 0x10000000,), REFUSED),
    "clone a mount namespace": (56, 220, (17 | 0x20000,), REFUSED),
    "socket AF_UNIX": (41, 198, (1,), ALLOWED),
    "socket AF_VSOCK": (41, 198, (40,), REFUSED),
    "socket AF_ALG": (41, 198, (38,), REFUSED),
    "socketpair AF_UNIX": (53, 199, (1,), ALLOWED),
    "socketpair AF_TIPC": (53, 199, (30,), REFUSED),
    "fcntl F_GETPIPE_SZ": (72, 25, (3, 1032), ALLOWED),
    "fcntl F_SETPIPE_SZ": (72, 25, (3, 1031), REFUSED),
    "mmap": (9, 222, (0, 4096, 3, 0x22), ALLOWED),
    "mmap of huge pages": (9, 222, (0, 4096, 3, 0x40022), REFUSED),
    "prctl PR_SET_NAME": (157, 167, (15,), ALLOWED),
    "prctl PR_SET_SECCOMP": (157, 167, (22,), REFUSED),
    "setsockopt SO_KEEPALIVE": (54, 208, (3, 1, 9), ALLOWED),
    "setsockopt SO_SNDBUF": (54, 208, (3, 1, 7), REFUSED),
    "setsockopt SO_ATTACH_BPF": (54, 208, (3, 1, 50), REFUSED),
    "setsockopt IPV6_V6ONLY": (54, 208, (3, 41, 26), ALLOWED),
    "ioctl FIONREAD": (16, 29, (0, 0x541B), ALLOWED),
    "ioctl TIOCSTI": (16, 29, (0, 0x5412), REFUSED),
}


def answer(
    machine: str,
    number: int,
    arguments: tuple[int, ...] = (),
    architecture: int | None = None,
    reach: str = "nothing",
) -> int:
    """What the kernel would do with a call: runs the filter as the instructions of man 2 seccomp say."""
    data = {0: number, 4: architecture or ARCHITECTURES[machine]} | dict(zip(range(16, 64, 8), arguments, strict=False))
    program, place, value = filter_calls(machine, reach), 0, 0
    tests = {0x15: int.__eq__, 0x25: int.__gt__, 0x45: int.__and__}
    while True:
        operation, if_true, if_false, constant = program[place]
        place += 1
        if operation == 0x06:
            return constant
        if operation == 0x20:
            value = data[constant]
        else:
            place += if_true if tests[operation](value, constant) else if_false


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize("name", CALLS)
def test_the_filter_answers_each_call(name: str, machine: str) -> None:
    x86, aarch, arguments, expected = CALLS[name]
    assert answer(machine, x86 if machine == "x86_64" else aarch, arguments) == expected


@pytest.mark.stranger("2.A5")
@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_a_program_may_open_sockets_of_its_own_network_and_nothing_else_more(machine: str) -> None:
    for name, (x86, aarch, arguments, expected) in CALLS.items():
        assert answer(machine, x86 if machine == "x86_64" else aarch, arguments, reach="endpoint") == expected, name
    socket, pair = (41, 53) if machine == "x86_64" else (198, 199)
    families = {family for family in range(64) if answer(machine, socket, (family,), reach="endpoint") == ALLOWED}
    assert families == {1, 2, 10}  # AF_UNIX, AF_INET, AF_INET6
    assert {family for family in range(64) if answer(machine, pair, (family,), reach="endpoint") == ALLOWED} == {1}


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_all_named_calls_are_refused(machine: str) -> None:
    assert {name: answer(machine, number) for name, number in refused_calls(machine).items()} == dict.fromkeys(
        refused_calls(machine), REFUSED
    )


def test_programs_of_other_architectures_are_killed() -> None:
    assert answer("x86_64", 0, architecture=I386) == KILLED
    assert answer("aarch64", 63, architecture=ARCHITECTURES["x86_64"]) == KILLED
    assert answer("x86_64", 0x40000000 | 319) == ABSENT  # the x32 numbers of the same architecture


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    made = subprocess.run(
        ["gcc", "-E", "-dM", "-x", "c", "-"], input=HEADERS[machine], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(made.stderr.strip().splitlines()[0])
    defined = dict(re.findall(r"#define (\w+) (\w+)", made.stdout))
    numbers = {name: defined.get(f"__NR_{name}", "absent") for name in refused_calls(machine)}
    assert {name: defined.get(text, text) for name, text in numbers.items()} == {
        name: str(number) for name, number in refused_calls(machine).items()
    }


@cache
def errors_inside(sandbox: Sandbox) -> dict[str, int]:
    """The error number of each refused call, and of a socket of each address family, made inside a sandbox."""
    code = (
        f"calls = {refused_calls(os.uname().machine)}\n"
        "import ctypes, json, socket\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def error(result): return ctypes.get_errno() if result < 0 else 0\n"
        "errors = {name: error(libc.syscall(number, 0, 0, 0, 0, 0, 0)) for name, number in calls.items()}\n"
        "for family in range(2, 64):\n"
        "    for kind in range(1, 7):\n"
        "        number = error(libc.socket(family, kind, 0))\n"
        "        if kind == 1 or number != 1: errors[f'family {family}'] = number\n"
        "print(json.dumps(errors))"
    )
    result = asyncio.run(run_python(code, sandbox=sandbox, time_limit_s=LIMIT_S))
    assert result.ok, result
    return json.loads(result.output)


@pytest.mark.parametrize("name", [*refused_calls(os.uname().machine), *(f"family {n}" for n in range(2, 64))])
@pytest.mark.parametrize("sandbox", REAL)
def test_the_call_is_refused_in_a_sandbox(sandbox: Sandbox, name: str) -> None:
    need(sandbox)
    assert errors_inside(sandbox)[name] == errno.EPERM


def test_a_kernel_that_accepts_no_filter_is_refused() -> None:
    code = (
        "from ownloop_sandbox import find_way, inner_run\n"
        "own = [(0x20, 0, 0, 0), (0x15, 0, 3, 157 if inner_run.os.uname().machine == 'x86_64' else 167),\n"
        "       (0x20, 0, 0, 16), (0x15, 0, 1, 22), (0x06, 0, 0, 0x50016), (0x06, 0, 0, 0x7FFF0000)]\n"
        "inner_run.install_filter(own)\n"  # PR_SET_SECCOMP now fails with EINVAL, as in a kernel without filters
        "try: find_way('namespaces')\nexcept ValueError as error: print(error)"
    )
    need("namespaces")
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert "the kernel accepts no filter of system calls (seccomp): Invalid argument" in result.stdout, result


@pytest.mark.skipif(shutil.which("setarch") is None, reason="setarch, which names another machine, is not installed")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="hardware: i686 is the other machine of x86-64 alone")
def test_a_machine_without_a_filter_is_refused() -> None:
    text = (ROOT / "plugins/sandbox/ownloop_sandbox/inner_run.py").read_text()
    command = ["setarch", "i686", sys.executable, "-I", "-S", "-c", text, "", "{}", "nothing", "1,1,1,1,1,0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert result.returncode == 1
    assert result.stderr == "there is no filter of system calls for i686, only for x86_64 and aarch64\n"
