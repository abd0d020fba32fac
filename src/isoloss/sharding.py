"""Index maps between the slots of a window and the ranks of its sequence and context group.

[Note: shards]
Context parallelism cuts first. Each document's stride, and the padding after the last, is cut into 2 * cp
equal pieces; context rank r takes pieces r and 2 * cp - 1 - r, so that every rank does equal causal work
("zigzag"). What a context rank holds, in window order, is then cut into sp contiguous parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isoloss.batch.layout import Layout


def shard_slots(layout: Layout, *, cp_size: int, cp_rank: int, sp_size: int, sp_rank: int) -> Tensor:
    """Window slots that one rank holds, in the order in which it holds them: zigzag, then contiguous.

    Args:
        layout: the documents of the window.
        cp_size: size of the context axis.
        cp_rank: the rank's place on the context axis.
        sp_size: size of the sequence (Ulysses) axis.
        sp_rank: the rank's place on the sequence axis.

    Returns:
        int64[T / (cp_size * sp_size)]. Over all ranks every slot occurs exactly once.

    Raises:
        ValueError: a stride is no multiple of 2 * cp_size or T none of 2 * cp_size * sp_size.
    """
    slots = zigzag_slots(layout, cp_size=cp_size, cp_rank=cp_rank)
    if len(slots) % sp_size or (cp_size > 1 and layout.physical_tokens % (2 * cp_size * sp_size)):
        multiple = 2 * cp_size * sp_size if cp_size > 1 else sp_size
        raise ValueError(
            f"a window of {layout.physical_tokens} slots does not split over cp_size={cp_size} and "
            f"sp_size={sp_size}; data.window must be a multiple of {multiple}"
        )
    return slots[contiguous_slots(len(slots), size=sp_size, rank=sp_rank)]


def contiguous_slots(num_slots: int, *, size: int, rank: int) -> Tensor:
    """The `rank`-th of `size` equal runs of `num_slots` slots, int64[num_slots / size].

    Raises:
        ValueError: `size` does not divide `num_slots`.
    """
    start, end = _contiguous_run(num_slots, size, rank)
    return torch.arange(start, end)


def zigzag_slots(layout: Layout, *, cp_size: int, cp_rank: int) -> Tensor:
    """Window slots of one context rank, in window order, int64[T / cp_size]. See [Note: shards].

    Raises:
        ValueError: a stride, or the padding after the last, is no multiple of 2 * cp_size.
    """
    slots = torch.arange(layout.physical_tokens)
    if cp_size == 1:
        return slots
    pieces = 2 * cp_size
    tail = layout.physical_tokens - layout.aligned_tokens
    if any(stride % pieces for stride in layout.document_strides) or tail % pieces:
        raise ValueError(
            f"cp_size={cp_size} cuts each document into {pieces} pieces, which alignment "
            f"{layout.alignment} and a window of {layout.physical_tokens} slots do not allow; "
            f"data.alignment and data.window must be multiples of {pieces}"
        )
    strides = (*layout.document_strides, tail)
    starts = (*layout.document_starts, layout.aligned_tokens)
    return torch.cat(
        [
            slots[start + first : start + first + length]
            for start, stride in zip(starts, strides, strict=True)
            for first, length in _context_runs(stride, cp_size, cp_rank)
        ]
    )


def _context_runs(stride: int, cp_size: int, cp_rank: int) -> list[tuple[int, int]]:
    """(first slot, slots) of what a context rank holds of a stride; neighbouring pieces are one run."""
    if cp_size == 1:
        return [(0, stride)]
    piece = stride // (2 * cp_size)
    if cp_rank == cp_size - 1:
        return [(cp_rank * piece, 2 * piece)]
    return [(cp_rank * piece, piece), ((2 * cp_size - 1 - cp_rank) * piece, piece)]


@dataclass(frozen=True, slots=True)
class DocumentPiece:
    """Consecutive tokens of a document on one context rank."""

    document: int
    """Index in the layout."""
    place: int
    """Where the rank holds its first token: an index into `zigzag_slots`."""
    first: int
    """Offset of its first token in the document."""
    num_tokens: int


def document_pieces(layout: Layout, *, cp_size: int, cp_rank: int) -> list[DocumentPiece]:
    """What one context rank holds of each document: at most two pieces, without alignment slots."""
    pieces, place = [], 0
    for document, (length, stride) in enumerate(
        zip(layout.document_lengths, layout.document_strides, strict=True)
    ):
        for first, slots in _context_runs(stride, cp_size, cp_rank):
            num_tokens = min(slots, length - first)
            if num_tokens > 0:
                pieces.append(DocumentPiece(document, place, first, num_tokens))
            place += slots
    return pieces


def window_order(layout: Layout, *, cp_size: int) -> Tensor:
    """Where each window slot stands in the slots of all context ranks, one rank after the other; int64[T]."""
    slots = torch.cat([zigzag_slots(layout, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)])
    places = torch.empty_like(slots)
    places[slots] = torch.arange(len(slots))
    return places


def slot_ranks(layout: Layout, *, cp_size: int, sp_size: int) -> tuple[Tensor, Tensor]:
    """For each window slot the rank that holds it and its place there: the inverse of `shard_slots`.

    Returns:
        (ranks, places), int64[T] each; rank = cp_rank * sp_size + sp_rank.

    Raises:
        ValueError: as `shard_slots`.
    """
    part = len(shard_slots(layout, cp_size=cp_size, cp_rank=0, sp_size=sp_size, sp_rank=0))
    places = window_order(layout, cp_size=cp_size)
    return places // part, places % part


def local_boundaries(
    boundaries: Sequence[int], *, size: int, rank: int, num_slots: int | None = None
) -> list[int]:
    """Document boundaries of a row as the `rank`-th of `size` contiguous shards sees them.

    Args:
        boundaries: slot offsets of the documents and the end of the last, ascending from 0.
        size: number of shards of the row.
        rank: which of them.
        num_slots: slots of the row, where padding follows the last document; None: none does.

    Returns:
        The same for what the shard holds of them; [0] if it holds no document.

    Raises:
        ValueError: `size` does not divide the slots.

    Example:
        >>> [local_boundaries([0, 3, 6, 8], size=2, rank=rank) for rank in range(2)]
        [[0, 3, 4], [0, 2, 4]]
    """
    start, end = _contiguous_run(boundaries[-1] if num_slots is None else num_slots, size, rank)
    return sorted({min(max(boundary, start), end) - start for boundary in boundaries} | {0})


def _contiguous_run(num_slots: int, size: int, rank: int) -> tuple[int, int]:
    if num_slots % size:
        raise ValueError(f"{num_slots} slots do not split into {size} equal runs; use a multiple of {size}")
    part = num_slots // size
    return rank * part, (rank + 1) * part
