"""`linear_cross_entropy`: one signature and one contract over several backends."""

from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

from isoloss.losses.linear_cross_entropy.chunked import Kernels, chunked_linear_cross_entropy
from isoloss.losses.linear_cross_entropy.problem import (
    LinearCrossEntropyOutput,
    Problem,
    VocabularyShard,
    build_problem,
)
from isoloss.losses.linear_cross_entropy.recomputed import recomputed_linear_cross_entropy
from isoloss.losses.linear_cross_entropy.reference import reference_linear_cross_entropy

Backend = Literal["auto", "reference", "chunked", "triton"]
Gradients = Literal["forward", "backward"]

_SMALLEST_CAPABILITY = (8, 0)
"""Of a CUDA device, for "auto" to choose Triton: what Triton names as supported."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    token_weights: Tensor | None = None,
    bias: Tensor | None = None,
    bias_factors: tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    vocab_group: object | None = None,
    backend: Backend | str = "auto",
    gradients: Gradients | str = "forward",
) -> LinearCrossEntropyOutput:
    """The weighted sum of cross entropies of a linear head, and the loss of each row from the same pass.

    With z = softcap * tanh(logit_scale * (hidden weight^T + bias + a b^T) / softcap), without the tanh if
    softcap is None, and e = label_smoothing, row i with target t has

        token_losses[i]   = (1 - e) * (logsumexp(z) - z[t]) + e * (logsumexp(z) - mean(z))
        token_z_losses[i] = z_loss * logsumexp(z)^2
        loss              = sum over i of token_weights[i] * (token_losses[i] + token_z_losses[i])

    `targets` are used as they are: nothing is shifted. Rows whose target is `ignore_index` are left out
    before the projection: whatever they hold reaches nothing, and their gradients are exactly 0. Without any
    target the loss is 0 and every gradient is zeros.

    The gradients of `loss` are computed during the forward pass, for the inputs that need one and only when
    grad mode is on; backward hands them out, multiplied by the incoming gradient unless that is 1. So put the
    denominator into `token_weights`, where it costs nothing. Sums over rows are kept in float32 (float64) and
    rounded to the dtype of the input once. Only first derivatives exist.

    Args:
        hidden: [N, H], or [..., H] with leading dimensions shared by every per-row argument; floating.
        weight: [V, H], as torch.nn.Linear stores it; a plain tensor.
        targets: int[N], in [0, V) or `ignore_index`.
        token_weights: float32 or float64 [N], constants without a gradient. Default: ones. A row of weight 0
            is computed and shown, and 0 * NaN is NaN: `ignore_index` leaves a row out, as a step does with
            targets whose data weight is 0.
        bias: [V], or [N, V] for a value per row and class. -inf removes a class.
        bias_factors: a[N, r] and b[V, r]; a b^T is added to the logits.
        softcap: bound of the logits, or None.
        logit_scale: factor of the logits, before the cap.
        label_smoothing: in [0, 1], spread over all V classes as torch.nn.functional.cross_entropy does.
        z_loss: coefficient of logsumexp^2; 0 is off.
        ignore_index: the target of a row that is left out.
        chunk_size: rows whose logits exist at the same time; None chooses by `chunk_rows`. With `vocab_group`
            there are two such chunks, so that one is computed while the other's statistics are reduced.
        vocab_group: process group over whose ranks the vocabulary is spread. `weight`, `bias` and b are then
            this rank's slices, of any size, in the order of the ranks; `hidden`, `targets` (classes of the
            whole vocabulary), `token_weights` and a must be the same on every rank, and gradients of hidden
            and a come out complete. A `VocabularyShard` (`vocab_parallel.find_shard`, `shard_of`) instead of
            a group saves the collective that asks for the sizes. torch.compile runs this path eagerly.
        backend: "chunked" makes losses and gradients out of a chunk of logits by torch, "triton" by a fused
            kernel, on CUDA; with `vocab_group`, which the kernel does not take, that is "chunked" too.
            "reference" has full logits and plain autograd. "auto" is "triton" on CUDA devices of capability
            8.0 and above where the package triton is installed, else "chunked".
        gradients: "forward" is described above. "backward" keeps nothing of the size of a weight or of hidden
            between the passes, and no sum of weight gradients is alive during the rest of the model's
            backward; backward computes the logits again with the incoming gradient in the weight of each row:
            four matrix products instead of three. Loss and token losses are the same bits. Inputs must not be
            changed in place before backward. "reference" is always like that.

    Returns:
        `LinearCrossEntropyOutput`: loss, token_losses, token_z_losses. All are float32 for bfloat16, float16
        and float32 inputs, and float64 if hidden or weight is float64.

    Collectives: none without `vocab_group`. With it a MAX and a SUM per chunk (with gradients="backward" once
    more in backward, which every rank must then run), one SUM for the gradients of hidden and a, and one SUM
    for the sizes; their number and size depend on shapes and options alone.

    Host syncs: none; one on a device with "reference".

    Raises:
        ValueError: a shape, option, group or backend that does not fit; on CPU also a target outside [0, V)
            (a device asserts there, without making the host wait).
        TypeError: a dtype that cannot be used, or a DTensor.

    Example:
        >>> import torch
        >>> hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
        >>> out = linear_cross_entropy(hidden, torch.zeros(4, 2), torch.tensor([2, -100]))
        >>> out.token_losses
        tensor([1.3863, 0.0000])
        >>> out.loss.backward()
        >>> hidden.grad
        tensor([[0., 0.],
                [0., 0.]])
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}")
    if gradients not in get_args(Gradients):
        raise ValueError(
            f"gradients must be 'forward' or 'backward', the pass that computes them, got {gradients!r}"
        )
    shard = find_vocabulary_shard(vocab_group, weight, backend)
    problem = build_problem(
        hidden,
        weight,
        targets,
        token_weights=token_weights,
        bias=bias,
        bias_factors=bias_factors,
        softcap=softcap,
        logit_scale=logit_scale,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        ignore_index=ignore_index,
        chunk_size=chunk_size,
        shard=shard,
    )
    if backend == "reference":
        output = reference_linear_cross_entropy(problem)
    else:
        run = chunked_linear_cross_entropy if gradients == "forward" else recomputed_linear_cross_entropy
        output = run(problem, choose_kernels(backend, problem))
    return LinearCrossEntropyOutput(
        output.loss,
        output.token_losses.reshape(targets.shape),
        output.token_z_losses.reshape(targets.shape),
    )


def choose_kernels(backend: str, problem: Problem) -> Kernels:
    """What makes losses and gradients out of logits, by backend, device and options, as documented above.

    Raises:
        ValueError: "triton" is asked for and cannot run here.
    """
    device = problem.hidden.device
    if backend == "triton":
        _check_triton_runs_on(device)
        is_wanted = True
    else:
        is_wanted = backend == "auto" and device.type == "cuda" and find_spec("triton") is not None
        is_wanted = is_wanted and torch.cuda.get_device_capability(device) >= _SMALLEST_CAPABILITY
    # The statistics of a shard are reduced over ranks between the two halves of what the kernel does.
    return "triton" if is_wanted and problem.shard is None else "torch"


def _check_triton_runs_on(device: torch.device) -> None:
    try:
        # Not above: the core needs torch alone.
        from isoloss.losses.linear_cross_entropy import triton_kernels
    except ImportError as error:
        raise ValueError(
            f"backend 'triton' needs the package triton, got: {error}; install isoloss[triton], or use "
            "backend 'auto'"
        ) from error
    if device.type != "cuda" and not triton_kernels.is_interpreted():
        raise ValueError(
            f"backend 'triton' needs tensors on a CUDA device, got {device}; use backend 'auto', or start "
            "the process with TRITON_INTERPRET=1, which runs the kernel on CPU tensors, for tests"
        )


def find_vocabulary_shard(vocab_group: object | None, weight: Tensor, backend: str) -> VocabularyShard | None:
    """The slice of the vocabulary that `weight` is; None, for all of it, without a group.

    Collectives: as `vocab_parallel.find_shard`.

    Raises:
        ValueError: the backend needs the whole vocabulary.
        TypeError: `vocab_group` is no group.
    """
    if vocab_group is None:
        return None
    if backend == "reference":
        raise ValueError(
            "backend 'reference' needs the logits of the whole vocabulary and takes no vocab_group; use "
            "'auto', or gather the weight"
        )
    # Not above: it needs a torch that was built with torch.distributed.
    from isoloss.losses.linear_cross_entropy.vocab_parallel import find_shard

    return find_shard(vocab_group, weight)
