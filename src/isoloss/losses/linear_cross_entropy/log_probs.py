"""`linear_log_probs`: the log-probability of each target, with a gradient per row that only backward knows.

Shapes: N rows, H hidden width, V vocabulary, r rank of a factored bias.

Forward keeps no logits and backward computes them again, see [Note: known in backward] in `recomputed`.
"""

from typing import get_args

from torch import Tensor

from isoloss.losses.linear_cross_entropy.interface import Backend, choose_kernels, find_vocabulary_shard
from isoloss.losses.linear_cross_entropy.problem import build_problem
from isoloss.losses.linear_cross_entropy.recomputed import recomputed_row_losses
from isoloss.losses.linear_cross_entropy.reference import reference_log_probs


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    bias_factors: tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    vocab_group: object | None = None,
    backend: Backend | str = "auto",
) -> Tensor:
    """Log-probability of each row's target under a linear head, differentiable row by row.

    z[t] - logsumexp(z) with the logits z of `linear_cross_entropy`: its `token_losses`, negated and in the
    graph. Use it where the gradient of a row is known only after the forward pass; where it is known before,
    `linear_cross_entropy` with `token_weights` is a quarter cheaper.

    `targets` are used as they are: nothing is shifted. Rows whose target is `ignore_index` are left out
    before the projection, in forward and in backward: whatever they and their incoming gradients hold reaches
    nothing, and their gradients are exactly 0.

    The logits of one chunk of rows exist at a time. Backward computes them again, and sums gradients over
    rows in float32 (float64), rounded to the dtype of the input once. Only first derivatives exist.

    Args:
        hidden: [..., H], floating; leading dimensions are shared by every per-row argument.
        weight: [V, H], as torch.nn.Linear stores it; a plain tensor.
        targets: int[...], in [0, V) or `ignore_index`.
        bias: [V], or [..., V] for a value per row and class. -inf removes a class.
        bias_factors: a[..., r] and b[V, r]; a b^T is added to the logits.
        softcap: bound of the logits, or None.
        logit_scale: factor of the logits, before the cap.
        ignore_index: the target of a row that is left out.
        chunk_size: rows whose logits exist at the same time; None chooses by `chunk_rows`.
        vocab_group: as in `linear_cross_entropy`, for a vocabulary spread over ranks. The gradient that comes
            in must be the same on every rank too, and every rank must run backward if one does.
        backend: as in `linear_cross_entropy`.

    Returns:
        Shaped like `targets`, 0 where ignored; float32 for bfloat16, float16 and float32 inputs, and float64
        if hidden or weight is float64.

    Collectives: none without `vocab_group`. With it a MAX and a SUM per chunk, in forward and again in
    backward, one SUM in backward for the gradients of hidden and a, and one SUM for the sizes; their number
    and size depend on shapes and options alone.

    Host syncs: none; one on a device with "reference".

    Raises:
        ValueError: a shape, option, group or backend that does not fit; on CPU also a target outside [0, V)
            (a device asserts there, without making the host wait).
        TypeError: a dtype that cannot be used, or a DTensor.

    Example:
        >>> import torch
        >>> hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
        >>> log_probs = linear_log_probs(hidden, torch.eye(2), torch.tensor([0, -100]))
        >>> log_probs.detach()
        tensor([-0.3133,  0.0000])
        >>> log_probs.exp()[0].backward()  # a gradient that depends on the value
        >>> hidden.grad
        tensor([[ 0.1966, -0.1966],
                [ 0.0000,  0.0000]])
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}")
    problem = build_problem(
        hidden,
        weight,
        targets,
        token_weights=None,
        bias=bias,
        bias_factors=bias_factors,
        softcap=softcap,
        logit_scale=logit_scale,
        label_smoothing=0.0,
        z_loss=0.0,
        ignore_index=ignore_index,
        chunk_size=chunk_size,
        shard=find_vocabulary_shard(vocab_group, weight, backend),
    )
    if backend == "reference":
        return reference_log_probs(problem).reshape(targets.shape)
    row_losses, _, _ = recomputed_row_losses(problem, choose_kernels(backend, problem))
    return (0.0 - row_losses).reshape(targets.shape)  # not -row_losses, which shows ignored rows as -0
