"""Orders depend on their keys alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from isoloss.data.ordering import choose, random_order

ORDER = [4, 6, 3, 1, 5, 0, 2, 7]
CHOSEN = [[1, 5, 6], [0, 2, 3, 4, 7]]


def test_orders_are_those_of_every_other_machine_and_version() -> None:
    """A run that is resumed elsewhere meets the same documents; other values here break such runs."""
    assert random_order(8, 1, "pass", "a", 0).tolist() == ORDER
    assert [part.tolist() for part in choose(8, 3, 1, "held out", "a")] == CHOSEN


@given(st.integers(0, 300), st.integers(0, 5), st.text(max_size=3))
def test_every_position_comes_once(count: int, seed: int, name: str) -> None:
    assert sorted(random_order(count, seed, name)) == list(range(count))
    chosen, others = choose(count, count // 3, seed, name)
    assert len(chosen) == count // 3
    assert sorted([*chosen, *others]) == list(range(count))


def test_every_part_of_a_key_matters_and_parts_do_not_run_together() -> None:
    keys = [
        (1, "a"),
        (2, "a"),
        (1, "b"),
        (1, "a", 0),
        ("1", "a"),
        ("1a",),
        (1, "pass", "a1", 2),
        (1, "pass", "a", 12),
    ]
    orders = {tuple(random_order(50, *key).tolist()) for key in keys}  # type: ignore[arg-type]
    assert len(orders) == len(keys)


def test_orders_are_fair() -> None:
    """Each position holds each row about equally often: a chi-square far below what a bias would give."""
    counts = np.zeros((6, 6))
    for seed in range(3000):
        for place, row in enumerate(random_order(6, seed, "x")):
            counts[place, row] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 60  # 25 degrees of freedom
