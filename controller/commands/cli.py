"""The entry point of `ownloop`.

Imports next to nothing before `main` runs: a Ctrl-C while modules are loaded would print a traceback. The commands are
in `controller.commands.command_line`.
"""

import atexit
import errno
import gc
import os
import sys

_INTERRUPTED = 128 + 2  # SIGINT; the module `signal` would take a while to load
_BROKEN_PIPE = 128 + 13  # SIGPIPE
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: list[str] | tuple[str, ...] | None = None) -> None:
    """Runs one command and exits: 0, 1 if the command failed, 2 for a mistake of the caller, 128 + signal.

    If the reader of the output goes away, as `head` does, the status is that of SIGPIPE and nothing is printed.
    """
    if arguments is None:
        sys.unraisablehook = _unraisable
    atexit.register(gc.freeze)  # an interpreter's last collections walk through all of torch, which takes a second
    try:
        from rl.system.hardware import keep_few_arenas, open_standard_streams

        open_standard_streams()
        keep_few_arenas()
        from controller.commands.command_line import run_command

        code = run_command(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        code = _BROKEN_PIPE
    except OSError as error:
        if error.errno not in _FULL:
            raise
        sys.stderr.write(f"error: the output or a temporary file cannot be written: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(1)  # exit handlers would try to write the rest
    except KeyboardInterrupt:  # before a run or a parity test handles signals itself
        print("interrupted", file=sys.stderr, flush=True)
        code = _INTERRUPTED
    if code > 128:
        os._exit(code)  # exit handlers would flush to a pipe without reader, or wait for processes that are dead by now
    raise SystemExit(code)


def _unraisable(dropped: "sys.UnraisableHookArgs") -> None:
    """Raises a Ctrl-C again that came in a callback, as importing runs many: Python drops what those raise."""
    if not isinstance(dropped.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    import signal

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)  # when the callback has ended


if __name__ == "__main__":
    main()
