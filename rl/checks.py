"""Checks of values that users choose, with the same wording everywhere."""

import contextlib
import difflib
import importlib
import json
import re
import sys
import traceback
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, TypeGuard, cast

from rl.system.plugins import why_absent, why_not_imported

MAX_SEED = 1 << 62
"""Bound of seeds. PyTorch's generators take 64 bits, of which this leaves room for every sample's."""
MAX_FLOAT32 = 3.4028234663852886e38
"""The largest number of float32, in which trainers compute."""
MIN_FLOAT32 = 1.1754943508222875e-38
"""The smallest number above 0 that float32 holds in full precision."""
_MAX_NAMES = 5


def check_at_least(minimum: float, **values: float) -> None:
    """Raises ValueError naming the first value that is below the minimum or NaN."""
    for name, value in values.items():
        if not value >= minimum:  # unlike `value < minimum`, true for NaN as well
            raise ValueError(f"{name} is {value}; it must be at least {minimum}")


def check_above_zero(**values: float) -> None:
    """Raises ValueError naming the first value that is not above 0 and finite."""
    for name, value in values.items():
        if not 0 < value <= MAX_FLOAT32:
            raise ValueError(f"{name} is {value}; it must be above 0 and finite, in float32")


def check_between(low: float, high: float, **values: float) -> None:
    """Raises ValueError naming the first value that is below `low`, above `high` or NaN."""
    for name, value in values.items():
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}; it must be in [{low}, {high}]")


def check_known(name: str, value: str, known: Iterable[str], kind: str = "") -> None:
    """Raises `unknown_name` if the value is not a known one."""
    known = list(known)
    if value not in known:
        raise unknown_name(name, value, known, kind)


def unknown_name(name: str, value: str, known: Iterable[str], kind: str = "") -> ValueError:
    """The error for an unknown value: names the plug-in that has it, or else the nearest known one.

    `kind` is a kind of names in `rl.system.plugins.OURS`; empty where no plug-in can have the value.
    """
    if reason := why_absent(kind, value):
        return ValueError(f"{name} is {value!r}; {reason}")
    return ValueError(f"{name} is {value!r}, which is not known{did_you_mean(value, known)}")


def did_you_mean(value: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of an error message about an unknown name: the nearest known name, or if none is near, all of them.

    A name with these initials is the nearest, one without a dot first: `--lr` means `--learning-rate`.
    `otherwise` stands for all of them where they are too many to read.
    """
    known = sorted(known, key=lambda name: (name.count("."), name))
    initials = [name for name in known if "".join(re.findall(r"(?:^|[-_.])-*(\w)", name)) == str(value).lstrip("-")]
    close = initials or difflib.get_close_matches(str(value), known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    if otherwise:
        return f"; {otherwise}"
    return f"; known: {', '.join(known)}" if known else "; there are none"


def text_fault(value: object) -> str:
    """What keeps a value from being a non-empty text."""
    if not isinstance(value, str):
        return f"is a {type(value).__name__}; text is needed"
    return "" if value else "is empty; text is needed"


def surrogate_fault(value: object) -> str:
    """What keeps the texts anywhere in a JSON value from being encoded, as for a tokenizer: half of a UTF-16 pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        text = error.object
        return f"holds the lone surrogate {text[error.start]!a} in {text[max(error.start - 40, 0) : error.start]!a}"
    return ""


def prompt_fault(value: object) -> str:
    """What keeps a value from being a prompt (`rl.protocols.Prompt`)."""
    if isinstance(value, str):
        return text_fault(value)
    if not isinstance(value, list | tuple) or not value:
        return f"is {value!r:.80}; text, or messages with 'role' and 'content', are needed"
    for message in cast("list[object]", value):
        fields = cast("dict[str, object]", message) if isinstance(message, dict) else {}
        content = fields.get("content")
        silent = content is None and fields.get("role") == "assistant"  # which may only call tools
        if not isinstance(fields.get("role"), str) or not (silent or isinstance(content, str) or are_parts(content)):
            return f"holds {message!r:.80}; each message needs 'role' and 'content', both text, or parts with images"
    return ""


def are_parts(content: object) -> TypeGuard[list[dict[str, object] | str]]:
    """Whether the content of a message is a list of texts and images."""
    parts = cast("list[object]", content) if isinstance(content, list) else []
    names = "text", "refusal", "thinking"
    texts = [
        part
        for part in parts
        if isinstance(part, str) or (isinstance(part, dict) and any(isinstance(part.get(name), str) for name in names))
    ]
    images = [part for part in parts if isinstance(part, dict) and part.get("type") == "image" and "image" in part]
    return bool(parts) and len(texts) + len(images) == len(parts)


def check_empty_folder(directory: Path) -> None:
    """Raises ValueError if something is there already."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists; --to names a new folder")


def first_names(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _MAX_NAMES} more" if len(ordered) > _MAX_NAMES else ""
    return ", ".join(ordered[:_MAX_NAMES]) + more


def see_working_directory() -> None:
    """Has Python find the modules of the working directory, behind all others: the user's own have no path.

    `python -m` looks there first. Here a file `types.py` that lies there must change nothing.
    """
    if "" not in sys.path:
        sys.path.append("")


@contextlib.contextmanager
def errors_of_user_code(name: str, passing: tuple[type[Exception], ...] = ()) -> Generator[None]:
    """Turns an error of code that the user wrote into a ValueError with the file and the line; `passing` ones stay."""
    try:
        yield
    except SyntaxError as error:
        raise ValueError(f"{name}: {error.filename}, line {error.lineno}: {error.msg}") from error
    except (ValueError, *passing):
        raise
    except (Exception, SystemExit) as error:  # a module may end the program that imports it
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_file()]
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
        raise ValueError(f"{name}: {why_not_imported(error)}{where}") from error


def frames_below(error: BaseException, caller: str) -> str:
    """Where code of the user raised an error: a line for each frame below the last one of the file `caller`."""
    frames = traceback.extract_tb(error.__traceback__)
    last = max((i for i, frame in enumerate(frames) if frame.filename == caller), default=-1)
    return "".join(f"\n  {frame.filename}, line {frame.lineno}, in {frame.name}" for frame in frames[last + 1 :])


def told(error: BaseException) -> str:
    """The message of an error and, if a loss of the user's raised it, where, which `rl.losses.Loss` notes."""
    notes: list[str] = getattr(error, "__notes__", [])
    return "\n".join([str(error), *(note for note in notes if note.startswith("loss "))])


def named_function(field: str, path: str) -> Callable[..., Any]:
    """The user's function that "module:function" names. Raises ValueError naming the field if it cannot be imported."""
    module, _, name = path.partition(":")
    see_working_directory()
    try:
        with errors_of_user_code("its module", passing=(ImportError, AttributeError)):
            found = getattr(importlib.import_module(module), name)
    except (ValueError, ImportError, AttributeError) as error:
        reason = error if isinstance(error, ValueError) else why_not_imported(error)
        said = f"{field} is {path!r}, which cannot be imported ({reason}); it must be "
        raise ValueError(f'{said}"module:function"') from error
    if not callable(found):
        raise ValueError(f"{field} is {path!r}, a {type(found).__name__}; it must be a function")
    return found
