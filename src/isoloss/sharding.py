"""Index maps between the slots of a window and the ranks of its sequence and context group.

[Note: shards]
Context parallelism cuts first. Each document's stride, and the padding after the last, is cut into 2 * cp
equal pieces; context rank r takes pieces r and 2 * cp - 1 - r, so that every rank does equal causal work
("zigzag"). What a context rank holds, in window order, is then cut into sp contiguous parts.
"""

import torch
from torch import Tensor

from isoloss.batch.layout import Layout


def shard_slots(layout: Layout, *, cp_size: int, cp_rank: int, sp_size: int, sp_rank: int) -> Tensor:
    """Window slots that one rank holds, in the order in which it holds them.

    Args:
        layout: the documents of the window.
        cp_size: size of the context axis.
        cp_rank: the rank's place on the context axis.
        sp_size: size of the sequence (Ulysses) axis.
        sp_rank: the rank's place on the sequence axis.

    Returns:
        int64[T / (cp_size * sp_size)]. Over all ranks every slot occurs exactly once.

    Raises:
        ValueError: with cp_size above 1 a stride is no multiple of 2 * cp_size (an alignment that is one
            makes all strides so), or T none of 2 * cp_size * sp_size.
    """
    slots = _context_slots(layout, cp_size, cp_rank)
    if len(slots) % sp_size or (cp_size > 1 and layout.physical_tokens % (2 * cp_size * sp_size)):
        multiple = 2 * cp_size * sp_size if cp_size > 1 else sp_size
        raise ValueError(
            f"a window of {layout.physical_tokens} slots does not split over cp_size={cp_size} and "
            f"sp_size={sp_size}; data.window must be a multiple of {multiple}"
        )
    part = len(slots) // sp_size
    return slots[sp_rank * part : (sp_rank + 1) * part]


def _context_slots(layout: Layout, cp_size: int, cp_rank: int) -> Tensor:
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
    held = []
    for start, length in zip(
        (*layout.document_starts, layout.aligned_tokens), (*layout.document_strides, tail), strict=True
    ):
        piece = length // pieces
        for number in (cp_rank, pieces - 1 - cp_rank):
            held.append(slots[start + number * piece : start + (number + 1) * piece])
    return torch.cat(held)


def slot_ranks(layout: Layout, *, cp_size: int, sp_size: int) -> tuple[Tensor, Tensor]:
    """For each window slot the rank that holds it and its place there: the inverse of `shard_slots`.

    Returns:
        (ranks, places), int64[T] each; rank = cp_rank * sp_size + sp_rank.
    """
    ranks = torch.empty(layout.physical_tokens, dtype=torch.int64)
    places = torch.empty_like(ranks)
    for cp_rank in range(cp_size):
        for sp_rank in range(sp_size):
            slots = shard_slots(layout, cp_size=cp_size, cp_rank=cp_rank, sp_size=sp_size, sp_rank=sp_rank)
            ranks[slots] = cp_rank * sp_size + sp_rank
            places[slots] = torch.arange(len(slots))
    return ranks, places
