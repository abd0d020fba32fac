"""Linear cross entropy in plain torch with full logits: what every other backend must agree with.

Shapes: n rows that have a target, H hidden width, V vocabulary.
"""

import torch
from torch import Tensor

from isoloss.losses.linear_cross_entropy.problem import (
    LinearCrossEntropyOutput,
    Problem,
    check_targets_on_cpu,
)


def reference_linear_cross_entropy(problem: Problem) -> LinearCrossEntropyOutput:
    """Loss of `problem` by autograd; memory grows as several times n x V.

    Host syncs: one, on a device, for the number of rows that have a target.
    """
    dtype = problem.compute_dtype
    rows, losses, z_losses = _row_losses(problem)
    loss = (problem.token_weights[rows] * (losses + z_losses)).sum().to(dtype)
    token_losses = problem.hidden.new_zeros(problem.targets.shape, dtype=dtype)
    token_z_losses = torch.zeros_like(token_losses)
    token_losses[rows] = losses.detach()
    token_z_losses[rows] = z_losses.detach()
    return LinearCrossEntropyOutput(loss, token_losses, token_z_losses)


def reference_log_probs(problem: Problem) -> Tensor:
    """Log-probability of each row's target, [N], 0 where ignored, by autograd through full logits.

    Host syncs: as `reference_linear_cross_entropy`.
    """
    rows, losses, _ = _row_losses(problem)
    return losses.new_zeros(problem.targets.shape).index_copy(0, rows, -losses)


def _row_losses(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """The rows that have a target, int64[n], and their losses and z-losses, [n], in the graph."""
    # Rows are taken out, not multiplied by zero: 0 * NaN is NaN.
    rows = (problem.targets != problem.ignore_index).nonzero().squeeze(1)
    targets = problem.targets[rows]
    if targets.device.type == "cpu":
        check_targets_on_cpu(targets, problem.weight.shape[0])
    with torch.autocast(problem.hidden.device.type, enabled=False):
        logits = reference_logits(problem, rows)
        row_max = logits.detach().amax(-1, keepdim=True)
        shifted = logits - row_max
        log_sum = shifted.exp().sum(-1).log()
        # (max - z_t) + log(sum), not lse - z_t, which cancels under a large common offset.
        losses = log_sum - shifted.gather(-1, targets.unsqueeze(1)).squeeze(1)
        if problem.label_smoothing:
            uniform = log_sum - shifted.mean(-1)
            losses = (1 - problem.label_smoothing) * losses + problem.label_smoothing * uniform
        z_losses = torch.zeros_like(log_sum)
        if problem.z_loss:
            z_losses = problem.z_loss * (log_sum + row_max.squeeze(1)).square()
    return rows, losses, z_losses


def reference_logits(problem: Problem, rows: Tensor) -> Tensor:
    """[n, V] in the dtype of the computation, connected to every parameter."""
    dtype = problem.compute_dtype
    logits = problem.hidden[rows].to(dtype) @ problem.weight.to(dtype).T
    if problem.bias is not None:
        bias = problem.bias if problem.bias.ndim == 1 else problem.bias[rows]
        logits = logits + bias.to(dtype)
    if problem.bias_factors is not None:
        a, b = problem.bias_factors
        logits = logits + a[rows].to(dtype) @ b.to(dtype).T
    logits = problem.logit_scale * logits
    if problem.softcap is not None:
        logits = problem.softcap * torch.tanh(logits / problem.softcap)
    return logits
