"""Training streams over a fixed set of items, and the split into training and held-out items.

Item i of a stream is a pure function of (seed, i), so that a run can be resumed anywhere. Whether an item is held out
depends only on its text, so that it is on the same side in every file, run and process.
"""

import functools
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

EVAL_FRACTION = 0.1
T = TypeVar("T")


class Order(Protocol):
    """The order in which one epoch of a stream goes through the items."""

    def __call__(self, num_items: int, seed: int, epoch: int) -> Sequence[int]:
        """A permutation of 0..num_items-1."""
        ...


# There are two orders because a run that was begun with one must be resumed with the same: `rl.data.sources` has always
# used NumPy's permutation, and the environments Python's shuffle.


@functools.lru_cache(maxsize=4)  # `stream` asks for every item, and a step may span two epochs
def numpy_order(num_items: int, seed: int, epoch: int) -> list[int]:
    """The order of examples and preferences; see `Order`."""
    return np.random.default_rng([seed, epoch]).permutation(num_items).tolist()


@functools.lru_cache(maxsize=4)
def python_order(num_items: int, seed: int, epoch: int) -> list[int]:
    """The order of environments over rows; see `Order`."""
    order = list(range(num_items))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def stream(items: Sequence[T], order: Order, seed: int, start: int, count: int) -> list[T]:
    """Items start to start + count - 1 of an endless stream. Every epoch has every item once, in its own order."""
    positions = (divmod(number, len(items)) for number in range(start, start + count))
    return [items[order(len(items), seed, epoch)[i]] for epoch, i in positions]


def is_eval(text: str) -> bool:
    """Whether items of this text are held out. True for a tenth of all texts."""
    return hashed_number(f"split/{text}") < EVAL_FRACTION * 2**31


def split(items: Iterable[T], text_of: Callable[[T], str]) -> tuple[list[T], list[T]]:
    """Training and held-out items, in order. Items with the same text are on the same side."""
    sides: tuple[list[T], list[T]] = ([], [])
    for item in items:
        sides[is_eval(text_of(item))].append(item)
    return sides


def without_held_out(items: Iterable[T], held_out: Iterable[T], text_of: Callable[[T], str]) -> list[T]:
    """The items whose text, but for white space around it, is none of the held-out items'."""
    texts = {text_of(item).strip() for item in held_out}
    return [item for item in items if text_of(item).strip() not in texts]


def content_id(value: Any) -> str:
    """An id of a JSON value, computed from its content: the same on every machine."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def hashed_number(key: str) -> int:
    """A number in 0..2^31-1 computed from the key alone: the same on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big") >> 1
