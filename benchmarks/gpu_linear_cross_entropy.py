"""Linear cross entropies on a CUDA device: time over their bare products, memory, error; the tests first.

One call does everything: the tests that are marked `gpu`, then both shapes with nothing and with 75 % of the
rows ignored. The floor is the three products in bfloat16 over all rows, into memory that is there before: on
a device ignored rows keep their place, since to leave them out the host would have to wait for their number.
Time is by CUDA events, in rotation with the floor and over two sets of inputs, medians with quartiles. Memory
is the peak above the inputs, gradients included. Errors are against float64, the largest difference over the
largest value. Without a device it says so and ends.

    python benchmarks/gpu_linear_cross_entropy.py                      about five minutes
    python benchmarks/gpu_linear_cross_entropy.py --no-tests --repeats 30 --output results.json

Written where no device was at hand: its numbers are in no document yet.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from linear_cross_entropy import (
    IGNORED,
    Case,
    Inputs,
    Result,
    Run,
    clear,
    compute_reference,
    load_liger,
    relative_error,
    run_eager,
)
from measuring import describe_machine, print_table, spread

from isoloss import linear_cross_entropy

SHAPES = ((16384, 4096, 128256), (16384, 2048, 151936))
IGNORED_FRACS = (0.0, 0.75)
NUM_CHANNELS = 50


def make_inputs(case: Case, seed: int) -> Inputs:
    """As on CPU, in bfloat16, made on the device."""
    generator = torch.Generator("cuda").manual_seed(seed)
    place: dict[str, Any] = {"generator": generator, "device": "cuda"}
    hidden = torch.randn(case.num_rows, case.width, **place)
    weight = torch.randn(case.vocabulary, case.width, **place) * (2 / case.width**0.5)
    targets = (case.vocabulary ** torch.rand(case.num_rows, **place) - 1).long().clamp(0, case.vocabulary - 1)
    targets[torch.randperm(case.num_rows, **place)[case.num_targets :]] = IGNORED
    return Inputs(
        hidden.bfloat16().requires_grad_(),
        weight.bfloat16().requires_grad_(),
        targets,
        torch.full((case.num_rows,), 1 / case.num_targets, device="cuda"),
        torch.randint(NUM_CHANNELS, (case.num_rows,), **place),
    )


def run_ours(inputs: Inputs, **options: Any) -> Result:
    """With token weights and 50 channels."""
    output = linear_cross_entropy(
        inputs.hidden, inputs.weight, inputs.targets, token_weights=inputs.token_weights, **options
    )
    sums = torch.zeros(NUM_CHANNELS, dtype=torch.float64, device="cuda")
    sums.index_add_(0, inputs.channels, output.token_losses.double())
    output.loss.backward()
    return Result(output.loss.detach(), output.token_losses)


def run_torch(inputs: Inputs) -> Result:
    """Torch's own, with its default chunk."""
    loss = torch.nn.functional.linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets)
    loss.backward()
    return Result(loss.detach())


def load_cut_cross_entropy(implementation: str) -> Run:
    """The kernels of cut-cross-entropy, plain or with float32 sums."""
    from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy

    def run(inputs: Inputs) -> Result:
        loss = cut_cross_entropy(inputs.hidden, inputs.weight, inputs.targets, impl=implementation)
        loss.backward()
        return Result(loss.detach())

    return run


VARIANTS: Mapping[str, Callable[[], Run]] = {
    "ours, triton": lambda: partial(run_ours, backend="triton"),
    "ours, triton, gradients in backward": lambda: partial(run_ours, backend="triton", gradients="backward"),
    "ours, chunked": lambda: partial(run_ours, backend="chunked"),
    "liger-kernel": load_liger,
    "cut-cross-entropy": lambda: load_cut_cross_entropy("cce"),
    "cut-cross-entropy, exact": lambda: load_cut_cross_entropy("cce_exact"),
    "torch, default chunk": lambda: run_torch,
    "eager": lambda: run_eager,
}


class Floor:
    """The three products in bfloat16 over all rows at once."""

    def __init__(self, case: Case) -> None:
        place: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.logits = torch.zeros(case.num_rows, case.vocabulary, **place)
        self.grad_hidden = torch.zeros(case.num_rows, case.width, **place)
        self.grad_weight = torch.zeros(case.vocabulary, case.width, **place)

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> None:
        """Logits, gradient of hidden, gradient of the weight."""
        torch.mm(inputs.hidden, inputs.weight.T, out=self.logits)
        torch.mm(self.logits, inputs.weight, out=self.grad_hidden)
        torch.mm(self.logits.T, inputs.hidden, out=self.grad_weight)


def milliseconds(call: Callable[[], object]) -> float:
    """Time on the device between two events around a call."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def measure_case(case: Case, repeats: int) -> dict[str, Any]:
    """Memory and error of each variant's first call, then time in rounds."""
    sets = [make_inputs(case, seed) for seed in range(2)]
    reference = compute_reference(sets[0])
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[Inputs], object]] = {}
    for name, load in VARIANTS.items():
        try:
            run = load()
            run(sets[1])  # compiles
        # What a peer raises on a device or version that it does not know is its own; it is shown.
        except Exception as error:  # noqa: BLE001
            rows[name] = {"missing": f"{type(error).__name__}: {str(error)[:90]}"}
            clear(sets[1])
            continue
        clear(sets[1])
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = run(sets[0])
        rows[name] = {
            "mib": (torch.cuda.max_memory_allocated() - before) / 2**20,
            "loss": relative_error(result.loss, reference.loss),
            "token_losses": relative_error(result.token_losses, reference.token_losses),
            "grad_hidden": relative_error(sets[0].hidden.grad, reference.grad_hidden),
            "grad_weight": relative_error(sets[0].weight.grad, reference.grad_weight),
        }
        clear(sets[0])
        calls[name] = run
    del reference
    floor = Floor(case)
    floor(sets[0])
    order, ratios, times = random.Random(0), {name: [] for name in calls}, {name: [] for name in calls}
    floors = []
    for number in range(repeats):
        taken = {}
        for name in order.sample([*calls, "floor"], len(calls) + 1):
            inputs = sets[(number + len(taken)) % 2]
            taken[name] = milliseconds(partial(floor if name == "floor" else calls[name], inputs))
            clear(inputs)
        floors.append(taken["floor"])
        for name in calls:
            times[name].append(taken[name])
            ratios[name].append(taken[name] / taken["floor"])
    for name in calls:
        rows[name] |= {"ms": spread(times[name]).median, "ratio": asdict(spread(ratios[name]))}
        rows[name]["shown"] = str(spread(ratios[name]))
    return {"case": str(case), "floor_ms": spread(floors).median, "rows": rows}


def report(measured: Mapping[str, Any]) -> None:
    """One table."""
    cells = []
    for name, row in measured["rows"].items():
        if "missing" in row:
            cells.append([name, row["missing"], *[""] * 6])
            continue
        errors = [row[key] for key in ("loss", "token_losses", "grad_hidden", "grad_weight")]
        cells.append(
            [name, f"{row['ms']:.2f}", row["shown"], f"{row['mib']:.0f}", *(f"{e:.0e}" for e in errors)]
        )
    columns = ["variant", "ms", "time / floor", "MiB", "error of loss", "token losses", "grad hidden"]
    print_table(
        f"{measured['case']}, bfloat16; floor {measured['floor_ms']:.2f} ms", [*columns, "grad weight"], cells
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The tests, then the tables; 0 where there is no device, else the status of the tests."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", help="ROWSxWIDTHxVOCABULARY; default: the two above")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--output", type=Path, help="a JSON file")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing is measured")
        return 0
    machine = describe_machine(("triton", "liger-kernel", "cut-cross-entropy")) | {
        "device": torch.cuda.get_device_name()
    }
    print(" | ".join(f"{key}: {value}" for key, value in machine.items()), flush=True)
    status = 0
    if not arguments.no_tests:
        root = Path(__file__).parents[1]
        status = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/losses"],
            cwd=root,
        ).returncode
    shapes: Sequence[Sequence[int]] = SHAPES
    if arguments.shapes:
        shapes = [[int(size) for size in shape.split("x")] for shape in arguments.shapes]
    cases = []
    for rows, width, vocabulary in shapes:
        for ignored in IGNORED_FRACS:
            cases.append(measure_case(Case(rows, width, vocabulary, ignored), arguments.repeats))
            report(cases[-1])
            torch.cuda.empty_cache()
    if arguments.output is not None:
        document = {"machine": machine, "tests": status, "cases": cases}
        arguments.output.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
