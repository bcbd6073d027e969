"""Runs in the sandbox: limits this process, reads code from standard input and runs it.

It is started with `python -c` and the text of this file, so it imports nothing but the standard library. Its arguments
are the limits, numbers all: bytes of memory, seconds of CPU time, processes (0: as many as the user may have), and
bytes of a file.
"""

import os
import resource
import sys

memory_bytes, cpu_seconds, num_processes, file_bytes = map(int, sys.argv[1:5])
limits = {
    resource.RLIMIT_AS: memory_bytes,
    resource.RLIMIT_CPU: cpu_seconds,
    resource.RLIMIT_FSIZE: file_bytes,
    resource.RLIMIT_NOFILE: 32,
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_MSGQUEUE: 0,
    resource.RLIMIT_MEMLOCK: 0,
}
if num_processes:
    limits[resource.RLIMIT_NPROC] = num_processes
for limit, value in limits.items():
    resource.setrlimit(limit, (value, value))  # soft and hard are the same, so that the code cannot raise them
os.write(1, b"\n")  # says that the sandbox stands: the time limit begins here
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # until here errors go to the controller
os.closerange(3, 32)
code = sys.stdin.read()
try:
    exec(compile(code, "<model>", "exec"), {"__name__": "__main__"})
except BaseException as error:
    sys.stdout.flush()
    print(f"{type(error).__name__}: {error}")
    sys.exit(1)
