"""A process of its own that compares answers with math-verify. `ownloop_tasks.math_answers` starts it, by its path.

Its argument is the number of a pipe's file descriptor. It answers every request that comes through the pipe, and ends
when the pipe is closed. It imports nothing of ownloop, which would cost each of these processes a second.
"""

import importlib
import logging
import math
import resource
import sys
import time
from multiprocessing.connection import Connection

_MAX_MEMORY_BYTES = 4 << 30  # of address space: powers of powers would take all there is


def main() -> None:
    """Serves requests `(answer, text, time_limit_s)`, of texts with answers, with `(found, right)`."""
    pipe = Connection(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    sys.set_int_max_str_digits(100_000)
    logging.disable(logging.ERROR)  # math-verify warns about every call without a time limit of its own
    try:
        math_verify = importlib.import_module("math_verify")
    except ImportError as error:
        pipe.send(str(error))
        return
    pipe.send("")
    answers: dict[str, object] = {}
    while True:
        try:
            answer, text, time_limit_s = pipe.recv()
        except EOFError:
            return
        # The parent ends this process at the limit. If the parent was killed, the kernel does, even in the middle of
        # an operation that would never end.
        seconds = math.ceil(time.process_time() + time_limit_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        try:
            if answer not in answers:
                answers[answer] = math_verify.parse(answer, parsing_timeout=None)
            given = math_verify.parse(text, parsing_timeout=None)
            right = math_verify.verify(answers[answer], given, timeout_seconds=None)
            pipe.send((bool(given), bool(right)))
        except Exception:  # SymPy raises anything for what a model writes; such an answer is not right
            pipe.send((False, False))


if __name__ == "__main__":
    main()
