"""What a linear cross entropy is asked to compute, checked once for every backend.

Shapes: N rows (tokens), H hidden width, V vocabulary, r rank of a factored bias.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The classes whose rows of the weight this rank holds, where the vocabulary is spread over ranks.

    Every rank of the group has all rows of `hidden`, their targets (classes of the whole vocabulary) and
    token weights, and its own slice of `weight` and of whatever else is per class. Slices may have any size,
    zero included; together they are the vocabulary, in the order of the ranks.
    """

    start: int | Tensor
    """First class of this rank; an int64 scalar on the device where the host does not know it."""
    size: int | Tensor
    """Classes of the whole vocabulary; likewise."""
    reduce_max: Callable[[Tensor], object]
    """Replaces a tensor by its maximum over the group, in place."""
    reduce_sum: Callable[[Tensor], object]
    """Replaces a tensor by its sum over the group, in place."""
    begin_max: Callable[[Tensor], Callable[[], object]] | None = None
    """`reduce_max` that goes on while the caller computes, until the caller calls what is returned.

    None, here or for the sum: nothing is computed meanwhile."""
    begin_sum: Callable[[Tensor], Callable[[], object]] | None = None
    """Likewise `reduce_sum`."""

    @property
    def overlaps(self) -> bool:
        """Whether reductions go on beside products."""
        return self.begin_max is not None and self.begin_sum is not None


@dataclass(frozen=True, slots=True)
class Problem:
    """Checked and flattened arguments of one call; see `linear_cross_entropy` for their meaning."""

    hidden: Tensor
    """[N, H], floating."""
    weight: Tensor
    """[V, H], floating."""
    targets: Tensor
    """int64[N]; `ignore_index` marks rows that are left out."""
    token_weights: Tensor
    """float32 or float64 [N], constants."""
    bias: Tensor | None
    """[V] or [N, V]."""
    bias_factors: tuple[Tensor, Tensor] | None
    """a[N, r] and b[V, r]; their product a b^T is added to the logits before the scale."""
    softcap: float | None
    logit_scale: float
    label_smoothing: float
    z_loss: float
    ignore_index: int
    chunk_size: int | None
    shard: VocabularyShard | None = None
    """None: `weight` is whole."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of row statistics, sums and results: float64 if an input is, else float32."""
        dtype = torch.promote_types(self.hidden.dtype, self.weight.dtype)
        return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, slots=True)
class LinearCrossEntropyOutput:
    """What `linear_cross_entropy` returns; float64 for float64 inputs, else float32."""

    loss: Tensor
    """Scalar, differentiable: sum of `token_weights * (token_losses + token_z_losses)`."""
    token_losses: Tensor
    """Cross entropy of each row in nats, detached, shaped like `targets`; 0 where ignored."""
    token_z_losses: Tensor
    """`z_loss * logsumexp^2` of each row, detached, shaped like `targets`; 0 where ignored."""


def build_problem(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    token_weights: Tensor | None,
    bias: Tensor | None,
    bias_factors: tuple[Tensor, Tensor] | None,
    softcap: float | None,
    logit_scale: float,
    label_smoothing: float,
    z_loss: float,
    ignore_index: int,
    chunk_size: int | None,
    shard: VocabularyShard | None = None,
) -> Problem:
    """Check the arguments of `linear_cross_entropy` and flatten leading dimensions to N rows.

    Raises:
        TypeError: a dtype that cannot be used, or a sharded tensor (DTensor).
        ValueError: a shape or an option that does not fit.
    """
    tensors = {"hidden": hidden, "weight": weight, "targets": targets, "token_weights": token_weights}
    tensors |= {"bias": bias}
    if bias_factors is not None:
        tensors |= {"bias_factors[0]": bias_factors[0], "bias_factors[1]": bias_factors[1]}
    for name, tensor in tensors.items():
        if tensor is not None:
            _check_not_sharded(name, tensor)
            if tensor.device != hidden.device:
                raise ValueError(
                    f"all tensors must be on one device; hidden is on {hidden.device}, {name} on "
                    f"{tensor.device}; move {name} there"
                )
    for name in ("hidden", "weight", "bias", "bias_factors[0]", "bias_factors[1]"):
        floating = tensors.get(name)
        if floating is not None and not floating.is_floating_point():
            raise TypeError(f"{name} must be floating, got {floating.dtype}; cast it before the call")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TypeError(f"targets must hold class indices (int32 or int64), got {targets.dtype}")

    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"expected hidden [N, H] and weight [V, H], got {list(hidden.shape)} and {list(weight.shape)}; "
            "pass the head's weight as torch.nn.Linear stores it"
        )
    rows, vocabulary = hidden.shape[:-1], weight.shape[0]
    if vocabulary == 0 and shard is None:
        raise ValueError("weight must have at least one row (V >= 1), got an empty vocabulary")
    _check_shape("targets", targets, (*rows,), "one target per row of hidden")
    if token_weights is None:
        token_weights = torch.ones(targets.numel(), dtype=torch.float32, device=hidden.device)
    else:
        _check_shape("token_weights", token_weights, (*rows,), "one weight per row of hidden")
        if token_weights.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"token_weights must be float32 or float64, got {token_weights.dtype}; a weight rounded to "
                "fewer digits would not sum to its denominator"
            )
        if token_weights.requires_grad:
            raise ValueError(
                "token_weights are constants but require a gradient; pass token_weights.detach()"
            )
    if bias is not None and bias.ndim != 1:
        _check_shape("bias", bias, (*rows, vocabulary), "or [V]; one value per row and class")
        bias = bias.reshape(targets.numel(), vocabulary)
    elif bias is not None:
        _check_shape("bias", bias, (vocabulary,), "or [N, V]; one value per class")
    if bias_factors is not None:
        a, b = bias_factors
        rank = a.shape[-1] if a.ndim else 0
        _check_shape("bias_factors[0]", a, (*rows, rank), "a[N, r]")
        _check_shape("bias_factors[1]", b, (vocabulary, rank), "b[V, r] with the rank of a")
        bias_factors = (a.reshape(-1, rank), b)

    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap must be positive and finite, got {softcap}; pass None for no cap")
    if not math.isfinite(logit_scale):
        raise ValueError(f"logit_scale must be finite, got {logit_scale}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if not (z_loss >= 0.0 and math.isfinite(z_loss)):
        raise ValueError(f"z_loss must be 0 (off) or a positive coefficient, got {z_loss}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 row, got {chunk_size}; pass None for the default")
    return Problem(
        hidden=hidden.reshape(-1, weight.shape[1]),
        weight=weight,
        targets=targets.reshape(-1).to(torch.int64),
        token_weights=token_weights.reshape(-1),
        bias=bias,
        bias_factors=bias_factors,
        softcap=softcap,
        logit_scale=float(logit_scale),
        label_smoothing=float(label_smoothing),
        z_loss=float(z_loss),
        ignore_index=ignore_index,
        chunk_size=chunk_size,
        shard=shard,
    )


def check_targets_on_cpu(targets: Tensor, vocabulary: int) -> None:
    """Raise if a target that is not ignored lies outside [0, V).

    On a device this would wait for it, so there the range check is the device-side assertion of `gather`.
    """
    outside = (targets < 0) | (targets >= vocabulary)
    if outside.any():
        row = int(outside.nonzero()[0])
        raise ValueError(
            f"targets must lie in [0, {vocabulary}) or be ignore_index, got {int(targets[row])}; check that "
            "the labels come from the tokenizer of this head, and the vocabulary size"
        )


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], meaning: str) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name} must have shape {list(expected)} ({meaning}), got {list(tensor.shape)}")


def _check_not_sharded(name: str, tensor: Tensor) -> None:
    # By name, so that this module works in a torch built without torch.distributed.
    if any(base.__name__ == "DTensor" for base in type(tensor).__mro__):
        raise TypeError(
            f"{name} is a DTensor, expected a plain tensor: call the loss inside the wrapped forward, where "
            "the head's weight is gathered (isoloss.LossModel does), or, for one sharded over the "
            "vocabulary on a tensor-parallel axis, pass its to_local() and vocab_group"
        )
