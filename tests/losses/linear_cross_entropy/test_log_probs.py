"""One contract for every backend of `linear_log_probs`, against torch's log-softmax of full logits."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from isoloss import linear_cross_entropy, linear_log_probs
from isoloss.losses.linear_cross_entropy import chunked
from isoloss.losses.linear_cross_entropy.chunked import compute_in_chunks
from losses.linear_cross_entropy.test_chunked import PRODUCTS, SYNCHRONISING, Recorder, relative_error
from losses.linear_cross_entropy.test_contract import (
    PARTS,
    Case,
    assert_close,
    assert_same_bits,
    is_per_row,
    make_case,
    per_row,
)
from losses.linear_cross_entropy.test_vocab_parallel import (
    BIAS_KINDS,
    SLICES,
    LargestTensor,
    expected_part,
    local_case,
)
from ranks import on_ranks, run_on_ranks

BACKENDS = ("reference", "chunked")
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "logit_scale": {"logit_scale": 0.3},
    "both": {"softcap": 3.0, "logit_scale": 1.7},
}
TOLERANCE = 1e-11

for_each_backend = pytest.mark.parametrize("backend", BACKENDS)
for_each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
for_each_bias = pytest.mark.parametrize("bias_kind", BIAS_KINDS)


def log_probs_of(tensors: dict[str, Tensor], targets: Tensor, backend: str, **options: Any) -> Tensor:
    return linear_log_probs(
        tensors["hidden"],
        tensors["weight"],
        targets,
        bias=tensors.get("bias"),
        bias_factors=(tensors["a"], tensors["b"]) if "a" in tensors else None,
        backend=backend,
        **options,
    )


def run(case: Case, backend: str, **overrides: Any) -> Tensor:
    return log_probs_of(case.tensors, case.targets, backend, **{**case.options, **overrides})


def preference(log_probs: Tensor) -> Tensor:
    """A loss whose gradient in each row depends on every row: two documents and a sigmoid."""
    signs = torch.ones_like(log_probs)
    signs[len(signs) // 2 :] = -1
    return -torch.nn.functional.logsigmoid((0.3 * signs * log_probs).sum())


def oracle(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities and the gradients of `preference` by plain torch on full logits."""
    tensors = {n: t.detach().to(dtype).requires_grad_() for n, t in case.tensors.items()}
    options = {"softcap": None, "logit_scale": 1.0} | case.options
    logits = tensors["hidden"] @ tensors["weight"].T
    if "bias" in tensors:
        logits = logits + tensors["bias"]
    if "a" in tensors:
        logits = logits + tensors["a"] @ tensors["b"].T
    logits = logits * options["logit_scale"]
    if options["softcap"] is not None:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    valid = case.targets != -100
    chosen = logits.log_softmax(-1).gather(1, case.targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    log_probs = torch.where(valid, chosen, 0)
    preference(log_probs).backward()
    return log_probs.detach(), {n: t.grad for n, t in tensors.items() if t.grad is not None}


def assert_matches_oracle(case: Case, log_probs: Tensor, tolerance: float = TOLERANCE) -> None:
    expected, gradients = oracle(case)
    assert_close(log_probs, expected, tolerance)
    for name, gradient in case.gradients().items():
        assert_close(gradient, gradients[name], tolerance)


# ---------------------------------------------------------------------------------------------------------
# The mathematics


@for_each_backend
@for_each_option
@for_each_bias
def test_values_and_gradients_match_full_logits(
    backend: str, options: dict[str, Any], bias_kind: str
) -> None:
    case = make_case(bias_kind=bias_kind, **options)
    log_probs = run(case, backend, chunk_size=4)
    preference(log_probs).backward()
    assert_matches_oracle(case, log_probs)


@for_each_backend
@for_each_option
@pytest.mark.parametrize("bias_kind", ["row", "all"])
def test_gradcheck(backend: str, options: dict[str, Any], bias_kind: str) -> None:
    case = make_case(5, 4, width=3, bias_kind=bias_kind, **options)
    names = list(case.tensors)

    def function(*tensors: Tensor) -> Tensor:
        named = dict(zip(names, tensors, strict=True))
        return log_probs_of(named, case.targets, backend, chunk_size=2, **options)

    assert torch.autograd.gradcheck(function, tuple(case.tensors.values()))


@for_each_bias
@for_each_option
def test_the_same_bits_as_the_losses_of_the_cross_entropy(bias_kind: str, options: dict[str, Any]) -> None:
    """One chunk loop: the values are its token losses, and so are gradients under the same weights."""
    case = make_case(bias_kind=bias_kind, dtype=torch.float32, **options)
    other = case.copy()
    assert case.token_weights is not None
    weights = case.token_weights.float()
    log_probs = run(case, "chunked", chunk_size=4)
    (-weights * log_probs).sum().backward()
    output = other.copy(token_weights=weights, tensors=other.tensors).run("chunked", chunk_size=4)
    output.loss.backward()
    assert_same_bits(-log_probs, output.token_losses)
    for name, gradient in case.gradients().items():
        assert_same_bits(gradient, other.gradients()[name])


@for_each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("bias_kind", ["none", "row", "all"])
def test_dtypes(backend: str, dtype: torch.dtype, bias_kind: str) -> None:
    """Values in float32 (float64), gradients rounded once to the dtype of their input."""
    case = make_case(40, 30, bias_kind=bias_kind, dtype=dtype)
    log_probs = run(case, backend, chunk_size=7)
    assert log_probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    preference(log_probs).backward()
    expected, gradients = oracle(case)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    assert_close(log_probs, expected, tolerance)
    for name, gradient in case.gradients().items():
        assert gradient is not None and gradient.dtype == dtype
        # the sigmoid magnifies the rounding of the sum of log-probabilities
        assert_close(gradient, gradients[name], max(20 * tolerance, torch.finfo(dtype).eps))


@for_each_backend
def test_float16_gradients_with_a_loss_scale(backend: str) -> None:
    """Gradients of 1e-9 vanish in float16, times a loss scale of 2^16 they do not."""
    case = make_case(8, dtype=torch.float16, ignored=0.0)
    (run(case, backend).sum() * 1e-8 * 2.0**16).backward()
    exact = make_case(8, dtype=torch.float16, ignored=0.0)
    exact.tensors = {n: t.detach().double().requires_grad_() for n, t in exact.tensors.items()}
    (run(exact, "reference").sum() * 1e-8 * 2.0**16).backward()
    for name, gradient in case.gradients().items():
        reference = exact.gradients()[name]
        assert reference is not None
        assert relative_error(gradient, reference) <= 1e-3


@for_each_backend
@pytest.mark.parametrize("trained", [c for n in range(6) for c in itertools.combinations(PARTS, n)])
def test_any_part_may_be_frozen(backend: str, trained: tuple[str, ...]) -> None:
    """Frozen head, frozen trunk, and every other subset."""
    case = make_case(bias_kind="all", softcap=2.0)
    _, gradients = oracle(case)
    for name, tensor in case.tensors.items():
        tensor.requires_grad_(name in trained)
    log_probs = run(case, backend, chunk_size=5)
    assert log_probs.requires_grad == bool(trained)
    if trained:
        preference(log_probs).backward()
    for name, gradient in case.gradients().items():
        if name in trained:
            assert_close(gradient, gradients[name], TOLERANCE)
        else:
            assert gradient is None


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 19, 100, None])
def test_chunk_size_does_not_matter(chunk_size: int | None) -> None:
    case = make_case(bias_kind="all", softcap=3.0)
    log_probs = run(case, "chunked", chunk_size=chunk_size)
    preference(log_probs).backward()
    assert_matches_oracle(case, log_probs)


# ---------------------------------------------------------------------------------------------------------
# Rows that are left out


@for_each_backend
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("bias_kind", ["row", "all"])
def test_a33_ignored_rows_reach_nothing(backend: str, poison: float, bias_kind: str) -> None:
    """Neither what an ignored row holds, nor the gradient that comes in for it."""
    clean = make_case(bias_kind=bias_kind)
    ignored = clean.targets == -100
    poisoned = clean.copy()
    with torch.no_grad():
        for tensor in poisoned.tensors.values():
            if tensor.shape[0] == len(ignored):
                tensor[ignored] = poison
    upstream = torch.linspace(-1, 2, len(ignored), dtype=torch.float64)
    expected, log_probs = (run(case, backend, chunk_size=4) for case in (clean, poisoned))
    expected.backward(upstream)
    log_probs.backward(upstream.masked_fill(ignored, poison))
    assert_same_bits(log_probs, expected)
    assert (log_probs[ignored] == 0).all() and not log_probs[ignored].signbit().any()
    for name, gradient in poisoned.gradients().items():
        assert_same_bits(gradient, clean.gradients()[name])
        if gradient is not None and gradient.shape[0] == len(ignored):
            assert (gradient[ignored] == 0).all()


@for_each_backend
def test_a33_nan_in_a_row_with_a_target_shows(backend: str) -> None:
    case = make_case(ignored=0.0)
    with torch.no_grad():
        case.tensors["hidden"][3] = math.nan
    log_probs = run(case, backend, chunk_size=4)
    assert log_probs.isnan().nonzero().tolist() == [[3]]
    clean = make_case(ignored=0.0)
    upstream = torch.ones(19, dtype=torch.float64)
    upstream[3] = math.nan
    run(clean, backend, chunk_size=4).backward(upstream)
    assert clean.tensors["hidden"].grad is not None
    assert clean.tensors["hidden"].grad.isnan().any(-1).nonzero().tolist() == [[3]]


@for_each_backend
@pytest.mark.parametrize("num_rows", [0, 1, 6])
@pytest.mark.parametrize("bias_kind", ["none", "row", "all"])
def test_a30_no_valid_target(backend: str, num_rows: int, bias_kind: str) -> None:
    """Zeros in the graph; gradients are zeros, not None and not NaN, whatever comes in."""
    case = make_case(num_rows, bias_kind=bias_kind, ignored=1.0)
    log_probs = run(case, backend)
    assert log_probs.requires_grad and log_probs.shape == (num_rows,) and not log_probs.any()
    log_probs.backward(torch.full((num_rows,), 3.0, dtype=torch.float64))
    for name, gradient in case.gradients().items():
        assert gradient is not None and gradient.shape == case.tensors[name].shape
        assert not gradient.any()


@for_each_backend
@pytest.mark.parametrize("valid", [[0], [18], [4, 5, 6], list(range(19))])
def test_one_few_and_all_rows_valid(backend: str, valid: list[int]) -> None:
    case = make_case(ignored=0.0, bias_kind="all")
    case.targets = torch.full_like(case.targets, -100).index_copy(0, torch.tensor(valid), case.targets[valid])
    log_probs = run(case, backend, chunk_size=2)
    preference(log_probs).backward()
    assert_matches_oracle(case, log_probs)


@for_each_backend
def test_ignore_index_may_be_a_class(backend: str) -> None:
    case = make_case(ignored=0.0)
    other = case.copy(targets=case.targets.masked_fill(case.targets == 3, -100))
    assert (case.targets == 3).any()
    assert_same_bits(run(case, backend, ignore_index=3), run(other, backend))


@for_each_backend
def test_target_outside_the_vocabulary_is_an_error(backend: str) -> None:
    case = make_case()
    case.targets[5] = 13
    with pytest.raises(ValueError, match=r"\[0, 13\).*got 13"):
        run(case, backend)


# ---------------------------------------------------------------------------------------------------------
# Properties


@st.composite
def small_cases(draw: Callable[..., Any]) -> Case:
    case = make_case(
        draw(st.integers(0, 12)),
        draw(st.integers(1, 9)),
        width=draw(st.integers(1, 5)),
        bias_kind=draw(st.sampled_from(BIAS_KINDS)),
        ignored=draw(st.sampled_from([0.0, 0.5, 1.0])),
        seed=draw(st.integers(0, 10**6)),
        **draw(st.sampled_from(list(OPTIONS.values()))),
    )
    case.options["chunk_size"] = draw(st.sampled_from([None, 1, 2, 5, 100]))
    return case


def backward(case: Case, backend: str) -> Tensor:
    """Runs it with the case's token weights as the incoming gradients."""
    log_probs = run(case, backend)
    log_probs.backward(case.token_weights)
    return log_probs.detach()


@for_each_backend
@given(case=small_cases(), seed=st.integers(0, 1000))
def test_row_order_does_not_matter(backend: str, case: Case, seed: int) -> None:
    order = torch.randperm(len(case.targets), generator=torch.Generator().manual_seed(seed))
    shuffled = per_row(case, order)
    assert_close(backward(shuffled, backend), backward(case, backend)[order])
    for name, gradient in shuffled.gradients().items():
        reference = case.gradients()[name]
        assert reference is not None
        assert_close(gradient, reference[order] if is_per_row(name, reference) else reference, TOLERANCE)


@for_each_backend
@given(case=small_cases(), data=st.data())
def test_splitting_the_rows_does_not_matter(backend: str, case: Case, data: st.DataObject) -> None:
    num_rows = len(case.targets)
    cut = data.draw(st.integers(0, num_rows))
    parts = [per_row(case, torch.arange(cut)), per_row(case, torch.arange(cut, num_rows))]
    assert_close(torch.cat([backward(part, backend) for part in parts]), backward(case, backend))
    for name, reference in case.gradients().items():
        first, second = (part.gradients()[name] for part in parts)
        assert reference is not None and first is not None and second is not None
        joined = torch.cat([first, second]) if is_per_row(name, reference) else first + second
        assert_close(joined, reference, TOLERANCE)


@for_each_backend
@given(case=small_cases())
def test_ignored_rows_do_not_matter(backend: str, case: Case) -> None:
    kept = (case.targets != -100).nonzero().squeeze(1)
    without = per_row(case, kept)
    assert_close(backward(case, backend)[kept], backward(without, backend))
    for name, gradient in case.gradients().items():
        reference = without.gradients()[name]
        assert gradient is not None and reference is not None
        assert_close(gradient[kept] if is_per_row(name, gradient) else gradient, reference, TOLERANCE)


@given(case=small_cases())
def test_backends_agree(case: Case) -> None:
    other = case.copy()
    assert_close(backward(case, "chunked"), backward(other, "reference"))
    for name, gradient in case.gradients().items():
        expected = other.gradients()[name]
        assert expected is not None
        assert_close(gradient, expected, TOLERANCE)


# ---------------------------------------------------------------------------------------------------------
# The graph around it


@for_each_backend
def test_backward_again_through_a_kept_graph(backend: str) -> None:
    """Each time with another incoming gradient, and each time right."""
    case = make_case(bias_kind="all")
    log_probs = run(case, backend, chunk_size=4)
    upstream = torch.linspace(-1, 2, 19, dtype=torch.float64)
    log_probs.backward(upstream, retain_graph=True)
    once = {name: gradient.clone() for name, gradient in case.gradients().items() if gradient is not None}
    log_probs.backward(-3 * upstream, retain_graph=True)
    log_probs.backward(torch.zeros_like(upstream))
    for name, gradient in case.gradients().items():
        assert_close(gradient, -2 * once[name])


@for_each_backend
@for_each_option
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant", "offload"])
def test_bits_do_not_depend_on_recomputation_or_offloading(
    backend: str, options: dict[str, Any], dtype: torch.dtype, mode: str
) -> None:
    plain = make_case(bias_kind="all", dtype=dtype, **options)
    other = plain.copy()
    expected = run(plain, backend, chunk_size=4)
    preference(expected).backward()

    def function(hidden: Tensor, weight: Tensor) -> Tensor:
        tensors = other.tensors | {"hidden": hidden, "weight": weight}
        return log_probs_of(tensors, other.targets, backend, chunk_size=4, **options)

    hidden, weight = other.tensors["hidden"], other.tensors["weight"]
    if mode == "offload":
        with torch.autograd.graph.save_on_cpu():
            log_probs = function(hidden, weight)
    else:
        log_probs = checkpoint(function, hidden, weight, use_reentrant=mode == "reentrant")
    preference(log_probs).backward()
    assert_same_bits(log_probs, expected)
    for name, gradient in other.gradients().items():
        assert_same_bits(gradient, plain.gradients()[name])


def test_everything_that_is_kept_passes_through_the_hooks_of_saved_tensors() -> None:
    """What a hook replaces is what backward uses: nothing else is alive in between."""
    case = make_case(bias_kind="all")
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor * 0 if tensor.is_floating_point() else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        log_probs = run(case, "chunked", chunk_size=4)
    assert len(seen) == 6  # five inputs and the targets
    log_probs.sum().backward()
    zeros = make_case(bias_kind="all")
    with torch.no_grad():
        for tensor in zeros.tensors.values():
            tensor.zero_()
    run(zeros, "chunked", chunk_size=4).sum().backward()
    for name, gradient in case.gradients().items():
        assert_same_bits(gradient, zeros.gradients()[name])


def test_a_weight_changed_before_backward_is_an_error() -> None:
    case = make_case()
    log_probs = run(case, "chunked")
    with torch.no_grad():
        case.tensors["weight"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


def test_second_derivatives_are_refused() -> None:
    case = make_case()
    loss = run(case, "chunked").square().sum()
    (gradient,) = torch.autograd.grad(loss, case.tensors["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@for_each_backend
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_the_same_bits_without_gradients(backend: str, off: Callable[[], Any]) -> None:
    case = make_case(bias_kind="all", dtype=torch.float32, softcap=2.0)
    with off():
        log_probs = run(case, backend, chunk_size=4)
    assert not log_probs.requires_grad
    assert_same_bits(log_probs, run(case, backend, chunk_size=4))


@for_each_backend
def test_autocast_does_not_reach_the_statistics(backend: str) -> None:
    case = make_case(30, 20, bias_kind="all", dtype=torch.float32)
    plain = case.copy()
    preference(run(plain, backend)).backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = preference(run(case, backend))
    loss.backward()
    for name, gradient in case.gradients().items():
        assert_same_bits(gradient, plain.gradients()[name])


@for_each_backend
def test_a_tied_weight_collects_both_gradients(backend: str) -> None:
    weight = torch.randn(11, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids, targets = torch.tensor([1, 2, 3, 1]), torch.tensor([2, 3, 1, -100])

    def gradient(chosen: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        leaf = weight.clone().requires_grad_()
        preference(chosen(leaf[ids].tanh(), leaf)).backward()
        assert leaf.grad is not None
        return leaf.grad

    def plain(hidden: Tensor, head: Tensor) -> Tensor:
        log_probs = (hidden @ head.T).log_softmax(-1).gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
        return log_probs * torch.tensor([1, 1, 1, 0])

    assert_close(gradient(lambda h, w: linear_log_probs(h, w, targets, backend=backend)), gradient(plain))


# Tracing looks at the class of the function in a way that torch itself warns about.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("bias_kind", ["none", "row", "all"])
def test_compiled_without_a_graph_break_gives_the_same_bits(bias_kind: str) -> None:
    case = make_case(bias_kind=bias_kind, dtype=torch.float32, softcap=3.0)
    names = list(case.tensors)

    def function(*tensors: Tensor) -> Tensor:
        named = dict(zip(names, tensors, strict=True))
        return log_probs_of(named, case.targets, "auto", chunk_size=5, softcap=3.0)

    results = []
    for called in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        log_probs = called(*case.tensors.values())
        results.append([log_probs, *torch.autograd.grad(preference(log_probs), list(case.tensors.values()))])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


# ---------------------------------------------------------------------------------------------------------
# Forms of the inputs


@for_each_backend
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_memory_layouts(backend: str, layout: str) -> None:
    """Gradients reach the tensors behind a non-contiguous hidden and weight."""
    case = make_case(12, 11, width=6, ignored=0.2)
    if layout == "expanded":
        with torch.no_grad():
            for tensor in case.tensors.values():
                tensor.copy_(tensor[:1].expand_as(tensor).clone())

    def view(base: Tensor) -> Tensor:
        if layout == "transposed":
            return base.T.contiguous().T
        if layout == "strided":
            return torch.stack([base, base + 1], -1)[..., 0]
        return base[:1].expand_as(base)

    views = {name: view(tensor) for name, tensor in case.tensors.items()}
    log_probs = log_probs_of(views, case.targets, backend, chunk_size=5)
    preference(log_probs).backward()
    expected, gradients = oracle(case)
    assert_close(log_probs, expected, TOLERANCE)
    for name, gradient in case.gradients().items():
        reference = gradients[name]
        if layout == "expanded":
            reference = torch.zeros_like(reference).index_fill_(0, torch.tensor([0]), 1) * reference.sum(0)
        assert_close(gradient, reference, TOLERANCE)


@for_each_backend
def test_leading_dimensions(backend: str) -> None:
    flat = make_case(12, bias_kind="row", ignored=0.2)
    log_probs = run(flat, backend)
    preference(log_probs).backward()
    deep = flat.copy()
    tensors = {n: t if n == "weight" else t.unflatten(0, (3, 4)) for n, t in deep.tensors.items()}
    result = log_probs_of(tensors, deep.targets.view(3, 4), backend)
    assert result.shape == (3, 4)
    preference(result.flatten()).backward()
    assert_same_bits(result.flatten(), log_probs)
    for name, gradient in deep.gradients().items():
        assert_same_bits(gradient, flat.gradients()[name])
    one = linear_log_probs(tensors["hidden"][0, 0], flat.tensors["weight"], torch.tensor(3), backend=backend)
    assert one.shape == ()


@for_each_backend
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_narrow_integer_targets(backend: str, dtype: torch.dtype) -> None:
    case = make_case()
    assert_same_bits(run(case.copy(targets=case.targets.to(dtype)), backend), run(case, backend))


@for_each_backend
@pytest.mark.parametrize("num_rows, vocabulary", [(1, 2), (1, 1), (5, 1), (2, 131072)])
def test_extreme_shapes(backend: str, num_rows: int, vocabulary: int) -> None:
    case = make_case(num_rows, vocabulary, width=3, ignored=0.0)
    log_probs = run(case, backend)
    preference(log_probs).backward()
    assert_matches_oracle(case, log_probs, 1e-10)


# ---------------------------------------------------------------------------------------------------------
# Numbers


@for_each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_logits(backend: str, dtype: torch.dtype) -> None:
    """Logits of 1e4: the log-probability of a far class is -1e4, not -infinity."""
    hidden = torch.tensor([[1e4], [1e4], [1e4]], dtype=dtype, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], dtype=dtype, requires_grad=True)
    log_probs = linear_log_probs(hidden, weight, torch.tensor([0, 1, 2]), backend=backend)
    log_probs.sum().backward()
    top = hidden.detach()[0, 0].float()
    assert_close(log_probs, torch.stack([0 * top, -top, -2 * top]), 1e-6)
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.flatten().tolist() == [0.0, -1.0, -2.0]


@for_each_backend
def test_a_common_offset_does_not_cancel(backend: str) -> None:
    weight = torch.tensor([[1e4], [1e4 - 7.0]])
    log_probs = linear_log_probs(torch.ones(1, 1), weight, torch.tensor([0]), backend=backend)
    assert_close(log_probs, torch.tensor([-math.log1p(math.exp(-7.0))]), 2e-4)


@for_each_backend
def test_a_removed_target_has_no_probability(backend: str) -> None:
    bias = torch.tensor([0.0, -math.inf])
    hidden = torch.ones(2, 1, requires_grad=True)
    log_probs = linear_log_probs(hidden, torch.ones(2, 1), torch.tensor([0, 1]), bias=bias, backend=backend)
    assert log_probs.tolist() == [0.0, -math.inf]
    log_probs[0].backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


# ---------------------------------------------------------------------------------------------------------
# Cases


@for_each_backend
def test_a44_nothing_is_shifted_here(backend: str) -> None:
    """Targets made once within the document: no wrapped token enters the sum of an answer."""
    log_p = torch.tensor([-0.5, -1.5, -7.0], dtype=torch.float64)
    logits = torch.stack([log_p, (-log_p.expm1()).log()], 1)
    targets = torch.tensor([0, 0, -100])
    log_probs = linear_log_probs(logits, torch.eye(2, dtype=torch.float64), targets, backend=backend)
    assert float(log_probs.sum()) == pytest.approx(-2.0, abs=1e-12)


@for_each_backend
def test_a70_each_row_has_its_own_upstream_gradient(backend: str) -> None:
    weight = torch.zeros(2, 1, requires_grad=True)
    arguments = (torch.ones(3, 1), weight, torch.tensor([0, 1, 0]))
    linear_log_probs(*arguments, backend=backend).backward(-torch.tensor([0.0, 1.0, 2.0]))
    assert weight.grad is not None and weight.grad.flatten().tolist() == pytest.approx([-0.5, 0.5])
    with torch.no_grad():
        evaluated = linear_log_probs(*arguments, backend=backend)
    assert evaluated.tolist() == pytest.approx([-math.log(2)] * 3)


@for_each_backend
@pytest.mark.parametrize("frozen_base", [False, True])
@pytest.mark.parametrize("form", ["merged", "factors"])
def test_a71_an_adapter_on_the_head_counts_and_trains(backend: str, frozen_base: bool, form: str) -> None:
    base = torch.zeros(2, 1, requires_grad=not frozen_base)
    up = torch.tensor([[math.log(3)], [0.0]], requires_grad=True)
    down = torch.ones(1, 1, requires_grad=True)
    hidden, targets = torch.ones(1, 1), torch.tensor([0])
    bias = torch.zeros(2, requires_grad=True)
    head = base + up @ down if form == "merged" else base
    factors = (hidden @ down.T, up) if form == "factors" else None
    log_probs = linear_log_probs(hidden, head, targets, bias=bias, bias_factors=factors, backend=backend)
    log_probs.sum().backward()
    assert float(log_probs.detach()) == pytest.approx(-0.287682, abs=1e-6)
    for trained in (up, down, bias):
        assert trained.grad is not None and trained.grad.abs().max() > 0.1
    assert (base.grad is None) == frozen_base


@for_each_backend
@pytest.mark.parametrize(
    "options, expected", [({"logit_scale": 0.5}, -0.126928), ({"softcap": 2.0}, -0.135781)]
)
def test_a72_scale_and_cap(backend: str, options: dict[str, float], expected: float) -> None:
    hidden = torch.tensor([[4.0, 0.0]])
    log_probs = linear_log_probs(hidden, torch.eye(2), torch.tensor([0]), backend=backend, **options)
    assert float(log_probs) == pytest.approx(expected, abs=1e-6)


@for_each_backend
@pytest.mark.parametrize("chunk_size", [1, 64])
def test_a75_a_bfloat16_model_sums_in_float32(backend: str, chunk_size: int) -> None:
    """The head gradient over 512 equal tokens is 512 times that of one; bfloat16 stops at 256."""
    hidden = torch.full((512, 1), 1.0, dtype=torch.bfloat16)
    weight = torch.tensor([[0.0], [0.540625]], dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(512, dtype=torch.int64)
    log_probs = linear_log_probs(hidden, weight, targets, chunk_size=chunk_size, backend=backend)
    (-log_probs).sum().backward()
    cost = -float(log_probs.detach()[0])
    assert float(-log_probs.detach().sum()) == pytest.approx(512 * cost, rel=1e-6)
    assert weight.grad is not None
    assert float(weight.grad[1]) == pytest.approx(512 * (1 - math.exp(-cost)), rel=4e-3)


# ---------------------------------------------------------------------------------------------------------
# Work and memory


@pytest.mark.parametrize(
    "trained, products_per_chunk", [("hidden weight", 4), ("hidden", 3), ("weight", 3), ("", 1)]
)
def test_four_products_and_none_for_a_frozen_part(trained: str, products_per_chunk: int) -> None:
    hidden = torch.randn(12, 8, requires_grad="hidden" in trained)
    weight = torch.randn(9, 8, requires_grad="weight" in trained)
    with Recorder() as record:
        log_probs = linear_log_probs(hidden, weight, torch.arange(12) % 9, chunk_size=4)
        if trained:
            log_probs.sum().backward()
    assert record.count(*PRODUCTS) == 3 * products_per_chunk


def test_never_more_logits_than_a_chunk() -> None:
    """Neither in forward nor in backward, however many rows there are; ignored rows take no place."""
    case = make_case(200, 1000, width=4, ignored=0.2, bias_kind="class", softcap=3.0)
    with LargestTensor() as watched:
        preference(run(case, "chunked", chunk_size=10)).backward()
    assert watched.largest == 10 * 1000 * 8
    with LargestTensor() as watched:
        preference(run(case, "reference")).backward()
    assert watched.largest > 100 * 1000 * 8, "the watch sees whole logits where there are some"


@pytest.mark.parametrize("bias_kind", ["row", "all"])
def test_the_host_never_waits_on_a_device(monkeypatch: pytest.MonkeyPatch, bias_kind: str) -> None:
    """There all rows keep their place, and nothing is read: neither in forward nor in backward."""
    case = make_case(bias_kind=bias_kind, softcap=3.0)

    def as_on_a_device(*args: Any, compact: bool, **kwargs: Any) -> Any:
        return compute_in_chunks(*args, compact=False, **kwargs)

    monkeypatch.setattr(chunked, "compute_in_chunks", as_on_a_device)
    with Recorder() as record:
        log_probs = run(case, "chunked", chunk_size=4)
        preference(log_probs).backward()
    assert record.count(*SYNCHRONISING) == 0 and record.count(*PRODUCTS) > 0
    assert_matches_oracle(case, log_probs)


# ---------------------------------------------------------------------------------------------------------
# A vocabulary that is spread over ranks


def run_local(local: Case, **overrides: Any) -> Tensor:
    return run(local, "auto", vocab_group=dist.group.WORLD, **overrides)


@pytest.mark.parametrize("ranks", [2, 3])
def test_slices_of_the_vocabulary_match_full_logits(ranks: int) -> None:
    """Values and the gradients of hidden and a are whole on every rank, to the same bits."""

    def body() -> None:
        for number, (options, bias_kind) in enumerate(itertools.product(OPTIONS.values(), BIAS_KINDS)):
            case = make_case(bias_kind=bias_kind, **options)
            sizes = SLICES[ranks][number % len(SLICES[ranks])]
            local = local_case(case, sizes)
            log_probs = run_local(local, chunk_size=(None, 5, 1)[number % 3])
            preference(log_probs).backward()
            expected, gradients = oracle(case)
            assert_close(log_probs, expected, TOLERANCE)
            for name, gradient in local.gradients().items():
                assert_close(gradient, expected_part(name, gradients[name], sizes), TOLERANCE)
            for values in (log_probs.detach(), local.tensors["hidden"].grad):
                copies = [torch.empty_like(values) for _ in range(ranks)]
                dist.all_gather(copies, values.contiguous())
                for copy in copies:
                    assert_same_bits(copy, values)

    run_on_ranks(ranks, body)


@on_ranks(2)
def test_as_many_collectives_whatever_the_targets() -> None:
    for ignored in (0.0, 0.6, 1.0):
        local = local_case(make_case(20, ignored=ignored, bias_kind="all"), [7, 6])
        with CommDebugMode() as communication:
            log_probs = run_local(local, chunk_size=8)
        assert communication.get_total_counts() == 1 + 2 * 3  # sizes; a MAX and a SUM per chunk
        with CommDebugMode() as communication:
            log_probs.sum().backward()
        assert communication.get_total_counts() == 2 * 3 + 1  # and one for hidden and a


@on_ranks(2)
def test_slices_under_recomputation() -> None:
    case = make_case(bias_kind="all")
    plain, recomputed = local_case(case, [7, 6]), local_case(case, [7, 6])
    preference(run_local(plain)).backward()

    def function(hidden: Tensor) -> Tensor:
        recomputed.tensors["hidden"] = hidden
        return run_local(recomputed)

    hidden = recomputed.tensors["hidden"]
    preference(checkpoint(function, hidden, use_reentrant=False)).backward()
    assert_same_bits(hidden.grad, plain.tensors["hidden"].grad)
    assert_same_bits(recomputed.tensors["weight"].grad, plain.tensors["weight"].grad)


@on_ranks(2)
def test_the_reference_takes_no_group() -> None:
    local = local_case(make_case(), [7, 6])
    with pytest.raises(ValueError, match="'reference' needs the logits of the whole vocabulary"):
        run(local, "reference", vocab_group=dist.group.WORLD)


# ---------------------------------------------------------------------------------------------------------
# Errors, and that the checks can fail


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"backend": "tritn"}, ValueError, "auto, reference, chunked.*'tritn'"),
        ({"vocab_group": object()}, TypeError, "vocab_group must be a ProcessGroup .* got object"),
        ({"chunk_size": 0}, ValueError, "chunk_size.*got 0"),
        ({"softcap": 0.0}, ValueError, "softcap.*got 0.0"),
        ({"targets": torch.zeros(5, dtype=torch.int64)}, ValueError, r"targets.*\[4\].*\[5\]"),
        ({"weight": torch.ones(5, 3)}, ValueError, r"\[4, 2\] and \[5, 3\]"),
        ({"bias": torch.ones(4)}, ValueError, r"bias.*\[5\].*\[4\]"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"hidden": torch.ones(4, 2), "weight": torch.ones(5, 2), "targets": torch.zeros(4).long()}
    with pytest.raises(error, match=message):
        linear_log_probs(**{**arguments, **change})


def test_mutants_are_caught() -> None:
    """A weight gradient from the first row's incoming gradient alone, and one scaled by their mean."""
    case = make_case(ignored=0.0)
    _, gradients = oracle(case)
    values, _ = oracle(case)
    leaf = values.clone().requires_grad_()
    preference(leaf).backward()
    assert leaf.grad is not None
    for wrong in (leaf.grad[:1].expand(19), leaf.grad.mean().expand(19)):
        mutant = case.copy(token_weights=-wrong.contiguous())
        mutant.run("chunked").loss.backward()
        with pytest.raises(AssertionError, match="off by"):
            assert_close(mutant.tensors["weight"].grad, gradients["weight"], 1e-3)


def test_a_preference_loss_through_the_cross_entropy_is_the_same() -> None:
    """With the gradients known, `linear_cross_entropy` with these token weights trains the same."""
    case = make_case(bias_kind="all")
    other = case.copy()
    log_probs = run(case, "chunked")
    log_probs.retain_grad()
    preference(log_probs).backward()
    assert log_probs.grad is not None
    linear_cross_entropy(
        other.tensors["hidden"],
        other.tensors["weight"],
        other.targets,
        token_weights=-log_probs.grad,
        bias=other.tensors["bias"],
        bias_factors=(other.tensors["a"], other.tensors["b"]),
    ).loss.backward()
    for name, gradient in case.gradients().items():
        assert_same_bits(gradient, other.gradients()[name])
