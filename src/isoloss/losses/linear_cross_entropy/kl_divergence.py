"""`linear_kl_divergence`: distillation in the chunk loop, from a teacher's head or from its stored top k.

Shapes: N rows, m rows of a chunk, H hidden width, Ht that of the teacher, V vocabulary, k stored classes.

[Note: one pass over both] Let d be the difference of both logits of a class, each less the maximum of its
row, S and U the sums of exponentials of student and teacher, and D the sum of d weighted by the exponentials
of the side that is averaged over. Both directions need only these three numbers per row:

    forward  KL(teacher || student) = D / U + log (S / U),   gradient * S = e_student - (S / U) e_teacher
    reverse  KL(student || teacher) = D / S + log (U / S),   gradient * S = e_student d - (D / S) e_student

so the buffers of both sides end as two addends of the gradient, and a vocabulary spread over ranks takes one
MAX of two numbers and one SUM of three numbers per row. Equal logits give exactly 0.

[Note: temperature] Logits over T are those of the scale and the softcap over T. The loop runs with these;
only the factor T^2 is applied to losses and gradients afterwards.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from isoloss.losses.linear_cross_entropy.chunked import choose_product_dtype, chunked_linear_cross_entropy
from isoloss.losses.linear_cross_entropy.interface import find_vocabulary_shard
from isoloss.losses.linear_cross_entropy.problem import (
    LinearCrossEntropyOutput,
    Problem,
    VocabularyShard,
    build_problem,
)
from isoloss.losses.linear_cross_entropy.reference import reference_logits
from isoloss.losses.linear_cross_entropy.row_losses import LogitsChunk, RowLosses, block_rows

Direction = Literal["forward", "reverse"]
DivergenceBackend = Literal["auto", "reference", "chunked"]


@dataclass(frozen=True, slots=True)
class TeacherLogits:
    """A teacher that runs beside the student: its logits are made chunk by chunk, and never whole.

    Constants: no gradient reaches them.
    """

    hidden: Tensor
    """[..., Ht], floating; the leading dimensions of the student's hidden."""
    weight: Tensor
    """[V, Ht], the student's vocabulary; with a vocab_group this rank's slice, the student's classes."""
    bias: Tensor | None = None
    """[V], or [..., V]. -inf removes a class."""
    softcap: float | None = None
    logit_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class TeacherTopK:
    """The most probable classes of a teacher, as they were stored with the data. Constants."""

    ids: Tensor
    """int[..., k], classes of the whole vocabulary, in [0, V); distinct where their probability is not 0."""
    log_probs: Tensor
    """float[..., k], at temperature 1, up to a constant per row; -inf where a row has fewer than k."""


def linear_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher: TeacherLogits | TeacherTopK,
    targets: Tensor,
    *,
    token_weights: Tensor | None = None,
    direction: Direction | str = "forward",
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    vocab_group: object | None = None,
    backend: DivergenceBackend | str = "auto",
) -> LinearCrossEntropyOutput:
    """Weighted sum of the divergences of a linear head from a teacher, and each row's from the same pass.

    With q = softmax(z / T) of the student's logits z, as `linear_cross_entropy` makes them, p the teacher's
    likewise, and T = temperature,

        token_losses[i] = T^2 * sum over v of p[v] (log p[v] - log q[v])     "forward", KL(teacher || student)
        token_losses[i] = T^2 * sum over v of q[v] (log q[v] - log p[v])     "reverse", KL(student || teacher)
        loss            = sum over i of token_weights[i] * token_losses[i]

    The factor T^2 (Hinton, Vinyals and Dean, 2015) is in: gradients shrink as 1 / T^2 when the logits are
    divided by T, so with it their size, and the balance with a cross entropy beside it, stays when T changes.

    A `TeacherTopK` knows nothing of the mass outside its k classes. "forward": p is renormalised over the k
    classes and q is the full softmax, so that probability on any other class costs: this trains to the
    teacher's distribution cut off at k. (At a high temperature one side tends to uniform over k classes, the
    other over V, and the gradient grows with T.) "reverse": a p of 0 elsewhere would make every loss
    infinite, so both are renormalised over the k classes; what the student gives to other classes is then
    free, and needs a cross entropy or a forward term beside it. Classes stored with -inf count as outside.

    Gradients are made during the forward pass, sums over rows are kept in float32 (float64), and rows
    without a target are left out before the projection of both sides, as in `linear_cross_entropy`. Only
    first derivatives exist. torch.compile runs it eagerly.

    Args:
        hidden: [..., H], floating; leading dimensions are shared by every per-row argument.
        weight: [V, H], as torch.nn.Linear stores it; a plain tensor.
        teacher: `TeacherLogits` or `TeacherTopK`.
        targets: int[...]; only whether one is `ignore_index` is read: those rows are left out.
        token_weights: float32 or float64 [...], constants without a gradient. Default: ones.
        direction: "forward" or "reverse".
        temperature: T, of both sides.
        bias: [V], or [..., V] for a value per row and class, of the student. -inf removes a class; where only
            one side has removed it, the divergence may be infinite, as the formula says.
        softcap: bound of the student's logits, or None.
        logit_scale: factor of the student's logits, before the cap.
        ignore_index: the target of a row that is left out.
        chunk_size: rows whose logits exist at the same time, of both sides; None chooses by `chunk_rows`.
        vocab_group: as in `linear_cross_entropy`, for a vocabulary spread over ranks. `TeacherLogits` has the
            same slices of its own weight; everything per row, the teacher's too, is the same on every rank.
        backend: "chunked", "reference" (full logits, plain autograd), or "auto", the fastest that applies.

    Returns:
        `LinearCrossEntropyOutput`: loss, token_losses, and zeros as token_z_losses. All are float32 for
        bfloat16, float16 and float32 inputs, and float64 if the student's hidden or weight is float64.

    Collectives: none without `vocab_group`. With it a SUM and, except for a top k in reverse, a MAX per
    chunk, one SUM for the gradient of hidden, and one SUM for the sizes; their number and size depend on
    shapes and options alone.

    Host syncs: none with "chunked"; one on a device with "reference".

    Raises:
        ValueError: a shape, option, group or backend that does not fit; on CPU also a stored class outside
            [0, V) (a device asserts there, without making the host wait).
        TypeError: a dtype that cannot be used, a DTensor, or another kind of teacher.

    Example:
        >>> import torch
        >>> hidden = torch.tensor([[0.0, 0.0]], requires_grad=True)
        >>> teacher = TeacherTopK(torch.tensor([[1]]), torch.tensor([[0.0]]))  # all mass on class 1
        >>> out = linear_kl_divergence(hidden, torch.eye(2), teacher, torch.tensor([1]))
        >>> out.token_losses
        tensor([0.6931])
        >>> out.loss.backward()
        >>> hidden.grad
        tensor([[ 0.5000, -0.5000]])
    """
    for name, value, known in (("direction", direction, Direction), ("backend", backend, DivergenceBackend)):
        if value not in get_args(known):
            raise ValueError(f"{name} must be one of {', '.join(get_args(known))}, got {value!r}")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    student = _build(
        hidden,
        weight,
        targets,
        token_weights=token_weights,
        bias=bias,
        softcap=softcap,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
        chunk_size=chunk_size,
        shard=find_vocabulary_shard(vocab_group, weight, backend),
    )
    side: Problem | TeacherTopK
    if isinstance(teacher, TeacherLogits):
        side = _check_teacher_logits(teacher, student, targets)
        student, side = _at_temperature(student, temperature), _at_temperature(side, temperature)
    elif isinstance(teacher, TeacherTopK):
        side = _check_top_k(teacher, student, targets)
        student = _at_temperature(student, temperature)
        # log p of softmax(z / T) is log p / T up to a constant, which renormalising takes out.
        side = replace(side, log_probs=side.log_probs / temperature)
    else:
        raise TypeError(
            f"teacher must be TeacherLogits or TeacherTopK, got {type(teacher).__name__}; pass the teacher's "
            "hidden states and head, or its stored classes and log-probabilities"
        )
    is_reverse, factor = direction == "reverse", temperature**2
    if backend == "reference":
        output = _reference(student, side, is_reverse, factor)
    elif isinstance(side, Problem):
        rows = partial(_dense_rows_, student, _TeacherChunks(side, student.compute_dtype), is_reverse, factor)
        output = chunked_linear_cross_entropy(student, compute_rows=rows)
    else:
        rows = partial(_top_k_reverse_rows_ if is_reverse else _top_k_forward_rows_, student, side, factor)
        output = chunked_linear_cross_entropy(student, compute_rows=rows)
    return LinearCrossEntropyOutput(
        output.loss,
        output.token_losses.reshape(targets.shape),
        output.token_z_losses.reshape(targets.shape),
    )


# ---------------------------------------------------------------------------------------------------------
# Checks


def _build(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    token_weights: Tensor | None,
    bias: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    ignore_index: int,
    chunk_size: int | None,
    shard: VocabularyShard | None,
) -> Problem:
    problem = build_problem(
        hidden,
        weight,
        targets,
        token_weights=token_weights,
        bias=bias,
        bias_factors=None,
        softcap=softcap,
        logit_scale=logit_scale,
        label_smoothing=0.0,
        z_loss=0.0,
        ignore_index=ignore_index,
        chunk_size=chunk_size,
        shard=shard,
    )
    # A class that exists, whatever the targets say: they only mark the rows that count.
    marks = torch.where(problem.targets != ignore_index, 0, -100)
    return replace(problem, targets=marks, ignore_index=-100)


def _at_temperature(problem: Problem, temperature: float) -> Problem:
    """See [Note: temperature]."""
    softcap = None if problem.softcap is None else problem.softcap / temperature
    return replace(problem, softcap=softcap, logit_scale=problem.logit_scale / temperature)


def _check_teacher_logits(teacher: TeacherLogits, student: Problem, targets: Tensor) -> Problem:
    if teacher.weight.ndim != 2 or teacher.weight.shape[0] != student.weight.shape[0]:
        here = "" if student.shard is None else " on this rank"
        raise ValueError(
            f"teacher and student must have one vocabulary{here}; the teacher's weight is "
            f"{list(teacher.weight.shape)}, the student's {list(student.weight.shape)}: V of "
            f"{teacher.weight.shape[0]} against {student.weight.shape[0]}; use a teacher with the student's "
            "tokenizer, and cut or pad (bias -inf) the head that has more rows than the tokenizer has tokens"
        )
    expected = [*targets.shape, teacher.weight.shape[1]]
    if list(teacher.hidden.shape) != expected:
        raise ValueError(
            f"the teacher's hidden must have shape {expected}, the student's rows and the width of the "
            f"teacher's weight, got {list(teacher.hidden.shape)}; run both on the same tokens"
        )
    try:
        return _build(
            teacher.hidden.detach(),
            teacher.weight.detach(),
            student.targets.reshape(targets.shape),
            token_weights=None,
            bias=None if teacher.bias is None else teacher.bias.detach(),
            softcap=teacher.softcap,
            logit_scale=teacher.logit_scale,
            ignore_index=student.ignore_index,
            chunk_size=None,
            shard=student.shard,
        )
    except (TypeError, ValueError) as error:
        raise type(error)(f"of the teacher: {error}") from error


def _check_top_k(teacher: TeacherTopK, student: Problem, targets: Tensor) -> TeacherTopK:
    ids, log_probs = teacher.ids, teacher.log_probs
    k = ids.shape[-1] if ids.ndim else 0
    if list(ids.shape) != [*targets.shape, k] or log_probs.shape != ids.shape or k < 1:
        raise ValueError(
            f"the teacher's ids and log_probs must both have shape {[*targets.shape, 'k']} with k >= 1, got "
            f"{list(ids.shape)} and {list(log_probs.shape)}; store as many classes for every row, with "
            "log_probs of -inf where there are fewer"
        )
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"the teacher's ids must be class indices (int32 or int64), got {ids.dtype}")
    if not log_probs.is_floating_point():
        raise TypeError(f"the teacher's log_probs must be floating, got {log_probs.dtype}")
    if ids.device != student.hidden.device or log_probs.device != student.hidden.device:
        raise ValueError(
            f"all tensors must be on one device; hidden is on {student.hidden.device}, the teacher's ids on "
            f"{ids.device} and log_probs on {log_probs.device}; move them there"
        )
    ids = ids.reshape(-1, k).to(torch.int64)
    if ids.device.type == "cpu":
        vocabulary = student.weight.shape[0] if student.shard is None else int(student.shard.size)
        counts = (student.targets != student.ignore_index).unsqueeze(1)
        outside = counts & ((ids < 0) | (ids >= vocabulary))
        if outside.any():
            raise ValueError(
                f"the teacher's ids must lie in [0, {vocabulary}), got {int(ids[outside][0])}; store the top "
                "k of a teacher with the student's tokenizer, and as padding any class with log_probs of -inf"
            )
    return TeacherTopK(ids, log_probs.detach().reshape(-1, k).to(student.compute_dtype))


# ---------------------------------------------------------------------------------------------------------
# Rows of a chunk


class _TeacherChunks:
    """The teacher's logits of one chunk of rows after the other, in one buffer."""

    def __init__(self, teacher: Problem, dtype: torch.dtype) -> None:
        self.hidden, self.bias, self.softcap = teacher.hidden, teacher.bias, teacher.softcap
        self.dtype = dtype
        self.product_dtype = dtype if teacher.hidden.device.type == "cpu" else choose_product_dtype(teacher)
        weight = teacher.weight.to(self.product_dtype)
        self.weight = weight if 1 in weight.stride() else weight.contiguous()  # once, not in every product
        self.scale = teacher.logit_scale / (1.0 if teacher.softcap is None else teacher.softcap)
        self.buffer: Tensor | None = None

    def project(self, chunk: LogitsChunk) -> Tensor:
        """[m, V]: scaled, divided by the softcap if there is one, without bias."""
        num_rows, classes = chunk.logits.shape
        if self.buffer is None:  # the first chunk is the largest
            self.buffer = chunk.logits.new_empty((num_rows, classes), dtype=self.product_dtype)
        out = self.buffer[:num_rows]
        x = chunk.take(self.hidden).to(self.dtype) * self.scale
        torch.mm(x.to(self.product_dtype), self.weight.T, out=out)
        return out.to(self.dtype)

    def add_bias(self, chunk: LogitsChunk) -> Callable[[Tensor, int, int], None] | None:
        """What adds the bias to a block of these logits."""
        bias = self.bias
        if bias is None:
            return None
        values = bias if bias.ndim == 1 else chunk.take(bias)

        def add(z: Tensor, low: int, high: int) -> None:
            z.add_(values if values.ndim == 1 else values[low:high], alpha=self.scale)

        return add


def _finish_(
    z: Tensor, add_bias: Callable[[Tensor, int, int], None] | None, softcap: float | None, part: slice
) -> None:
    """Turn the rows `part` of a chunk, as they come out of the product, into logits."""
    if add_bias is not None:
        add_bias(z, part.start, part.stop)
    if softcap is not None:
        z.tanh_().mul_(softcap)


def _rounds(logits: Tensor, shard: VocabularyShard | None, num_buffers: int = 1) -> list[list[slice]]:
    """Blocks of rows that fit into the cache, grouped by what goes through all passes together.

    Each block alone, while it is in the cache; of a shard all at once, as reductions stand between passes.
    """
    num_rows, classes = logits.shape
    block = block_rows(num_rows, num_buffers * classes, logits.device)
    blocks = [slice(low, min(low + block, num_rows)) for low in range(0, num_rows, block)] if classes else []
    return [[part] for part in blocks] if shard is None else [blocks]


def _dense_rows_(
    student: Problem, teacher: _TeacherChunks, is_reverse: bool, factor: float, chunk: LogitsChunk
) -> RowLosses:
    """Divergences from a teacher with all classes; see [Note: one pass over both].

    Collectives: of a shard, a MAX of 2 and a SUM of 3 numbers for each of `reduced_rows`.
    """
    z_student, z_teacher, shard = chunk.logits, teacher.project(chunk), student.shard
    num_rows = z_student.shape[0]
    add_teacher_bias = teacher.add_bias(chunk)
    may_be_removed = chunk.add_bias is not None or add_teacher_bias is not None  # by a bias of -inf
    maxima = z_student.new_full((2, chunk.reduced_rows, 1), -math.inf)
    student_max, teacher_max = maxima[:, :num_rows].unbind()
    packed = z_student.new_zeros(3, chunk.reduced_rows, 1)
    student_sums, teacher_sums, gaps = packed[:, :num_rows].unbind()

    for parts in _rounds(z_student, shard, num_buffers=2):
        for part in parts:
            s, t = z_student[part], z_teacher[part]
            _finish_(s, chunk.add_bias, student.softcap, part)
            _finish_(t, add_teacher_bias, teacher.softcap, part)
            torch.amax(s, -1, keepdim=True, out=student_max[part])
            torch.amax(t, -1, keepdim=True, out=teacher_max[part])
        if shard is not None:
            shard.reduce_max(maxima)
        for part in parts:
            s, t = z_student[part], z_teacher[part]
            slope = None
            if student.softcap is not None and chunk.needs_gradient:
                slope = 1 - (s / student.softcap).square()
            s.sub_(student_max[part])
            t.sub_(teacher_max[part])
            averaged = s if is_reverse else t
            gap = s - t if is_reverse else t - s
            torch.sum(s.exp_(), -1, keepdim=True, out=student_sums[part])
            torch.sum(t.exp_(), -1, keepdim=True, out=teacher_sums[part])
            gap.mul_(averaged)
            if may_be_removed:
                # What has no probability counts nothing, whatever the other side makes of it: not 0 * inf.
                gap.masked_fill_(averaged == 0, 0)
            torch.sum(gap, -1, keepdim=True, out=gaps[part])
            if is_reverse and chunk.needs_gradient:
                t.copy_(gap)
            if slope is not None:
                s.mul_(slope)
                t.mul_(slope)
        if shard is not None:
            shard.reduce_sum(packed)
        for part in parts if chunk.needs_gradient else ():
            s, t = z_student[part], z_teacher[part]
            if is_reverse:
                torch.addcmul(t, s, gaps[part] / student_sums[part], value=-1, out=s)
            else:
                s.addcmul_(t, student_sums[part] / teacher_sums[part], value=-1)

    sums, others = (student_sums, teacher_sums) if is_reverse else (teacher_sums, student_sums)
    # One logarithm: the difference of two would lose the digits of a small divergence.
    return _row_losses(factor * (gaps / sums + (others / sums).log()), student_sums, factor)


def _top_k_forward_rows_(
    student: Problem, teacher: TeacherTopK, factor: float, chunk: LogitsChunk
) -> RowLosses:
    """Divergences of the full softmax from p over k classes.

    Collectives: of a shard, a MAX of 1 and a SUM of 2 numbers for each of `reduced_rows`.
    """
    z, shard = chunk.logits, student.shard
    num_rows = z.shape[0]
    places, is_here = _find_places(chunk.take(teacher.ids), z, shard)
    log_p = chunk.take(teacher.log_probs).log_softmax(-1)
    p = log_p.exp()
    is_absent = p == 0
    maxima = z.new_full((chunk.reduced_rows, 1), -math.inf)
    row_max = maxima[:num_rows]
    # Sum of exp(z - max), and that of p (z - max).
    packed = z.new_zeros(2, chunk.reduced_rows, 1)
    sums, cross = packed[:, :num_rows].unbind()
    chosen = torch.zeros_like(p)

    for parts in _rounds(z, shard):
        for part in parts:
            _finish_(z[part], chunk.add_bias, student.softcap, part)
            torch.amax(z[part], -1, keepdim=True, out=row_max[part])
        if shard is not None:
            shard.reduce_max(maxima)
        for part in parts:
            slope = None
            if student.softcap is not None and chunk.needs_gradient:
                slope = 1 - (z[part] / student.softcap).square()
            z[part].sub_(row_max[part])
            chosen[part] = torch.where(is_here[part], z[part].gather(-1, places[part]), 0)
            torch.sum(z[part].exp_(), -1, keepdim=True, out=sums[part])
            if slope is not None:
                z[part].mul_(slope)
    torch.sum((p * chosen).masked_fill_(is_absent, 0), -1, keepdim=True, out=cross)
    if shard is not None:
        shard.reduce_sum(packed)

    if chunk.needs_gradient and z.shape[1]:
        pull = p * sums
        if student.softcap is not None:
            pull.mul_(1 - ((chosen + row_max) / student.softcap).square())
        # Padding may name one class several times: added, not put.
        z.scatter_add_(-1, places, torch.where(is_here, -pull, 0))
    negative_entropy = (p * log_p).masked_fill_(is_absent, 0).sum(-1, keepdim=True)
    return _row_losses(factor * (negative_entropy - cross + sums.log()), sums, factor)


def _top_k_reverse_rows_(
    student: Problem, teacher: TeacherTopK, factor: float, chunk: LogitsChunk
) -> RowLosses:
    """Divergences from p of q, both over k classes.

    Collectives: of a shard, a SUM of k numbers for each of `reduced_rows`.
    """
    z, shard = chunk.logits, student.shard
    num_rows = z.shape[0]
    places, is_here = _find_places(chunk.take(teacher.ids), z, shard)
    log_probs = chunk.take(teacher.log_probs)
    packed = z.new_zeros(chunk.reduced_rows, log_probs.shape[1])
    chosen = packed[:num_rows]
    for part in itertools.chain(*_rounds(z, shard)):
        _finish_(z[part], chunk.add_bias, student.softcap, part)
        chosen[part] = torch.where(is_here[part], z[part].gather(-1, places[part]), 0)
    if shard is not None:
        shard.reduce_sum(packed)

    losses, gradient = _reverse_over_k(chosen, log_probs)
    if chunk.needs_gradient and z.shape[1]:
        if student.softcap is not None:
            gradient.mul_(1 - (chosen / student.softcap).square())
        z.zero_().scatter_add_(-1, places, torch.where(is_here, gradient, 0))
    return _row_losses(factor * losses, torch.ones_like(losses), factor)


def _reverse_over_k(logits: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q || p) over k classes, [m, 1], and its gradient in the student's logits, [m, k]."""
    log_q = logits.masked_fill(log_probs == -math.inf, -math.inf).log_softmax(-1)
    q = log_q.exp()
    gaps = (q * (log_q - log_probs.log_softmax(-1))).masked_fill_(q == 0, 0)
    losses = gaps.sum(-1, keepdim=True)
    return losses, gaps - q * losses


def _find_places(ids: Tensor, logits: Tensor, shard: VocabularyShard | None) -> tuple[Tensor, Tensor]:
    """Columns [m, k] of the classes `ids`, and which of them this rank has; the others read column 0."""
    if shard is None:
        return ids, torch.ones_like(ids, dtype=torch.bool)
    if logits.device.type != "cpu":  # where the caller has looked, and `gather` would look without shards
        torch._assert_async(((ids >= 0) & (ids < shard.size)).all())
    places = ids - shard.start
    is_here = (places >= 0) & (places < logits.shape[1])
    return torch.where(is_here, places, 0), is_here


def _row_losses(losses: Tensor, sums: Tensor, factor: float) -> RowLosses:
    """`losses` [m, 1] with T^2; the gradient in the logits buffer, without it, is to be divided by `sums`."""
    return RowLosses(losses.squeeze(1), torch.zeros_like(losses).squeeze(1), (sums / factor).squeeze(1))


# ---------------------------------------------------------------------------------------------------------
# Plain torch


def _reference(
    student: Problem, teacher: Problem | TeacherTopK, is_reverse: bool, factor: float
) -> LinearCrossEntropyOutput:
    """By autograd through full logits; memory grows as several times n x V.

    Host syncs: one, on a device, for the number of rows that count.
    """
    dtype = student.compute_dtype
    counts = student.targets != student.ignore_index
    with torch.autocast(student.hidden.device.type, enabled=False):
        logits = reference_logits(student, counts)
        if isinstance(teacher, Problem):
            log_q = logits.log_softmax(-1)
            log_p = reference_logits(teacher, counts).to(dtype).log_softmax(-1)
        else:
            log_probs = teacher.log_probs[counts]
            chosen = logits.gather(1, teacher.ids[counts])
            if is_reverse:
                log_q = chosen.masked_fill(log_probs == -math.inf, -math.inf).log_softmax(-1)
            else:
                log_q = chosen - logits.logsumexp(-1, keepdim=True)
            log_p = log_probs.log_softmax(-1)
        averaged, other = (log_q, log_p) if is_reverse else (log_p, log_q)
        # Inside as well as outside: the derivative of what is not chosen would be 0 * inf.
        absent = averaged.detach().exp() == 0
        gaps = averaged.masked_fill(absent, 0) - other.masked_fill(absent, 0)
        losses = factor * (averaged.exp() * gaps).sum(-1)
        loss = (student.token_weights[counts] * losses).sum().to(dtype)
    token_losses = student.hidden.new_zeros(student.targets.shape, dtype=dtype)
    token_losses[counts] = losses.detach()
    return LinearCrossEntropyOutput(loss, token_losses, torch.zeros_like(token_losses))
