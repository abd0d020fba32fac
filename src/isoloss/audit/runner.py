"""Runs the cases of an audit and compares what they gave with the reference."""

import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isoloss.audit.case import AuditCase, AuditedStep, AuditResult
from isoloss.audit.matrix import (
    AuditLayout,
    ModelKind,
    assign_rows,
    audit_rows,
    data_layouts,
    model_builder,
    own_layouts,
)
from isoloss.audit.own_step import own_step
from isoloss.audit.reference import reference_result

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest relative difference that passes, by dtype."""
KINDS: tuple[ModelKind, ...] = ("dense tied", "dense untied", "mixture of experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One case compared with the reference."""

    layout: str
    model: str
    dtype: str
    loss_error: float
    """Relative."""
    gradient_error: float
    """Largest difference of an element over the largest element, in the worst parameter."""
    worst_parameter: str
    channel_error: float
    counts: str
    """"equal", or what differs."""
    num_collectives: int | None
    passed: bool


def run_layouts(rank: int, target: str, world_size: int, dtype_name: str, output: str) -> None:
    """Run every case of one world size; rank 0 writes the findings to `output`, a JSON file.

    Args:
        rank: this process's number.
        target: "self", or MODULE:FUNCTION of a step to audit.
        world_size: of the process group that this rank has joined.
        dtype_name: "float64", "float32" or "bfloat16".
        output: path of the file to write.
    """
    dtype = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}[dtype_name]
    step = load_step(target)
    findings = []
    for layout, kind in cases(target, world_size):
        findings.append(asdict(run_case(step, layout, kind, dtype, Path(output).parent)))
    if rank == 0:
        Path(output).write_text(json.dumps(findings), encoding="utf-8")


def load_step(target: str) -> AuditedStep:
    """The step of "self" or MODULE:FUNCTION.

    Raises:
        ValueError: there is no such module or function.
    """
    if target == "self":
        return own_step
    module_name, _, function_name = target.partition(":")
    if not function_name:
        raise ValueError(
            f"audit target {target!r} is neither self nor MODULE:FUNCTION, such as my_trainer.audit:step"
        )
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"audit target {target!r}: no module {error.name!r} in the working directory or on the path"
        ) from error
    if function_name not in vars(module):
        raise ValueError(f"audit target {target!r}: module {module_name} has no {function_name}")
    function: AuditedStep = vars(module)[function_name]
    return function


def cases(target: str, world_size: int) -> Iterator[tuple[AuditLayout, ModelKind]]:
    """Layouts and models to audit at one world size."""
    layouts = own_layouts() if target == "self" else data_layouts()
    for layout in layouts:
        if layout.world_size != world_size:
            continue
        for kind in KINDS if target == "self" else KINDS[:2]:
            is_mixture = kind == "mixture of experts"
            if layout.experts_only and not is_mixture:
                continue
            if is_mixture and layout.sizes.get("tp_size", 1) > 1:
                continue  # experts are spread over ep, not cut over tp
            yield layout, kind


def run_case(
    step: AuditedStep, layout: AuditLayout, kind: ModelKind, dtype: torch.dtype, folder: Path
) -> Finding:
    """Run a case on this rank and compare it."""
    rows = audit_rows()
    case = AuditCase(
        rows=rows,
        assignment=assign_rows(len(rows), layout),
        strategy=layout.strategy,
        packed=True,
        dtype=dtype,
        output_dir=folder,
        build_model=model_builder(kind),
        sizes=layout.sizes,
    )
    result = step(case)
    return compare(layout.name, kind, dtype, result, reference_result(case))


def compare(
    layout: str, kind: str, dtype: torch.dtype, result: AuditResult, reference: AuditResult
) -> Finding:
    """How far a result is from the reference."""
    worst, worst_parameter = 0.0, ""
    for name, expected in reference.gradients.items():
        error = float("inf")
        if name in result.gradients and result.gradients[name].shape == expected.shape:
            error = _relative(result.gradients[name], expected)
        if error > worst:
            worst, worst_parameter = error, name
    channel_error = max(
        (
            abs(result.channels[source] - expected) / abs(expected)
            for source, expected in reference.channels.items()
            if source in result.channels
        ),
        default=0.0,
    )
    different = [
        f"{name} {result.counts[name]} for {expected}"
        for name, expected in reference.counts.items()
        if name in result.counts and result.counts[name] != expected
    ]
    loss_error = abs(result.loss - reference.loss) / abs(reference.loss)
    tolerance = TOLERANCES[dtype]
    return Finding(
        layout=layout,
        model=kind,
        dtype=str(dtype).removeprefix("torch."),
        loss_error=loss_error,
        gradient_error=worst,
        worst_parameter=worst_parameter,
        channel_error=channel_error,
        counts="; ".join(different) or "equal",
        num_collectives=result.num_collectives,
        passed=all(error <= tolerance for error in (loss_error, worst, channel_error)) and not different,
    )


def _relative(value: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest element; over 1 where all elements are 0."""
    value, expected = value.detach().to("cpu", torch.float64), expected.to("cpu", torch.float64)
    scale = float(expected.abs().max()) or 1.0
    difference = float((value - expected).abs().max())
    return difference / scale if math.isfinite(difference) else math.inf


Launch = Callable[[int, Callable[..., None], Sequence[Any]], int]
"""Starts local workers, which call the function with their rank and the arguments: (number of processes,
function, arguments) -> exit status."""


def run_audit(
    target: str, nproc: int, devices: Sequence[tuple[str, str]], folder: Path, launch: Launch
) -> Iterator[list[Finding]]:
    """Findings, one list for each world size and device as it is done.

    Args:
        target: "self" or MODULE:FUNCTION.
        nproc: the most processes to start.
        devices: (device, dtype name) pairs to run on.
        folder: for files of the audit.
        launch: starts the workers.

    Raises:
        RuntimeError: workers failed; their error has been shown.
    """
    for device, dtype_name in devices:
        for world_size in (1, 2, 4, 8):
            if world_size > nproc or not any(True for _ in cases(target, world_size)):
                continue
            output = folder / f"findings-{device}-{dtype_name}-{world_size}.json"
            status = launch(world_size, run_layouts, (target, world_size, dtype_name, str(output)))
            if status:
                raise RuntimeError(f"the audit stopped: {world_size} processes ended with status {status}")
            yield [Finding(**values) for values in json.loads(output.read_text(encoding="utf-8"))]
