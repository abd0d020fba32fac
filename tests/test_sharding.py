"""Index maps between the slots of a window and the ranks that share it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batch.strategies import layouts
from isoloss import Layout
from isoloss.sharding import shard_slots, slot_ranks

SPLITS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (2, 4), (4, 2)]


def padded(layout: Layout, multiple: int) -> Layout:
    """The same documents in a window that splits into `multiple` parts."""
    slots = -(-max(layout.physical_tokens, 1) // multiple) * multiple
    return Layout(layout.document_lengths, alignment=layout.alignment, padded_length=slots)


def held_by(layout: Layout, cp_size: int, sp_size: int) -> list[list[int]]:
    """Slots of each rank, context ranks outermost."""
    return [
        shard_slots(layout, cp_size=cp_size, cp_rank=cp_rank, sp_size=sp_size, sp_rank=sp_rank).tolist()
        for cp_rank in range(cp_size)
        for sp_rank in range(sp_size)
    ]


@given(layouts(alignments=(8, 16)), st.sampled_from(SPLITS))
def test_row_16_every_slot_is_held_once_and_all_ranks_hold_as_many(
    layout: Layout, split: tuple[int, int]
) -> None:
    cp_size, sp_size = split
    window = padded(layout, 2 * cp_size * sp_size * 8)
    held = held_by(window, cp_size, sp_size)
    assert {len(slots) for slots in held} == {window.physical_tokens // (cp_size * sp_size)}
    assert sorted(slot for slots in held for slot in slots) == list(range(window.physical_tokens))
    for slots in held:
        assert slots == sorted(slots), "a shard keeps the order of the window"


@given(layouts(alignments=(8, 16)), st.sampled_from(SPLITS))
def test_the_inverse_map_finds_every_slot(layout: Layout, split: tuple[int, int]) -> None:
    cp_size, sp_size = split
    window = padded(layout, 2 * cp_size * sp_size * 8)
    held = torch.tensor(held_by(window, cp_size, sp_size))
    ranks, places = slot_ranks(window, cp_size=cp_size, sp_size=sp_size)
    assert torch.equal(held[ranks, places], torch.arange(window.physical_tokens))


@given(layouts(alignments=(8, 16)), st.sampled_from([2, 4]))
def test_context_ranks_do_equal_causal_work(layout: Layout, cp_size: int) -> None:
    window = padded(layout, 16 * cp_size)
    work = []
    for slots in held_by(window, cp_size, 1):
        # a slot attends to itself and to the slots of its stride before it
        work.append(
            sum(
                slot - start + 1
                for start, stride in zip(window.document_starts, window.document_strides, strict=True)
                for slot in slots
                if start <= slot < start + stride
            )
        )
    assert len(set(work)) == 1


def test_contiguous_work_is_not_balanced() -> None:
    """What the test above must be able to see: without the zigzag the last rank does most."""
    layout = Layout([16], alignment=8)
    contiguous = [sum(slot + 1 for slot in range(rank * 8, rank * 8 + 8)) for rank in range(2)]
    zigzag = [sum(slot + 1 for slot in slots) for slots in held_by(layout, 2, 1)]
    assert contiguous == [36, 100]
    assert zigzag == [68, 68]


def test_zigzag_and_contiguous_by_hand() -> None:
    layout = Layout([8, 3], alignment=4, padded_length=16)
    assert held_by(layout, 2, 1) == [[0, 1, 6, 7, 8, 11, 12, 15], [2, 3, 4, 5, 9, 10, 13, 14]]
    assert held_by(layout, 1, 2) == [list(range(8)), list(range(8, 16))]
    assert held_by(layout, 2, 2) == [[0, 1, 6, 7], [8, 11, 12, 15], [2, 3, 4, 5], [9, 10, 13, 14]]


def test_a_shard_may_hold_no_token() -> None:
    layout = Layout([2], padded_length=8)
    ids = layout.document_ids()
    assert [[int(ids[slot]) for slot in slots] for slots in held_by(layout, 1, 4)] == [
        [0, 0],
        [-1, -1],
        [-1, -1],
        [-1, -1],
    ]
    empty = Layout([], padded_length=8)
    assert held_by(empty, 2, 2) == [[0, 1], [6, 7], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("layout", "cp_size", "sp_size", "message"),
    [
        (
            Layout([3], padded_length=6),
            1,
            4,
            r"6 slots does not split over cp_size=1 and sp_size=4; .*multiple of 4",
        ),
        (
            Layout([3], alignment=4, padded_length=12),
            2,
            2,
            r"cp_size=2 and sp_size=2; .* must be a multiple of 8",
        ),
        (
            Layout([5], alignment=2, padded_length=8),
            2,
            1,
            r"cp_size=2 cuts each document into 4 .* multiples of 4",
        ),
        (Layout([4], padded_length=6), 2, 1, r"alignment 1 and a window of 6 slots do not allow"),
    ],
)
def test_errors_name_the_keys_and_what_fits(layout: Layout, cp_size: int, sp_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_slots(layout, cp_size=cp_size, cp_rank=0, sp_size=sp_size, sp_rank=0)
