"""How the chunked backend works: products, memory, host synchronisation, precision across chunks."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isoloss.losses.linear_cross_entropy import chunk_rows, linear_cross_entropy, row_losses
from isoloss.losses.linear_cross_entropy.chunked import Needs, compute_in_chunks
from isoloss.losses.linear_cross_entropy.problem import Problem, build_problem

PRODUCTS = ("mm", "addmm", "addmm_")
# What makes the host wait on a device: sizes or values that only the device knows.
SYNCHRONISING = ("nonzero", "_local_scalar_dense", "masked_select", "unique", "is_nonzero", "equal")
OPTIONS = {"softcap": 3.0, "logit_scale": 1.7, "label_smoothing": 0.2, "z_loss": 0.01}


class Recorder(TorchDispatchMode):
    """Names of the operators that ran, and the number of elements of the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.names.append(name)
        if isinstance(out, Tensor) and not func.is_view and name != "detach":
            self.largest = max(self.largest, out.numel())
        return out

    def count(self, *names: str) -> int:
        return sum(name in names for name in self.names)


def make_problem(
    num_rows: int = 23, *, dtype: torch.dtype = torch.float64, bias_kind: str = "none", **options: Any
) -> Problem:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    targets = torch.randint(17, (num_rows,), generator=generator)
    targets[::3] = -100
    defaults = {"softcap": None, "logit_scale": 1.0, "label_smoothing": 0.0, "z_loss": 0.0}
    return build_problem(
        draw(num_rows, 8),
        draw(17, 8),
        targets,
        token_weights=torch.rand(num_rows, generator=generator, dtype=torch.float64),
        bias={"row": draw(num_rows, 17), "class": draw(17)}.get(bias_kind),
        bias_factors=(draw(num_rows, 2), draw(17, 2)) if bias_kind == "factors" else None,
        ignore_index=-100,
        chunk_size=5,
        **{**defaults, **options},
    )


ALL = Needs(True, True, True, True, True)


# ---------------------------------------------------------------------------------------------------------
# Chunk size


@pytest.mark.parametrize(
    "num_rows, hidden_size, chunk_size, expected",
    [
        (0, 512, None, 1),
        (1, 512, None, 1),
        (2048, 512, None, 512),
        (2049, 512, None, 513),
        (700, 512, None, 700),
        (800, 512, None, 400),
        (2048, 16, None, 256),
        (2048, 256, None, 256),
        (2048, 384, None, 410),
        (4096, 576, None, 586),
        (8192, 4096, None, 1024),
        (2048, 512, 100, 100),
        (7, 512, 100, 7),
    ],
)
def test_chunk_rows(num_rows: int, hidden_size: int, chunk_size: int | None, expected: int) -> None:
    assert chunk_rows(num_rows, hidden_size, chunk_size) == expected


@given(num_rows=st.integers(1, 10**6), hidden_size=st.integers(1, 10**5))
def test_chunks_are_equal_and_bounded(num_rows: int, hidden_size: int) -> None:
    chunk = chunk_rows(num_rows, hidden_size)
    num_chunks = -(-num_rows // chunk)
    assert min(num_rows, 171) <= chunk <= min(num_rows, 1536)
    assert num_chunks * chunk - num_rows < num_chunks  # the last chunk lacks less than a row for each chunk


# ---------------------------------------------------------------------------------------------------------
# Products, memory, backward


@pytest.mark.parametrize(
    "trained, products_per_chunk", [("hidden weight", 3), ("hidden", 2), ("weight", 2), ("", 1)]
)
def test_one_projection_and_no_wasted_product(trained: str, products_per_chunk: int) -> None:
    """Row 12: per-token losses cost no second projection; a frozen part costs no product."""
    hidden = torch.randn(12, 8, requires_grad="hidden" in trained)
    weight = torch.randn(9, 8, requires_grad="weight" in trained)
    with Recorder() as record:
        output = linear_cross_entropy(hidden, weight, torch.arange(12) % 9, chunk_size=4)
        if trained:
            output.loss.backward()
    assert record.count(*PRODUCTS) == 3 * products_per_chunk


def test_no_gradient_is_made_without_grad_mode() -> None:
    weight = torch.randn(9, 8, requires_grad=True)
    with torch.no_grad(), Recorder() as record:
        linear_cross_entropy(torch.randn(12, 8), weight, torch.arange(12) % 9, chunk_size=12)
    assert record.count(*PRODUCTS) == 1


def test_ignored_rows_are_left_out_of_the_products() -> None:
    hidden, weight = torch.randn(100, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    targets = torch.full((100,), -100)
    targets[::20] = 3
    with Recorder() as record:
        linear_cross_entropy(hidden, weight, targets).loss.backward()
    assert record.count(*PRODUCTS) == 3
    assert record.largest <= max(hidden.numel(), weight.numel())  # never [100, 50]


@pytest.mark.parametrize("bias_kind", ["none", "row", "class", "factors"])
def test_never_more_logits_than_a_chunk(bias_kind: str) -> None:
    """However many rows there are; a bias per row has a gradient of its own size."""
    problem = make_problem(200, bias_kind=bias_kind, **OPTIONS)
    with Recorder() as record:
        compute_in_chunks(problem, ALL, compact=True, product_dtype=torch.float64)
    own = [problem.hidden, problem.weight] + ([] if problem.bias is None else [problem.bias])
    assert record.largest <= max(5 * 17, *(tensor.numel() for tensor in own))


def test_backward_adds_no_pass_over_the_head() -> None:
    """With an incoming gradient of 1, what forward saved becomes `.grad` itself."""
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.arange(4)).loss
    with Recorder() as record:
        loss.backward()
    assert record.largest <= hidden.numel()
    doubled = linear_cross_entropy(hidden, weight, torch.arange(4)).loss * 2
    with Recorder() as record:
        doubled.backward()
    assert record.largest == weight.numel()


def test_second_derivatives_are_refused() -> None:
    hidden = torch.randn(4, 8, requires_grad=True)
    loss = linear_cross_entropy(hidden, torch.randn(5, 8), torch.arange(4)).loss
    (gradient,) = torch.autograd.grad(loss * loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# ---------------------------------------------------------------------------------------------------------
# Devices: the same loop with the shapes of all rows


@pytest.mark.parametrize("bias_kind", ["none", "row", "class", "factors"])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
def test_static_shapes_give_the_same_result(bias_kind: str, options: dict[str, Any]) -> None:
    """And never wait for the device, and read nothing of an ignored row."""
    problem = make_problem(bias_kind=bias_kind, **options)
    expected = compute_in_chunks(problem, ALL, compact=True, product_dtype=torch.float64)
    ignored = problem.targets == -100
    problem.hidden[ignored] = torch.nan
    problem.token_weights[ignored] = torch.nan
    problem.targets[ignored] = -100
    if problem.bias is not None and problem.bias.ndim == 2:
        problem.bias[ignored] = torch.nan
    if problem.bias_factors is not None:
        problem.bias_factors[0][ignored] = torch.nan
    with Recorder() as record:
        result = compute_in_chunks(problem, ALL, compact=False, product_dtype=torch.float64)
    assert record.count(*SYNCHRONISING) == 0
    torch.testing.assert_close(result.loss, expected.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(result.token_losses, expected.token_losses, rtol=1e-12, atol=0)
    assert not result.token_losses[ignored].any()
    for gradient, reference in zip(result.gradients, expected.gradients, strict=True):
        assert (gradient is None) == (reference is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, reference, rtol=1e-11, atol=1e-13)


def test_static_shapes_without_targets() -> None:
    problem = make_problem(bias_kind="row")
    problem.targets.fill_(-100)
    problem.hidden.fill_(torch.nan)
    result = compute_in_chunks(problem, ALL, compact=False, product_dtype=torch.float64)
    assert result.loss == 0
    assert all(not gradient.any() for gradient in result.gradients if gradient is not None)


@pytest.mark.parametrize("bias_kind", ["none", "row", "class", "factors"])
@pytest.mark.parametrize("compact", [True, False])
def test_bfloat16_products(bias_kind: str, compact: bool) -> None:
    """Operands rounded to bfloat16, everything else in float32."""
    problem = make_problem(dtype=torch.bfloat16, bias_kind=bias_kind, **OPTIONS)
    expected = compute_in_chunks(problem, ALL, compact=True, product_dtype=torch.float32)
    result = compute_in_chunks(problem, ALL, compact=compact, product_dtype=torch.bfloat16)
    assert result.loss.dtype == torch.float32
    torch.testing.assert_close(result.loss, expected.loss, rtol=1e-2, atol=0)
    for gradient, reference in zip(result.gradients, expected.gradients, strict=True):
        if gradient is not None and reference is not None:
            assert (gradient - reference).abs().max() <= 2e-2 * reference.abs().max()


@pytest.mark.parametrize("logits_per_block", [1, 40, 10**6])
def test_cache_blocks_change_no_bit(monkeypatch: pytest.MonkeyPatch, logits_per_block: int) -> None:
    problem = make_problem(60, dtype=torch.float32, bias_kind="row", **OPTIONS)
    expected = compute_in_chunks(problem, ALL, compact=True, product_dtype=torch.float32)
    monkeypatch.setattr(row_losses, "_BLOCK_LOGITS_PER_THREAD", logits_per_block)
    result = compute_in_chunks(problem, ALL, compact=True, product_dtype=torch.float32)
    assert torch.equal(result.token_losses, expected.token_losses)
    for gradient, reference in zip(result.gradients, expected.gradients, strict=True):
        assert gradient is reference is None or torch.equal(gradient, reference)


# ---------------------------------------------------------------------------------------------------------
# Precision


def relative_error(value: Tensor | None, expected: Tensor) -> float:
    assert value is not None
    return float((value.double() - expected).norm() / expected.norm())


def test_weight_gradient_of_a_bfloat16_head_does_not_depend_on_the_number_of_chunks() -> None:
    """At 2, 16 and 128 chunks the error against float64 is eager float32's: that of one rounding."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, 16, generator=generator).bfloat16()
    weight = (torch.randn(100, 16, generator=generator) / 4).bfloat16()
    targets = (100 * torch.rand(512, generator=generator) ** 4).long()

    def head_gradient(loss: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        leaf = weight.to(dtype, copy=True).requires_grad_()
        loss(leaf).backward()
        assert leaf.grad is not None
        return leaf.grad

    exact = head_gradient(
        lambda w: F.cross_entropy(hidden.double() @ w.T, targets, reduction="sum"), torch.float64
    )
    eager = head_gradient(
        lambda w: F.cross_entropy(hidden.float() @ w.float().T, targets, reduction="sum"), torch.bfloat16
    )
    for num_chunks in (2, 16, 128):
        ours = head_gradient(
            lambda w, c=512 // num_chunks: linear_cross_entropy(hidden, w, targets, chunk_size=c).loss,
            torch.bfloat16,
        )
        assert relative_error(ours, exact) <= 1.02 * relative_error(eager, exact) <= 2e-3


def test_float16_gradients_wait_for_the_loss_scale() -> None:
    """Gradients of 1e-9 vanish in float16, times a loss scale of 2^16 they do not."""
    hidden = torch.randn(6, 8, dtype=torch.float16, requires_grad=True)
    weight = torch.randn(9, 8, dtype=torch.float16, requires_grad=True)
    weights = torch.full((6,), 1e-8)
    loss = linear_cross_entropy(hidden, weight, torch.arange(6), token_weights=weights).loss
    (loss * 2.0**16).backward()
    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    exact = F.cross_entropy(exact_hidden @ exact_weight.T, torch.arange(6), reduction="sum")
    (exact * 1e-8 * 2.0**16).backward()
    for ours, expected in ((hidden, exact_hidden), (weight, exact_weight)):
        assert expected.grad is not None
        assert relative_error(ours.grad, expected.grad) <= 1e-3


# ---------------------------------------------------------------------------------------------------------
# torch.compile


# Tracing looks at the class of the function in a way that torch itself warns about.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("bias_kind", ["none", "class", "row", "factors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_without_a_graph_break_gives_the_same_bits(bias_kind: str, dtype: torch.dtype) -> None:
    problem = make_problem(dtype=dtype, bias_kind=bias_kind)
    leaves = [problem.hidden, problem.weight, problem.bias, *(problem.bias_factors or (None, None))]
    leaves = [None if leaf is None else leaf.requires_grad_() for leaf in leaves]

    def run(hidden: Tensor, weight: Tensor, bias: Tensor | None, a: Any, b: Any) -> tuple[Tensor, Tensor]:
        output = linear_cross_entropy(
            hidden,
            weight,
            problem.targets,
            token_weights=problem.token_weights,
            bias=bias,
            bias_factors=None if a is None else (a, b),
            chunk_size=5,
            **OPTIONS,
        )
        return output.loss * 2, output.token_losses

    results = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        loss, token_losses = function(*leaves)
        present = [leaf for leaf in leaves if leaf is not None]
        results.append([loss, token_losses, *torch.autograd.grad(loss, present)])
        assert not token_losses.requires_grad
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a compiler"
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor.*")
@pytest.mark.parametrize("gradients", ["forward", "backward"])
def test_inductor_compiles_a_caller_without_a_graph_break(
    gradients: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trunk, head and what is made of the token losses in one graph, with other rows ignored in each call."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    generator = torch.Generator().manual_seed(0)
    x, trunk, head = (torch.randn(*shape, generator=generator) for shape in ((40, 8), (8, 8), (30, 8)))
    trunk.requires_grad_()
    head.requires_grad_()

    def step(x: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        output = linear_cross_entropy(
            torch.tanh(x @ trunk), head, targets, token_weights=weights, gradients=gradients, chunk_size=16
        )
        return output.loss * 2, output.token_losses.cumsum(0)

    compiled = torch.compile(step, fullgraph=True)
    for number in range(3):
        targets = torch.randint(30, (40,), generator=generator)
        targets[:: number + 2 if number < 2 else 1] = -100  # at last all of them
        weights = torch.rand(40, generator=generator)
        results = []
        for function in (step, compiled):
            loss, token_losses = function(x, targets, weights)
            results.append([loss, token_losses, *torch.autograd.grad(loss, (trunk, head))])
        for eager, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, eager, rtol=2e-6, atol=1e-6)
