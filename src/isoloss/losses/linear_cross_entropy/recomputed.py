"""Losses of rows that are differentiable one by one, with nothing kept for backward but the inputs.

Shapes: N rows.

[Note: known in backward] `chunked_linear_cross_entropy` makes its gradients in forward, for which it must
know the weight of each row. A preference loss knows it after a sigmoid of sums over whole documents, a policy
gradient after a ratio. Here forward keeps no logits and no gradient, and backward runs the same chunk loop
again with the incoming gradient in the place of the token weights: four matrix products where the other needs
three.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isoloss.losses.linear_cross_entropy.chunked import Kernels, choose_product_dtype, run_chunks
from isoloss.losses.linear_cross_entropy.problem import LinearCrossEntropyOutput, Problem


def recomputed_row_losses(problem: Problem, kernels: Kernels = "torch") -> tuple[Tensor, Tensor, Tensor]:
    """Token loss plus token z-loss of each row, differentiable, and the two apart, detached.

    See [Note: known in backward]. `problem.token_weights` play no part. Ignored rows are 0, and what their
    incoming gradients hold reaches nothing.

    Host syncs: none.
    """
    a, b = problem.bias_factors if problem.bias_factors is not None else (None, None)
    row_losses, token_losses, token_z_losses = _RecomputedRowLosses.apply(
        problem.hidden, problem.weight, problem.bias, a, b, problem, kernels
    )
    return row_losses, token_losses, token_z_losses


def recomputed_linear_cross_entropy(problem: Problem, kernels: Kernels = "torch") -> LinearCrossEntropyOutput:
    """Loss of `problem`, to the bit as by `chunked_linear_cross_entropy`; gradients are computed in backward.

    Host syncs: none.
    """
    row_losses, token_losses, token_z_losses = recomputed_row_losses(problem, kernels)
    token_weights = torch.where(problem.targets != problem.ignore_index, problem.token_weights, 0)
    loss = (token_weights * row_losses).sum().to(problem.compute_dtype)
    return LinearCrossEntropyOutput(loss, token_losses, token_z_losses)


class _RecomputedRowLosses(torch.autograd.Function):
    """Saves the inputs and computes the logits again in backward; see [Note: known in backward]."""

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        # In here, where a compiled graph still knows of autocast.
        ctx.product_dtype = choose_product_dtype(problem)
        ctx.kernels = kernels
        # The options alone: a tensor kept beside those that are saved could be neither dropped nor moved.
        ctx.options = (
            problem.softcap,
            problem.logit_scale,
            problem.label_smoothing,
            problem.z_loss,
            problem.ignore_index,
            problem.chunk_size,
            problem.shard,
        )
        ctx.save_for_backward(hidden, weight, problem.targets, bias, a, b)
        _, token_losses, token_z_losses = run_chunks(problem, [False] * 5, ctx.product_dtype, kernels)
        ctx.mark_non_differentiable(token_losses, token_z_losses)
        ctx.set_materialize_grads(False)
        return token_losses + token_z_losses, token_losses, token_z_losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_rows is None:
            return (None,) * 7
        hidden, weight, targets, bias, a, b = ctx.saved_tensors
        factors = None if a is None else (a, b)
        problem = Problem(hidden, weight, targets, grad_rows, bias, factors, *ctx.options)
        needs = ctx.needs_input_grad[:5]
        gradients = iter(run_chunks(problem, needs, ctx.product_dtype, ctx.kernels)[3:])
        inputs = zip((hidden, weight, bias, a, b), needs, strict=True)
        made = (next(gradients).to(tensor.dtype) if need else None for tensor, need in inputs)
        return (*made, None, None)
