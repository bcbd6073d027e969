"""Tests an answer's code from another process than its own. `ownloop_tasks.code_problems` runs this text in a sandbox.

    tests' process --a call, its arguments--> answer's process
                  <--a result, what it printed--

Tests and expected values are in the first process alone; the second one executes the code. Values travel as JSON:
numbers, texts, dates, None, and the containers of the standard library as copies, and so do objects of classes that the
problem's setup defines. Everything else stays where it is, and the other side holds a `Remote`. What a call does to its
arguments is done to the originals. The file imports nothing of ownloop, whose packages the sandbox does not show.
"""

import ast
import builtins
import collections
import contextlib
import datetime
import decimal
import enum
import fractions
import importlib
import io
import json
import operator
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TextIO

_MAX_DEPTH = 20_000  # of lists and objects in one another, such as a linked list
_PLAIN = (type(None), bool, int, float, str)
_Makers = Mapping[str, Callable[..., object]]
_ROWS: _Makers = {kind.__name__: kind for kind in (list, tuple, set, frozenset, collections.deque)}
_MAPS: _Makers = {kind.__name__: kind for kind in (dict, collections.OrderedDict, collections.Counter)}
_IN_WORDS: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: (bytes.hex, bytes.fromhex),
    bytearray: (bytearray.hex, bytearray.fromhex),
    complex: (lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    range: (lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    decimal.Decimal: (str, decimal.Decimal),
    fractions.Fraction: (str, fractions.Fraction),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: (datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.datetime: (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.timedelta: (
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
}
_UNARY = "len iter next reversed str repr bool hash int float complex abs round".split()
_OPERATORS = "getitem setitem delitem index neg pos invert".split()
_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift eq lt le gt ge".split()


class Remote:
    """An object of the other process. Operators between it and a value of this process do not exist."""

    def __init__(self, link: "Link", number: int) -> None:
        vars(self).update(_link=link, _number=number)

    def __getattr__(self, name: str) -> Any:
        return self._link.ask("getattr", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._link.ask("setattr", self, name, value)

    def __call__(self, *arguments: object, **named: object) -> Any:
        return self._link.ask("call", self, *arguments, **named)

    def __instancecheck__(self, instance: object) -> Any:
        return isinstance(instance, Remote) and self._link.ask("isinstance", instance, self)

    def __subclasscheck__(self, subclass: object) -> Any:
        return isinstance(subclass, Remote) and self._link.ask("issubclass", subclass, self)


def _forwarded(function: str, is_binary: bool) -> Callable[..., Any]:
    def method(self: Remote, *others: object) -> Any:
        if is_binary and not isinstance(others[0], Remote):  # else the code would see and judge what is expected
            return NotImplemented
        return self._link.ask(function, self, *others)

    return method


for each in _UNARY + _OPERATORS + _BINARY:
    setattr(Remote, f"__{each}__", _forwarded(each if each in _UNARY else f"__{each}__", each in _BINARY))


class Link:
    """One end of the connection. `ask` has the other end do something, and serves it until the answer comes."""

    def __init__(self, reader: TextIO, writer: TextIO, served: Callable[..., object]) -> None:
        """`served(operation, *arguments)` does what the other end asks for."""
        self._reader, self._writer, self._served = reader, writer, served
        module = sys.modules["answer"] = ModuleType("answer")  # where dataclasses look for it
        self.space: dict[str, Any] = vars(module)
        self.classes = set[str]()
        self.given, self._exceptions = list[object](), dict[str, type[BaseException]]()

    def ask(self, operation: str, *arguments: object, **named: object) -> Any:
        """What the other end returns. Raises what it raises, and EOFError if it has ended."""
        self._send("ask", operation, [*arguments], named)
        while (message := self._receive())[0] == "ask":
            self._answer(*message[1:])
        status, value, after, printed = message
        sys.stdout.write(printed)
        for mine, other in zip((*arguments, *named.values()), after, strict=True):
            _update(mine, other)
        if status == "raised":
            raise value
        return value

    def serve(self) -> None:
        """Answers until the other end has ended."""
        while True:
            try:
                _, operation, arguments, named = self._receive()
            except EOFError:
                return
            self._answer(operation, arguments, named)

    def _answer(self, operation: str, arguments: list[object], named: dict[str, object]) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                status, value = "done", self._served(operation, *arguments, **named)
            except BaseException as error:
                status, value = "raised", error
        after = [each if _is_mutable(each, self) else None for each in (*arguments, *named.values())]
        self._send(status, value, after, printed.getvalue())

    def _send(self, *message: object) -> None:
        self._writer.write(json.dumps(self._encoded([*message], {})) + "\n")
        self._writer.flush()

    def _receive(self) -> Any:
        line = self._reader.readline()
        if not line.endswith("\n"):
            raise EOFError("the code has ended its process")
        return self._decoded(json.loads(line), {})

    def _encoded(self, value: Any, seen: dict[int, tuple[int, object]]) -> Any:
        kind, name = type(value), type(value).__name__
        if kind in _PLAIN:
            return value
        if kind in _ROWS.values():
            return [name, *(self._encoded(item, seen) for item in value)]
        if kind in _MAPS.values() or kind is collections.defaultdict:
            pairs = [[self._encoded(each, seen) for each in pair] for pair in value.items()]
            return [name if kind in _MAPS.values() else "dict", *pairs]
        if kind in _IN_WORDS:
            return [name, _IN_WORDS[kind][0](value)]
        if kind.__base__ is tuple and hasattr(kind, "_fields"):
            return ["named", name, list(kind._fields), *(self._encoded(item, seen) for item in value)]
        if isinstance(value, BaseException) and not _is_own(value, self):
            return ["error", _line_of(kind), *(self._encoded(item, seen) for item in value.args)]
        return self._named(value) or self._object(value, seen)

    def _named(self, value: object) -> list[object] | None:
        """A class or a module that both sides have, or that the other side can make an image of."""
        if isinstance(value, ModuleType):
            return ["module", value.__name__]
        if not isinstance(value, type):
            return None
        is_known = issubclass(value, BaseException) or vars(builtins).get(value.__name__) is value
        return ["class", _line_of(value)] if is_known else None

    def _object(self, value: object, seen: dict[int, tuple[int, object]]) -> list[object]:
        if id(value) in seen:
            return ["same", seen[id(value)][0]]
        if _is_own(value, self):
            seen[id(value)] = len(seen), value  # which keeps its id
            return ["object", seen[id(value)][0], type(value).__name__, self._encoded(_state_of(value), seen)]
        if isinstance(value, Remote):
            return ["yours", value._number]
        self.given.append(value)
        return ["mine", len(self.given) - 1]

    def _decoded(self, read: Any, seen: dict[int, object]) -> Any:
        if not isinstance(read, list):
            return read
        name, *parts = read
        if name in _ROWS:
            return _ROWS[name](self._decoded(part, seen) for part in parts)
        if name in _MAPS:
            return _MAPS[name]({self._decoded(key, seen): self._decoded(value, seen) for key, value in parts})
        match name, *parts:
            case "named", str(kind), list(fields), *items:
                made = collections.namedtuple(kind, fields)  # pyright: ignore[reportUntypedNamedTuple] - known only now
                return (self._own(kind, tuple) or made)(*(self._decoded(item, seen) for item in items))
            case "error", list(line), *words:
                return self._exception(line)(*(self._decoded(item, seen) for item in words))
            case "class", list(line):
                known = vars(builtins).get(line[0])
                return known if isinstance(known, type) else self._exception(line)
            case "module", str(module) if module.partition(".")[0] in sys.stdlib_module_names:
                return importlib.import_module(module)
            case "object", int(number), str(kind), state if kind in self.classes:
                return self._made(number, kind, state, seen)
            case "same", int(number):
                return seen[number]
            case "yours", int(number):
                return self.given[number]
            case "mine", int(number):
                return Remote(self, number)
            case _:
                return next(back for kind, (_, back) in _IN_WORDS.items() if kind.__name__ == name)(*parts)

    def _own(self, name: str, base: type) -> Any:
        """The class of the setup that has this name and inherits from `base`; None if there is none."""
        found = self.space.get(name) if name in self.classes else None
        return found if isinstance(found, type) and issubclass(found, base) else None

    def _made(self, number: int, kind: str, state: object, seen: dict[int, object]) -> object:
        """An object of a class that both sides have."""
        if members := self._own(kind, enum.Enum):
            return members(self._decoded(state, seen)["value"])
        new = self.space[kind].__new__ if self._own(kind, BaseException) else object.__new__
        made = seen[number] = new(self.space[kind])
        found: dict[str, object] = self._decoded(state, seen)
        if any(callable(getattr(type(made), name, None)) for name in found):
            raise ValueError(f"an object of {kind} has an attribute in the place of a method")
        _give(made, found)
        return made

    def _exception(self, line: Sequence[str]) -> type[BaseException]:
        """The exception of Python's own, or one made in its image, by the names of a class and those it inherits."""
        known = vars(builtins).get(line[0])
        if isinstance(known, type) and issubclass(known, BaseException):
            return known
        if line[0] not in self._exceptions:
            self._exceptions[line[0]] = type(line[0], (self._exception(line[1:]),), {})
        return self._exceptions[line[0]]


def _line_of(kind: type) -> list[str]:
    return [each.__name__ for each in kind.__mro__]


def _is_own(value: object, link: Link) -> bool:
    """Whether the value's class is one of the setup's."""
    name = type(value).__name__
    return name in link.classes and type(value) is link.space.get(name)


def _is_mutable(value: object, link: Link) -> bool:
    """Whether a copy of the value can be brought up to date."""
    if _is_own(value, link):
        return not isinstance(value, enum.Enum)
    return isinstance(value, list | dict | set | bytearray | collections.deque)


def _slots(kind: type) -> list[str]:
    """The names of what an object holds besides its `__dict__`."""
    found = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    names = [name for each in found for name in ((each,) if isinstance(each, str) else each)]
    return [*names, "args"] if issubclass(kind, BaseException) else names


def _state_of(value: object) -> dict[str, object]:
    if isinstance(value, enum.Enum):
        return {"value": value.value}
    state = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **state}


def _give(value: object, state: dict[str, object]) -> None:
    """Sets what an object holds."""
    for name in state.keys() & _slots(type(value)):
        object.__setattr__(value, name, state.pop(name))
    if state:
        vars(value).update(state)


def _update(mine: Any, other: Any) -> None:
    """Gives an argument the content that it has after a call."""
    if other is None or type(mine) is not type(other):
        return
    if isinstance(mine, list | bytearray):
        mine[:] = other
    elif isinstance(mine, dict | set | collections.deque):
        mine.clear()
        mine.extend(other) if isinstance(mine, collections.deque) else mine.update(other)
    else:
        getattr(mine, "__dict__", {}).clear()
        _give(mine, _state_of(other))


def begin(space: dict[str, object], setup: str, link: Link) -> None:
    """Runs the setup, which both processes have."""
    sys.setrecursionlimit(_MAX_DEPTH)
    sys.set_int_max_str_digits(0)
    exec(setup, space)
    link.classes = {n for n, v in space.items() if isinstance(v, type) and v.__module__ == space["__name__"]}


def answer(reader: int, writer: int) -> None:
    """Is the answer's process: runs the setup and the code, and then what the tests ask for."""
    before = dict[str, object]()

    def prepare(setup: str) -> None:
        begin(space, setup, link)
        before.update(space)

    def run(code: str) -> None:
        exec(code, space)

    def look(names: list[str]) -> dict[str, object]:
        return {name: space[name] for name in names if name in space and space[name] is not before.get(name, space)}

    own = {
        "begin": prepare,
        "run": run,
        "look": look,
        "call": lambda function, *arguments, **named: function(*arguments, **named),
    }
    known = {**vars(operator), **vars(builtins), **own}

    def served(operation: str, *arguments: Any, **named: Any) -> Any:
        return known[operation](*arguments, **named)

    link = Link(os.fdopen(reader), os.fdopen(writer, "w"), served)
    space = link.space
    link.serve()


def score(text: str, mark: str, setup: str, code: str, tests: Sequence[str]) -> None:
    """Prints a mark when the setup has run in both processes, and at the end how many tests pass, and a mark.

    `text` is this file's. Raises if the code does.
    """
    (their_reader, writer), (reader, their_writer) = os.pipe(), os.pipe()
    program = f"{text}\nanswer({their_reader}, {their_writer})"
    command = [sys.executable, "-I", "-S", "-B", "-c", program]
    null, theirs = subprocess.DEVNULL, (their_reader, their_writer)
    subprocess.Popen(command, stdin=null, stdout=null, stderr=null, pass_fds=theirs)
    for each in theirs:
        os.close(each)

    def callback(operation: str, function: Callable[..., object], *arguments: object, **named: object) -> Any:
        if operation != "call" or all(function is not given for given in link.given):
            raise ValueError("code may call the functions that a test gave it, and nothing else")
        return function(*arguments, **named)

    link = Link(os.fdopen(reader), os.fdopen(writer, "w"), callback)
    space = link.space = Names(link)
    passed = 0
    with contextlib.redirect_stdout(io.StringIO()):
        begin(space, setup, link)
        link.ask("begin", setup)
    print(mark, flush=True)
    with contextlib.redirect_stdout(io.StringIO()):
        link.ask("run", code)
        imported = {name for name, value in space.items() if getattr(value, "__module__", "") != space["__name__"]}
        found = {*link.ask("look", sorted(set().union(*map(_names, tests))))} - imported
        # An answer may be called `sum`, but not replace `abs` in the tests of something else.
        space.of_answer = found - (vars(builtins).keys() | space.keys() if len(found) > 1 else set())
        for test in tests:
            with contextlib.suppress(BaseException):
                exec(test, space)
                passed += 1
    print(passed, mark, flush=True)


class Names(dict[str, object]):
    """The names of the tests. Each of `of_answer` is looked up where the code is, until a test sets it."""

    def __init__(self, link: Link) -> None:
        self._link, self.of_answer = link, set[str]()
        super().__init__(__name__="answer")

    def __getitem__(self, name: str) -> Any:
        return self._link.ask("look", [name])[name] if name in self.of_answer else super().__getitem__(name)

    def __setitem__(self, name: str, value: object) -> None:
        self.of_answer.discard(name)
        super().__setitem__(name, value)


def _names(test: str) -> set[str]:
    """The names in a test, which may be no Python at all."""
    try:
        return {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    except (SyntaxError, ValueError):
        return set()
