"""Linear cross entropy over chunks of rows, gradients computed in the forward pass.

Shapes: N rows, n of them with a target, m rows of a chunk, H hidden width, V vocabulary, r rank of a
factored bias.

[Note: where scales go] With e = exp(z - max) and S = its sum over the vocabulary, the gradient of a row's
loss with respect to its logits is (e - S * onehot) / S. The logits buffer holds e - S * onehot. Everything
that is one number per row (1 / S, the token weight, the logit scale) is applied to operands of width H, not
V; so is the division by the cap. The Triton kernel has each number in a register anyway: there the buffer
holds the gradient itself, rounded once, and the other operands stay as they came.

[Note: vocabulary shards] Where the vocabulary is spread over ranks, V is this rank's slice and the loop is
the same. A chunk takes two reductions: the maximum of each row, then one sum of what the row's loss is made
of. Gradients of hidden and a are partial over the slices and summed once, at the end. How many chunks there
are and what is reduced follows from N, never from the rows that have a target: ranks cannot lose step.
Two chunks take turns, each with logits of its own: while the sum of one is under way the logits of the next
are made, and during the maximum of that one the gradients of the first.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isoloss.losses.linear_cross_entropy.problem import (
    LinearCrossEntropyOutput,
    Problem,
    VocabularyShard,
    check_targets_on_cpu,
)
from isoloss.losses.linear_cross_entropy.row_losses import (
    LogitsChunk,
    RowComputation,
    block_rows,
    compute_row_losses_,
    compute_sharded_row_losses_,
)

Kernels = Literal["torch", "triton"]
"""What makes row losses and the gradient of the logits out of a chunk of logits. Products are torch's."""


def chunk_rows(num_rows: int, hidden_size: int, chunk_size: int | None = None) -> int:
    """Rows whose logits exist at the same time, from the shape and the options alone.

    Each chunk streams the weight and its gradient once, which 256 rows pay for; from there to H rows the
    logits are no larger than the weight gradient, which exists anyway. More would cost time besides memory:
    pages of a new buffer are cleared when they are first touched. So rows are cut into equal chunks of
    nearly t = H, held between 256 and 1024: round(num_rows / t) of them, at least one. Rounding to the
    nearest keeps a few rows above t from being cut in two halves, which would be slower. Free memory plays
    no part: ranks would lose step, and runs their bits.

    Args:
        num_rows: rows to compute: those with a target on CPU; all rows on other devices, where the number
            of targets is not known to the host.
        hidden_size: H.
        chunk_size: an explicit choice, used as it is.

    Returns:
        At least 1, at most `max(num_rows, 1)` and 1536.

    Example:
        >>> chunk_rows(2048, 512), chunk_rows(2050, 512), chunk_rows(700, 512), chunk_rows(2048, 512, 100)
        (512, 513, 700, 100)
    """
    if num_rows == 0:
        return 1
    if chunk_size is not None:
        return min(chunk_size, num_rows)
    return _cut_evenly(num_rows, min(max(hidden_size, 256), 1024))


def device_chunk_rows(
    num_rows: int, hidden_size: int, product_dtype: torch.dtype, chunk_size: int | None = None
) -> int:
    """`chunk_rows` for the Triton kernel, beside which nothing but the logits has the size of the logits.

    Each chunk reads and writes the float32 sum of weight gradients, 8 bytes an element, for 6 operations on
    each of its rows: at 600 TFLOP/s and 3.3 TB/s a quarter of the time of the products with 1024 rows, 6 %
    with 4096. So there are as many rows as make the logits as large as that sum, H in float32 and 2 H in
    bfloat16, held between 1024 and 4096.

    Args:
        num_rows: all rows.
        hidden_size: H.
        product_dtype: of the logits.
        chunk_size: an explicit choice, used as it is.

    Returns:
        At least 1, at most `max(num_rows, 1)` and 6144.

    Example:
        >>> device_chunk_rows(16384, 4096, torch.bfloat16), device_chunk_rows(16384, 576, torch.bfloat16)
        (4096, 1171)
    """
    if num_rows == 0:
        return 1
    if chunk_size is not None:
        return min(chunk_size, num_rows)
    return _cut_evenly(num_rows, min(max(hidden_size * 4 // product_dtype.itemsize, 1024), 4096))


def _cut_evenly(num_rows: int, target: int) -> int:
    num_chunks = max(1, (2 * num_rows + target) // (2 * target))
    return -(-num_rows // num_chunks)


def chunked_linear_cross_entropy(
    problem: Problem, kernels: Kernels = "torch", *, compute_rows: RowComputation | None = None
) -> LinearCrossEntropyOutput:
    """Loss of `problem`, with its gradients if grad mode is on and an input needs one.

    Host syncs: none.
    """
    a, b = problem.bias_factors if problem.bias_factors is not None else (None, None)
    loss, token_losses, token_z_losses = _ChunkedLinearCrossEntropy.apply(
        problem.hidden,
        problem.weight,
        problem.bias,
        a,
        b,
        problem,
        kernels,
        torch.is_grad_enabled(),
        compute_rows,
    )
    return LinearCrossEntropyOutput(loss, token_losses, token_z_losses)


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    """Saves the gradients for an incoming gradient of 1 in forward, and hands them out in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        problem: Problem,
        kernels: Kernels,
        grad_enabled: bool,
        compute_rows: RowComputation | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = (hidden, weight, bias, a, b)
        # needs_input_grad, not requires_grad: a view made in here would not require a gradient.
        needs = [need and grad_enabled for need in ctx.needs_input_grad[: len(inputs)]]
        # In here, where a compiled graph still knows of autocast.
        product_dtype = choose_product_dtype(problem)
        loss, token_losses, token_z_losses, *made = run_chunks(
            problem, needs, product_dtype, kernels, compute_rows
        )
        gradients = iter(made)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs]
        ctx.are_leaves = [tensor is not None and tensor.is_leaf for tensor in inputs]
        # By save_for_backward, so that checkpointing can drop them and offloading can move them.
        ctx.save_for_backward(*(next(gradients) if need else None for need in needs))
        ctx.mark_non_differentiable(token_losses, token_z_losses)
        ctx.set_materialize_grads(False)
        return loss, token_losses, token_z_losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_loss is None:
            return (None,) * 9
        # Reading the factor is free on CPU; on a device the host would wait, and a compiled graph break.
        is_readable = grad_loss.device.type == "cpu" and not torch.compiler.is_compiling()
        is_one = is_readable and bool(grad_loss == 1)
        gradients: list[Tensor | None] = []
        for saved, dtype, is_leaf in zip(ctx.saved_tensors, ctx.dtypes, ctx.are_leaves, strict=True):
            if saved is None:
                gradients.append(None)
            elif is_one and is_leaf:
                # No pass over V x H. If the graph is kept, autograd copies this, but at a leaf only: behind
                # a view, `.grad` would be the saved memory itself and collect into it.
                gradients.append(saved.to(dtype))
            else:
                gradients.append((saved * grad_loss).to(dtype))
        return (*gradients, None, None, None, None)


def _chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor,
    bias: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    label_smoothing: float,
    z_loss: float,
    ignore_index: int,
    chunk_size: int | None,
    product_dtype: torch.dtype,
    needs: list[bool],
    kernels: str,
) -> list[Tensor]:
    """`compute_in_chunks` in the types of an operator: loss, both token losses, and the needed gradients."""
    problem = Problem(
        hidden,
        weight,
        targets,
        token_weights,
        bias,
        None if a is None or b is None else (a, b),
        softcap,
        logit_scale,
        label_smoothing,
        z_loss,
        ignore_index,
        chunk_size,
    )
    return _compute(problem, needs, product_dtype, "triton" if kernels == "triton" else "torch")


def run_chunks(
    problem: Problem,
    needs: Sequence[bool],
    product_dtype: torch.dtype,
    kernels: Kernels = "torch",
    compute_rows: RowComputation | None = None,
) -> list[Tensor]:
    """`compute_in_chunks`, as one opaque operator in a compiled graph.

    Args:
        problem: the checked arguments.
        needs: of hidden, weight, bias, a and b, whether to compute the gradient.
        product_dtype: see `compute_in_chunks`.
        kernels: likewise.
        compute_rows: likewise; with it, and with a shard, the graph is left.

    Returns:
        The loss, both token losses, and the gradients that were asked for.
    """
    # Called outside a compiled graph, the operator would load the compiler.
    if not torch.compiler.is_compiling():
        return _compute(problem, needs, product_dtype, kernels, compute_rows)
    if problem.shard is not None or compute_rows is not None:  # no types of an operator
        run: Callable[..., list[Tensor]] = torch.compiler.disable(_compute)
        return run(problem, needs, product_dtype, kernels, compute_rows)
    a, b = problem.bias_factors if problem.bias_factors is not None else (None, None)
    made: list[Tensor] = _chunks_operator(
        problem.hidden,
        problem.weight,
        problem.targets,
        problem.token_weights,
        problem.bias,
        a,
        b,
        problem.softcap,
        problem.logit_scale,
        problem.label_smoothing,
        problem.z_loss,
        problem.ignore_index,
        problem.chunk_size,
        product_dtype,
        list(needs),
        kernels,
    )
    return made


def _compute(
    problem: Problem,
    needs: Sequence[bool],
    product_dtype: torch.dtype,
    kernels: Kernels,
    compute_rows: RowComputation | None = None,
) -> list[Tensor]:
    result = compute_in_chunks(
        problem,
        Needs(*needs),
        compact=problem.hidden.device.type == "cpu" and kernels == "torch",
        product_dtype=product_dtype,
        kernels=kernels,
        compute_rows=compute_rows,
    )
    made = [gradient for gradient in result.gradients if gradient is not None]
    return [result.loss, result.token_losses, result.token_z_losses, *made]


_chunks_operator = torch.library.custom_op("isoloss::linear_cross_entropy_chunks", _chunks, mutates_args=())


@_chunks_operator.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor,
    bias: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    label_smoothing: float,
    z_loss: float,
    ignore_index: int,
    chunk_size: int | None,
    product_dtype: torch.dtype,
    needs: list[bool],
    kernels: str,
) -> list[Tensor]:
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    losses = [hidden.new_empty(shape, dtype=dtype) for shape in ((), targets.shape, targets.shape)]
    inputs = zip((hidden, weight, bias, a, b), needs, strict=True)
    needed = [tensor for tensor, need in inputs if tensor is not None and need]
    gradients = [tensor.new_empty(tensor.shape, dtype=_saved_dtype(tensor)) for tensor in needed]
    return losses + gradients


@dataclass(frozen=True, slots=True)
class Needs:
    """Which gradients to compute; a product that serves only the others is not made."""

    hidden: bool
    weight: bool
    bias: bool
    a: bool
    b: bool

    @property
    def any(self) -> bool:
        """Whether there is any."""
        return self.hidden or self.weight or self.bias or self.a or self.b


@dataclass(frozen=True, slots=True)
class ChunkedResult:
    """Losses, and the gradients of hidden, weight, bias, a and b (None where not asked for)."""

    loss: Tensor
    token_losses: Tensor
    token_z_losses: Tensor
    gradients: Sequence[Tensor | None]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows to compute: listed by index, or all of them with ignored ones read as zeros."""

    count: int
    index: Tensor | None
    """int64[n], or None for all rows."""
    is_valid: Tensor | None
    """bool[N], or None if every listed row has a target."""

    @property
    def takes_all(self) -> bool:
        """Whether rows are slices, and none of them is ignored."""
        return self.index is None and self.is_valid is None

    def take(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of the list out of a per-row tensor; may be a view."""
        if self.index is not None:
            return tensor.index_select(0, self.index[start:stop])
        return self._without_ignored(tensor[start:stop], start, stop)

    def put(self, destination: Tensor, start: int, stop: int, rows: Tensor) -> None:
        """Write rows `start` to `stop` of the list into a per-row tensor that is 0 elsewhere."""
        if self.index is not None:
            destination.index_copy_(0, self.index[start:stop], rows.to(destination.dtype))
        else:
            destination[start:stop] = self._without_ignored(rows, start, stop)

    def _without_ignored(self, rows: Tensor, start: int, stop: int) -> Tensor:
        if self.is_valid is None:
            return rows
        mask = self.is_valid[start:stop]
        # A choice, not a product with 0, which would keep NaN.
        return torch.where(mask if rows.ndim == 1 else mask.unsqueeze(1), rows, 0)


def _select_rows(is_valid: Tensor, compact: bool) -> _Rows:
    if not compact:
        return _Rows(is_valid.shape[0], None, is_valid)
    index = is_valid.nonzero().squeeze(1)
    if index.shape[0] == is_valid.shape[0]:
        return _Rows(index.shape[0], None, None)  # slices instead of copies
    return _Rows(index.shape[0], index, None)


@torch.no_grad()
def compute_in_chunks(
    problem: Problem,
    needs: Needs,
    *,
    compact: bool,
    product_dtype: torch.dtype,
    kernels: Kernels = "torch",
    compute_rows: RowComputation | None = None,
) -> ChunkedResult:
    """Losses and gradients of `problem`, a chunk of rows at a time.

    Args:
        problem: the checked arguments.
        needs: the gradients to compute.
        compact: leave ignored rows out of the products. The host must know their number for that, so on a
            device all rows keep their place, and ignored ones enter as zeros.
        product_dtype: of the operands of the matrix products. Statistics and sums are in
            `problem.compute_dtype` anyway.
        kernels: "triton" takes neither `compact` rows nor a shard of the vocabulary.
        compute_rows: another loss than the cross entropy, with the kernels of torch.
    """
    with torch.autocast(problem.hidden.device.type, enabled=False):
        result = _compute_in_chunks(problem, needs, compact, product_dtype, kernels, compute_rows)
    # Not in there: by now what the loop needed, such as a wider copy of the weight, is gone.
    a, b = problem.bias_factors if problem.bias_factors is not None else (None, None)
    inputs = (problem.hidden, problem.weight, problem.bias, a, b)
    gradients = [
        None if gradient is None or tensor is None else gradient.to(_saved_dtype(tensor))
        for gradient, tensor in zip(result.gradients, inputs, strict=True)
    ]
    return replace(result, gradients=gradients)


def _compute_in_chunks(
    problem: Problem,
    needs: Needs,
    compact: bool,
    product_dtype: torch.dtype,
    kernels: Kernels,
    compute_rows: RowComputation | None,
) -> ChunkedResult:
    dtype, (vocabulary, hidden_size) = problem.compute_dtype, problem.weight.shape
    hidden, bias, shard = problem.hidden, problem.bias, problem.shard
    a, b = problem.bias_factors if problem.bias_factors is not None else (None, None)
    is_valid = problem.targets != problem.ignore_index
    # Where a row is ignored, its weight may be anything, and its target is no index.
    token_weights = torch.where(is_valid, problem.token_weights, 0)
    targets = torch.where(is_valid, problem.targets, 0)
    use_triton = kernels == "triton"
    assert not (use_triton and (compact or shard is not None)), "the kernel takes whole rows, in their place"
    if compact or (use_triton and hidden.device.type == "cpu"):
        check_targets_on_cpu(targets, vocabulary if shard is None else int(shard.size))
    elif use_triton:  # which reads where the target points; `gather` looks first
        torch._assert_async(((targets >= 0) & (targets < vocabulary)).all())
    rows = _select_rows(is_valid, compact)

    weight = problem.weight.to(product_dtype)
    if 1 not in weight.stride():
        weight = weight.contiguous()  # once, not in every product
    factor = None if b is None else b.to(product_dtype)
    class_bias = bias.to(dtype) if bias is not None and bias.ndim == 1 else None
    row_bias = bias if bias is not None and bias.ndim == 2 else None
    # See [Note: where scales go].
    input_scale = problem.logit_scale / (1.0 if problem.softcap is None else problem.softcap)
    scaled_dtype = dtype  # of the operands of width H while they are scaled
    if use_triton:
        input_scale, scaled_dtype = 1.0, product_dtype

    token_losses = hidden.new_zeros(hidden.shape[0], dtype=dtype)
    token_z_losses = torch.zeros_like(token_losses)
    # What is still to be summed over ranks keeps its digits until then.
    row_dtype = None if shard is None else dtype
    grad_hidden = _new_gradient(hidden, row_dtype) if needs.hidden else None
    grad_a = _new_gradient(a, row_dtype) if a is not None and needs.a else None
    grad_row_bias = _new_gradient(row_bias) if row_bias is not None and needs.bias else None
    grad_class_bias = torch.zeros_like(class_bias) if class_bias is not None and needs.bias else None
    grad_weight = _new_sum(weight, dtype, rows.count) if needs.weight else None
    grad_b = _new_sum(factor, dtype, rows.count) if factor is not None and needs.b else None

    # The gradient of a bias by row is that of the logits: where they are of one dtype and every row has a
    # target, logits are made in its memory. A chunk beside it would be written, read and copied for nothing.
    logits_memory = None
    if rows.takes_all and not use_triton and grad_row_bias is not None:
        logits_memory = grad_row_bias if grad_row_bias.dtype == product_dtype == dtype else None

    # See [Note: vocabulary shards].
    overlaps = False
    span = rows.count if shard is None else hidden.shape[0]
    chunk = chunk_rows(span, hidden_size, problem.chunk_size)
    if use_triton:
        # Not above: it needs the package triton.
        from isoloss.losses.linear_cross_entropy import triton_kernels

        chunk = device_chunk_rows(span, hidden_size, product_dtype, problem.chunk_size)
        buffers = [triton_kernels.new_logits(hidden, min(chunk, rows.count), vocabulary, product_dtype)]
    else:
        overlaps = shard is not None and shard.overlaps and compute_rows is None and chunk < span
        if logits_memory is not None:
            buffers = list(logits_memory.split(chunk))
        else:
            buffers = [
                hidden.new_empty((min(chunk, rows.count), vocabulary), dtype=product_dtype)
                for _ in range(2 if overlaps else 1)
            ]
    block = block_rows(chunk, vocabulary, hidden.device)

    def run_chunk(start: int, buffer: Tensor) -> Generator[None, None, None]:
        stop = max(start, min(start + chunk, rows.count))  # of a shard, the last chunks may be empty
        is_first = start == 0
        x = rows.take(hidden, start, stop).to(scaled_dtype)
        x_scaled = x if input_scale == 1.0 else x * input_scale
        operand = buffer[: stop - start]
        torch.mm(x_scaled.to(product_dtype), weight.T, out=operand)
        logits = operand if use_triton else operand.to(dtype)  # the same memory where the dtypes agree
        a_rows = None
        if a is not None and factor is not None:
            a_rows = rows.take(a, start, stop).to(scaled_dtype)
            _add_product_(logits, (a_rows * input_scale).to(product_dtype), factor.T)

        def add_bias(z: Tensor, low: int, high: int) -> None:
            if class_bias is not None:
                z.add_(class_bias, alpha=input_scale)
            if row_bias is not None:
                z.add_(rows.take(row_bias, start + low, start + high), alpha=input_scale)

        row_weights = rows.take(token_weights, start, stop).to(dtype) * problem.logit_scale
        if use_triton:
            row = triton_kernels.compute_row_losses_by_triton_(
                logits,
                problem.targets[start:stop],
                problem,
                bias=class_bias if row_bias is None else row_bias[start:stop],
                gradient_scale=row_weights,
                needs_gradient=needs.any,
            )
        elif compute_rows is not None:
            take = partial(rows.take, start=start, stop=stop)
            row = compute_rows(
                LogitsChunk(logits, take, add_bias if bias is not None else None, needs.any, chunk)
            )
        else:
            arguments = (logits, rows.take(targets, start, stop), problem)
            add = add_bias if bias is not None else None
            if shard is None:
                row = compute_row_losses_(*arguments, add_bias=add, needs_gradient=needs.any)
            else:
                row = yield from compute_sharded_row_losses_(
                    *arguments, add_bias=add, needs_gradient=needs.any, shard=shard, reduced_rows=chunk
                )
        rows.put(token_losses, start, stop, row.losses)
        rows.put(token_z_losses, start, stop, row.z_losses)
        if not needs.any:
            return

        # None where the buffer holds the gradient itself.
        scale = None if row.sums is None else (row_weights / row.sums).unsqueeze(1)
        if grad_class_bias is not None and scale is not None:
            grad_class_bias.addmv_(logits.T, scale.squeeze(1))
        elif grad_class_bias is not None:
            grad_class_bias.add_(logits.sum(0, dtype=dtype))
        if grad_row_bias is not None and logits_memory is None:
            for low in range(start, stop, block):
                high = min(low + block, stop)
                part = slice(low - start, high - start)
                rows.put(
                    grad_row_bias, low, high, logits[part] if scale is None else logits[part] * scale[part]
                )
        if logits.dtype != product_dtype:
            operand.copy_(logits)
        if grad_hidden is not None:
            product = torch.mm(operand, weight).to(scaled_dtype)
            rows.put(grad_hidden, start, stop, product if scale is None else product.mul_(scale))
        if grad_weight is not None:
            x = x if scale is None else x * scale
            _add_product_(grad_weight, operand.T, x.to(product_dtype), replace=is_first)
        if a_rows is not None and factor is not None:
            if grad_a is not None:
                product = torch.mm(operand, factor).to(scaled_dtype)
                rows.put(grad_a, start, stop, product if scale is None else product.mul_(scale))
            if grad_b is not None:
                a_rows = a_rows if scale is None else a_rows * scale
                _add_product_(grad_b, operand.T, a_rows.to(product_dtype), replace=is_first)
        if logits_memory is not None and scale is not None:
            operand.mul_(scale)

    chunks = [
        run_chunk(start, buffers[number % len(buffers)]) for number, start in enumerate(range(0, span, chunk))
    ]
    if overlaps:
        _interleave(chunks)
    else:
        for steps in chunks:
            _finish(steps)
    if shard is not None:
        grad_hidden, grad_a = _sum_over_ranks([grad_hidden, grad_a], shard)

    # Exactly the numbers that are handed out; on rows without a target all three are 0.
    loss = (token_weights * (token_losses + token_z_losses)).sum().to(dtype)
    grad_bias = grad_row_bias if grad_class_bias is None else grad_class_bias
    return ChunkedResult(
        loss, token_losses, token_z_losses, (grad_hidden, grad_weight, grad_bias, grad_a, grad_b)
    )


def _finish(steps: Generator[None, None, None]) -> None:
    for _ in steps:
        pass


def _interleave(chunks: Sequence[Generator[None, None, None]]) -> None:
    """Run chunks that pause twice: the products of one are made while the other's numbers are reduced.

    Each runs, and adds to the sums of gradients, in the order and with the bits that it has alone.
    """
    previous: Generator[None, None, None] | None = None
    for steps in chunks:
        next(steps)  # its logits, during the previous one's sum
        if previous is not None:
            _finish(previous)  # gradients of the previous one, during the maximum of this
        next(steps)
        previous = steps
    if previous is not None:
        _finish(previous)


def _sum_over_ranks(gradients: Sequence[Tensor | None], shard: VocabularyShard) -> list[Tensor | None]:
    """Gradients summed over the group in one reduction."""
    made = [gradient.reshape(-1) for gradient in gradients if gradient is not None]
    if not made:
        return list(gradients)
    flat = torch.cat(made) if len(made) > 1 else made[0]
    shard.reduce_sum(flat)
    pieces = iter(flat.split([part.numel() for part in made]))
    return [None if gradient is None else next(pieces).view_as(gradient) for gradient in gradients]


def _add_product_(total: Tensor, left: Tensor, right: Tensor, *, replace: bool = False) -> None:
    """Add left @ right to `total`, or overwrite it; `total` may have more digits than the operands."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=0 if replace else 1)
    elif total.is_cuda and total.dtype == torch.float32:
        # Into the sum, with its digits: neither a rounded product of that size nor a pass to add it.
        if replace:
            torch.mm(left, right, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif replace:
        total.copy_(torch.mm(left, right))
    else:
        total.add_(torch.mm(left, right))


def choose_product_dtype(problem: Problem) -> torch.dtype:
    """What the operands of the matrix products are rounded to."""
    device = problem.hidden.device.type
    if device == "cpu":
        return problem.compute_dtype  # products of bfloat16 are up to 70 times slower on common CPUs
    dtype = torch.promote_types(problem.hidden.dtype, problem.weight.dtype)
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    # Not float16: gradients of weights such as 1e-6 would vanish before a loss scaler can help.
    return torch.bfloat16 if dtype == torch.bfloat16 else problem.compute_dtype


def _saved_dtype(tensor: Tensor) -> torch.dtype:
    # The factor of a loss scaler arrives in backward: float16 rounded before it would vanish.
    return torch.float32 if tensor.dtype == torch.float16 else tensor.dtype


def _new_gradient(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.zeros(tensor.shape, dtype=dtype or _saved_dtype(tensor), device=tensor.device)


def _new_sum(like: Tensor, dtype: torch.dtype, num_rows: int) -> Tensor:
    """Contiguous memory for a sum over rows, zeros if there are none to write it."""
    if num_rows == 0:
        return torch.zeros(like.shape, dtype=dtype, device=like.device)
    return torch.empty(like.shape, dtype=dtype, device=like.device)
