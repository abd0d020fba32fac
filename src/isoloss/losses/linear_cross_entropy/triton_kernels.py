"""From a chunk of logits to row losses and the gradient of the logits, in place, by one Triton kernel.

Shapes: m rows, V vocabulary.

A program takes one row and reads it twice, in blocks of columns: first for the statistics, which are kept up
to date from block to block, then for the gradient, which takes its place. Nothing else of size m x V is read
or written. Programs share nothing and each sums in a fixed order: the same call gives the same bits.

This module imports the package triton and is imported only when its kernel is to run. Triton decides when a
kernel is defined whether it will be compiled or interpreted (TRITON_INTERPRET=1 at the start of the process);
interpreted, it runs on CPU tensors.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from isoloss.losses.linear_cross_entropy.problem import Problem
from isoloss.losses.linear_cross_entropy.row_losses import RowLosses

_SMALLEST_BLOCK = 128
_LARGEST_BLOCK = 4096
_ELEMENTS_PER_WARP = 512


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How a program works on its row."""

    block: int
    """Columns at a time, a power of 2."""
    warps: int
    """A power of 2, at most 8."""


def launch_shape(vocabulary: int) -> LaunchShape:
    """Block and warps by the vocabulary alone.

    16 elements for each thread and at most 4096 for a program: compiled for compute capability 9.0, that
    leaves registers for four to six programs on a multiprocessor, so that some read while others reduce.
    Nothing is tried out at run time: ranks that measured different winners would sum in different orders.

    Example:
        >>> launch_shape(128256), launch_shape(1000)
        (LaunchShape(block=4096, warps=8), LaunchShape(block=1024, warps=2))
    """
    block = max(_SMALLEST_BLOCK, min(triton.next_power_of_2(vocabulary), _LARGEST_BLOCK))
    return LaunchShape(block, max(1, block // _ELEMENTS_PER_WARP))


def new_logits(like: Tensor, num_rows: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """[num_rows, V] for the kernel, on the device of `like`, not initialised.

    Rows lie a multiple of 16 elements apart: loads of 16 bytes, and products on the fast path, for any V.
    """
    stride = -(-vocabulary // 16) * 16
    return torch.empty((num_rows, stride), dtype=dtype, device=like.device)[:, :vocabulary]


def is_interpreted() -> bool:
    """Whether the kernel runs under Triton's interpreter, on CPU tensors."""
    return not isinstance(_row_losses_kernel, triton.JITFunction)


def compute_row_losses_by_triton_(
    logits: Tensor,
    targets: Tensor,
    problem: Problem,
    *,
    bias: Tensor | None,
    gradient_scale: Tensor,
    needs_gradient: bool,
) -> RowLosses:
    """Loss of each row; `logits` becomes the gradient of the row's loss and z-loss, times `gradient_scale`.

    Ignored rows are not read: their losses are 0 and what is left of their logits is zeros.

    Args:
        logits: [m, V], before bias, scale and cap; overwritten. Rows may lie further apart than V, as in
            `new_logits`; what lies between them is overwritten too. Each element of the gradient is computed
            in `problem.compute_dtype` and rounded to the dtype of `logits` once.
        targets: int64[m], each in [0, V) or `problem.ignore_index`.
        problem: for the options. They are compiled into the kernel: another value is another kernel.
        bias: [V] or [m, V], added to the logits, or None.
        gradient_scale: [m], in `problem.compute_dtype`: token weight times logit scale, whatever the logits
            are multiplied by.
        needs_gradient: whether what is left in `logits` will be used.

    Host syncs: none.
    """
    num_rows, vocabulary = logits.shape
    losses, z_losses = gradient_scale.new_empty(2, num_rows).unbind()
    if num_rows == 0:
        return RowLosses(losses, z_losses, None)
    shape = launch_shape(vocabulary)
    softcap = problem.softcap
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _row_losses_kernel[(num_rows,)](
            logits,
            targets,
            gradient_scale,
            bias,
            losses,
            z_losses,
            vocabulary,
            logits.stride(0),
            problem.ignore_index,
            0 if bias is None or bias.ndim == 1 else bias.stride(0),
            0 if bias is None else bias.stride(-1),
            HAS_BIAS=bias is not None,
            SCALE=problem.logit_scale / (1.0 if softcap is None else softcap),
            SOFTCAP=softcap,
            SMOOTHING=problem.label_smoothing,
            SMOOTHING_PER_CLASS=problem.label_smoothing / vocabulary,
            Z_LOSS=problem.z_loss,
            NEEDS_GRADIENT=needs_gradient,
            IS_DOUBLE=problem.compute_dtype == torch.float64,
            BLOCK=shape.block,
            num_warps=shape.warps,
            enable_fp_fusion=False,  # the same bits whatever else a variant of the kernel computes
        )
    return RowLosses(losses, z_losses, None)


@triton.jit
def _read_logits(
    logits_row,
    bias_row,
    bias_stride,
    columns,
    vocabulary,
    row_stride,
    HAS_BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_DOUBLE: tl.constexpr,
):
    """Logits with bias, scale and cap, and the slope of the cap; finite numbers where there is no class."""
    dtype: tl.constexpr = tl.float64 if IS_DOUBLE else tl.float32
    is_class = columns < vocabulary
    # Up to the stride, a multiple of 16: bounded by an odd V, elements would be loaded one by one.
    z = tl.load(logits_row + columns, mask=columns < row_stride, other=0.0).to(dtype)
    z = tl.where(is_class, z, 0.0)
    if HAS_BIAS:
        # In int64: the columns of a transposed [N, V] lie N apart.
        z += tl.load(bias_row + columns.to(tl.int64) * bias_stride, mask=is_class, other=0.0).to(dtype)
    z = z * SCALE
    slope = z
    if SOFTCAP is not None:
        # tanh(|z|) = (1 - d) / (1 + d) and its derivative 4 d / (1 + d)^2 with d = exp(-2 |z|), at most 1.
        decay = tl.exp(-2.0 * tl.abs(z))
        capped = (1.0 - decay) / (1.0 + decay) * SOFTCAP
        slope = 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
        z = tl.where(z < 0.0, -capped, capped)
    return z, slope


@triton.jit
def _row_losses_kernel(
    logits_ptr,
    targets_ptr,
    scales_ptr,
    bias_ptr,
    losses_ptr,
    z_losses_ptr,
    vocabulary,
    row_stride,
    ignore_index,
    bias_row_stride,
    bias_stride,
    HAS_BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    SMOOTHING_PER_CLASS: tl.constexpr,
    Z_LOSS: tl.constexpr,
    NEEDS_GRADIENT: tl.constexpr,
    IS_DOUBLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = tl.float64 if IS_DOUBLE else tl.float32
    row = tl.program_id(0).to(tl.int64)  # m x V may pass 2^31
    logits_row = logits_ptr + row * row_stride
    bias_row = bias_ptr
    if HAS_BIAS:
        bias_row = bias_ptr + row * bias_row_stride
    target = tl.load(targets_ptr + row)

    if target == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        tl.store(z_losses_ptr + row, 0.0)
        if NEEDS_GRADIENT:
            for start in range(0, vocabulary, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                zeros = tl.zeros([BLOCK], dtype=logits_ptr.dtype.element_ty)
                tl.store(logits_row + columns, zeros, mask=columns < row_stride)
        return

    lowest = float("-inf")
    target_logit, _target_slope = _read_logits(
        logits_row, bias_row, bias_stride, target, vocabulary, row_stride, HAS_BIAS, SCALE, SOFTCAP, IS_DOUBLE
    )
    # The sum for label smoothing is of differences to the target: a large common offset takes no digits.
    origin = tl.where(target_logit == lowest, 0.0, target_logit)
    row_max = tl.full([], lowest, dtype)
    base = tl.full([], 0.0, dtype)  # the maximum, or 0 as long as every class is removed
    total = tl.full([], 0.0, dtype)
    shifted_sum = tl.full([], 0.0, dtype)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_class = columns < vocabulary
        z, _slope = _read_logits(
            logits_row,
            bias_row,
            bias_stride,
            columns,
            vocabulary,
            row_stride,
            HAS_BIAS,
            SCALE,
            SOFTCAP,
            IS_DOUBLE,
        )
        if SMOOTHING > 0.0:
            shifted_sum += tl.sum(tl.where(is_class, z - origin, 0.0), 0)
        z = tl.where(is_class, z, lowest)
        new_max = tl.maximum(row_max, tl.max(z, 0))
        base = tl.where(new_max == lowest, 0.0, new_max)
        total = total * tl.exp(row_max - base) + tl.sum(tl.exp(z - base), 0)
        row_max = new_max

    log_sum = tl.log(total)
    # log(sum) + (max - z_t), not logsumexp - z_t, which cancels under a large common offset.
    loss = log_sum + (row_max - target_logit)
    if SMOOTHING > 0.0:
        loss -= shifted_sum * SMOOTHING_PER_CLASS
    log_sum_exp = log_sum + row_max
    tl.store(losses_ptr + row, loss)
    tl.store(z_losses_ptr + row, log_sum_exp * log_sum_exp * Z_LOSS)

    if NEEDS_GRADIENT:
        # exp(z - max) - sum * onehot is exact to rounding at the target; one factor a row divides by the sum.
        scale = tl.load(scales_ptr + row) / total
        growth = log_sum_exp * (2.0 * Z_LOSS) + 1.0
        pull = total * (1.0 - SMOOTHING)
        level = total * SMOOTHING_PER_CLASS
        for start in range(0, vocabulary, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            z, slope = _read_logits(
                logits_row,
                bias_row,
                bias_stride,
                columns,
                vocabulary,
                row_stride,
                HAS_BIAS,
                SCALE,
                SOFTCAP,
                IS_DOUBLE,
            )
            gradient = tl.exp(tl.where(columns < vocabulary, z, base) - base)
            if Z_LOSS > 0.0:
                gradient = gradient * growth
            if SMOOTHING > 0.0:
                gradient = gradient - level
            gradient = tl.where(columns == target, gradient - pull, gradient)
            if SOFTCAP is not None:
                gradient = gradient * slope
            gradient = gradient * scale
            tl.store(
                logits_row + columns, gradient.to(logits_ptr.dtype.element_ty), mask=columns < row_stride
            )
