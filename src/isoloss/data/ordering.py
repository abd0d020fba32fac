"""Orders that depend on their keys alone: the same on every machine, today and in a year.

numpy promises that the raw bits of a generator never change, but not what its methods such as `permutation`
make of them. A run that is resumed with another numpy must see the same order, so only raw bits are used.
"""

import hashlib
import json

import numpy as np


def random_order(count: int, *key: int | str) -> np.ndarray:
    """A permutation of `range(count)` that depends on `count` and `key` alone, uint32[count]."""
    if count >= 2**32:
        raise ValueError(f"an order of {count} rows needs more than 32 bits; split the source in two")
    return np.argsort(_raw_bits(count, *key), kind="stable").astype(np.uint32)


def choose(count: int, chosen: int, *key: int | str) -> tuple[np.ndarray, np.ndarray]:
    """Split `range(count)` at random into `chosen` positions and the others, each in ascending order.

    A position draws its lot from `key` and itself, so rows added at the end move few others.

    Returns:
        The chosen positions and the others, int64.
    """
    lots = np.argsort(_raw_bits(count, *key), kind="stable")
    return np.sort(lots[:chosen]), np.sort(lots[chosen:])


def _raw_bits(count: int, *key: int | str) -> np.ndarray:
    digest = hashlib.sha256(json.dumps(key).encode()).digest()
    bits: np.ndarray = np.random.PCG64(int.from_bytes(digest[:16], "big")).random_raw(count)
    return bits
