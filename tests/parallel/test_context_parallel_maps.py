"""What context ranks hold of each document, and boundaries as shards see them (row 16)."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batch.strategies import layouts
from isoloss import Layout
from isoloss.sharding import (
    contiguous_slots,
    document_pieces,
    local_boundaries,
    shard_slots,
    window_order,
    zigzag_slots,
)

CP_SIZES = st.sampled_from([1, 2, 4])


def padded(layout: Layout, multiple: int) -> Layout:
    slots = -(-max(layout.physical_tokens, 1) // multiple) * multiple
    return Layout(
        layout.document_lengths,
        None,
        layout.document_groups,
        layout.document_parents,
        alignment=layout.alignment,
        padded_length=slots,
    )


@settings(max_examples=25)
@given(layouts(alignments=(8, 16)), CP_SIZES, st.sampled_from([1, 2, 4]))
def test_shards_are_contiguous_parts_of_zigzag_parts(layout: Layout, cp_size: int, sp_size: int) -> None:
    window = padded(layout, 2 * cp_size * sp_size * 8)
    for cp_rank, sp_rank in itertools.product(range(cp_size), range(sp_size)):
        zigzag = zigzag_slots(window, cp_size=cp_size, cp_rank=cp_rank)
        part = contiguous_slots(len(zigzag), size=sp_size, rank=sp_rank)
        composed = shard_slots(window, cp_size=cp_size, cp_rank=cp_rank, sp_size=sp_size, sp_rank=sp_rank)
        assert torch.equal(zigzag[part], composed)


@settings(max_examples=25)
@given(layouts(alignments=(8, 16)), CP_SIZES)
def test_pieces_hold_every_token_once_where_the_map_says(layout: Layout, cp_size: int) -> None:
    window = padded(layout, 16 * cp_size)
    held = []
    for cp_rank in range(cp_size):
        slots = zigzag_slots(window, cp_size=cp_size, cp_rank=cp_rank).tolist()
        pieces = document_pieces(window, cp_size=cp_size, cp_rank=cp_rank)
        assert [piece.place for piece in pieces] == sorted(piece.place for piece in pieces)
        for piece in pieces:
            first = window.document_starts[piece.document] + piece.first
            expected = list(range(first, first + piece.num_tokens))
            assert slots[piece.place : piece.place + piece.num_tokens] == expected
            held += [(piece.document, piece.first + offset) for offset in range(piece.num_tokens)]
        most = max(
            (sum(p.document == d for p in pieces) for d in range(len(window.document_lengths))), default=0
        )
        assert most <= 2
    tokens = [(d, t) for d, length in enumerate(window.document_lengths) for t in range(length)]
    assert sorted(held) == tokens


@settings(max_examples=25)
@given(layouts(alignments=(8, 16)), st.sampled_from([2, 4]))
def test_work_on_tokens_is_balanced_within_one_piece(layout: Layout, cp_size: int) -> None:
    """A context rank's queries times the keys that they see, per document, alignment slots left out."""
    window = padded(layout, 16 * cp_size)
    for document, (length, stride) in enumerate(
        zip(window.document_lengths, window.document_strides, strict=True)
    ):
        work = [
            sum(
                sum(range(piece.first + 1, piece.first + piece.num_tokens + 1))
                for piece in document_pieces(window, cp_size=cp_size, cp_rank=cp_rank)
                if piece.document == document
            )
            for cp_rank in range(cp_size)
        ]
        last = stride // (2 * cp_size)
        one_piece = sum(range(stride - last + 1, stride + 1))  # the dearest, with all its slots
        assert max(work) - min(work) <= one_piece
        if length == stride:
            assert len(set(work)) == 1


@settings(max_examples=25)
@given(layouts(alignments=(8, 16)), CP_SIZES)
def test_window_order_undoes_the_zigzag(layout: Layout, cp_size: int) -> None:
    window = padded(layout, 16 * cp_size)
    gathered = torch.cat([zigzag_slots(window, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)])
    order = window_order(window, cp_size=cp_size)
    assert torch.equal(gathered[order], torch.arange(window.physical_tokens))


def test_pieces_by_hand() -> None:
    """Neighbouring pieces are one: the last context rank holds the middle of a document."""
    layout = Layout([7, 1, 8], alignment=8, padded_length=32)

    def pieces(cp_rank: int, cp_size: int) -> list[tuple[int, ...]]:
        found = document_pieces(layout, cp_size=cp_size, cp_rank=cp_rank)
        return [(piece.document, piece.place, piece.first, piece.num_tokens) for piece in found]

    assert pieces(0, 1) == [(0, 0, 0, 7), (1, 8, 0, 1), (2, 16, 0, 8)]
    assert pieces(0, 2) == [(0, 0, 0, 2), (0, 2, 6, 1), (1, 4, 0, 1), (2, 8, 0, 2), (2, 10, 6, 2)]
    assert pieces(1, 2) == [(0, 0, 2, 4), (2, 8, 2, 4)]
    assert pieces(3, 4) == [(0, 0, 3, 2), (2, 4, 3, 2)]


def test_row_16_local_boundaries() -> None:
    """row 16"""
    assert local_boundaries([0, 3, 6, 8], size=2, rank=0) == [0, 3, 4]
    assert local_boundaries([0, 3, 6, 8], size=2, rank=1) == [0, 2, 4]
    assert local_boundaries([0, 3, 6, 8], size=1, rank=0) == [0, 3, 6, 8]
    assert local_boundaries([0, 4, 8], size=2, rank=1) == [0, 4], "a boundary at the cut is none inside"
    # padding after the last document, and a shard that is all padding
    assert local_boundaries([0, 3, 5], size=2, rank=1, num_slots=8) == [0, 1]
    assert local_boundaries([0, 3], size=2, rank=1, num_slots=8) == [0]
    assert local_boundaries([0], size=2, rank=0, num_slots=8) == [0]
    with pytest.raises(ValueError, match="8 slots do not split into 3 equal runs; use a multiple of 3"):
        local_boundaries([0, 3, 8], size=3, rank=0)


@settings(max_examples=25)
@given(layouts(), st.sampled_from([1, 2, 4]))
def test_local_boundaries_separate_what_the_window_separates(layout: Layout, size: int) -> None:
    window = padded(layout, size)
    starts = window.cu_seqlens.tolist()
    strides = torch.bucketize(torch.arange(window.physical_tokens), window.cu_seqlens[1:], right=True)
    part = window.physical_tokens // size
    for rank in range(size):
        local = local_boundaries(starts, size=size, rank=rank, num_slots=window.physical_tokens)
        held = strides[contiguous_slots(window.physical_tokens, size=size, rank=rank)]
        lengths = [end - start for start, end in itertools.pairwise(local)]
        documents = [int(d) for d in held if d < len(window.document_lengths)]
        assert lengths == [len(list(run)) for _, run in itertools.groupby(documents)]
        assert local[0] == 0 and local[-1] == len(documents) <= part
