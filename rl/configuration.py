"""Configurations are data: dataclasses of pydantic, frozen, with the constraint of a field at the field.

    @configuration
    class Sampling:
        max_tokens: PositiveInt
        '''The largest number of tokens to sample.'''
        stop: Several[str] = ()

    Sampling(max_tokens=0)   ->   ValueError: Sampling.max_tokens is 0: Input should be greater than 0

Values are not converted, except that an integer fits a float, a NumPy scalar its Python type, a list a tuple
(`Several`) and a text a path (`AnyPath`). What two fields must be to each other is checked in `__post_init__`.
A class that is derived from a configuration is one, with this decorator.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args, get_type_hints, overload

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field, SkipValidation, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from rl.checks import MAX_FLOAT32, MAX_SEED, did_you_mean
from rl.system.plugins import why_absent

T = TypeVar("T")
Seed = Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED)]
Positive = Annotated[float, Field(gt=0, le=MAX_FLOAT32)]
"""A number above 0, finite in float32."""
NotNegative = Annotated[float, Field(ge=0, le=MAX_FLOAT32)]
"""A number of at least 0, finite in float32."""
UpToOne = Annotated[float, Field(ge=0, le=1)]
AnyPath = Annotated[Path, Strict(False)]
"""A path, which may be given as text."""
Several = Annotated[tuple[T, ...], Strict(False)]
"""A tuple, which may be given as a list."""
Gpus = Several[int | str] | None
"""A GPU for each rank, by its number, UUID or MIG name. None takes the next free ones."""
_RULES = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)


class _Rare:
    """Marks a field that few need."""


Rare = Annotated[T, _Rare()]
"""A field that `--help` leaves out. It is an option as any other is, and `ownloop show` prints it."""
AsItIs = SkipValidation
"""A value of a protocol, whose class is not checked: `AsItIs[Env]`."""


@overload
def configuration(kind: type[T], /) -> type[T]: ...
@overload
def configuration(*, kw_only: bool = True) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def configuration(kind: Any = None, *, kw_only: bool = True) -> Any:
    """Makes a class a configuration. A wrong value raises ValueError with the field's path, the value and the rule."""
    if kind is None:
        return functools.partial(configuration, kw_only=kw_only)
    made: Any = dataclass(kind, frozen=True, slots=True, kw_only=kw_only, config=_RULES)
    validated = made.__init__

    @functools.wraps(validated)
    def init(self: object, *args: object, **values: object) -> None:
        try:
            values.update(zip((each.name for each in fields(made)), args, strict=False))
            validated(self, **{name: _plain(value) for name, value in values.items()})
        except ValidationError as error:
            raise _as_value_error(error) from None

    made.__init__ = init
    return made


def holds(text: str) -> AfterValidator:
    """The rule that a text holds another: `Annotated[str, holds("{question}")]`."""

    def check(value: str) -> str:
        if text not in value:
            raise ValueError(f"Input should contain {text}")
        return value

    return AfterValidator(check)


def one_of(names: Callable[[], Iterable[str]], kind: str = "") -> AfterValidator:
    """The rule that a text is one of the names that there are when it is checked. `kind` is as for `unknown_name`."""

    def check(value: str) -> str:
        if value not in (known := list(names())):
            raise ValueError(why_absent(kind, value) or f"not known{did_you_mean(value, known)}")
        return value

    return AfterValidator(check)


def is_rare(kind: object, field: str) -> bool:
    """Whether a class declares this field as `Rare`."""
    hint = get_type_hints(kind, include_extras=True).get(field)
    return any(isinstance(each, _Rare) for each in get_args(hint)[1:])


def check_value(name: str, value: object, hint: Any) -> None:
    """Raises ValueError, with the name of the value, if it is not of an annotated type, by the rules of a field."""
    try:
        TypeAdapter(hint, config=_RULES).validate_python(_plain(value))
    except ValidationError as error:
        raise _as_value_error(error, name) from None


def check_gpus(owner: str, gpus: Gpus, num_ranks: int) -> None:
    """Raises ValueError naming `owner`'s field `gpus` if it does not name a different GPU for each rank."""
    if gpus is not None and not len(gpus) == len(set(gpus)) == num_ranks:
        raise ValueError(
            f"{owner}.gpus is {list(gpus)}; it must name {num_ranks} different GPUs, one per rank, or be None"
        )


def _plain(value: object) -> object:
    """NumPy's scalars as Python's numbers."""
    return value.item() if isinstance(value, np.generic) else value


def _as_value_error(error: ValidationError, owner: str = "") -> ValueError:
    """The first mistake, in one line; of a union, what each of its types says of the value."""
    first, *others = error.errors(include_url=False)
    cause = first.get("ctx", {}).get("error")
    if not (first["loc"] or owner):  # `__post_init__` raised it, and has named the field
        return cause if isinstance(cause, ValueError) else ValueError(f"{error.title}: {first['msg']}")
    same = [
        first,
        *(each for each in others if each["input"] is first["input"] and each["loc"][:1] == first["loc"][:1]),
    ]
    parts = zip(*(each["loc"] for each in same), strict=False)
    place = [part[0] for part in itertools.takewhile(lambda part: len(set(part)) == 1, parts)]
    said = dict.fromkeys(str(each.get("ctx", {}).get("error", each["msg"])) for each in same)
    names = (name for name in place if name != "[key]")  # it follows the name in a mapping that is wrong itself
    where = "".join(f".{name}" if isinstance(name, str) and name.isidentifier() else f"[{name!r}]" for name in names)
    value = "missing" if first["type"] == "missing" else f"{first['input']!r:.200}"
    return ValueError(f"{owner or error.title}{where} is {value}: {', or '.join(said)}")
