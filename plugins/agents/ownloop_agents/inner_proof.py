"""Runs a Python program and says with a mark that it came to its end, and that the work under test did not end it.

    python OPTIONS -c "$(cat inner_proof.py)" (SCRIPT | -m MODULE | -c CODE) ARGUMENTS...

Standard input has the mark and the names of the files that are not the work's, as JSON. Standard output ends with the
mark if the program ended with status 0, by itself, and no test was skipped, expected to fail or left out by the work.
pytest must pass at least one test. What cannot be started, and a pytest that finds its arguments wrong, end the output
with the mark and a "?".
"""

import sys

sys.path[:] = [path for path in sys.path if path]  # nothing is imported from the folder of the work until it runs

import json  # noqa: E402
import os  # noqa: E402
import runpy  # noqa: E402
import unittest.loader  # noqa: E402
import unittest.result  # noqa: E402
from types import ModuleType, TracebackType  # noqa: E402
from typing import Any  # noqa: E402

_COMMAND = "<command>"
_USAGE = 4  # of pytest: it was asked for what is not there


class Proof:
    """What is known of the program's end."""

    def __init__(self, trusted: list[str]) -> None:
        """`trusted` are the files of the folder that are not the work's."""
        self.trusted = {os.path.realpath(name) for name in trusted}
        self.installed = tuple(os.path.realpath(path) + "/" for path in (*sys.path, sys.prefix, sys.base_prefix))
        self.doubted = False
        self.collected = self.finished = self.passed = 0

    def is_of_work(self, trace: TracebackType | None) -> bool:
        """Whether an exception came through a file of the work."""
        while trace is not None:
            name = trace.tb_frame.f_code.co_filename
            path = os.path.realpath(name)
            known = name == _COMMAND or name.startswith("<frozen ") or trace.tb_frame.f_globals is globals()
            if not known and path not in self.trusted and not path.startswith(self.installed):
                return True
            trace = trace.tb_next
        return False

    def doubt(self, error: BaseException | None) -> None:
        """Remembers an exception that ends a test without a failure, if the work raised it."""
        self.doubted = self.doubted or (error is not None and self.is_of_work(error.__traceback__))

    def watch_unittest(self) -> None:
        """Sees what is skipped."""
        loader: Any = unittest.loader
        result: Any = unittest.result.TestResult
        add, make = result.addSkip, loader._make_skipped_test

        def add_skip(tests: object, test: object, reason: str) -> None:
            self.doubt(sys.exc_info()[1])
            add(tests, test, reason)

        def make_skipped(name: str, error: Exception, suite: object) -> object:
            self.doubt(error)
            return make(name, error, suite)

        result.addSkip, loader._make_skipped_test = add_skip, make_skipped

    # hooks of pytest

    def pytest_collection_finish(self, session: Any) -> None:
        """Counts the tests."""
        self.collected = len(session.items)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Counts what has ended."""
        self.finished += report.when == "teardown"
        self.passed += report.when == "call" and report.passed and not hasattr(report, "wasxfail")

    def pytest_runtest_makereport(self, item: object, call: Any) -> None:
        """Sees why a test was skipped or expected to fail."""
        del item
        if call.excinfo is not None and type(call.excinfo.value).__name__ in ("Skipped", "XFailed", "SkipTest"):
            self.doubt(call.excinfo.value)

    def run_pytest(self, pytest: ModuleType, arguments: list[str]) -> int:
        """The status. A module that is skipped as a whole counts as a test of it, by the hook below."""

        @pytest.hookimpl(hookwrapper=True)
        def pytest_make_collect_report(collector: object) -> Any:
            del collector
            call = (yield).get_result().call
            if call.excinfo is not None:
                self.doubt(call.excinfo.value)

        vars(self)["pytest_make_collect_report"] = pytest_make_collect_report
        status = int(pytest.main(arguments, plugins=[self]))
        self.doubted = self.doubted or not self.passed or self.finished != self.collected
        return status

    def run(self, words: list[str]) -> int:
        """Runs the program and returns its status."""
        how, *rest = words
        if how not in ("-m", "-c"):
            sys.argv, folder = words, os.path.dirname(os.path.abspath(how))
        else:
            sys.argv, folder = [how, *rest[1:]], os.getcwd()
        pytest = __import__("pytest") if words[:2] == ["-m", "pytest"] else None
        if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
            sys.path.insert(0, folder)
        try:
            if pytest is not None:
                return self.run_pytest(pytest, rest[1:])
            self.watch_unittest()
            if how == "-m":
                runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
            elif how == "-c":
                exec(compile(rest[0], _COMMAND, "exec"), {"__name__": "__main__"})
            else:
                runpy.run_path(how, run_name="__main__")
        except SystemExit as error:
            self.doubt(error)
            if error.code not in (None, 0):
                raise
        return 0


def can_start(words: list[str]) -> bool:
    """Whether the program is there. A module is looked for where no file of the work is."""
    if words[0] == "-c":
        return True
    if words[0] != "-m":
        return os.path.exists(words[0])
    from importlib.util import find_spec

    top = words[1].partition(".")[0]
    return find_spec(top) is not None or any(os.path.exists(f"{top}{ending}") for ending in ("", ".py"))


def main() -> None:
    """Runs the program of the arguments."""
    given = json.loads(sys.stdin.read())
    out, write, leave = os.dup(1), os.write, os._exit
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    proof = Proof(given["trusted"])
    status = proof.run(sys.argv[1:]) if can_start(sys.argv[1:]) else _USAGE
    if status == _USAGE:
        write(out, f"\n{given['mark']}?".encode())
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if status == 0 and not proof.doubted:
        write(out, f"\n{given['mark']}".encode())
    leave(status)


if __name__ == "__main__":
    main()
