from collections import Counter

import pytest

from rl.data.rows import Order, content_id, is_eval, numpy_order, python_order, split, stream


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (numpy_order, [3, 0, 2, 1, 4, 0, 5, 6, 3, 4, 0, 2]),
        (python_order, [3, 4, 2, 6, 5, 0, 1, 3, 4, 2, 1, 0]),
    ],
)
def test_the_order_of_a_stream_never_changes(order: Order, expected: list[int]) -> None:
    """A run that was begun with another version of this code must be resumed with the same items."""
    assert stream(range(7), order, 3, 5, 12) == expected


@pytest.mark.parametrize("order", [numpy_order, python_order])
def test_every_epoch_has_every_item_once(order: Order) -> None:
    items = stream("abcdefghij", order, 0, 0, 30)
    assert Counter(items) == dict.fromkeys("abcdefghij", 3)
    assert len({tuple(items[i : i + 10]) for i in (0, 10, 20)}) == 3
    assert stream("abcdefghij", order, 0, 7, 20) == items[7:27]
    assert stream("abcdefghij", order, 1, 0, 30) != items


def test_a_tenth_of_all_texts_is_held_out() -> None:
    train, held_out = split(range(2000), lambda number: f"text {number // 2}")
    assert sorted([*train, *held_out]) == list(range(2000))
    assert 0.07 < len(held_out) / 2000 < 0.13
    assert {n // 2 for n in train}.isdisjoint(n // 2 for n in held_out)
    assert all(is_eval(f"text {n // 2}") for n in held_out)


def test_a_content_id_depends_on_the_content_alone() -> None:
    assert content_id({"a": 1, "b": [2]}) == content_id({"b": [2], "a": 1})
    assert content_id(["a", 1]) != content_id(["a", "1"])
