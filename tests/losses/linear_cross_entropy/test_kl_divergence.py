"""One contract for every backend of `linear_kl_divergence`, against torch's KL divergence on full logits."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from isoloss import (
    LinearCrossEntropyOutput,
    TeacherLogits,
    TeacherTopK,
    linear_cross_entropy,
    linear_kl_divergence,
)
from isoloss.losses.linear_cross_entropy import chunked, row_losses
from isoloss.losses.linear_cross_entropy.chunked import compute_in_chunks
from losses.linear_cross_entropy.test_chunked import PRODUCTS, SYNCHRONISING, Recorder
from losses.linear_cross_entropy.test_contract import assert_close, assert_same_bits
from losses.linear_cross_entropy.test_vocab_parallel import SLICES, LargestTensor, rank_slice
from ranks import on_ranks, run_on_ranks

DIRECTIONS = ("forward", "reverse")
TEACHERS = ("logits", "top_k")
BACKENDS = ("reference", "chunked")
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 2.5},
    "softcap": {"softcap": 2.0},
    "logit_scale": {"logit_scale": 0.3},
    "all": {"temperature": 0.7, "softcap": 3.0, "logit_scale": 1.7},
}
TOLERANCE = 1e-11
VOCABULARY = 13

for_each_backend = pytest.mark.parametrize("backend", BACKENDS)
for_each_direction = pytest.mark.parametrize("direction", DIRECTIONS)
for_each_teacher = pytest.mark.parametrize("kind", TEACHERS)
for_each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
for_each_bias = pytest.mark.parametrize("bias_kind", ["none", "class", "row"])


@dataclass
class Case:
    """Inputs of one call."""

    tensors: dict[str, Tensor]
    """hidden, weight and perhaps bias, leaves."""
    teacher: TeacherLogits | TeacherTopK
    targets: Tensor
    token_weights: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, backend: str, **overrides: Any) -> LinearCrossEntropyOutput:
        return linear_kl_divergence(
            self.tensors["hidden"],
            self.tensors["weight"],
            self.teacher,
            self.targets,
            token_weights=self.token_weights,
            bias=self.tensors.get("bias"),
            backend=backend,
            **{**self.options, **overrides},
        )

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: tensor.grad for name, tensor in self.tensors.items()}

    def copy(self, **changes: Any) -> "Case":
        tensors = {name: t.detach().clone().requires_grad_() for name, t in self.tensors.items()}
        return Case(**{**vars(self), "tensors": tensors, **changes})


def make_case(
    num_rows: int = 19,
    vocabulary: int = VOCABULARY,
    *,
    width: int = 7,
    kind: str = "logits",
    bias_kind: str = "none",
    ignored: float = 0.3,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **options: Any,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    tensors = {"hidden": draw(num_rows, width), "weight": draw(vocabulary, width)}
    if bias_kind == "class":
        tensors["bias"] = draw(vocabulary)
    if bias_kind == "row":
        tensors["bias"] = draw(num_rows, vocabulary)
    tensors = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    teacher: TeacherLogits | TeacherTopK
    teacher_bias = draw(num_rows, vocabulary) if bias_kind == "row" else draw(vocabulary)
    teacher = TeacherLogits(draw(num_rows, 5), draw(vocabulary, 5), teacher_bias, 4.0, 1.3)
    if kind == "top_k":
        k = min(4, vocabulary)
        log_probs, ids = teacher_logits(teacher).log_softmax(-1).topk(k)
        if k > 2:  # two classes of a row that has fewer than k, padded with one that the row names already
            log_probs[::4, -2:], ids[::4, -2:] = -math.inf, ids[::4, :1]
        teacher = TeacherTopK(ids, log_probs.to(dtype))
    targets = torch.randint(vocabulary, (num_rows,), generator=generator)
    targets[torch.rand(num_rows, generator=generator) < ignored] = -100
    weights = torch.rand(num_rows, generator=generator, dtype=torch.float64)
    return Case(tensors, teacher, targets, weights, options)


def teacher_logits(teacher: TeacherLogits, dtype: torch.dtype = torch.float64) -> Tensor:
    logits = teacher.hidden.to(dtype) @ teacher.weight.to(dtype).T
    if teacher.bias is not None:
        logits = logits + teacher.bias.to(dtype)
    logits = teacher.logit_scale * logits
    return logits if teacher.softcap is None else teacher.softcap * torch.tanh(logits / teacher.softcap)


def oracle(case: Case) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, losses of rows and gradients in float64, by `torch.nn.functional.kl_div` on log-probabilities."""
    tensors = {n: t.detach().to(torch.float64).requires_grad_() for n, t in case.tensors.items()}
    defaults = {"softcap": None, "logit_scale": 1.0, "temperature": 1.0, "direction": "forward"}
    options = defaults | case.options
    logits = tensors["hidden"] @ tensors["weight"].T
    if "bias" in tensors:
        logits = logits + tensors["bias"]
    logits = options["logit_scale"] * logits
    if options["softcap"] is not None:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    temperature = options["temperature"]
    rows = []
    for i in range(len(case.targets)):
        log_q = (logits[i] / temperature).log_softmax(-1)
        if isinstance(case.teacher, TeacherLogits):
            log_p = (teacher_logits(case.teacher)[i] / temperature).log_softmax(-1)
        else:
            stored = case.teacher.log_probs[i].double()
            ids, stored = case.teacher.ids[i][stored > -math.inf], stored[stored > -math.inf]
            log_p = (stored / temperature).log_softmax(-1)
            log_q = log_q[ids] if options["direction"] == "forward" else log_q[ids].log_softmax(-1)
        pair = (log_q, log_p) if options["direction"] == "forward" else (log_p, log_q)
        rows.append(temperature**2 * F.kl_div(*pair, reduction="sum", log_target=True))
    losses = torch.stack(rows) if rows else logits.sum(-1)
    losses = torch.where(case.targets != -100, losses, 0)
    weights = torch.ones_like(losses) if case.token_weights is None else case.token_weights
    loss = (weights.to(torch.float64) * losses).sum()
    loss.backward()
    return loss.detach(), losses.detach(), {n: t.grad for n, t in tensors.items() if t.grad is not None}


def assert_matches_oracle(case: Case, output: LinearCrossEntropyOutput, tolerance: float = TOLERANCE) -> None:
    loss, losses, gradients = oracle(case)
    assert_close(output.loss, loss, tolerance)
    assert_close(output.token_losses, losses, tolerance)
    assert not output.token_z_losses.any() and output.token_z_losses.shape == losses.shape
    for name, gradient in case.gradients().items():
        assert_close(gradient, gradients[name], tolerance)


# ---------------------------------------------------------------------------------------------------------
# The mathematics


@for_each_backend
@for_each_direction
@for_each_teacher
@for_each_option
@for_each_bias
def test_loss_and_gradients_match_full_logits(
    backend: str, direction: str, kind: str, options: dict[str, Any], bias_kind: str
) -> None:
    """Row 21: the divergence of each row, which channels sum."""
    case = make_case(kind=kind, bias_kind=bias_kind, direction=direction, **options)
    output = case.run(backend, chunk_size=4)
    output.loss.backward()
    assert_matches_oracle(case, output)


@for_each_backend
@for_each_direction
@for_each_teacher
@for_each_option
def test_gradcheck(backend: str, direction: str, kind: str, options: dict[str, Any]) -> None:
    case = make_case(5, 6, width=3, kind=kind, bias_kind="class", direction=direction, **options)
    names = list(case.tensors)

    def loss(*tensors: Tensor) -> Tensor:
        other = Case(dict(zip(names, tensors, strict=True)), case.teacher, case.targets, case.token_weights)
        return other.run(backend, chunk_size=2, direction=direction, **options).loss

    assert torch.autograd.gradcheck(loss, tuple(case.tensors.values()))


@for_each_backend
@for_each_direction
@for_each_teacher
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes(backend: str, direction: str, kind: str, dtype: torch.dtype) -> None:
    """Losses in float32 (float64), gradients rounded once to the dtype of their input."""
    case = make_case(40, 30, kind=kind, bias_kind="class", dtype=dtype, direction=direction)
    output = case.run(backend, chunk_size=7)
    output.loss.backward()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert output.loss.dtype == output.token_losses.dtype == output.token_z_losses.dtype == wide
    loss, losses, gradients = oracle(case)
    tolerance = 1e-12 if dtype == torch.float64 else 5e-6
    assert_close(output.loss, loss, tolerance)
    assert_close(output.token_losses, losses, tolerance)
    for name, gradient in case.gradients().items():
        assert gradient is not None and gradient.dtype == dtype
        assert_close(gradient, gradients[name], max(tolerance, torch.finfo(dtype).eps))


@for_each_backend
@for_each_teacher
def test_a_teacher_of_another_dtype(backend: str, kind: str) -> None:
    """A bfloat16 teacher of a float32 student is used as it is; the result has the student's precision."""
    case = make_case(kind=kind, dtype=torch.bfloat16)
    case.tensors = {n: t.detach().float().requires_grad_() for n, t in case.tensors.items()}
    output = case.run(backend)
    output.loss.backward()
    assert output.loss.dtype == torch.float32
    assert_matches_oracle(case, output, 5e-6)


@for_each_backend
@for_each_direction
@for_each_teacher
@pytest.mark.parametrize("trained", [(), ("hidden",), ("weight",), ("bias",), ("hidden", "bias")])
def test_any_part_may_be_frozen(backend: str, direction: str, kind: str, trained: tuple[str, ...]) -> None:
    case = make_case(kind=kind, bias_kind="class", softcap=2.0, direction=direction)
    _, _, gradients = oracle(case)
    for name, tensor in case.tensors.items():
        tensor.requires_grad_(name in trained)
    output = case.run(backend, chunk_size=5)
    assert output.loss.requires_grad == bool(trained)
    assert not output.token_losses.requires_grad
    if trained:
        output.loss.backward()
    for name, gradient in case.gradients().items():
        if name in trained:
            assert_close(gradient, gradients[name], TOLERANCE)
        else:
            assert gradient is None


@for_each_direction
@for_each_teacher
@pytest.mark.parametrize("chunk_size", [1, 2, 5, 19, 100, None])
def test_chunk_size_does_not_matter(direction: str, kind: str, chunk_size: int | None) -> None:
    case = make_case(kind=kind, softcap=3.0, direction=direction)
    output = case.run("chunked", chunk_size=chunk_size)
    output.loss.backward()
    assert_matches_oracle(case, output)


@for_each_direction
@for_each_teacher
@pytest.mark.parametrize("logits_per_block", [1, 40, 10**6])
def test_cache_blocks_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, direction: str, kind: str, logits_per_block: int
) -> None:
    case = make_case(
        60, kind=kind, bias_kind="row", dtype=torch.float32, direction=direction, **OPTIONS["all"]
    )
    other = case.copy()
    expected = case.run("chunked", chunk_size=11)
    expected.loss.backward()
    monkeypatch.setattr(row_losses, "_BLOCK_LOGITS_PER_THREAD", logits_per_block)
    output = other.run("chunked", chunk_size=11)
    output.loss.backward()
    assert_same_bits(output.token_losses, expected.token_losses)
    for name, gradient in other.gradients().items():
        assert_same_bits(gradient, case.gradients()[name])


@for_each_backend
@for_each_direction
def test_the_teacher_itself_costs_nothing(backend: str, direction: str) -> None:
    """A student with its teacher's logits: exactly 0, and no gradient beyond rounding."""
    case = make_case(dtype=torch.float32, direction=direction, temperature=2.0)
    hidden, weight = (case.tensors[name].detach().clone() for name in ("hidden", "weight"))
    case.teacher = TeacherLogits(hidden, weight)
    output = case.run(backend, chunk_size=4)
    output.loss.backward()
    assert output.token_losses.abs().max() <= (0 if backend == "chunked" else 1e-6)
    assert case.tensors["hidden"].grad is not None and case.tensors["hidden"].grad.abs().max() <= 1e-6


@for_each_direction
@pytest.mark.parametrize("vocabulary", [100, 20000])
def test_a_small_divergence_keeps_digits(direction: str, vocabulary: int) -> None:
    """Of logits that differ by 1e-2 around a size of 10, in float32 within 4e-7 of float64."""
    case = make_case(6, vocabulary, width=16, dtype=torch.float32, ignored=0.0, direction=direction)
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (case.tensors[name].detach() for name in ("hidden", "weight"))
    case.teacher = TeacherLogits(hidden, weight + 2e-3 * torch.randn(weight.shape, generator=generator))
    losses = case.run("chunked").token_losses
    expected = oracle(case)[1]
    assert 1e-6 < expected.min() and expected.max() < 1e-3
    assert (losses - expected).abs().max() <= 4e-7


@for_each_backend
def test_forward_from_all_classes_is_the_cross_entropy_less_the_teachers_entropy(backend: str) -> None:
    """With a teacher that gives all to the target, the cross entropy itself, gradients included."""
    case = make_case(bias_kind="class", softcap=3.0)
    ids = case.targets.clamp(min=0).unsqueeze(1)
    case.teacher = TeacherTopK(ids, torch.zeros(19, 1))
    output = case.run(backend, chunk_size=4)
    output.loss.backward()
    other = case.copy()
    expected = linear_cross_entropy(
        other.tensors["hidden"],
        other.tensors["weight"],
        other.targets,
        token_weights=other.token_weights,
        bias=other.tensors["bias"],
        softcap=3.0,
    )
    expected.loss.backward()
    assert_close(output.token_losses, expected.token_losses)
    for name, gradient in case.gradients().items():
        reference = other.gradients()[name]
        assert reference is not None
        assert_close(gradient, reference)


@for_each_backend
@for_each_direction
def test_a_top_k_of_all_classes_is_the_teacher(backend: str, direction: str) -> None:
    case = make_case(direction=direction, temperature=1.5)
    assert isinstance(case.teacher, TeacherLogits)
    log_probs, ids = teacher_logits(case.teacher).log_softmax(-1).topk(VOCABULARY)
    other = case.copy(teacher=TeacherTopK(ids.int(), log_probs + 5.0))  # a constant per row is no difference
    outputs = [c.run(backend, chunk_size=4) for c in (case, other)]
    for output in outputs:
        output.loss.backward()
    assert_close(outputs[1].token_losses, outputs[0].token_losses, TOLERANCE)
    for name, gradient in other.gradients().items():
        reference = case.gradients()[name]
        assert reference is not None
        assert_close(gradient, reference, TOLERANCE)


def test_the_mass_outside_the_top_k() -> None:
    """Forward, a student pays for what it gives to other classes; in reverse that is free."""
    teacher = TeacherTopK(torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]]).log())
    for outside, forward in ((0.0, 0.0), (0.5, math.log(2)), (0.9, math.log(10))):
        student = torch.tensor([[(1 - outside) / 2, (1 - outside) / 2, outside]], dtype=torch.float64).log()
        arguments = (student, torch.eye(3, dtype=torch.float64), teacher, torch.tensor([0]))
        bias = torch.tensor([0.0, 0.0, 0.0 if outside else -math.inf], dtype=torch.float64)
        if not outside:
            arguments = (student.clamp(min=-1e3), *arguments[1:])
        losses = [linear_kl_divergence(*arguments, bias=bias, direction=d).loss for d in DIRECTIONS]
        assert [float(loss) for loss in losses] == pytest.approx([forward, 0.0], abs=1e-12)


@for_each_backend
@pytest.mark.parametrize(
    "kind, direction", [("logits", "forward"), ("logits", "reverse"), ("top_k", "reverse")]
)
def test_gradients_keep_their_size_at_high_temperatures(backend: str, kind: str, direction: str) -> None:
    """The factor T^2 is in: between T = 30 and T = 300 gradients hardly change; without it, by 100.

    Not of a top k in forward, where both sides tend to be uniform over other sets of classes.
    """
    norms = []
    for temperature in (30.0, 300.0):
        case = make_case(kind=kind, direction=direction, temperature=temperature)
        case.run(backend).loss.backward()
        gradient = case.tensors["weight"].grad
        assert gradient is not None
        norms.append(float(gradient.norm()))
    assert norms[1] == pytest.approx(norms[0], rel=0.1)


# ---------------------------------------------------------------------------------------------------------
# Rows that are left out


@for_each_backend
@for_each_direction
@for_each_teacher
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a33_ignored_rows_reach_nothing(backend: str, direction: str, kind: str, poison: float) -> None:
    """Whatever an ignored row of either side holds, classes outside the vocabulary included."""
    clean = make_case(kind=kind, bias_kind="row", direction=direction)
    ignored = clean.targets == -100
    assert clean.token_weights is not None
    poisoned = clean.copy(token_weights=clean.token_weights.masked_fill(ignored, poison))
    mask = ignored.unsqueeze(1)
    if isinstance(clean.teacher, TeacherLogits):
        assert clean.teacher.bias is not None
        poisoned.teacher = TeacherLogits(
            clean.teacher.hidden.masked_fill(mask, poison),
            clean.teacher.weight,
            clean.teacher.bias.masked_fill(mask, poison),
            clean.teacher.softcap,
            clean.teacher.logit_scale,
        )
    else:
        poisoned.teacher = TeacherTopK(
            clean.teacher.ids.masked_fill(mask, 10**6), clean.teacher.log_probs.masked_fill(mask, poison)
        )
    with torch.no_grad():
        for name in ("hidden", "bias"):
            poisoned.tensors[name][ignored] = poison
    outputs = [case.run(backend, chunk_size=4) for case in (clean, poisoned)]
    for output in outputs:
        output.loss.backward()
    assert_same_bits(outputs[1].loss, outputs[0].loss)
    assert_same_bits(outputs[1].token_losses, outputs[0].token_losses)
    assert (outputs[1].token_losses[ignored] == 0).all()
    for name, gradient in poisoned.gradients().items():
        assert_same_bits(gradient, clean.gradients()[name])
        if gradient is not None and gradient.shape[0] == len(ignored):
            assert (gradient[ignored] == 0).all()


@for_each_backend
@for_each_direction
@for_each_teacher
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a33_nan_in_a_row_that_counts_shows(backend: str, direction: str, kind: str, side: str) -> None:
    case = make_case(kind=kind, ignored=0.0, direction=direction)
    if side == "student":
        broken = case.tensors["hidden"]
    else:
        broken = case.teacher.hidden if isinstance(case.teacher, TeacherLogits) else case.teacher.log_probs
    with torch.no_grad():
        broken[3] = math.nan
    output = case.run(backend, chunk_size=4)
    assert output.loss.isnan()
    assert output.token_losses.isnan().nonzero().tolist() == [[3]]


@for_each_backend
@for_each_direction
@for_each_teacher
@pytest.mark.parametrize("num_rows", [0, 1, 6])
def test_a30_no_row_counts(backend: str, direction: str, kind: str, num_rows: int) -> None:
    case = make_case(num_rows, kind=kind, bias_kind="class", ignored=1.1, direction=direction)
    output = case.run(backend)
    assert output.loss.requires_grad and output.loss == 0
    assert output.token_losses.shape == (num_rows,) and not output.token_losses.any()
    (output.loss * 3).backward()
    for name, gradient in case.gradients().items():
        assert gradient is not None and gradient.shape == case.tensors[name].shape
        assert not gradient.any()


@for_each_backend
@for_each_direction
@for_each_teacher
@pytest.mark.parametrize("valid", [[0], [18], [4, 5, 6]])
def test_one_and_few_rows(backend: str, direction: str, kind: str, valid: list[int]) -> None:
    case = make_case(kind=kind, ignored=0.0, direction=direction)
    case.targets = torch.full_like(case.targets, -100).index_fill(0, torch.tensor(valid), 0)
    output = case.run(backend, chunk_size=2)
    output.loss.backward()
    assert_matches_oracle(case, output)


@for_each_backend
def test_targets_say_only_which_rows_count(backend: str) -> None:
    """Any integer but `ignore_index`, which may be a class, 0 included."""
    case = make_case(ignored=0.0)
    expected = case.run(backend)
    assert_same_bits(case.copy(targets=torch.arange(19).int() + 10**6).run(backend).loss, expected.loss)
    marked = case.copy(targets=torch.arange(19) % 3)
    other = case.copy(targets=torch.where(torch.arange(19) % 3 == 0, -100, 5))
    assert_same_bits(marked.run(backend, ignore_index=0).loss, other.run(backend).loss)


# ---------------------------------------------------------------------------------------------------------
# Properties


@st.composite
def small_cases(draw: Callable[..., Any]) -> Case:
    case = make_case(
        draw(st.integers(0, 12)),
        draw(st.integers(1, 9)),
        width=draw(st.integers(1, 5)),
        kind=draw(st.sampled_from(TEACHERS)),
        bias_kind=draw(st.sampled_from(["none", "class", "row"])),
        ignored=draw(st.sampled_from([0.0, 0.5, 1.1])),
        seed=draw(st.integers(0, 10**6)),
        direction=draw(st.sampled_from(DIRECTIONS)),
        **draw(st.sampled_from(list(OPTIONS.values()))),
    )
    case.options["chunk_size"] = draw(st.sampled_from([None, 1, 2, 5, 100]))
    return case


def per_row(case: Case, index: Tensor) -> Case:
    """The same case with rows chosen by `index`."""
    tensors = {n: (t[index] if is_per_row(n, t) else t).detach().clone() for n, t in case.tensors.items()}
    if isinstance(case.teacher, TeacherTopK):
        teacher = TeacherTopK(case.teacher.ids[index], case.teacher.log_probs[index])
    else:
        bias = case.teacher.bias
        bias = bias[index] if bias is not None and bias.ndim == 2 else bias
        teacher = TeacherLogits(case.teacher.hidden[index], case.teacher.weight, bias, 4.0, 1.3)
    assert case.token_weights is not None
    tensors = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    return Case(tensors, teacher, case.targets[index], case.token_weights[index], case.options)


def is_per_row(name: str, tensor: Tensor) -> bool:
    return name == "hidden" or (name == "bias" and tensor.ndim == 2)


def backward(case: Case, backend: str) -> LinearCrossEntropyOutput:
    output = case.run(backend)
    output.loss.backward()
    return output


def assert_near(actual: Tensor | None, expected: Tensor | None) -> None:
    """To 1e-11 of what is summed, which is of the size of 1: divergences of one class cancel to rounding."""
    assert actual is not None and expected is not None and actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


@for_each_backend
@settings(max_examples=25)
@given(case=small_cases(), seed=st.integers(0, 1000))
def test_row_order_does_not_matter(backend: str, case: Case, seed: int) -> None:
    order = torch.randperm(len(case.targets), generator=torch.Generator().manual_seed(seed))
    shuffled = per_row(case, order)
    expected, output = backward(case, backend), backward(shuffled, backend)
    assert_near(output.loss, expected.loss)
    assert_near(output.token_losses, expected.token_losses[order])
    for name, gradient in shuffled.gradients().items():
        reference = case.gradients()[name]
        assert reference is not None
        assert_near(gradient, reference[order] if is_per_row(name, reference) else reference)


@for_each_backend
@settings(max_examples=25)
@given(case=small_cases(), data=st.data())
def test_splitting_the_rows_does_not_matter(backend: str, case: Case, data: st.DataObject) -> None:
    num_rows = len(case.targets)
    cut = data.draw(st.integers(0, num_rows))
    parts = [per_row(case, torch.arange(cut)), per_row(case, torch.arange(cut, num_rows))]
    expected = backward(case, backend)
    outputs = [backward(part, backend) for part in parts]
    assert_near(outputs[0].loss + outputs[1].loss, expected.loss)
    assert_near(torch.cat([output.token_losses for output in outputs]), expected.token_losses)
    for name, reference in case.gradients().items():
        first, second = (part.gradients()[name] for part in parts)
        assert reference is not None and first is not None and second is not None
        joined = torch.cat([first, second]) if is_per_row(name, reference) else first + second
        assert_near(joined, reference)


@for_each_backend
@settings(max_examples=25)
@given(case=small_cases())
def test_ignored_rows_do_not_matter(backend: str, case: Case) -> None:
    kept = (case.targets != -100).nonzero().squeeze(1)
    without = per_row(case, kept)
    expected, output = backward(without, backend), backward(case, backend)
    assert_near(output.loss, expected.loss)
    assert_near(output.token_losses[kept], expected.token_losses)
    for name, gradient in case.gradients().items():
        assert gradient is not None
        assert_near(gradient[kept] if is_per_row(name, gradient) else gradient, without.gradients()[name])


@given(case=small_cases())
def test_backends_agree_and_divergences_are_not_negative(case: Case) -> None:
    other = case.copy()
    output, expected = backward(case, "chunked"), backward(other, "reference")
    assert_near(output.loss, expected.loss)
    assert_near(output.token_losses, expected.token_losses)
    assert (output.token_losses >= -1e-14).all()
    for name, gradient in case.gradients().items():
        assert_near(gradient, other.gradients()[name])


# ---------------------------------------------------------------------------------------------------------
# The graph around it


@for_each_backend
@for_each_teacher
@pytest.mark.parametrize("upstream", [0.0, 1.0, 2.0, -0.5])
def test_incoming_gradient_and_a_kept_graph(backend: str, kind: str, upstream: float) -> None:
    case = make_case(kind=kind, bias_kind="class")
    loss = case.run(backend).loss * upstream
    loss.backward(retain_graph=True)
    loss.backward()
    _, _, gradients = oracle(case)
    for name, gradient in case.gradients().items():
        assert_close(gradient, 2 * upstream * gradients[name], TOLERANCE)


@for_each_backend
@for_each_direction
@for_each_teacher
@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant", "offload"])
def test_bits_do_not_depend_on_recomputation_or_offloading(
    backend: str, direction: str, kind: str, mode: str
) -> None:
    plain = make_case(kind=kind, dtype=torch.float32, direction=direction)
    other = plain.copy()
    plain.run(backend, chunk_size=4).loss.backward()

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        tensors = {"hidden": hidden, "weight": weight}
        return (
            Case(tensors, other.teacher, other.targets, other.token_weights, other.options)
            .run(backend, chunk_size=4)
            .loss
        )

    arguments = (other.tensors["hidden"], other.tensors["weight"])
    if mode == "offload":
        with torch.autograd.graph.save_on_cpu():
            value = loss(*arguments)
    else:
        value = checkpoint(loss, *arguments, use_reentrant=mode == "reentrant")
    value.backward()
    for name, gradient in other.gradients().items():
        assert_same_bits(gradient, plain.gradients()[name])


@for_each_backend
@for_each_direction
@for_each_teacher
def test_the_same_bits_without_gradients_and_under_autocast(backend: str, direction: str, kind: str) -> None:
    case = make_case(kind=kind, dtype=torch.float32, direction=direction, softcap=2.0)
    other = case.copy()
    expected = case.run(backend, chunk_size=4)
    expected.loss.backward()
    with torch.no_grad():
        assert_same_bits(case.run(backend, chunk_size=4).token_losses, expected.token_losses)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = other.run(backend, chunk_size=4)
    output.loss.backward()
    assert_same_bits(output.loss, expected.loss)
    for name, gradient in other.gradients().items():
        assert_same_bits(gradient, case.gradients()[name])


@for_each_backend
def test_the_teacher_is_constant(backend: str) -> None:
    """No gradient reaches it, also where its tensors ask for one."""
    case = make_case()
    assert isinstance(case.teacher, TeacherLogits)
    case.teacher.hidden.requires_grad_()
    case.teacher.weight.requires_grad_()
    output = case.run(backend)
    output.loss.backward()
    assert case.teacher.hidden.grad is None and case.teacher.weight.grad is None
    case.tensors = {name: tensor.detach() for name, tensor in case.tensors.items()}
    assert not case.run(backend).loss.requires_grad


# Where the graph is left, tracing looks at `.grad` of whatever comes in next.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@for_each_teacher
def test_compiled_gives_the_same_bits(kind: str) -> None:
    case = make_case(kind=kind, dtype=torch.float32)
    other = case.copy()
    expected = case.run("auto", chunk_size=4)
    expected.loss.backward()
    output = torch.compile(lambda: other.run("auto", chunk_size=4), backend="eager")()
    output.loss.backward()
    assert_same_bits(output.loss, expected.loss)
    for name, gradient in other.gradients().items():
        assert_same_bits(gradient, case.gradients()[name])


# ---------------------------------------------------------------------------------------------------------
# Forms of the inputs and numbers


@for_each_backend
@for_each_teacher
def test_memory_layouts_and_leading_dimensions(backend: str, kind: str) -> None:
    flat = make_case(12, kind=kind, ignored=0.2)
    expected = flat.run(backend)
    expected.loss.backward()
    deep = flat.copy()
    hidden = deep.tensors["hidden"].view(3, 4, 7).transpose(0, 1).contiguous().transpose(0, 1)
    weight = torch.stack([deep.tensors["weight"], deep.tensors["weight"] + 1], -1)[..., 0]
    if isinstance(flat.teacher, TeacherLogits):
        teacher: Any = TeacherLogits(
            flat.teacher.hidden.view(3, 4, 5).transpose(0, 1).contiguous().transpose(0, 1),
            flat.teacher.weight.T.contiguous().T,
            flat.teacher.bias,
            4.0,
            1.3,
        )
    else:
        teacher = TeacherTopK(flat.teacher.ids.view(3, 4, 4), flat.teacher.log_probs.view(3, 4, 4))
    assert flat.token_weights is not None
    output = linear_kl_divergence(
        hidden,
        weight,
        teacher,
        flat.targets.view(3, 4),
        token_weights=flat.token_weights.view(3, 4),
        backend=backend,
    )
    output.loss.backward()
    assert output.token_losses.shape == output.token_z_losses.shape == (3, 4)
    assert_close(output.loss, expected.loss)
    for name, gradient in deep.gradients().items():
        reference = flat.gradients()[name]
        assert reference is not None
        assert_close(gradient, reference)


@for_each_backend
@for_each_direction
def test_large_logits(backend: str, direction: str) -> None:
    """Logits of 1e4 on either side: a large divergence, not an infinite one."""
    hidden = torch.tensor([[1e4], [1e4], [0.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], requires_grad=True)
    teacher = TeacherLogits(torch.tensor([[1e4], [0.0], [1e4]]), torch.tensor([[0.0], [1.0]]))
    output = linear_kl_divergence(
        hidden, weight, teacher, torch.tensor([0, 0, 0]), direction=direction, backend=backend
    )
    output.loss.backward()
    half = 0.5e4 - math.log(2)
    expected = [1e4, half, -math.log(0.5)] if direction == "forward" else [1e4, -math.log(0.5), half]
    assert_close(output.token_losses, torch.tensor(expected), 1e-5)
    assert hidden.grad is not None and hidden.grad.isfinite().all()


@for_each_backend
@for_each_direction
@for_each_teacher
def test_classes_that_are_removed(backend: str, direction: str, kind: str) -> None:
    """Removed from both sides, a class is as if it were not there."""
    case = make_case(kind="logits", bias_kind="class", direction=direction)
    assert isinstance(case.teacher, TeacherLogits) and case.teacher.bias is not None
    keep = torch.tensor([v for v in range(VOCABULARY) if v != 3])
    teacher = TeacherLogits(
        case.teacher.hidden, case.teacher.weight[keep], case.teacher.bias[keep], case.teacher.softcap
    )
    with torch.no_grad():
        case.tensors["bias"][3] = -math.inf
        case.teacher.bias[3] = -math.inf
    removed = TeacherLogits(case.teacher.hidden, case.teacher.weight, case.teacher.bias)
    kept = TeacherLogits(teacher.hidden, teacher.weight, teacher.bias)
    case.teacher = removed
    small = case.copy(teacher=kept)
    small.tensors = {
        n: (t if n == "hidden" else t.detach()[keep].requires_grad_()) for n, t in small.tensors.items()
    }
    if kind == "top_k":
        log_probs, ids = teacher_logits(kept).log_softmax(-1).topk(4)
        small.teacher, case.teacher = TeacherTopK(ids, log_probs), TeacherTopK(keep[ids], log_probs)
    expected, output = backward(small, backend), case.run(backend, chunk_size=4)
    output.loss.backward()
    assert_close(output.token_losses, expected.token_losses, TOLERANCE)
    for name, gradient in case.gradients().items():
        reference = small.gradients()[name]
        assert gradient is not None and reference is not None and gradient.isfinite().all()
        assert_close(gradient if name == "hidden" else gradient[keep], reference, TOLERANCE)


@for_each_backend
def test_a_class_removed_from_one_side_alone(backend: str) -> None:
    """Finite in the direction that does not average over it, infinite in the other, as the formula says."""
    gone = torch.tensor([0.0, 0.0, -math.inf])
    hidden, weight = torch.ones(1, 2), torch.zeros(3, 2)
    for student, teacher, forward, reverse in (
        (None, gone, math.log(1.5), math.inf),
        (gone, None, math.inf, math.log(1.5)),
    ):
        side = TeacherLogits(hidden, weight, teacher)
        losses = [
            linear_kl_divergence(
                hidden, weight, side, torch.tensor([0]), bias=student, direction=d, backend=backend
            ).token_losses
            for d in DIRECTIONS
        ]
        assert [float(loss) for loss in losses] == pytest.approx([forward, reverse])


# ---------------------------------------------------------------------------------------------------------
# Cases


@for_each_backend
def test_a70_each_row_has_its_own_weight_in_the_weight_gradient(backend: str) -> None:
    weight = torch.zeros(2, 1, requires_grad=True)
    teacher = TeacherTopK(torch.tensor([[0], [1], [0]]), torch.zeros(3, 1))
    arguments = (torch.ones(3, 1), weight, teacher, torch.zeros(3, dtype=torch.int64))
    output = linear_kl_divergence(*arguments, token_weights=torch.tensor([0.0, 1.0, 2.0]), backend=backend)
    output.loss.backward()
    assert weight.grad is not None and weight.grad.flatten().tolist() == pytest.approx([-0.5, 0.5])
    with torch.no_grad():
        evaluated = linear_kl_divergence(*arguments, backend=backend)
    assert evaluated.token_losses.tolist() == pytest.approx([math.log(2)] * 3)


@for_each_backend
@pytest.mark.parametrize("frozen_base", [False, True])
def test_a71_an_adapter_on_the_head_counts_and_trains(backend: str, frozen_base: bool) -> None:
    base = torch.zeros(2, 1, requires_grad=not frozen_base)
    up = torch.tensor([[math.log(3)], [0.0]], requires_grad=True)
    down = torch.ones(1, 1, requires_grad=True)
    teacher = TeacherTopK(torch.tensor([[0]]), torch.zeros(1, 1))
    output = linear_kl_divergence(
        torch.ones(1, 1), base + up @ down, teacher, torch.tensor([0]), backend=backend
    )
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(0.287682, abs=1e-6)
    for trained in (up, down):
        assert trained.grad is not None and trained.grad.abs().max() > 0.1
    assert (base.grad is None) == frozen_base


@for_each_backend
@pytest.mark.parametrize(
    "options, expected", [({"logit_scale": 0.5}, 0.126928), ({"softcap": 2.0}, 0.135781)]
)
def test_a72_scale_and_cap(backend: str, options: dict[str, float], expected: float) -> None:
    """Of the student, and of the teacher."""
    hidden, eye, targets = torch.tensor([[4.0, 0.0]]), torch.eye(2), torch.tensor([0])
    top = TeacherTopK(torch.tensor([[0]]), torch.zeros(1, 1))
    output = linear_kl_divergence(hidden, eye, top, targets, backend=backend, **options)
    assert float(output.loss) == pytest.approx(expected, abs=1e-6)
    teacher = TeacherLogits(hidden, eye, **options)
    student = torch.tensor([[-math.inf, 0.0]]).clamp(min=-200.0)
    output = linear_kl_divergence(student, eye, teacher, targets, backend=backend)
    p = math.exp(-expected)
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert float(output.loss) == pytest.approx(200 * p - entropy, rel=1e-5)


@for_each_backend
@pytest.mark.parametrize("chunk_size", [1, 64])
def test_a75_a_bfloat16_model_sums_in_float32(backend: str, chunk_size: int) -> None:
    hidden = torch.full((512, 1), 1.0, dtype=torch.bfloat16)
    weight = torch.tensor([[0.0], [0.540625]], dtype=torch.bfloat16, requires_grad=True)
    teacher = TeacherTopK(torch.zeros(512, 1, dtype=torch.int64), torch.zeros(512, 1, dtype=torch.bfloat16))
    targets = torch.zeros(512, dtype=torch.int64)
    output = linear_kl_divergence(hidden, weight, teacher, targets, chunk_size=chunk_size, backend=backend)
    output.loss.backward()
    cost = float(output.token_losses[0])
    assert float(output.loss.detach()) == pytest.approx(512 * cost, rel=1e-6)
    assert weight.grad is not None
    assert float(weight.grad[1]) == pytest.approx(512 * (1 - math.exp(-cost)), rel=4e-3)


# ---------------------------------------------------------------------------------------------------------
# Work and memory


@for_each_direction
@pytest.mark.parametrize("kind, products", [("logits", 4), ("top_k", 3)])
def test_one_more_product_for_a_teacher_that_runs_beside(direction: str, kind: str, products: int) -> None:
    case = make_case(12, kind=kind, ignored=0.0, direction=direction)
    with Recorder() as record:
        case.run("chunked", chunk_size=4).loss.backward()
    assert record.count(*PRODUCTS) == 3 * products


@for_each_direction
@for_each_teacher
def test_never_more_logits_than_a_chunk(direction: str, kind: str) -> None:
    """Neither the student's nor the teacher's, however many rows there are."""
    case = make_case(200, 1000, width=4, kind=kind, ignored=0.2, direction=direction, **OPTIONS["all"])
    with LargestTensor() as watched:
        case.run("chunked", chunk_size=10).loss.backward()
    assert watched.largest == 10 * 1000 * 8
    with LargestTensor() as watched:
        case.run("reference").loss.backward()
    assert watched.largest > 100 * 1000 * 8, "the watch sees whole logits where there are some"


@for_each_direction
@for_each_teacher
def test_the_host_never_waits_on_a_device(monkeypatch: pytest.MonkeyPatch, direction: str, kind: str) -> None:
    """There all rows keep their place; the checks of the top k belong to the CPU."""
    case = make_case(kind=kind, bias_kind="row", direction=direction, **OPTIONS["all"])

    def as_on_a_device(*args: Any, compact: bool, **kwargs: Any) -> Any:
        with Recorder() as record:
            result = compute_in_chunks(*args, compact=False, **kwargs)
        assert record.count(*PRODUCTS) > 0
        # The check of the targets looks for CPU tensors, and is one look at one number.
        assert record.count(*(name for name in SYNCHRONISING if name != "_local_scalar_dense")) <= 1
        assert record.count("_local_scalar_dense") <= 1
        return result

    monkeypatch.setattr(chunked, "compute_in_chunks", as_on_a_device)
    output = case.run("chunked", chunk_size=4)
    output.loss.backward()
    assert_matches_oracle(case, output)


@for_each_direction
@for_each_teacher
def test_bfloat16_products(monkeypatch: pytest.MonkeyPatch, direction: str, kind: str) -> None:
    """As on a device: operands in bfloat16, statistics in float32."""
    case = make_case(40, 30, kind=kind, dtype=torch.bfloat16, direction=direction)

    def as_on_a_device(*args: Any, compact: bool, product_dtype: torch.dtype, **kwargs: Any) -> Any:
        return compute_in_chunks(*args, compact=False, product_dtype=torch.bfloat16, **kwargs)

    monkeypatch.setattr(chunked, "compute_in_chunks", as_on_a_device)
    output = case.run("chunked", chunk_size=7)
    output.loss.backward()
    assert output.loss.dtype == torch.float32
    assert_matches_oracle(case, output, 4e-2)


# ---------------------------------------------------------------------------------------------------------
# A vocabulary that is spread over ranks


def local_case(case: Case, sizes: Sequence[int]) -> Case:
    """This rank's part of a case."""
    mine = rank_slice(sizes)
    tensors = {n: part_of(n, t.detach(), mine).clone().requires_grad_() for n, t in case.tensors.items()}
    teacher = case.teacher
    if isinstance(teacher, TeacherLogits):
        bias = None if teacher.bias is None else teacher.bias[..., mine]
        teacher = TeacherLogits(
            teacher.hidden, teacher.weight[mine], bias, teacher.softcap, teacher.logit_scale
        )
    return Case(tensors, teacher, case.targets, case.token_weights, case.options)


def part_of(name: str, tensor: Tensor, mine: slice) -> Tensor:
    return {"hidden": tensor, "weight": tensor[mine], "bias": tensor[..., mine]}[name]


@pytest.mark.parametrize("ranks", [2, 3])
def test_slices_of_the_vocabulary_match_full_logits(ranks: int) -> None:
    """Losses and the gradient of hidden are whole on every rank, to the same bits."""

    def body() -> None:
        chosen = list(OPTIONS.values()) if ranks == 2 else [OPTIONS["plain"], OPTIONS["all"]]
        choices = itertools.product(chosen, ("none", "class", "row"), DIRECTIONS, TEACHERS)
        for number, (options, bias_kind, direction, kind) in enumerate(choices):
            case = make_case(bias_kind=bias_kind, kind=kind, direction=direction, **options)
            sizes = SLICES[ranks][number // 2 % len(SLICES[ranks])]
            local = local_case(case, sizes)
            output = local.run("auto", vocab_group=dist.group.WORLD, chunk_size=(None, 5, 1)[number % 3])
            output.loss.backward()
            loss, losses, gradients = oracle(case)
            assert_close(output.loss, loss, TOLERANCE)
            assert_close(output.token_losses, losses, TOLERANCE)
            for name, gradient in local.gradients().items():
                assert_close(gradient, part_of(name, gradients[name], rank_slice(sizes)), TOLERANCE)
            for values in (output.token_losses, local.tensors["hidden"].grad):
                assert values is not None
                copies = [torch.empty_like(values) for _ in range(ranks)]
                dist.all_gather(copies, values.contiguous())
                for copy in copies:
                    assert_same_bits(copy, values)

    run_on_ranks(ranks, body)


@on_ranks(2)
def test_as_many_collectives_whatever_the_targets() -> None:
    for ignored, kind, direction in itertools.product((0.0, 0.6, 1.1), TEACHERS, DIRECTIONS):
        local = local_case(make_case(20, ignored=ignored, kind=kind, direction=direction), [7, 6])
        with CommDebugMode() as communication:
            local.run("auto", vocab_group=dist.group.WORLD, chunk_size=8).loss.backward()
        per_chunk = 1 if (kind, direction) == ("top_k", "reverse") else 2
        assert communication.get_total_counts() == 1 + 3 * per_chunk + 1


# ---------------------------------------------------------------------------------------------------------
# Errors, and that the checks can fail


TEACHER = TeacherLogits(torch.ones(4, 3), torch.ones(5, 3))
TOP = TeacherTopK(torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2))


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"backend": "tritn"}, ValueError, "auto, reference, chunked.*'tritn'"),
        ({"direction": "backward"}, ValueError, "forward, reverse, got 'backward'"),
        ({"temperature": 0.0}, ValueError, "temperature.*got 0.0"),
        ({"temperature": math.inf}, ValueError, "temperature.*got inf"),
        ({"softcap": 0.0}, ValueError, "softcap.*got 0.0"),
        ({"teacher": torch.ones(4, 5)}, TypeError, "TeacherLogits or TeacherTopK, got Tensor"),
        (
            {"teacher": TeacherLogits(torch.ones(4, 3), torch.ones(6, 3))},
            ValueError,
            r"one vocabulary.*\[6, 3\].*\[5, 2\].*6 against 5.*tokenizer",
        ),
        ({"teacher": TeacherLogits(torch.ones(3, 3), torch.ones(5, 3))}, ValueError, r"\[4, 3\].*\[3, 3\]"),
        ({"teacher": TeacherLogits(torch.ones(4, 2), torch.ones(5, 3))}, ValueError, r"\[4, 3\].*\[4, 2\]"),
        (
            {"teacher": TeacherLogits(torch.ones(4, 3), torch.ones(5, 3), torch.ones(4))},
            ValueError,
            r"of the teacher: bias.*\[5\].*\[4\]",
        ),
        (
            {"teacher": TeacherTopK(TOP.ids, torch.zeros(4, 3))},
            ValueError,
            r"\[4, 'k'\].*\[4, 2\] and \[4, 3\]",
        ),
        ({"teacher": TeacherTopK(TOP.ids[:3], torch.zeros(3, 2))}, ValueError, r"\[3, 2\] and \[3, 2\]"),
        ({"teacher": TeacherTopK(TOP.ids[:, :0], TOP.log_probs[:, :0])}, ValueError, r"k >= 1.*\[4, 0\]"),
        ({"teacher": TeacherTopK(TOP.ids.float(), TOP.log_probs)}, TypeError, "ids.*float32"),
        ({"teacher": TeacherTopK(TOP.ids, TOP.ids)}, TypeError, "log_probs.*int64"),
        ({"teacher": TeacherTopK(TOP.ids + 5, TOP.log_probs)}, ValueError, r"\[0, 5\), got 5.*tokenizer"),
        ({"teacher": TeacherTopK(TOP.ids - 1, TOP.log_probs)}, ValueError, r"\[0, 5\), got -1"),
        ({"targets": torch.zeros(5, dtype=torch.int64)}, ValueError, r"\[4\].*\[5\]"),
        ({"targets": torch.zeros(4)}, TypeError, "targets.*float32"),
        ({"token_weights": torch.ones(3)}, ValueError, r"token_weights.*\[4\].*\[3\]"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"hidden": torch.ones(4, 2), "weight": torch.ones(5, 2), "teacher": TEACHER}
    arguments |= {"targets": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(error, match=message):
        linear_kl_divergence(**{**arguments, **change})


@on_ranks(2)
def test_mistakes_are_named_where_the_vocabulary_is_spread() -> None:
    local = local_case(make_case(), [7, 6])
    with pytest.raises(ValueError, match="'reference' needs the logits of the whole vocabulary"):
        local.run("reference", vocab_group=dist.group.WORLD)
    whole = make_case()
    with pytest.raises(ValueError, match="one vocabulary on this rank"):
        Case(local.tensors, whole.teacher, local.targets, None).run("auto", vocab_group=dist.group.WORLD)
    top = make_case(kind="top_k", ignored=0.0).teacher
    assert isinstance(top, TeacherTopK)
    wrong = TeacherTopK(top.ids + VOCABULARY, top.log_probs)
    with pytest.raises(ValueError, match=r"\[0, 13\)"):
        Case(local.tensors, wrong, local.targets, None).run("auto", vocab_group=dist.group.WORLD)


def test_mutants_are_caught() -> None:
    """The other direction, no T^2, T on one side alone, and a top k that is not renormalised."""
    case = make_case(ignored=0.0, temperature=2.0)
    loss, losses, gradients = oracle(case)
    assert isinstance(case.teacher, TeacherLogits)
    for mutant in (
        case.copy(options={"direction": "reverse", "temperature": 2.0}),
        case.copy(options={"temperature": 1.0}),
        case.copy(token_weights=case.token_weights / 4),
        case.copy(options={"temperature": 2.0, "logit_scale": 2.0}),
    ):
        output = mutant.run("chunked")
        output.loss.backward()
        with pytest.raises(AssertionError, match="off by"):
            assert_close(output.loss, loss, 1e-2)
        with pytest.raises(AssertionError, match="off by"):
            assert_close(mutant.tensors["weight"].grad, gradients["weight"], 1e-2)
    top = make_case(kind="top_k", ignored=0.0)
    assert isinstance(top.teacher, TeacherTopK)
    log_q = (top.tensors["hidden"] @ top.tensors["weight"].T).log_softmax(-1).detach()
    stored = top.teacher.log_probs
    unnormalised = (stored.exp() * (stored - log_q.gather(1, top.teacher.ids))).nan_to_num(0).sum(-1)
    with pytest.raises(AssertionError, match="off by"):
        assert_close(top.run("chunked").token_losses, unnormalised, 1e-2)
