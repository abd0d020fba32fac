"""What is special to the Triton kernel, under Triton's interpreter; test_triton.py runs this file.

Its own process starts with TRITON_INTERPRET=1. The interpreter cuts numbers where it converts to bfloat16; a
device rounds them. So errors of bfloat16 may be twice what they are there.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isoloss.losses.linear_cross_entropy import chunked, linear_cross_entropy, linear_log_probs
from isoloss.losses.linear_cross_entropy.chunked import Needs, compute_in_chunks
from isoloss.losses.linear_cross_entropy.problem import Problem, build_problem
from isoloss.losses.linear_cross_entropy.triton_kernels import (
    LaunchShape,
    compute_row_losses_by_triton_,
    is_interpreted,
    launch_shape,
    new_logits,
)
from losses.linear_cross_entropy.test_chunked import PRODUCTS, SYNCHRONISING, Recorder
from losses.linear_cross_entropy.test_contract import (
    Case,
    assert_close,
    assert_matches_oracle,
    assert_same_bits,
    make_case,
    oracle,
)

ALL = Needs(True, True, True, True, True)
OPTIONS = {"softcap": 3.0, "logit_scale": 1.7, "label_smoothing": 0.2, "z_loss": 0.01}


def problem_of(case: Case, chunk_size: int | None = None) -> Problem:
    options = {"softcap": None, "logit_scale": 1.0, "label_smoothing": 0.0, "z_loss": 0.0} | case.options
    tensors = {name: tensor.detach() for name, tensor in case.tensors.items()}
    return build_problem(
        tensors["hidden"],
        tensors["weight"],
        case.targets,
        token_weights=case.token_weights,
        bias=tensors.get("bias"),
        bias_factors=(tensors["a"], tensors["b"]) if "a" in tensors else None,
        ignore_index=-100,
        chunk_size=chunk_size,
        **options,
    )


def test_the_kernel_is_interpreted() -> None:
    assert is_interpreted()


# ---------------------------------------------------------------------------------------------------------
# Shapes


@pytest.mark.parametrize(
    "vocabulary, dtype",
    [(v, torch.float32) for v in (1, 2, 127, 128, 129, 4095, 4096, 4097, 131071)] + [(12289, torch.float64)],
)
def test_any_vocabulary(vocabulary: int, dtype: torch.dtype) -> None:
    """A part of a block, one, several, and a last of one class; targets in the first and the last class.

    The gradient of hidden is a sum over all classes by torch's product, rounded like that of eager.
    """
    case = make_case(3, vocabulary, width=3, ignored=0.0, dtype=dtype, bias_kind="class", **OPTIONS)
    case.targets[:3] = torch.tensor([0, vocabulary - 1, -100])
    eager = case.copy()
    eager.run("reference").loss.backward()
    output = case.run("triton")
    output.loss.backward()
    loss, losses, z_losses, gradients = oracle(case)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert_close(output.loss, loss, tolerance)
    assert_close(output.token_losses, losses, tolerance)
    assert_close(output.token_z_losses, z_losses, tolerance)
    for name, gradient in case.gradients().items():
        expected, by_eager = gradients[name], eager.gradients()[name]
        assert by_eager is not None
        error = float((by_eager.double() - expected).abs().max() / expected.abs().max())
        assert_close(gradient, expected, tolerance + 2 * error)


def test_what_lies_between_rows_plays_no_part() -> None:
    case = make_case(5, 131, dtype=torch.float32, bias_kind="class", **OPTIONS)
    problem, results = problem_of(case), []
    for rubbish in (0.0, math.nan, math.inf):
        logits = new_logits(problem.hidden, 5, 131, torch.float32)
        assert logits.stride() == (144, 1)
        logits.as_strided((5, 144), (144, 1)).fill_(rubbish)
        torch.mm(problem.hidden, problem.weight.T, out=logits)
        scale = torch.ones(5)
        row = compute_row_losses_by_triton_(
            logits, problem.targets, problem, bias=problem.bias, gradient_scale=scale, needs_gradient=True
        )
        results.append((row.losses, row.z_losses, logits))
    for result in results[1:]:
        for ours, expected in zip(result, results[0], strict=True):
            assert_same_bits(ours, expected)


def test_rows_beyond_the_reach_of_int32() -> None:
    """Row 1 starts 2^31 elements after row 0; memory that is not touched is not there."""
    stride = 2**31
    logits = torch.empty(stride + 4096, dtype=torch.bfloat16).as_strided((2, 8), (stride, 1))
    values = torch.randn(2, 8).bfloat16()
    logits.copy_(values)
    problem = problem_of(make_case(2, 8, ignored=0.0, dtype=torch.float32))
    row = compute_row_losses_by_triton_(
        logits, problem.targets, problem, bias=None, gradient_scale=torch.ones(2), needs_gradient=True
    )
    assert_close(row.losses, F.cross_entropy(values.float(), problem.targets, reduction="none"), 1e-6)
    expected = values.float().softmax(-1) - F.one_hot(problem.targets, 8)
    assert_close(logits, expected, 2**-7)


@pytest.mark.parametrize("layout", ["transposed", "expanded rows", "expanded classes"])
def test_a_bias_of_any_layout(layout: str) -> None:
    case = make_case(6, 11, bias_kind="row", ignored=0.3)
    bias = case.tensors["bias"].detach()
    if layout == "transposed":
        bias = bias.T.contiguous().T
    else:
        bias = (bias[:1] if layout == "expanded rows" else bias[:, :1]).expand(6, 11)
    case.tensors["bias"] = bias.requires_grad_()
    output = case.run("triton", chunk_size=4)
    output.loss.backward()
    assert_matches_oracle(case, output)


# ---------------------------------------------------------------------------------------------------------
# Numbers


@pytest.mark.parametrize("chunk_size", [6, 48])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "all"])
def test_bfloat16_products_err_no_more_than_eager(options: dict[str, Any], chunk_size: int) -> None:
    """As on a device: bfloat16 logits in the buffer, one rounding of their gradient, float32 statistics."""
    case = make_case(
        48,
        257,
        width=32,
        ignored=0.2,
        dtype=torch.bfloat16,
        bias_kind="class" if options else "none",
        **options,
    )
    with torch.no_grad():
        case.tensors["weight"].mul_(0.3)
    loss, losses, _, exact = oracle(case)
    result = compute_in_chunks(
        problem_of(case, chunk_size),
        ALL,
        compact=False,
        product_dtype=torch.bfloat16,
        kernels="triton",
    )
    assert result.loss.dtype == result.token_losses.dtype == torch.float32

    eager = case.copy()
    tensors, o = eager.tensors, {"softcap": None, "logit_scale": 1.0, "z_loss": 0.0} | options
    logits = F.linear(tensors["hidden"], tensors["weight"], tensors.get("bias")).float() * o["logit_scale"]
    if o["softcap"] is not None:
        logits = o["softcap"] * torch.tanh(logits / o["softcap"])
    eager_losses = F.cross_entropy(
        logits, case.targets, reduction="none", label_smoothing=options.get("label_smoothing", 0.0)
    )
    z_losses = o["z_loss"] * logits.logsumexp(-1).square() * (case.targets != -100)
    assert case.token_weights is not None
    (case.token_weights.float() * (eager_losses + z_losses)).sum().backward()

    def error(actual: Tensor | None, expected: Tensor) -> float:
        assert actual is not None
        return float((actual.detach().double() - expected).norm() / expected.norm())

    assert error(result.token_losses, losses) <= 2 * error(eager_losses, losses) + 1e-6
    assert error(result.loss, loss) <= 1e-3
    for name, ours in zip(("hidden", "weight", "bias"), result.gradients, strict=False):
        if name in exact:
            bound = 2 * error(eager.gradients()[name], exact[name])
            assert error(ours, exact[name]) <= bound, name


def test_float32_losses_do_not_cancel() -> None:
    """Losses of 1e-3 under offsets of 1e4, far classes, and a smoothed loss of both."""
    logits = torch.tensor([[1e4, 1e4 - 7], [-1e4, 1e4], [1e4, -math.inf]])
    targets = torch.tensor([0, 0, 0])
    output = linear_cross_entropy(torch.eye(3), logits.T.nan_to_num(neginf=0.0), targets, backend="triton")
    expected = [math.log1p(math.exp(-7)), 2e4]
    assert output.token_losses[:2].tolist() == pytest.approx(expected, rel=1e-4)
    bias = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, -math.inf]])
    removed = linear_cross_entropy(
        torch.eye(3), logits.T.nan_to_num(neginf=0.0), targets, bias=bias, backend="triton"
    )
    assert removed.token_losses[2] == 0.0


def test_removed_classes_fill_whole_blocks() -> None:
    """No class is left in the first block, nor in the third."""
    case = make_case(3, 3 * 4096, width=2, ignored=0.0, bias_kind="class")
    case.targets[:] = torch.tensor([4096, 5000, 8191])
    with torch.no_grad():
        case.tensors["bias"][:4096] = -math.inf
        case.tensors["bias"][8192:] = -math.inf
    output = case.run("triton")
    output.loss.backward()
    loss, losses, _, gradients = oracle(case)
    assert_close(output.token_losses, losses)
    for name, gradient in case.gradients().items():
        assert_close(gradient, gradients[name])


# ---------------------------------------------------------------------------------------------------------
# The loop around it


def test_no_step_needs_what_only_the_device_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 1: neither the number of rows with a target nor a value is asked for."""
    monkeypatch.setattr(chunked, "check_targets_on_cpu", lambda targets, vocabulary: None)  # not on a device
    case = make_case(9, 11, dtype=torch.float32, bias_kind="all", **OPTIONS)
    problem = problem_of(case, 4)
    with Recorder() as recorder:
        compute_in_chunks(problem, ALL, compact=False, product_dtype=torch.float32, kernels="triton")
    assert recorder.count(*SYNCHRONISING) == 0
    # Of three chunks: logits and those of the factors, gradients of hidden, weight, a and b.
    assert recorder.count(*PRODUCTS) == 3 * 6


@pytest.mark.parametrize(
    "frozen, in_forward, in_backward", [((), 1, 3), (("weight",), 1, 2), (("hidden",), 1, 2)]
)
def test_gradients_in_backward_make_four_products(
    frozen: tuple[str, ...], in_forward: int, in_backward: int
) -> None:
    """Three with a frozen head or frozen hidden states: what serves only the others is not made."""
    case = make_case(8, 11, ignored=0.0)
    for name in frozen:
        case.tensors[name].requires_grad_(False)
    with Recorder() as recorder:
        loss = case.run("triton/backward", chunk_size=8).loss
    assert recorder.count(*PRODUCTS) == in_forward
    with Recorder() as recorder:
        loss.backward(torch.tensor(2.0, dtype=torch.float64))
    assert recorder.count(*PRODUCTS) == in_backward
    _, _, _, gradients = oracle(case)
    for name, gradient in case.gradients().items():
        if name in frozen:
            assert gradient is None
        else:
            assert_close(gradient, 2 * gradients[name])


@pytest.mark.parametrize("upstream", [0.0, 2.0])
def test_gradients_in_backward_again_and_again(upstream: float) -> None:
    case = make_case(bias_kind="all", **OPTIONS)
    _, _, _, gradients = oracle(case)
    loss = case.run("triton/backward", chunk_size=8).loss * upstream
    for times in (1, 2):
        loss.backward(retain_graph=times < 2)
        for name, gradient in case.gradients().items():
            assert_close(gradient, times * upstream * gradients[name])


def test_both_passes_give_the_same_loss_bits() -> None:
    case = make_case(bias_kind="class", dtype=torch.float32, **OPTIONS)
    forward, backward = case.run("triton", chunk_size=8), case.run("triton/backward", chunk_size=8)
    assert_same_bits(backward.loss, forward.loss)
    assert_same_bits(backward.token_losses, forward.token_losses)


def test_log_probs_by_triton() -> None:
    case = make_case(7, 130)
    log_probs = linear_log_probs(
        case.tensors["hidden"], case.tensors["weight"], case.targets, backend="triton", chunk_size=3
    )
    assert case.token_weights is not None
    (case.token_weights * log_probs).sum().neg().backward()
    _, losses, _, gradients = oracle(case)
    assert_close(log_probs, -losses)
    for name, gradient in case.gradients().items():
        assert_close(gradient, gradients[name])


# Tracing looks at the class of the function in a way that torch itself warns about.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("gradients", ["forward", "backward"])
def test_compiled_without_a_graph_break_gives_the_same_bits(gradients: str) -> None:
    case = make_case(7, 11, dtype=torch.float32)
    inputs = (case.tensors["hidden"], case.tensors["weight"])

    def run(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, case.targets, backend="triton", gradients=gradients, chunk_size=4
        ).loss

    eager = torch.autograd.grad(run(*inputs), inputs)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for ours, expected in zip(torch.autograd.grad(compiled(*inputs), inputs), eager, strict=True):
        assert_same_bits(ours, expected)


def test_a_target_that_is_no_class_is_named() -> None:
    with pytest.raises(ValueError, match=r"targets must lie in \[0, 3\).*got 3"):
        linear_cross_entropy(torch.ones(2, 2), torch.ones(3, 2), torch.tensor([0, 3]), backend="triton")


@pytest.mark.parametrize(
    "vocabulary, block, warps",
    [(1, 128, 1), (100, 128, 1), (1000, 1024, 2), (32001, 4096, 8), (262144, 4096, 8)],
)
def test_launch_shape(vocabulary: int, block: int, warps: int) -> None:
    assert launch_shape(vocabulary) == LaunchShape(block, warps)
