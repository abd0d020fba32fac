"""One contract for every backend of `linear_cross_entropy`, against torch's cross entropy on full logits.

Where TRITON_INTERPRET=1 is set, the backend "triton" is among them: test_triton.py starts such a process.
"""

import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from isoloss.losses import linear_cross_entropy as package
from isoloss.losses.linear_cross_entropy import LinearCrossEntropyOutput
from ranks import run_on_ranks

BACKENDS = ("reference", "chunked", "chunked/backward")
"""Name of the backend, and the pass that computes the gradients where it is not forward."""
if os.environ.get("TRITON_INTERPRET") == "1":
    BACKENDS += ("triton", "triton/backward")
PARTS = ("hidden", "weight", "bias", "a", "b")
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "logit_scale": {"logit_scale": 0.3},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.05},
    "all": {"softcap": 3.0, "logit_scale": 1.7, "label_smoothing": 0.2, "z_loss": 0.01},
}

for_each_backend = pytest.mark.parametrize("backend", BACKENDS)
for_each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
for_each_bias = pytest.mark.parametrize("bias_kind", ["none", "class", "row", "factors", "all"])


def linear_cross_entropy(*tensors: Tensor, backend: str = "auto", **options: Any) -> LinearCrossEntropyOutput:
    name, _, gradients = backend.partition("/")
    return package.linear_cross_entropy(*tensors, backend=name, gradients=gradients or "forward", **options)


@dataclass
class Case:
    """Inputs of one call."""

    tensors: dict[str, Tensor]
    targets: Tensor
    token_weights: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, backend: str, **overrides: Any) -> LinearCrossEntropyOutput:
        return call(self.tensors, self.targets, self.token_weights, backend, **{**self.options, **overrides})

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: tensor.grad for name, tensor in self.tensors.items()}

    def copy(self, **changes: Any) -> "Case":
        tensors = {name: t.detach().clone().requires_grad_() for name, t in self.tensors.items()}
        return Case(**{**vars(self), "tensors": tensors, **changes})


def call(
    tensors: dict[str, Tensor], targets: Tensor, token_weights: Tensor | None, backend: str, **options: Any
) -> LinearCrossEntropyOutput:
    factors = (tensors["a"], tensors["b"]) if "a" in tensors else None
    return linear_cross_entropy(
        tensors["hidden"],
        tensors["weight"],
        targets,
        token_weights=token_weights,
        bias=tensors.get("bias"),
        bias_factors=factors,
        backend=backend,
        **options,
    )


def make_case(
    num_rows: int = 19,
    vocabulary: int = 13,
    *,
    width: int = 7,
    bias_kind: str = "none",
    ignored: float = 0.3,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **options: Any,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    tensors = {"hidden": draw(num_rows, width), "weight": draw(vocabulary, width)}
    if bias_kind in ("class", "all"):
        tensors["bias"] = draw(vocabulary)
    if bias_kind == "row":
        tensors["bias"] = draw(num_rows, vocabulary)
    if bias_kind in ("factors", "all"):
        tensors |= {"a": draw(num_rows, 2), "b": draw(vocabulary, 2)}
    targets = torch.randint(vocabulary, (num_rows,), generator=generator)
    targets[torch.rand(num_rows, generator=generator) < ignored] = -100
    weights = torch.rand(num_rows, generator=generator, dtype=torch.float64)
    return Case(tensors, targets, weights, options)


def oracle(case: Case) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Loss, token losses, z-losses and gradients in float64 by torch's own cross entropy."""
    tensors = {n: t.detach().to(torch.float64).requires_grad_() for n, t in case.tensors.items()}
    options = {"softcap": None, "logit_scale": 1.0, "label_smoothing": 0.0, "z_loss": 0.0} | case.options
    logits = tensors["hidden"] @ tensors["weight"].T
    if "bias" in tensors:
        logits = logits + tensors["bias"]
    if "a" in tensors:
        logits = logits + tensors["a"] @ tensors["b"].T
    logits = logits * options["logit_scale"]
    if options["softcap"] is not None:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    losses = F.cross_entropy(
        logits, case.targets, reduction="none", label_smoothing=options["label_smoothing"]
    )
    valid = (case.targets != -100).to(torch.float64)
    z_losses = options["z_loss"] * logits.logsumexp(-1).square() * valid
    weights = torch.ones_like(losses) if case.token_weights is None else case.token_weights
    loss = (weights.to(torch.float64) * (losses + z_losses)).sum()
    loss.backward()
    gradients = {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}
    return loss.detach(), losses.detach(), z_losses.detach(), gradients


def assert_close(actual: Tensor | None, expected: Tensor, tolerance: float = 1e-12) -> None:
    """The largest difference over the largest expected element; an absolute 1e-14 where all cancels."""
    assert actual is not None
    assert actual.shape == expected.shape
    if not expected.numel():
        return
    actual, expected = actual.detach().to(torch.float64), expected.detach().to(torch.float64)
    difference, scale = (actual - expected).abs().max(), expected.abs().max()
    assert difference <= tolerance * scale + 1e-14, f"off by {difference:.3e} of {scale:.3e}"


def assert_same_bits(actual: Tensor | None, expected: Tensor | None) -> None:
    assert actual is not None and expected is not None
    assert torch.equal(actual.detach(), expected.detach())


def assert_matches_oracle(case: Case, output: LinearCrossEntropyOutput, tolerance: float = 1e-12) -> None:
    loss, losses, z_losses, gradients = oracle(case)
    assert_close(output.loss, loss, tolerance)
    assert_close(output.token_losses, losses, tolerance)
    assert_close(output.token_z_losses, z_losses, tolerance)
    for name, gradient in case.gradients().items():
        assert_close(gradient, gradients[name], tolerance)


# ---------------------------------------------------------------------------------------------------------
# The mathematics


@for_each_backend
@for_each_option
@for_each_bias
def test_loss_and_gradients_match_full_logits(backend: str, options: dict[str, Any], bias_kind: str) -> None:
    """Row 15 (targets used as they are; every bias form with gradients for all parts), row 12."""
    case = make_case(bias_kind=bias_kind, **options)
    output = case.run(backend, chunk_size=4)
    output.loss.backward()
    assert_matches_oracle(case, output)


@for_each_backend
@for_each_option
def test_gradcheck(backend: str, options: dict[str, Any]) -> None:
    case = make_case(5, 4, width=3, bias_kind="all", **options)
    names = list(case.tensors)

    def loss(*tensors: Tensor) -> Tensor:
        named = dict(zip(names, tensors, strict=True))
        return call(named, case.targets, case.token_weights, backend, chunk_size=2, **options).loss

    assert torch.autograd.gradcheck(loss, tuple(case.tensors.values()))


@for_each_backend
@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_gradcheck_with_a_bias_per_row(backend: str, ignored: float) -> None:
    case = make_case(5, 4, width=3, bias_kind="row", ignored=ignored, softcap=2.0, z_loss=0.1)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        named = {"hidden": hidden, "weight": weight, "bias": bias}
        return call(named, case.targets, case.token_weights, backend, chunk_size=2, **case.options).loss

    assert torch.autograd.gradcheck(loss, tuple(case.tensors.values()))


@for_each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("bias_kind", ["none", "row", "all"])
def test_dtypes(backend: str, dtype: torch.dtype, bias_kind: str) -> None:
    """Losses in float32 (float64), gradients rounded once to the dtype of their input."""
    case = make_case(40, 30, bias_kind=bias_kind, dtype=dtype, label_smoothing=0.1, z_loss=0.01)
    output = case.run(backend, chunk_size=7)
    output.loss.backward()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert output.loss.dtype == output.token_losses.dtype == output.token_z_losses.dtype == wide
    loss, losses, _, gradients = oracle(case)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    assert_close(output.loss, loss, tolerance)
    assert_close(output.token_losses, losses, tolerance)
    for name, gradient in case.gradients().items():
        assert gradient is not None and gradient.dtype == dtype
        assert_close(gradient, gradients[name], max(tolerance, torch.finfo(dtype).eps))


@for_each_backend
def test_mixed_dtypes(backend: str) -> None:
    """A bfloat16 trunk with a float32 head, as under autocast."""
    case = make_case(bias_kind="all", dtype=torch.float32)
    case.tensors["hidden"] = case.tensors["hidden"].detach().bfloat16().requires_grad_()
    output = case.run(backend)
    output.loss.backward()
    assert output.loss.dtype == torch.float32
    _, _, _, gradients = oracle(case)
    assert case.tensors["hidden"].grad is not None
    assert case.tensors["hidden"].grad.dtype == torch.bfloat16
    assert_close(case.tensors["weight"].grad, gradients["weight"], 2e-6)


@for_each_backend
@pytest.mark.parametrize("trained", [c for n in range(6) for c in itertools.combinations(PARTS, n)])
def test_any_part_may_be_frozen(backend: str, trained: tuple[str, ...]) -> None:
    """Frozen head, frozen trunk, and every other subset."""
    case = make_case(bias_kind="all", softcap=2.0)
    _, _, _, gradients = oracle(case)
    for name, tensor in case.tensors.items():
        tensor.requires_grad_(name in trained)
    output = case.run(backend, chunk_size=5)
    assert output.loss.requires_grad == bool(trained)
    if trained:
        output.loss.backward()
    for name, gradient in case.gradients().items():
        if name in trained:
            assert_close(gradient, gradients[name])
        else:
            assert gradient is None


@for_each_backend
@pytest.mark.parametrize("weighting", ["token", "sample", "square"])
def test_reductions_by_token_weights(backend: str, weighting: str) -> None:
    """Row 27: weights 1, 1/n and 1/sqrt(n) of the token's document, times the data's weight, over W."""
    case = make_case(12, ignored=0.0)
    lengths = torch.tensor([1, 4, 7])
    exponent = {"token": 0.0, "sample": 1.0, "square": 0.5}[weighting]
    factors = torch.repeat_interleave(lengths.double() ** -exponent, lengths)
    data_weights = torch.linspace(0.0, 2.0, 12, dtype=torch.float64)
    weights = factors * data_weights
    case.token_weights = weights / weights.sum()
    output = case.run(backend, chunk_size=5)
    output.loss.backward()
    assert_matches_oracle(case, output)
    by_hand = (weights * output.token_losses).sum() / weights.sum()
    assert_close(output.loss, by_hand)


# ---------------------------------------------------------------------------------------------------------
# Rows that are left out


@for_each_backend
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("bias_kind", ["row", "all"])
def test_a33_ignored_rows_reach_nothing(backend: str, poison: float, bias_kind: str) -> None:
    """Whatever an ignored row holds, the result is that without it, and its gradients are exactly 0."""
    clean = make_case(bias_kind=bias_kind, z_loss=0.1, label_smoothing=0.1)
    ignored = clean.targets == -100
    poisoned = clean.copy(token_weights=clean.token_weights.masked_fill(ignored, poison))
    with torch.no_grad():
        for tensor in poisoned.tensors.values():
            if tensor.shape[0] == len(ignored):
                tensor[ignored] = poison
    expected, output = clean.run(backend, chunk_size=4), poisoned.run(backend, chunk_size=4)
    expected.loss.backward()
    output.loss.backward()
    assert_same_bits(output.loss, expected.loss)
    assert_same_bits(output.token_losses, expected.token_losses)
    assert (output.token_losses[ignored] == 0).all()
    for name, gradient in poisoned.gradients().items():
        assert_same_bits(gradient, clean.gradients()[name])
        if gradient is not None and gradient.shape[0] == len(ignored):
            assert (gradient[ignored] == 0).all()


@for_each_backend
def test_a33_nan_in_a_row_with_a_target_shows(backend: str) -> None:
    case = make_case(ignored=0.0)
    with torch.no_grad():
        case.tensors["hidden"][3] = math.nan
    output = case.run(backend, chunk_size=4)
    output.loss.backward()
    assert output.loss.isnan()
    assert output.token_losses.isnan().nonzero().tolist() == [[3]]
    assert case.tensors["hidden"].grad is not None and case.tensors["hidden"].grad[3].isnan().any()


@for_each_backend
@pytest.mark.parametrize("num_rows", [0, 1, 6])
@pytest.mark.parametrize("bias_kind", ["none", "row", "all"])
def test_a30_no_valid_target(backend: str, num_rows: int, bias_kind: str) -> None:
    """Loss 0 in the graph; gradients are zeros, not None and not NaN, whatever the incoming gradient."""
    case = make_case(num_rows, bias_kind=bias_kind, ignored=1.0, z_loss=0.1)
    output = case.run(backend)
    assert output.loss.requires_grad and output.loss == 0
    assert output.token_losses.shape == (num_rows,) and not output.token_losses.any()
    (output.loss * 3).backward()
    for name, gradient in case.gradients().items():
        assert gradient is not None and gradient.shape == case.tensors[name].shape
        assert not gradient.any()


@for_each_backend
@pytest.mark.parametrize("valid", [[0], [18], [4, 5, 6], list(range(19))])
def test_one_few_and_all_rows_valid(backend: str, valid: list[int]) -> None:
    case = make_case(ignored=0.0, bias_kind="all")
    case.targets = torch.full_like(case.targets, -100).index_copy(0, torch.tensor(valid), case.targets[valid])
    output = case.run(backend, chunk_size=2)
    output.loss.backward()
    assert_matches_oracle(case, output)


@for_each_backend
def test_ignore_index_may_be_a_class(backend: str) -> None:
    case = make_case(ignored=0.0)
    other = case.copy(targets=case.targets.masked_fill(case.targets == 3, -100))
    output, expected = case.run(backend, ignore_index=3), other.run(backend)
    assert (case.targets == 3).any()
    assert_same_bits(output.loss, expected.loss)


@for_each_backend
@pytest.mark.parametrize("bad", [13, -1, -101, 2**40])
def test_target_outside_the_vocabulary_is_an_error(backend: str, bad: int) -> None:
    case = make_case()
    case.targets[5] = bad
    with pytest.raises(ValueError, match=rf"\[0, 13\).*got {bad}"):
        case.run(backend)


# ---------------------------------------------------------------------------------------------------------
# Properties


@st.composite
def small_cases(draw: Callable[..., Any]) -> Case:
    num_rows = draw(st.integers(0, 12))
    case = make_case(
        num_rows,
        draw(st.integers(1, 9)),
        width=draw(st.integers(1, 5)),
        bias_kind=draw(st.sampled_from(["none", "class", "row", "factors", "all"])),
        ignored=draw(st.sampled_from([0.0, 0.5, 1.0])),
        seed=draw(st.integers(0, 10**6)),
        **draw(st.sampled_from(list(OPTIONS.values()))),
    )
    case.options["chunk_size"] = draw(st.sampled_from([None, 1, 2, 5, 100]))
    return case


def per_row(case: Case, index: Tensor) -> Case:
    """The same case with rows chosen by `index`."""
    tensors = {
        name: (tensor.detach()[index] if is_per_row(name, tensor) else tensor.detach()).requires_grad_()
        for name, tensor in case.tensors.items()
    }
    assert case.token_weights is not None
    return Case(tensors, case.targets[index], case.token_weights[index], case.options)


def is_per_row(name: str, tensor: Tensor) -> bool:
    return name in ("hidden", "a") or (name == "bias" and tensor.ndim == 2)


@for_each_backend
@given(case=small_cases(), seed=st.integers(0, 1000))
def test_row_order_does_not_matter(backend: str, case: Case, seed: int) -> None:
    order = torch.randperm(len(case.targets), generator=torch.Generator().manual_seed(seed))
    shuffled = per_row(case, order)
    expected, output = case.run(backend), shuffled.run(backend)
    expected.loss.backward()
    output.loss.backward()
    assert_close(output.loss, expected.loss)
    assert_close(output.token_losses, expected.token_losses[order])
    for name, gradient in shuffled.gradients().items():
        reference = case.gradients()[name]
        assert reference is not None
        assert_close(gradient, reference[order] if is_per_row(name, reference) else reference)


@for_each_backend
@given(case=small_cases(), data=st.data())
def test_splitting_the_rows_does_not_matter(backend: str, case: Case, data: st.DataObject) -> None:
    num_rows = len(case.targets)
    cut = data.draw(st.integers(0, num_rows))
    parts = [per_row(case, torch.arange(cut)), per_row(case, torch.arange(cut, num_rows))]
    expected = case.run(backend)
    expected.loss.backward()
    outputs = [part.run(backend) for part in parts]
    for output in outputs:
        output.loss.backward()
    assert_close(outputs[0].loss + outputs[1].loss, expected.loss)
    assert_close(torch.cat([output.token_losses for output in outputs]), expected.token_losses)
    for name, reference in case.gradients().items():
        first, second = (part.gradients()[name] for part in parts)
        assert reference is not None and first is not None and second is not None
        joined = torch.cat([first, second]) if is_per_row(name, reference) else first + second
        assert_close(joined, reference)


@for_each_backend
@given(case=small_cases())
def test_ignored_rows_do_not_matter(backend: str, case: Case) -> None:
    kept = (case.targets != -100).nonzero().squeeze(1)
    without = per_row(case, kept)
    expected, output = without.run(backend), case.run(backend)
    expected.loss.backward()
    output.loss.backward()
    assert_close(output.loss, expected.loss)
    assert_close(output.token_losses[kept], expected.token_losses)
    for name, gradient in case.gradients().items():
        reference = without.gradients()[name]
        assert gradient is not None and reference is not None
        assert_close(gradient[kept] if is_per_row(name, gradient) else gradient, reference)


@for_each_backend
@given(case=small_cases(), factor=st.floats(-3, 3), seed=st.integers(0, 1000))
def test_linear_in_the_token_weights(backend: str, case: Case, factor: float, seed: int) -> None:
    assert case.token_weights is not None
    generator = torch.Generator().manual_seed(seed)
    others = torch.rand(case.token_weights.shape, generator=generator, dtype=torch.float64)
    total = case.copy(token_weights=case.token_weights + factor * others)
    one, two = case.copy(), case.copy(token_weights=others)
    outputs = [c.run(backend) for c in (total, one, two)]
    for output in outputs:
        output.loss.backward()
    size = outputs[1].loss.detach().abs() + abs(factor) * outputs[2].loss.detach().abs() + 1e-30
    difference = outputs[0].loss - outputs[1].loss - factor * outputs[2].loss
    assert difference.abs() <= 1e-12 * size
    for name, gradient in total.gradients().items():
        first, second = one.gradients()[name], two.gradients()[name]
        assert gradient is not None and first is not None and second is not None
        size = first.abs().max() + abs(factor) * second.abs().max() if first.numel() else torch.ones(())
        assert ((gradient - first - factor * second).abs() <= 1e-12 * size).all()


@given(case=small_cases())
def test_backends_agree(case: Case) -> None:
    cases = [case.copy() for _ in BACKENDS]
    outputs = [c.run(backend) for c, backend in zip(cases, BACKENDS, strict=True)]
    for output in outputs:
        output.loss.backward()
    for other, output in zip(cases[1:], outputs[1:], strict=True):
        assert_close(output.loss, outputs[0].loss)
        assert_close(output.token_losses, outputs[0].token_losses)
        assert_close(output.token_z_losses, outputs[0].token_z_losses)
        for name, expected in cases[0].gradients().items():
            assert expected is not None
            assert_close(other.gradients()[name], expected)


# ---------------------------------------------------------------------------------------------------------
# The graph around it


@for_each_backend
@pytest.mark.parametrize("upstream", [0.0, 1.0, 2.0, -0.5])
def test_incoming_gradient(backend: str, upstream: float) -> None:
    case = make_case(bias_kind="all")
    case.run(backend).loss.backward(torch.tensor(upstream, dtype=torch.float64))
    _, _, _, gradients = oracle(case)
    for name, gradient in case.gradients().items():
        assert gradient is not None
        assert ((gradient - upstream * gradients[name]).abs() <= 1e-12 * gradients[name].abs().max()).all()


@for_each_backend
@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("behind_a_view", [False, True])
def test_backward_again_through_a_kept_graph(backend: str, factor: float, behind_a_view: bool) -> None:
    """The third time adds what the first did: nothing saved was rescaled, and `.grad` shares no memory."""
    case = make_case(bias_kind="all")
    _, _, _, gradients = oracle(case)
    tensors = {n: t.view_as(t) if behind_a_view else t for n, t in case.tensors.items()}
    loss = call(tensors, case.targets, case.token_weights, backend).loss * factor
    for times in (1, 2, 3):
        loss.backward(retain_graph=times < 3)
        for name, gradient in case.gradients().items():
            assert_close(gradient, times * factor * gradients[name])


@for_each_backend
def test_tied_weight_collects_both_gradients(backend: str) -> None:
    weight = torch.randn(11, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids, targets = torch.tensor([1, 2, 3, 1]), torch.tensor([2, 3, 1, -100])

    def gradient(head_loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        leaf = weight.clone().requires_grad_()
        head_loss(leaf[ids].tanh(), leaf).backward()
        assert leaf.grad is not None
        return leaf.grad

    expected = gradient(lambda h, w: F.cross_entropy(h @ w.T, targets, reduction="sum"))
    assert_close(gradient(lambda h, w: linear_cross_entropy(h, w, targets, backend=backend).loss), expected)


@for_each_backend
@for_each_option
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant", "offload"])
def test_bits_do_not_depend_on_recomputation_or_offloading(
    backend: str, options: dict[str, Any], dtype: torch.dtype, mode: str
) -> None:
    """Rows 13 and 19: loss, token losses and gradients, to the bit."""
    plain = make_case(bias_kind="all", dtype=dtype, **options)
    other = plain.copy()
    expected = plain.run(backend, chunk_size=4)
    expected.loss.backward()

    def run(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        tensors = other.tensors | {"hidden": hidden, "weight": weight}
        output = call(tensors, other.targets, other.token_weights, backend, chunk_size=4, **options)
        return output.loss, output.token_losses

    hidden, weight = other.tensors["hidden"], other.tensors["weight"]
    if mode == "offload":
        with torch.autograd.graph.save_on_cpu():
            loss, token_losses = run(hidden, weight)
    else:
        loss, token_losses = checkpoint(run, hidden, weight, use_reentrant=mode == "reentrant")
    loss.backward()
    assert_same_bits(loss, expected.loss)
    assert_same_bits(token_losses, expected.token_losses)
    for name, gradient in other.gradients().items():
        assert_same_bits(gradient, plain.gradients()[name])


@for_each_backend
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_losses_are_the_same_bits_without_gradients(backend: str, off: Callable[[], Any]) -> None:
    """Row 13: what is observed does not depend on whether gradients are made."""
    case = make_case(bias_kind="all", dtype=torch.float32, softcap=2.0, z_loss=0.1, label_smoothing=0.1)
    expected = case.run(backend, chunk_size=4)
    with off():
        output = case.run(backend, chunk_size=4)
    assert not output.loss.requires_grad
    assert_same_bits(output.loss, expected.loss)
    assert_same_bits(output.token_losses, expected.token_losses)


@for_each_backend
@for_each_option
def test_bit_identical_from_run_to_run(backend: str, options: dict[str, Any]) -> None:
    """Row 13: the same call, with its token losses read in between or not, gives the same bits."""
    first = make_case(50, 40, bias_kind="all", dtype=torch.float32, **options)
    second = first.copy()
    one = first.run(backend, chunk_size=9)
    one.loss.backward()
    two = second.run(backend, chunk_size=9)
    two.token_losses.sum()
    two.loss.backward()
    assert_same_bits(two.loss, one.loss)
    for name, gradient in second.gradients().items():
        assert_same_bits(gradient, first.gradients()[name])


@for_each_backend
def test_the_loss_is_the_sum_of_the_token_losses(backend: str) -> None:
    """Row 12: the numbers handed out are the numbers that were summed, and they carry no graph."""
    case = make_case(dtype=torch.float32, z_loss=0.1)
    assert case.token_weights is not None
    case.token_weights = case.token_weights.float()
    output = case.run(backend, chunk_size=4)
    assert not output.token_losses.requires_grad and not output.token_z_losses.requires_grad
    total = (case.token_weights * (output.token_losses + output.token_z_losses)).sum()
    assert_close(output.loss, total, 1e-6)


@for_each_backend
def test_autocast_does_not_reach_the_statistics(backend: str) -> None:
    case = make_case(30, 20, bias_kind="all", dtype=torch.float32)
    plain = case.copy()
    expected = plain.run(backend)
    expected.loss.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = case.run(backend)
    output.loss.backward()
    assert_same_bits(output.loss, expected.loss)
    for name, gradient in case.gradients().items():
        assert_same_bits(gradient, plain.gradients()[name])


# ---------------------------------------------------------------------------------------------------------
# Forms of the inputs


@for_each_backend
@pytest.mark.parametrize("layout", ["transposed", "strided", "sliced"])
def test_memory_layouts(backend: str, layout: str) -> None:
    """Gradients reach the tensors behind a non-contiguous hidden and weight."""
    case = make_case(12, 11, width=6, ignored=0.2)

    def view(base: Tensor) -> Tensor:
        if layout == "transposed":
            return base.T.contiguous().T
        if layout == "strided":
            return torch.stack([base, base + 1], -1)[..., 0]
        return F.pad(base, (2, 3, 1, 1))[1:-1, 2:-3]

    views = {name: view(tensor) for name, tensor in case.tensors.items()}
    assert not views["hidden"].is_contiguous() and not views["weight"].is_contiguous()
    output = call(views, case.targets, case.token_weights, backend, chunk_size=5)
    output.loss.backward()
    assert_matches_oracle(case, output)


@for_each_backend
def test_expanded_hidden(backend: str) -> None:
    """One row in every place collects the gradients of all places."""
    case = make_case(6, ignored=0.2)
    row = case.tensors["hidden"].detach()[:1].clone().requires_grad_()
    with torch.no_grad():
        case.tensors["hidden"].copy_(row.expand(6, -1))
    tensors = case.tensors | {"hidden": row.expand(6, -1)}
    call(tensors, case.targets, case.token_weights, backend).loss.backward()
    _, _, _, gradients = oracle(case)
    assert_close(row.grad, gradients["hidden"].sum(0, keepdim=True))


@for_each_backend
def test_leading_dimensions(backend: str) -> None:
    flat = make_case(12, bias_kind="row", ignored=0.2)
    output = flat.run(backend)
    output.loss.backward()
    deep = flat.copy()
    tensors = {n: t if n == "weight" else t.unflatten(0, (3, 4)) for n, t in deep.tensors.items()}
    # A batch whose rows are not next to each other: flattening copies.
    tensors["hidden"] = tensors["hidden"].transpose(0, 1).contiguous().transpose(0, 1)
    assert deep.token_weights is not None
    result = call(tensors, deep.targets.view(3, 4), deep.token_weights.view(3, 4), backend)
    result.loss.backward()
    assert result.token_losses.shape == result.token_z_losses.shape == (3, 4)
    assert_same_bits(result.loss, output.loss)
    for name, gradient in deep.gradients().items():
        assert_same_bits(gradient, flat.gradients()[name])


@for_each_backend
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_narrow_integer_targets(backend: str, dtype: torch.dtype) -> None:
    case = make_case()
    assert_same_bits(case.copy(targets=case.targets.to(dtype)).run(backend).loss, case.run(backend).loss)


@for_each_backend
def test_token_weights_default_to_ones(backend: str) -> None:
    case = make_case(dtype=torch.float32)
    ones = case.copy(token_weights=torch.ones(19))
    none = case.copy(token_weights=None)
    assert_same_bits(none.run(backend).loss, ones.run(backend).loss)


@for_each_backend
@pytest.mark.parametrize("num_rows, vocabulary", [(1, 2), (1, 1), (5, 1), (7, 2), (2, 131072)])
def test_extreme_shapes(backend: str, num_rows: int, vocabulary: int) -> None:
    case = make_case(num_rows, vocabulary, width=3, ignored=0.0)
    output = case.run(backend)
    output.loss.backward()
    loss, losses, _, gradients = oracle(case)
    assert (output.token_losses - losses).abs().max() <= 1e-12 * max(1.0, float(losses.max()))
    for name, gradient in case.gradients().items():
        assert gradient is not None
        assert (gradient - gradients[name]).abs().max() <= 1e-12


# ---------------------------------------------------------------------------------------------------------
# Numbers


@for_each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_logits(backend: str, dtype: torch.dtype) -> None:
    """Logits of 1e4: the loss of a far class is large, not infinite; that of the top class is small."""
    hidden = torch.tensor([[1e4], [1e4], [1e4]], dtype=dtype, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], dtype=dtype, requires_grad=True)
    output = linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 2]), backend=backend)
    output.loss.backward()
    top = hidden.detach()[0, 0].float()
    assert_close(output.token_losses, torch.stack([0 * top, top, 2 * top]), 1e-6)
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.flatten().tolist() == [0.0, 1.0, 2.0]
    assert weight.grad.isfinite().all()


@for_each_backend
def test_a_common_offset_does_not_cancel(backend: str) -> None:
    """logsumexp - target logit would lose all digits of a loss of 1e-3 under an offset of 1e4."""
    hidden = torch.ones(1, 1)
    weight = torch.tensor([[1e4], [1e4 - 7.0]])
    output = linear_cross_entropy(hidden, weight, torch.tensor([0]), backend=backend)
    assert_close(output.token_losses, torch.tensor([math.log1p(math.exp(-7.0))]), 2e-4)
    smooth = linear_cross_entropy(hidden, weight, torch.tensor([0]), label_smoothing=0.1, backend=backend)
    assert_close(smooth.token_losses, torch.tensor([math.log1p(math.exp(-7.0)) + 0.05 * 7]), 1e-5)


@for_each_backend
@pytest.mark.parametrize("bias_kind", ["class", "row"])
def test_minus_infinity_in_the_bias_removes_a_class(backend: str, bias_kind: str) -> None:
    case = make_case(bias_kind=bias_kind, z_loss=0.1)
    case.targets[case.targets == 3] = 2
    without = case.copy()
    keep = torch.tensor([v for v in range(13) if v != 3])
    with torch.no_grad():
        case.tensors["bias"][..., 3] = -math.inf
    small = {"hidden": without.tensors["hidden"], "weight": without.tensors["weight"][keep]}
    small["bias"] = without.tensors["bias"][..., keep]
    targets = torch.where(case.targets > 3, case.targets - 1, case.targets)
    expected = call(small, targets, case.token_weights, backend, z_loss=0.1)
    output = case.run(backend, chunk_size=4)
    expected.loss.backward()
    output.loss.backward()
    assert_close(output.loss, expected.loss)
    for name, gradient in case.gradients().items():
        reference = without.gradients()[name]
        assert reference is not None
        assert_close(gradient, reference)


@for_each_backend
def test_a_removed_target_costs_infinity(backend: str) -> None:
    bias = torch.tensor([0.0, -math.inf])
    hidden = torch.ones(2, 1, requires_grad=True)
    output = linear_cross_entropy(hidden, torch.ones(2, 1), torch.tensor([0, 1]), bias=bias, backend=backend)
    output.loss.backward()
    assert output.token_losses.tolist() == [0.0, math.inf]
    assert hidden.grad is not None and hidden.grad.isfinite().all()


@for_each_backend
def test_softcap_bounds_any_logit(backend: str) -> None:
    bias = torch.tensor([0.0, -math.inf])
    output = linear_cross_entropy(
        torch.full((1, 1), 1e9), torch.ones(2, 1), torch.tensor([1]), bias=bias, softcap=5.0, backend=backend
    )
    assert_close(output.token_losses, torch.tensor([10 + math.log1p(math.exp(-10))]), 1e-6)


# ---------------------------------------------------------------------------------------------------------
# Cases


def cost_rows(costs: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden, weight and targets whose losses are `costs`; None is ignored. Two classes, logits (0, h)."""
    logits = [0.0 if c is None else math.log(math.expm1(c)) for c in costs]
    targets = torch.tensor([-100 if c is None else 0 for c in costs])
    weight = torch.tensor([[0.0], [1.0]], dtype=torch.float64, requires_grad=True)
    return torch.tensor(logits, dtype=torch.float64).unsqueeze(1).requires_grad_(), weight, targets


@for_each_backend
def test_a05_label_smoothing_keeps_the_window_count(backend: str) -> None:
    total = torch.zeros((), dtype=torch.float64)
    for logits in ([[0.0, math.log(3)]], [[0.0, 0.0]] * 3):
        hidden = torch.tensor(logits, dtype=torch.float64)
        targets = torch.zeros(len(logits), dtype=torch.int64)
        weights = torch.full((len(logits),), 1 / 4, dtype=torch.float64)
        total += linear_cross_entropy(
            hidden,
            torch.eye(2, dtype=torch.float64),
            targets,
            token_weights=weights,
            label_smoothing=0.1,
            backend=backend,
        ).loss
    assert float(total) == pytest.approx(0.852701, abs=1e-6)


@for_each_backend
def test_a30_a_share_without_targets_adds_zero(backend: str) -> None:
    total = torch.zeros((), dtype=torch.float64)
    for costs in ([None] * 6, [1.0, 5.0]):
        hidden, weight, targets = cost_rows(costs)
        weights = torch.full((len(costs),), 0.5, dtype=torch.float64)
        loss = linear_cross_entropy(hidden, weight, targets, token_weights=weights, backend=backend).loss
        loss.backward()
        assert weight.grad is not None and weight.grad.isfinite().all()
        total += loss.detach()
    assert float(total) == pytest.approx(3.0, abs=1e-12)


@for_each_backend
@pytest.mark.parametrize("costs", [[1, 1, 2, 2, 3, 3], [1, 1, 4, None, None, None]])
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 6])
def test_a58_chunks_are_summed_not_averaged(backend: str, costs: list[float], chunk_size: int) -> None:
    hidden, weight, targets = cost_rows(costs)
    count = int((targets != -100).sum())
    weights = torch.full((6,), 1 / count, dtype=torch.float64)
    output = linear_cross_entropy(
        hidden, weight, targets, token_weights=weights, chunk_size=chunk_size, backend=backend
    )
    assert float(output.loss.detach()) == pytest.approx(2.0, abs=1e-12)
    assert output.token_losses.tolist() == pytest.approx([c or 0 for c in costs], abs=1e-12)


@for_each_backend
def test_a70_each_row_has_its_own_weight_in_the_weight_gradient(backend: str) -> None:
    weight = torch.zeros(2, 1, requires_grad=True)
    arguments = (torch.ones(3, 1), weight, torch.tensor([0, 1, 0]))
    output = linear_cross_entropy(*arguments, token_weights=torch.tensor([0.0, 1.0, 2.0]), backend=backend)
    output.loss.backward()
    assert weight.grad is not None and weight.grad.flatten().tolist() == pytest.approx([-0.5, 0.5])
    with torch.no_grad():
        evaluated = linear_cross_entropy(*arguments, backend=backend)
    assert evaluated.token_losses.tolist() == pytest.approx([math.log(2)] * 3)


@for_each_backend
@pytest.mark.parametrize("frozen_base", [False, True])
@pytest.mark.parametrize("form", ["merged", "factors"])
def test_a71_an_adapter_on_the_head_counts_and_trains(backend: str, frozen_base: bool, form: str) -> None:
    """Merged into the weight, or as factors a = hidden A^T, b = B, that need no copy of the head."""
    base = torch.zeros(2, 1, requires_grad=not frozen_base)
    up = torch.tensor([[math.log(3)], [0.0]], requires_grad=True)
    down = torch.ones(1, 1, requires_grad=True)
    hidden, targets = torch.ones(1, 1), torch.tensor([0])
    bias = torch.zeros(2, requires_grad=True)
    if form == "merged":
        loss = linear_cross_entropy(hidden, base + up @ down, targets, bias=bias, backend=backend).loss
    else:
        factors = (hidden @ down.T, up)
        loss = linear_cross_entropy(
            hidden, base, targets, bias=bias, bias_factors=factors, backend=backend
        ).loss
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.287682, abs=1e-6)
    for trained in (up, down, bias):
        assert trained.grad is not None and trained.grad.abs().max() > 0.1
    assert (base.grad is None) == frozen_base


@for_each_backend
@pytest.mark.parametrize(
    "options, expected", [({"logit_scale": 0.5}, 0.126928), ({"softcap": 2.0}, 0.135781), ({}, 0.018150)]
)
def test_a72_scale_and_cap(backend: str, options: dict[str, float], expected: float) -> None:
    hidden = torch.tensor([[4.0, 0.0]])
    output = linear_cross_entropy(hidden, torch.eye(2), torch.tensor([0]), backend=backend, **options)
    assert float(output.loss) == pytest.approx(expected, abs=1e-6)


@for_each_backend
def test_a73_z_loss_is_apart_and_off_by_default(backend: str) -> None:
    arguments = (torch.tensor([[10.0, 10.0]]), torch.eye(2), torch.tensor([0]))
    off = linear_cross_entropy(*arguments, backend=backend)
    assert float(off.loss) == pytest.approx(0.693147, abs=1e-6)
    assert not off.token_z_losses.any()
    on = linear_cross_entropy(*arguments, z_loss=1e-4, backend=backend)
    assert float(on.token_losses) == pytest.approx(0.693147, abs=1e-6)
    assert float(on.token_z_losses) == pytest.approx(0.011434, abs=1e-6)
    assert float(on.loss) == pytest.approx(0.704582, abs=1e-6)


@for_each_backend
@pytest.mark.parametrize("chunk_size", [1, 64])
def test_a75_a_bfloat16_model_sums_in_float32(backend: str, chunk_size: int) -> None:
    """Loss and head gradient over 512 equal tokens are 512 times those of one; bfloat16 stops at 256."""
    hidden = torch.full((512, 1), 1.0, dtype=torch.bfloat16)
    weight = torch.tensor([[0.0], [0.540625]], dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(512, dtype=torch.int64)
    output = linear_cross_entropy(hidden, weight, targets, chunk_size=chunk_size, backend=backend)
    output.loss.backward()
    cost = float(output.token_losses[0])
    assert cost == pytest.approx(1.0, abs=2e-3)
    assert float(output.loss.detach()) == pytest.approx(512 * cost, rel=1e-6)
    assert weight.grad is not None
    assert float(weight.grad[1]) == pytest.approx(512 * (1 - math.exp(-cost)), rel=4e-3)


# ---------------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"backend": "tritn"}, ValueError, "auto, reference, chunked, triton.*'tritn'"),
        ({"backend": "auto/sideways"}, ValueError, "'forward' or 'backward'.*'sideways'"),
        ({"vocab_group": object()}, TypeError, "vocab_group must be a ProcessGroup .* got object"),
        ({"chunk_size": 0}, ValueError, "chunk_size.*got 0"),
        ({"softcap": 0.0}, ValueError, "softcap.*got 0.0"),
        ({"logit_scale": math.nan}, ValueError, "logit_scale.*nan"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing.*1.5"),
        ({"z_loss": -1.0}, ValueError, "z_loss.*-1.0"),
        ({"token_weights": torch.ones(3)}, ValueError, r"token_weights.*\[4\].*\[3\]"),
        ({"token_weights": torch.ones(4).bfloat16()}, TypeError, "token_weights.*bfloat16"),
        ({"token_weights": torch.ones(4).requires_grad_()}, ValueError, "token_weights.*detach"),
        ({"targets": torch.zeros(5, dtype=torch.int64)}, ValueError, r"targets.*\[4\].*\[5\]"),
        ({"targets": torch.zeros(4)}, TypeError, "targets.*float32"),
        ({"weight": torch.ones(5, 3)}, ValueError, r"\[4, 2\] and \[5, 3\]"),
        ({"weight": torch.ones(5, 2, dtype=torch.int64)}, TypeError, "weight.*int64"),
        ({"weight": torch.ones(0, 2)}, ValueError, "empty vocabulary"),
        ({"bias": torch.ones(4)}, ValueError, r"bias.*\[5\].*\[4\]"),
        ({"bias": torch.ones(5, 5)}, ValueError, r"bias.*\[4, 5\].*\[5, 5\]"),
        ({"bias_factors": (torch.ones(4, 2), torch.ones(5, 3))}, ValueError, r"bias_factors\[1\].*\[5, 2\]"),
        ({"weight": torch.ones(5, 2, device="meta")}, ValueError, "meta"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"hidden": torch.ones(4, 2), "weight": torch.ones(5, 2), "targets": torch.zeros(4).long()}
    with pytest.raises(error, match=message):
        linear_cross_entropy(**{**arguments, **change})


def sharded_weight_message() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    weight = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(TypeError) as error:
        linear_cross_entropy(torch.ones(3, 2), weight, torch.zeros(3, dtype=torch.int64))
    return str(error.value)


def test_a_sharded_weight_is_an_error_that_says_what_to_do() -> None:
    for message in run_on_ranks(2, sharded_weight_message):
        assert "weight is a DTensor" in message and "inside the wrapped forward" in message
