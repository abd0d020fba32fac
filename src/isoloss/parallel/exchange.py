"""Collectives with gradients that attention needs when the slots of a window lie on several ranks.

Every call is one collective, and one in backward, whatever the data holds: ranks cannot disagree.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def scatter_heads(parts: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Each rank's slots of all heads become all slots of each rank's heads (Ulysses).

    Args:
        parts: [1, heads, n, width] each, of one dtype; the group's size divides the heads.
        group: the sequence ranks; rank i holds the i-th run of slots and receives the i-th run of heads.

    Returns:
        [1, heads / size, n * size, width] each.

    Collectives: one all-to-all over `group`, and one in backward.
    """
    size = group.size()
    rows = torch.cat([part[0].unflatten(0, (size, -1)).flatten(1) for part in parts], dim=1)
    received = _AllToAll.apply(rows, group)
    return _join_slots(received, [(part.shape[1] // size, *part.shape[2:]) for part in parts])


def gather_heads(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse of `scatter_heads`: [1, heads, n * size, width] to [1, heads * size, n, width].

    Collectives: one all-to-all over `group`, and one in backward.
    """
    size = group.size()
    _, heads, slots, width = part.shape
    rows = part[0].unflatten(1, (size, -1)).transpose(0, 1).flatten(1)
    return _AllToAll.apply(rows, group).view(1, size * heads, slots // size, width)


def gather_slots(parts: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The slots of every rank, one rank after the other, on all ranks.

    Args:
        parts: [1, heads, n, width] each, of one dtype.
        group: the ranks whose slots are gathered.

    Returns:
        [1, heads, n * size, width] each. In backward every rank's gradient of a slot is summed where the
        slot came from.

    Collectives: one all-gather over `group`, and one reduce-scatter (SUM) in backward.
    """
    row = torch.cat([part.flatten() for part in parts])
    return _join_slots(_AllGather.apply(row, group), [tuple(part.shape[1:]) for part in parts])


def _join_slots(rows: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Rows [size, sum of heads * n * width] as tensors [1, heads, size * n, width]."""
    parts = rows.split([torch.Size(shape).numel() for shape in shapes], dim=1)
    return [
        part.unflatten(1, shape).transpose(0, 1).flatten(1, 2).unsqueeze(0)
        for part, shape in zip(parts, shapes, strict=True)
    ]


class _AllToAll(torch.autograd.Function):
    """Row j of rank i becomes row i of rank j: its own inverse, and its own transpose."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(rows, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, rows.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradient, ctx.group), None


class _AllGather(torch.autograd.Function):
    """[n] on each rank to [size, n] on all."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = row.new_empty(group.size(), row.shape[0])
        # In lists: torch renames the forms that take one tensor between the versions that are supported.
        dist.all_gather(list(gathered.unbind()), row.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Gradients below 32 bits are summed in float32, as those of parameters are.
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
        summed = wide.new_empty(wide.shape[1])
        dist.reduce_scatter(summed, list(wide.unbind()), group=ctx.group)
        return summed.to(gradient.dtype), None
