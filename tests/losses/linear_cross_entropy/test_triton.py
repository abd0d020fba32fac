"""The Triton backend: its contract in an interpreted process, its compilation, and a device if there is one.

Triton decides at import whether its kernels are interpreted, so the interpreter has a process of its own.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isoloss.losses.linear_cross_entropy import LinearCrossEntropyOutput, linear_cross_entropy
from isoloss.losses.linear_cross_entropy.chunked import device_chunk_rows
from losses.linear_cross_entropy.test_contract import (
    OPTIONS,
    Case,
    assert_close,
    assert_same_bits,
    make_case,
    oracle,
)

HERE = Path(__file__).parent
HAS_TRITON = find_spec("triton") is not None
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

needs_triton = pytest.mark.skipif(
    not HAS_TRITON, reason="needs the package triton: pip install 'isoloss[triton]'"
)
needs_compiler = pytest.mark.skipif(
    not HAS_TRITON or IS_INTERPRETED, reason="needs the package triton, and its kernels not interpreted"
)
# A row takes 7 ms. What these add lies around the kernel, or repeats it thousands of times.
LEFT_OUT = ("triton/backward", "gradcheck", "a75", "offloading", "run_to_run", "frozen", "kept_graph", "tied")
# The kernel sees one bias, of a class or of a row and class; the rest is the loop's. All options at once do.
LEFT_OUT += ("(full_logits and (row or factors) and not all)", "(dtypes and row)")


def run_interpreted(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    result = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    return result.stdout


@needs_triton
def test_contract_interpreted() -> None:
    """Rows 12, 13, 15, 27: the contract of every backend, cases included, and what is special to this one."""
    chosen = " and ".join(["triton", *(f"not {name}" for name in LEFT_OUT)])
    output = run_interpreted(
        str(HERE / "test_contract.py"),
        str(HERE / "interpreted_triton.py"),
        "-k",
        chosen,
        "--hypothesis-profile=interpreted",
    )
    assert "skipped" not in output


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_of_the_contract_interpreted() -> None:
    run_interpreted(str(HERE / "test_contract.py"), "-k", "triton")


# ---------------------------------------------------------------------------------------------------------
# Without a device


@needs_compiler
@pytest.mark.parametrize(
    "capability, logits, options",
    [
        (80, "bf16", "all"),
        (90, "bf16", "plain"),
        (90, "bf16", "losses alone"),
        (90, "fp32", "all"),
        (90, "fp64", "all"),
        (100, "bf16", "all"),
    ],
)
def test_the_kernel_compiles(
    capability: int, logits: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To machine code, for devices that this machine need not have."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from isoloss.losses.linear_cross_entropy import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    number = "fp64" if logits == "fp64" else "fp32"
    takes_all = options == "all"
    shape = triton_kernels.launch_shape(128256)
    constants = {
        "HAS_BIAS": takes_all,
        "SCALE": 1.7 if takes_all else 1.0,
        "SOFTCAP": 30.0 if takes_all else None,
        "SMOOTHING": 0.1 if takes_all else 0.0,
        "SMOOTHING_PER_CLASS": 0.1 / 128256 if takes_all else 0.0,
        "Z_LOSS": 1e-4 if takes_all else 0.0,
        "NEEDS_GRADIENT": options != "losses alone",
        "IS_DOUBLE": logits == "fp64",
        "BLOCK": shape.block,
    }
    signature = {
        "logits_ptr": f"*{logits}",
        "targets_ptr": "*i64",
        "scales_ptr": f"*{number}",
        "bias_ptr": f"*{number}" if takes_all else "constexpr",
        "losses_ptr": f"*{number}",
        "z_losses_ptr": f"*{number}",
        "vocabulary": "i32",
        "row_stride": "i32",
        "ignore_index": "i32",
        "bias_row_stride": "i64",
        "bias_stride": "i32",
        **dict.fromkeys(constants, "constexpr"),
    }
    source = ASTSource(
        fn=triton_kernels._row_losses_kernel,
        signature=signature,
        constexprs=constants | ({} if takes_all else {"bias_ptr": None}),
        attrs={(0,): [["tt.divisibility", 16]], (7,): [["tt.divisibility", 16]]},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": shape.warps, "enable_fp_fusion": False},
    )
    assert compiled.asm["cubin"]
    if logits == "bf16":
        assert "ld.global.v4.b32" in compiled.asm["ptx"], "logits must be loaded 16 bytes at a time"


def cpu_arguments() -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(2, 2), torch.ones(3, 2), torch.tensor([0, 1])


@needs_compiler
def test_cpu_tensors_are_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"CUDA device, got cpu; use backend 'auto'.*TRITON_INTERPRET=1"):
        linear_cross_entropy(*cpu_arguments(), backend="triton")


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it raises
    monkeypatch.delitem(sys.modules, "isoloss.losses.linear_cross_entropy.triton_kernels", raising=False)
    package = sys.modules["isoloss.losses.linear_cross_entropy"]
    monkeypatch.delattr(package, "triton_kernels", raising=False)  # `from package import` looks there first
    with pytest.raises(ValueError, match=r"install isoloss\[triton\], or use backend 'auto'"):
        linear_cross_entropy(*cpu_arguments(), backend="triton")


def test_auto_is_chunked_on_cpu() -> None:
    auto = linear_cross_entropy(*cpu_arguments())
    chunked = linear_cross_entropy(*cpu_arguments(), backend="chunked")
    assert_same_bits(auto.loss, chunked.loss)


@pytest.mark.parametrize(
    "num_rows, hidden_size, dtype, chunk_size, expected",
    [
        (0, 512, torch.bfloat16, None, 1),
        (16384, 4096, torch.bfloat16, None, 4096),
        (16384, 2048, torch.bfloat16, None, 4096),
        (16384, 2048, torch.float32, None, 2048),
        (16384, 256, torch.bfloat16, None, 1024),
        (16385, 4096, torch.bfloat16, None, 4097),
        (700, 4096, torch.bfloat16, None, 700),
        (700, 4096, torch.bfloat16, 100, 100),
    ],
)
def test_device_chunk_rows(
    num_rows: int, hidden_size: int, dtype: torch.dtype, chunk_size: int | None, expected: int
) -> None:
    assert device_chunk_rows(num_rows, hidden_size, dtype, chunk_size) == expected


# ---------------------------------------------------------------------------------------------------------
# On a device

needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
for_each_backend = pytest.mark.parametrize(
    "backend", ["chunked", "chunked/backward", "triton", "triton/backward"]
)
TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def run_on_device(
    case: Case, backend: str, upstream: float = 1.0, chunk_size: int | None = None
) -> tuple[LinearCrossEntropyOutput, Case]:
    """Loss and gradients on the device, during which no operator made the host wait."""
    tensors = {name: t.detach().cuda().requires_grad_(t.requires_grad) for name, t in case.tensors.items()}
    weights = None if case.token_weights is None else case.token_weights.cuda()
    moved = Case(tensors, case.targets.cuda(), weights, case.options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = moved.run(backend, chunk_size=chunk_size)
        (output.loss * upstream).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return output, moved


def assert_matches(output: LinearCrossEntropyOutput, moved: Case, case: Case, upstream: float = 1.0) -> None:
    dtype = case.tensors["hidden"].dtype
    tolerance = TOLERANCES[dtype]
    loss, losses, z_losses, gradients = oracle(case)
    assert_close(output.loss.cpu(), loss, tolerance)
    assert_close(output.token_losses.cpu(), losses, tolerance)
    assert_close(output.token_z_losses.cpu(), z_losses, tolerance)
    for name, tensor in moved.tensors.items():
        if tensor.requires_grad:
            assert tensor.grad is not None and tensor.grad.dtype == dtype
            assert_close(tensor.grad.cpu(), upstream * gradients[name], tolerance)


@pytest.mark.gpu
@needs_device
@for_each_backend
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("bias_kind", ["none", "class", "row", "factors", "all"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_contract_on_a_device(
    backend: str, options: dict[str, Any], bias_kind: str, dtype: torch.dtype
) -> None:
    """Row 1: the whole of it without a wait of the host."""
    case = make_case(67, 1031, width=24, bias_kind=bias_kind, dtype=dtype, **options)
    with torch.no_grad():
        case.tensors["weight"].mul_(0.25)
    output, moved = run_on_device(case, backend, chunk_size=32)
    assert_matches(output, moved, case)


@pytest.mark.gpu
@needs_device
@for_each_backend
@pytest.mark.parametrize("upstream", [0.0, 2.0])
@pytest.mark.parametrize("frozen", ["weight", "hidden", "none"])
def test_incoming_gradients_and_frozen_parts_on_a_device(backend: str, upstream: float, frozen: str) -> None:
    case = make_case(40, 131, width=24, dtype=torch.float32)
    for name in case.tensors:
        case.tensors[name].requires_grad_(name != frozen)
    output, moved = run_on_device(case, backend, upstream)
    assert_matches(output, moved, case, upstream)
    assert all((tensor.grad is None) == (name == frozen) for name, tensor in moved.tensors.items())


@pytest.mark.gpu
@needs_device
@for_each_backend
@pytest.mark.parametrize("ignored", [0.0, 1.0])
def test_all_or_no_rows_with_a_target_on_a_device(backend: str, ignored: float) -> None:
    case = make_case(40, 131, width=24, ignored=ignored, dtype=torch.float32, bias_kind="all")
    with torch.no_grad():
        case.tensors["hidden"][case.targets == -100] = float("nan")
    output, moved = run_on_device(case, backend)
    if ignored:
        assert output.loss == 0 and not output.token_losses.any()
        for tensor in moved.tensors.values():
            assert tensor.grad is not None and not tensor.grad.any()
    else:
        assert_matches(output, moved, case)


@pytest.mark.gpu
@needs_device
@for_each_backend
def test_a_large_vocabulary_of_bfloat16_on_a_device(backend: str) -> None:
    """Row 13: error beside that of eager, and the same bits again."""
    case = make_case(300, 50257, width=64, ignored=0.5, dtype=torch.bfloat16)
    with torch.no_grad():
        case.tensors["weight"].mul_(0.25)
    output, moved = run_on_device(case, backend)
    _, losses, _, gradients = oracle(case)
    hidden, weight = (case.tensors[n].detach().cuda().requires_grad_() for n in ("hidden", "weight"))
    assert case.token_weights is not None
    logits = torch.nn.functional.linear(hidden, weight).float()
    eager = torch.nn.functional.cross_entropy(logits, case.targets.cuda(), reduction="none")
    (eager * case.token_weights.cuda()).sum().backward()

    def error(actual: Tensor | None, expected: Tensor) -> float:
        assert actual is not None
        return float((actual.detach().cpu().double() - expected).norm() / expected.norm())

    assert error(output.token_losses, losses) <= 1.5 * error(eager, losses)
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        assert error(moved.tensors[name].grad, gradients[name]) <= 1.5 * error(tensor.grad, gradients[name])
    again, moved_again = run_on_device(case, backend)
    assert_same_bits(again.loss, output.loss)
    for name in ("hidden", "weight"):
        assert_same_bits(moved_again.tensors[name].grad, moved.tensors[name].grad)
