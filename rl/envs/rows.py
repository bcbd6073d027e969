"""What environments over a fixed set of rows share: the order in which a training stream goes through them."""

import functools
import hashlib
import json
import random
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def epochs(rows: Sequence[T], seed: int, start: int, count: int) -> list[T]:
    """Rows start to start + count - 1 of a stream that has every row once, in an order that seed and epoch decide, then
    all of them in the next order."""
    positions = (divmod(number, len(rows)) for number in range(start, start + count))
    return [rows[_order(seed, epoch, len(rows))[i]] for epoch, i in positions]


def content_id(value: Any) -> str:
    """A name for a JSON value, the same on every machine."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_rows: int) -> list[int]:
    order = list(range(num_rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
