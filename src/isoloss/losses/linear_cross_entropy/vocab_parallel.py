"""Which slice of the vocabulary a rank holds, where the head's weight is spread over tensor-parallel ranks.

The computation is the chunk loop of every backend, see [Note: vocabulary shards] there.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from isoloss.losses.linear_cross_entropy.problem import VocabularyShard


def find_shard(vocab_group: object, weight: Tensor) -> VocabularyShard:
    """The slice of the vocabulary that `weight` [V_local, H] is.

    Args:
        vocab_group: the ranks that hold the slices, or a shard, which is returned.
        weight: of this rank.

    Collectives: one SUM of an int64 per rank; none if a shard is given.
    Host syncs: none.

    Raises:
        TypeError: `vocab_group` is neither.
    """
    if isinstance(vocab_group, VocabularyShard):
        return vocab_group
    if not isinstance(vocab_group, dist.ProcessGroup):
        raise TypeError(
            f"vocab_group must be a ProcessGroup or a VocabularyShard, got {type(vocab_group).__name__}; "
            "pass the group of the tensor-parallel ranks"
        )
    sizes = torch.zeros(vocab_group.size(), dtype=torch.int64, device=weight.device)
    sizes[vocab_group.rank()] = weight.shape[0]
    dist.all_reduce(sizes, group=vocab_group)
    return VocabularyShard(
        start=sizes[: vocab_group.rank()].sum(),
        size=sizes.sum(),
        reduce_max=_reduction(dist.ReduceOp.MAX, vocab_group),
        reduce_sum=_reduction(dist.ReduceOp.SUM, vocab_group),
        begin_max=_begin_reduction(dist.ReduceOp.MAX, vocab_group),
        begin_sum=_begin_reduction(dist.ReduceOp.SUM, vocab_group),
    )


def shard_of(weight: DTensor) -> VocabularyShard:
    """The slice of the vocabulary that the local part of `weight` [V, H] is.

    Args:
        weight: sharded by rows over the one axis of its mesh.

    Collectives: none.

    Raises:
        ValueError: it is sharded in another way.
    """
    mesh = weight.device_mesh
    if mesh.ndim != 1 or weight.placements != (Shard(0),):
        raise ValueError(
            "the head's weight must be sharded by rows over the tensor-parallel axis alone, got placements "
            f"{weight.placements} over {mesh}; call the loss in the wrapped forward, where other axes are "
            "gathered"
        )
    group = mesh.get_group()
    vocabulary = weight.shape[0]
    most = -(-vocabulary // mesh.size())  # as torch.chunk cuts: the last ranks may have less, or nothing
    return VocabularyShard(
        start=min(group.rank() * most, vocabulary),
        size=vocabulary,
        reduce_max=_reduction(dist.ReduceOp.MAX, group),
        reduce_sum=_reduction(dist.ReduceOp.SUM, group),
        begin_max=_begin_reduction(dist.ReduceOp.MAX, group),
        begin_sum=_begin_reduction(dist.ReduceOp.SUM, group),
    )


def _reduction(operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Callable[[Tensor], object]:
    return lambda values: dist.all_reduce(values, operation, group=group)


def _begin_reduction(
    operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> Callable[[Tensor], Callable[[], object]]:
    def begin(values: Tensor) -> Callable[[], object]:
        work = dist.all_reduce(values, operation, group=group, async_op=True)
        assert work is not None, "this rank is in its group"
        return work.wait

    return begin
