"""From a chunk of logits to the loss of each row and the gradient of the logits, in place.

Shapes: m rows, V vocabulary.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from isoloss.losses.linear_cross_entropy.problem import Problem, VocabularyShard

# 1 MiB of float32 for each thread: a block stays in the second-level cache through all of its passes.
_BLOCK_LOGITS_PER_THREAD = 262144


@dataclass(frozen=True, slots=True)
class RowLosses:
    """Of each row, [m]."""

    losses: Tensor
    z_losses: Tensor
    sums: Tensor | None
    """Sum over the vocabulary of exp(z - max): what the gradient in the logits buffer is to be divided by.

    None if nothing is left to be done to it."""


@dataclass(frozen=True, slots=True)
class LogitsChunk:
    """What the chunk loop gives to a loss other than the cross entropy, see `RowComputation`."""

    logits: Tensor
    """[m, V], scaled, divided by the softcap if there is one, without bias; to be overwritten."""
    take: Callable[[Tensor], Tensor]
    """The rows of this chunk out of a per-row tensor [N, ...]; zeros in place of ignored rows."""
    add_bias: Callable[[Tensor, int, int], None] | None
    """See `compute_row_losses_`."""
    needs_gradient: bool
    """Whether what is left in `logits` will be used."""
    reduced_rows: int
    """Of a vocabulary shard, the length of what is reduced: at least m, the same on every rank."""


RowComputation = Callable[[LogitsChunk], RowLosses]
"""Loss of each row of a chunk; leaves in the logits its gradient times `RowLosses.sums`, in place."""


def block_rows(num_rows: int, vocabulary: int, device: torch.device) -> int:
    """Rows of one elementwise pass: what the caches of a CPU hold, all rows on a device."""
    if device.type != "cpu":
        return max(num_rows, 1)
    # A multiple of the threads: torch gives whole rows to each, so that blocks change no bit.
    return torch.get_num_threads() * max(1, _BLOCK_LOGITS_PER_THREAD // max(vocabulary, 1))


def compute_row_losses_(
    logits: Tensor,
    targets: Tensor,
    problem: Problem,
    *,
    add_bias: Callable[[Tensor, int, int], None] | None,
    needs_gradient: bool,
) -> RowLosses:
    """Loss of each row; `logits` becomes the gradient of the row's loss and z-loss, times `sums`.

    Args:
        logits: [m, V], scaled, divided by the softcap if there is one; overwritten.
        targets: int64[m], each in [0, V).
        problem: for the options.
        add_bias: adds to a block of logits what belongs to its rows, from the first to before the second
            number; it is called while the block is in the cache.
        needs_gradient: whether what is left in `logits` will be used.
    """
    num_rows, vocabulary = logits.shape
    smoothing, softcap, z_loss = problem.label_smoothing, problem.softcap, problem.z_loss
    index = targets.unsqueeze(1)
    row_max, target_logits, mean_logits, sums = logits.new_zeros(4, num_rows, 1).unbind()

    block = block_rows(num_rows, vocabulary, logits.device)
    for low in range(0, num_rows, block):
        part = slice(low, min(low + block, num_rows))
        z = logits[part]
        slope = None
        if add_bias is not None:
            add_bias(z, part.start, part.stop)
        if softcap is not None:
            z.tanh_()
            slope = 1 - z.square() if needs_gradient else None
            z.mul_(softcap)
        torch.amax(z, -1, keepdim=True, out=row_max[part])
        torch.gather(z, -1, index[part], out=target_logits[part])
        z.sub_(row_max[part])
        if smoothing:
            torch.mean(z, -1, keepdim=True, out=mean_logits[part])
        torch.sum(z.exp_(), -1, keepdim=True, out=sums[part])
        if needs_gradient:
            if z_loss:
                z.mul_(1 + 2 * z_loss * (sums[part].log() + row_max[part]))
            if smoothing:
                z.sub_(sums[part] * (smoothing / vocabulary))
            if slope is not None:
                z.mul_(slope)

    if needs_gradient:
        pull = (1 - smoothing) * sums
        if softcap is not None:
            pull.mul_(1 - (target_logits / softcap).square())
        # Not scatter_add_, which refuses to run under torch.use_deterministic_algorithms on CUDA.
        logits.scatter_(-1, index, logits.gather(-1, index) - pull)

    log_sums = sums.log()
    # log(sum) + (max - z_t), not logsumexp - z_t, which cancels under a large common offset.
    losses = log_sums + (row_max - target_logits)
    if smoothing:
        losses = (1 - smoothing) * losses + smoothing * (log_sums - mean_logits)
    z_losses = z_loss * (log_sums + row_max).square() if z_loss else torch.zeros_like(losses)
    return RowLosses(losses.squeeze(1), z_losses.squeeze(1), sums.squeeze(1))


def compute_sharded_row_losses_(
    logits: Tensor,
    targets: Tensor,
    problem: Problem,
    *,
    add_bias: Callable[[Tensor, int, int], None] | None,
    needs_gradient: bool,
    shard: VocabularyShard,
    reduced_rows: int,
) -> Generator[None, None, RowLosses]:
    """`compute_row_losses_` where `logits` has this rank's classes only, in three parts.

    It pauses twice, each time while a reduction is under way for which the caller may do something else.

    Args:
        logits: [m, classes of this rank]; see `compute_row_losses_`.
        targets: int64[m], classes of the whole vocabulary.
        problem: for the options.
        add_bias: see `compute_row_losses_`.
        needs_gradient: likewise.
        shard: which classes these are.
        reduced_rows: length of what is reduced, at least m, the same on every rank whatever its data.

    Returns:
        At last, the same bits on every rank, if the reductions give that.

    Collectives: one MAX of `reduced_rows` numbers, then one SUM of 2 * `reduced_rows`, or 3 * with label
    smoothing.
    """
    num_rows, classes = logits.shape
    smoothing, softcap, z_loss = problem.label_smoothing, problem.softcap, problem.z_loss
    # Other ranks' targets read class 0 and are masked: no index of theirs may reach what is no class.
    places = targets - shard.start
    if logits.device.type != "cpu":  # where the caller has looked, and `gather` would look without shards
        torch._assert_async(((targets >= 0) & (targets < shard.size)).all())
    is_here = ((places >= 0) & (places < classes)).unsqueeze(1)
    index = torch.where(is_here, places.unsqueeze(1), 0)
    block = block_rows(num_rows, classes, logits.device)
    parts = [slice(low, min(low + block, num_rows)) for low in range(0, num_rows, block)] if classes else []

    maxima = logits.new_full((reduced_rows, 1), float("-inf"))
    row_max = maxima[:num_rows]
    for part in parts:
        z = logits[part]
        if add_bias is not None:
            add_bias(z, part.start, part.stop)
        if softcap is not None:
            z.tanh_().mul_(softcap)
        torch.amax(z, -1, keepdim=True, out=row_max[part])
    wait = _begin(maxima, shard.reduce_max, shard.begin_max)
    yield
    wait()

    # Sum of exp(z - max), target logit - max, and for smoothing the sum of logits - max.
    packed = logits.new_zeros(3 if smoothing else 2, reduced_rows, 1)
    sums, shifted_targets, shifted_sums = packed[0, :num_rows], packed[1, :num_rows], packed[-1, :num_rows]
    # The cap's slope scales the smoothing's part of the gradient too, which only the sums determine.
    slopes = torch.ones_like(logits) if needs_gradient and smoothing and softcap is not None else None
    for part in parts:
        z = logits[part]
        slope = 1 - (z / softcap).square() if needs_gradient and softcap is not None else None
        z.sub_(row_max[part])
        shifted_targets[part] = torch.where(is_here[part], z.gather(-1, index[part]), 0)
        if smoothing:
            torch.sum(z, -1, keepdim=True, out=shifted_sums[part])
        torch.sum(z.exp_(), -1, keepdim=True, out=sums[part])
        if slope is not None:
            z.mul_(slope)
        if slope is not None and slopes is not None:
            slopes[part] = slope
    wait = _begin(packed, shard.reduce_sum, shard.begin_sum)
    yield
    wait()

    log_sums = sums.log()
    if needs_gradient:
        for part in parts if z_loss or smoothing else ():
            z = logits[part]
            if z_loss:
                z.mul_(1 + 2 * z_loss * (log_sums[part] + row_max[part]))
            if smoothing:
                level = sums[part] * smoothing / shard.size
                z.sub_(level if slopes is None else slopes[part] * level)
        if classes:
            pull = (1 - smoothing) * sums
            if softcap is not None:
                pull.mul_(1 - ((shifted_targets + row_max) / softcap).square())
            logits.scatter_(-1, index, logits.gather(-1, index) - torch.where(is_here, pull, 0))

    losses = log_sums - shifted_targets
    if smoothing:
        losses = (1 - smoothing) * losses + smoothing * (log_sums - shifted_sums / shard.size)
    z_losses = z_loss * (log_sums + row_max).square() if z_loss else torch.zeros_like(losses)
    return RowLosses(losses.squeeze(1), z_losses.squeeze(1), sums.squeeze(1))


def _begin(
    values: Tensor,
    reduce: Callable[[Tensor], object],
    begin: Callable[[Tensor], Callable[[], object]] | None,
) -> Callable[[], object]:
    if begin is not None:
        return begin(values)
    reduce(values)
    return lambda: None
