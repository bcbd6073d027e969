"""Single-turn tasks of the reasoning-gym package, by name: https://github.com/open-thought/reasoning-gym.

Some of its verifiers hand the answer to Python's `eval`, directly or through SymPy. Here they get literals alone, or
formulas of numbers, names and well-known functions; any other answer is scored as one that cannot be read.
"""

import ast
import contextlib
import functools
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Annotated, Any

from rl.checks import check_known
from rl.configuration import Several, configuration, holds, one_of
from rl.envs.procedural import TextProblem, eval_set, train_stream
from rl.protocols import Prompt
from rl.system.plugins import how_to_install

# Their entries depend on the order of Python's sets, hence on PYTHONHASHSEED.
_HASHED = frozenset(
    {
        *("futoshiki", "isomorphic_strings", "knight_swap", "polynomial_multiplication"),
        *("ransom_note", "sokoban", "zebra_puzzles"),
    }
)
# They make a list as long as the data set, or refuse a longer one.
_NUM_LISTED = {"acre": 2000, "gsm_symbolic": 20_000, "list_functions": 20_000, "word_ladder": 20_000}
# Their verifiers evaluate answers: as Python's literals, or as formulas of SymPy.
_LITERALS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
_FORMULAS = frozenset(
    {
        *("countdown", "puzzle24"),
        *("intermediate_integration", "polynomial_multiplication", "simple_integration"),
    }
)
_FUNCTIONS = frozenset("sin cos tan asin acos atan sinh cosh tanh exp log ln sqrt Abs abs Rational Integral".split())
_MAX_FORMULA = 1000  # characters; SymPy takes seconds for longer ones
_MAX_DEGREE = 100
_SERVE = "from rl.envs.reasoning import serve_entries; serve_entries()"


@configuration
class ReasoningGym:
    """One task of reasoning-gym, asked in one turn and scored by the task's own verifier."""

    task: Annotated[str, one_of(lambda: _tasks())]  # noqa: PLW0108 - it is below
    """Name of the task, such as "spell_backward"."""
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The task's own options, by its names."""
    template: Annotated[str, holds("{question}")] = "{question}"
    """Template of the prompt; `{question}` stands for the problem's text."""
    chat: bool = True
    """Whether the prompt is a user's message in a chat. Otherwise the model continues the text as it is."""
    stop: Several[str] = ()
    """Strings that end an answer."""

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown task or option, naming the nearest, or a template without `{question}`."""
        options = [f.name for f in fields(_tasks()[self.task][1])]
        for name in self.params:
            check_known(f"an option of {self.task} in ReasoningGym.params", name, options)
            if name in ("seed", "size"):
                raise ValueError(f"ReasoningGym.params has {name!r}, which every run sets itself; leave it out")
        try:
            _dataset(self.task, pickle.dumps(dict(self.params)))
        except Exception as error:  # mostly an AssertionError
            words = f"{error}".partition("\n")[0] or type(error).__name__
            raise ValueError(f"ReasoningGym.params is {dict(self.params)}; {self.task} refuses it: {words}") from error

    @property
    def name(self) -> str:
        """The task's name."""
        return self.task

    def train_problems(self, seed: int, start: int, count: int) -> list[TextProblem]:
        """See `rl.protocols.Env`."""
        return train_stream(self._problem, seed, start, count)

    def eval_problems(self, count: int) -> list[TextProblem]:
        """See `rl.protocols.Env`."""
        return eval_set(self._problem, count)

    def _problem(self, number: int) -> TextProblem:
        dataset = _dataset(self.task, pickle.dumps(dict(self.params)))
        if not _HASHED.isdisjoint(_names(self.task, self.params)) and sys.flags.hash_randomization:
            entry = _entry(self.task, dict(self.params), number)
        else:
            entry = dataset[number % dataset.size]
        text = self.template.replace("{question}", entry["question"])
        prompt: Prompt = [{"role": "user", "content": text}] if self.chat else text

        def score(completion: str) -> float:
            answer = completion.strip()
            if entry["metadata"].get("source_dataset", self.task) in _FORMULAS and not _is_formula(answer):
                answer = "?"  # which is none to SymPy either
            return float(dataset.score_answer(answer=answer, entry=entry))

        return TextProblem(
            id=f"{self.task}: {entry['question']}", prompt=prompt, score=score, answer=entry.get("answer")
        )


@functools.cache
def _tasks() -> Mapping[str, tuple[Any, Any]]:
    with warnings.catch_warnings():  # raised by a dependency's source
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            from reasoning_gym.factory import DATASETS
        except ModuleNotFoundError as error:
            raise ValueError(
                f"ReasoningGym needs {error.name}, which is not installed: {how_to_install('ownloop[reasoning]')}"
            ) from None
    for task in _LITERALS:  # the name within their modules
        vars(sys.modules[DATASETS[task][0].__module__])["eval"] = ast.literal_eval
    return DATASETS


def _names(task: str, params: Mapping[str, Any]) -> list[str]:
    """The task, and of a composite one its parts too."""
    return [task, *(each["name"] for each in params.get("datasets") or () if task == "composite")]


def _size(names: Iterable[str]) -> int:
    # reasoning-gym computes entry i from (seed, i) when asked, so the largest possible data set costs nothing.
    return min(_NUM_LISTED.get(name, 2**31 - 1) for name in names)


def _config(task: str, params: Mapping[str, Any]) -> Any:
    """The task's configuration. Raises what it raises for wrong parameters, and ValueError for an unknown part."""
    parts = dict[str, object]()
    if task == "composite" and params.get("datasets"):
        from reasoning_gym.composite import DatasetSpec

        parts["datasets"] = list[DatasetSpec]()
        for each in params["datasets"]:
            check_known("a name in ReasoningGym.params['datasets']", each["name"], _tasks())
            config = {"size": _size([each["name"]]), **each.get("config", {})}
            parts["datasets"].append(DatasetSpec(each["name"], each.get("weight", 1.0), config))
    return _tasks()[task][1](seed=0, size=_size(_names(task, params)), **{**params, **parts})


@functools.lru_cache(maxsize=8)
def _dataset(task: str, params: bytes) -> Any:
    """The data set of these options, pickled as the key of the cache."""
    return _tasks()[task][0](_config(task, pickle.loads(params)))


def _is_formula(text: str) -> bool:
    """Whether SymPy may evaluate the text: it runs nothing else, and takes no more than seconds."""
    try:
        tree = ast.parse(text[: _MAX_FORMULA + 1], mode="eval")
        return len(text) <= _MAX_FORMULA and _degree(tree) <= _MAX_DEGREE
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _degree(node: ast.AST) -> float:
    """The product of exponents in one another. Raises ValueError for what is not part of a formula."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return 1
        case ast.Name(id=name) if "__" not in name:
            return 1
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return max(map(_degree, arguments), default=1)
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent) if _degree(exponent) == 1:
            numbers = [each.value for each in ast.walk(exponent) if isinstance(each, ast.Constant)]
            return _degree(base) * max((abs(float(str(number))) for number in numbers), default=1)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return max(_degree(left), _degree(right))
        case ast.UnaryOp(operand=inner) | ast.Expression(body=inner):
            return _degree(inner)
        case _:
            raise ValueError(f"{type(node).__name__} is not part of a formula")


class _Entries:
    """A process with PYTHONHASHSEED=0 that computes entries, so that they are the same in every run.

    It answers (task, options, number) with entries. It ends when the pipe does, at the latest with this process.
    """

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-c", _SERVE, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, start_new_session=True
        )
        theirs.close()
        self._lock = threading.Lock()

    def ask(self, *request: object) -> Any:
        """The entry, or the error that computing it raised. Raises EOFError or OSError if the process was killed."""
        with self._lock:
            self._pipe.send(request)
            return self._pipe.recv()


_entries = functools.cache(_Entries)


def _entry(*request: object) -> dict[str, Any]:
    """The entry of (task, options, number), by a new process if that of before was killed."""
    try:
        found = _entries().ask(*request)
    except (EOFError, OSError):
        _entries.cache_clear()
        found = _entries().ask(*request)
    if isinstance(found, Exception):
        raise found
    return found


def serve_entries() -> None:
    """Answers requests of `_Entries` until they end. What reasoning-gym prints goes to the standard error."""
    pipe = Connection(int(sys.argv[1]))
    os.dup2(2, 1)
    with contextlib.suppress(EOFError):
        while True:
            task, params, number = pipe.recv()
            try:
                found: object = _dataset(task, pickle.dumps(params))[number]
            except Exception as error:  # raised where the entry was asked for
                found = error
            pipe.send(found)
