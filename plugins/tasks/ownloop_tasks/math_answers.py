"""Compares answers as mathematics, with math-verify: https://github.com/huggingface/Math-Verify.

Each comparison runs in one of a few processes that are kept for it, with a limit of CPU time: on a busy machine a right
answer stays right. math-verify's own limits are signals, which only work in a main thread and cannot stop one long
operation on large numbers; a process can be killed.
"""

import contextlib
import functools
import os
import queue
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from multiprocessing import Pipe
from pathlib import Path

import psutil

from rl.rollouts.guard import waiting

WAITING_FACTOR = 10
"""A comparison that gets no core may take so many times its limit."""
_STARTUP_LIMIT_S = 60.0  # importing SymPy takes a second, and much longer on a busy disk
_MAX_PROCESSES = 16

_NAME = r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*"
_BRACES = re.compile(rf"{_NAME}|\\.|[{{}}]", re.DOTALL)
# What a box without braces holds: a number, a fraction, a command with its arguments, a letter.
_BARE = re.compile(
    r"[-+]?(?:\\?\$?\d+(?:,\d{3})*(?:\.\d+)?(?:\s*/\s*\d+)?|\\[dt]?frac\s*\d\s*\d"
    r"|\\(?!(?:boxed|fbox|framebox)(?![a-zA-Z]))[a-zA-Z]+(?:\s*\{[^{}]{0,100}\})*|[a-zA-Z])"
)
_MATH = r"(?:[\s$]|\\[()\[\],;:!]|\\q?quad)*+"  # possessive, so that two of them share a run in one way only
_LINK = r"(?:[,;]|and|or|\\text\s*\{\s*(?:and|or)\s*\})"
_NAMED = rf"(?:[a-zA-Z](?:_\{{?\w+\}}?)?{_MATH}(?:=|\\in){_MATH})?"
_JOINED = re.compile(rf"{_MATH}\.?{_MATH}(?:{_LINK}{_MATH})+{_NAMED}")  # between two boxes that are one answer
_APART = re.compile(rf"{_MATH}(?:{_LINK}{_MATH})*{_NAMED}")  # the same for an answer that is known to be a list
_BRACKETS = {")": "(", "]": "[", "}": "{"}
_LISTS = re.compile(r"[,;]|\b(?:and|or)\b")
_COMMAS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d)")
_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,?\\[,!:; ]|\{,\}|~)\d{3})+(?!\d)")
_DASH = re.compile(r"(?<![\w)}\]])[\u2010-\u2013\ufe63\uff0d](?=\s*[\d.\\])")  # before a number, a minus
_END = re.compile(r"(?<=[^\\.,;\s])\s*[.,;]\s*\Z")  # of a sentence behind the answer; not of "1, 2, ..." and "\\,"
_FLOAT = re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d{1,3}")
_PRINTED = re.compile(r"(?<![\w.\\}])\d+(?:\.\d+)?[eE][-+]\d{2,3}(?![\w.])")  # not 2e-5, which may be 2 * e - 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What came of comparing a completion with the right answer."""

    found: bool = False
    """Whether the completion holds an answer at all."""
    right: bool = False
    timed_out: bool = False
    """Whether the comparison took too long; the answer then counts as not right."""


class MathComparer:
    """Compares answers in several processes, which start when they are first needed and end with this process."""

    def __init__(self, num_processes: int, waiting_factor: float = WAITING_FACTOR) -> None:
        """At most `num_processes` comparisons run at a time; further calls wait.

        A process that gets no core may take `waiting_factor` times its limit.
        """
        self._waiting_factor = waiting_factor
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(num_processes):
            self._idle.put(None)

    def compare(
        self, answer: str, completion: str, *, boxed: bool, time_limit_s: float, is_cut_off: bool = False
    ) -> Comparison:
        """Looks for an answer in the completion and compares it. Any thread may call it.

        If `boxed`, only the last box counts (`last_boxes`); otherwise math-verify finds the answer in a text without
        boxes. `time_limit_s` is in seconds of CPU time; waiting for a process is not counted. Raises ValueError if
        math-verify is not installed.
        """
        given = last_boxes(completion, is_cut_off=is_cut_off, is_list=is_list(answer))
        if given is not None:
            given = f"\\boxed{{{plain(given)}}}"
        elif not boxed:
            given = plain(completion[_begin_of_open_box(completion) :])
        if not given or not given.strip():
            return Comparison()
        with waiting():
            process = self._idle.get()
        try:
            for _ in range(2):  # a process that was killed, as for want of memory, says nothing of the answer
                if process is None or process.has_ended():
                    with waiting():
                        process = _Process(self._waiting_factor)
                try:
                    found = process.ask((f"\\boxed{{{plain(answer)}}}", given, time_limit_s), time_limit_s)
                    if found is not None:
                        return Comparison(found=found[0], right=found[1])
                    process.kill()
                    break
                except (EOFError, OSError):
                    process.kill()
            return Comparison(timed_out=True)
        finally:
            self._idle.put(process)


@functools.cache
def math_comparer() -> MathComparer:
    """The comparer that all environments of this process share."""
    return MathComparer(min(_MAX_PROCESSES, max(2, (os.cpu_count() or 2) // 2)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    start: int
    end: int
    """After the box. Of an open box, -1."""
    content: str


def _boxes(text: str, *, is_cut_off: bool = False) -> list[_Box]:
    """The boxes of a text, by their starts, without empty boxes and boxes within another one.

    A box is `\\boxed`, `\\fbox` or `\\framebox`, with braces or, as LaTeX allows, without: `\\boxed 5`. In a text that
    was cut off, a box without braces at its very end is open, and so is one whose name is not complete.
    """
    # Start, end, and where the content begins and ends. Contents are read last: of boxes in boxes, of the outer alone.
    found, begun = list[tuple[int, int, int, int]](), list[tuple[int, int] | None]()
    skipped = 0
    for token in _BRACES.finditer(text):
        at, end = token.start(), token.end()
        if at < skipped or (token[0][0] == "\\" and len(token[0]) == 2):  # an escaped character
            continue
        if token[0] == "}":
            box = begun.pop() if begun else None
            if box is not None:
                found.append((box[0], end, box[1], at))
        elif token[0] == "{":
            begun.append(None)
        elif text[end : end + 1] == "{":
            begun.append((at, end + 1))
            skipped = end + 1
        elif bare := _BARE.match(text, end):
            is_open = is_cut_off and bare.end() == len(text)
            found.append((at, -1 if is_open else bare.end(), *bare.span()))
        elif end == len(text):
            found.append((at, -1, 0, 0))
    found += [(box[0], -1, 0, 0) for box in begun if box is not None]
    name = text.rfind("\\")
    if is_cut_off and name >= 0 and any(each.startswith(text[name:]) for each in ("\\boxed", "\\fbox", "\\framebox")):
        found.append((name, -1, 0, 0))
    outer = list[_Box]()
    for start, end, first, last in sorted(found):
        if not (outer and start < outer[-1].end):
            content = _bare(text[first:last])
            outer += [_Box(start=start, end=end, content=content)] if end < 0 or content else []
    return outer


def last_boxes(text: str, *, is_cut_off: bool = False, is_list: bool = False) -> str | None:
    """What the last box holds, `\\boxed{5}` or `\\boxed 5`; None without a box, and if the last one is not closed.

    Boxes with nothing but a comma, "and" or "or" between them are one answer, a list; of an answer that `is_list`, so
    are boxes with nothing between them.
    """
    boxes = _boxes(text, is_cut_off=is_cut_off)
    return ", ".join(_last_run(text, boxes, is_list=is_list)) if boxes and boxes[-1].end >= 0 else None


def is_one_answer(text: str) -> bool:
    """Whether all boxes of a text are one answer, as in `last_boxes`, or hold what that answer holds."""
    boxes = _boxes(text)
    contents = {box.content for box in boxes}
    return all(box.end >= 0 for box in boxes) and contents == {*_last_run(text, boxes, is_list=False)}


def _last_run(text: str, boxes: list[_Box], *, is_list: bool) -> list[str]:
    """The contents of the last boxes that are one answer, each once."""
    link, first = _APART if is_list else _JOINED, len(boxes) - 1
    while first > 0 and link.fullmatch(text, boxes[first - 1].end, boxes[first].start):
        first -= 1
    return list(dict.fromkeys(box.content for box in boxes[max(first, 0) :]))


def _bare(content: str) -> str:
    """What a box holds, without inner boxes and dollar signs."""
    content = re.sub(_NAME, "", content).strip()
    return content[1:-1].strip() if re.fullmatch(r"\$[^$]*\$", content) else content


def _begin_of_open_box(text: str) -> int:
    """Where the content of a last box begins that is not closed; 0 if there is none."""
    boxes = _boxes(text)
    found = re.compile(_NAME + r"\{?").match(text, boxes[-1].start) if boxes else None
    return found.end() if found else 0


def is_list(answer: str) -> bool:
    """Whether the answer has several parts: "1,2", "1 or 2"; not "1,234" and "(1,2)"."""
    text = _COMMAS.sub("0", answer.strip().removeprefix("\\{").removesuffix("\\}"))
    outside, begun, open_brackets = list[str](), list[int](), Counter[str]()
    for character in text:
        outside.append(character)
        if character in "([{":
            begun.append(len(outside) - 1)
            open_brackets[character] += 1
        elif open_brackets[bracket := _BRACKETS.get(character, "")]:
            while outside[at := begun.pop()] != bracket:  # an unclosed one within
                open_brackets[outside[at]] -= 1
            open_brackets[bracket] -= 1
            del outside[at:]
    return bool(_LISTS.search("".join(outside)))


def plain(text: str) -> str:
    """The text as math-verify reads it as meant: 1\\,234 as 1234, 1e-05 as 0.00001, "5." as 5, a dash as a minus."""
    text = _GROUPS.sub(lambda found: re.sub(r"\D", "", found[0]), _END.sub("", _DASH.sub("-", text)))
    exponents = _FLOAT if _FLOAT.fullmatch(text.strip()) else _PRINTED
    return exponents.sub(lambda found: format(Decimal(found[0]), "f"), text)


class _Process:
    """A running `ownloop_tasks.math_process`."""

    def __init__(self, waiting_factor: float) -> None:
        self._waiting_factor = waiting_factor
        ours, theirs = Pipe()
        script = Path(__file__).with_name("math_process.py")
        # -P: the script's own folder must not be searched for modules.
        command = [sys.executable, "-P", str(script), str(theirs.fileno())]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        self._pipe = ours
        failure = None
        with contextlib.suppress(EOFError, OSError):
            failure = self._pipe.recv() if self._pipe.poll(_STARTUP_LIMIT_S) else None
        if failure != "":
            self.kill()
            raise ValueError(
                f"answers cannot be compared ({failure or 'the process did not start'}); pip install math-verify"
            )

    def ask(self, request: tuple[str, str, float], time_limit_s: float) -> tuple[bool, bool] | None:
        """(found, right), or None if the process did not answer in time. Raises EOFError or OSError if it died."""
        self._pipe.send(request)
        return self._pipe.recv() if self._answers_within(time_limit_s) else None

    def _answers_within(self, time_limit_s: float) -> bool:
        """Waits for an answer, or for the end of the process, until it has computed for `time_limit_s`."""
        begun, deadline = self._cpu_time_s(), time.monotonic() + self._waiting_factor * time_limit_s
        left = time_limit_s
        while left > 0 and time.monotonic() < deadline:
            if self._pipe.poll(max(left, 0.01)):
                return True
            left = begun + time_limit_s - self._cpu_time_s()
        return False

    def _cpu_time_s(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def has_ended(self) -> bool:
        """Whether it does not run any more."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()
