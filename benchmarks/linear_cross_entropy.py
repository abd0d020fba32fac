"""Time, memory and error of linear cross entropies, forward and backward, against their bare products.

The floor is three preallocated float32 products over the rows that have a target: logits, gradient of the
hidden states, gradient of the weight. A round times the floor twice and every variant that takes part, in
random order, each call on another set of random inputs than the one before, and gives one ratio per variant:
its time over the floor of the same round. Shown are medians with quartiles. CPU time is that of all threads
together: where other programs share the machine it is the steadier number. Ours takes part in every round,
the others in the first two, and those that take more than two floors of all rows in the first alone.

Ours runs with token weights, and adds the loss of each token to one of 50 channels. Peers that cannot be
imported or do not run here are named with the reason. Memory is the peak of a fresh process above its
inputs, so it includes the gradients. Errors are against float64, the largest difference over the largest
value.

    python benchmarks/linear_cross_entropy.py --output DIR             all peers, three shapes, everything
    python benchmarks/linear_cross_entropy.py --output DIR --parts time    12 minutes on two quiet cores
    python benchmarks/linear_cross_entropy.py --shapes 2048x512x32000 --parts options kernels
    python benchmarks/linear_cross_entropy.py --quick                  small shapes, seconds

Parts measured before into the same folder stay, and are shown with those of this run.
"""

import argparse
import json
import math
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import (
    Spread,
    Timing,
    describe_machine,
    foreign_load,
    in_fresh_process,
    peak_memory_mib,
    print_table,
    spread,
    time_rounds,
)
from torch import Tensor, nn

from isoloss import linear_cross_entropy
from isoloss.losses.linear_cross_entropy import (
    TeacherLogits,
    TeacherTopK,
    chunk_rows,
    linear_kl_divergence,
    linear_log_probs,
)

IGNORED = -100
NUM_CHANNELS = 50
SHAPES = ((2048, 512, 32000), (4096, 576, 49152), (2048, 256, 131072))
QUICK_SHAPES = ((96, 32, 500),)
IGNORED_FRACS = (0.0, 0.75)
PARTS = ("time", "memory", "error", "options", "kernels", "bfloat16")
MOST_ROUNDS = 2
"""Of a variant that is not ours."""
SLOWEST = 2.0
"""Floors of all rows; what takes longer in its first round is not called again."""
FEWEST_ROWS = 8
"""Torch's default chunk has 2 rows at the largest vocabulary, which takes minutes a call."""
QUICK_VARIANTS = ("ours", "eager", "torch, chunk 512")
PEERS = ("trl", "torchtitan", "cut-cross-entropy", "liger-kernel")


@dataclass(frozen=True)
class Case:
    """Rows, hidden width and vocabulary of a head, and the share of rows without a target."""

    num_rows: int
    width: int
    vocabulary: int
    ignored_frac: float

    def __str__(self) -> str:
        return f"{self.num_rows} x {self.width} x {self.vocabulary}, {self.ignored_frac:.0%} ignored"

    @property
    def num_targets(self) -> int:
        """Rows that have a target."""
        return self.num_rows - int(self.num_rows * self.ignored_frac)


@dataclass(frozen=True)
class Inputs:
    """One set of random inputs."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    token_weights: Tensor
    """1 / (number of targets), so that every variant minimises the mean."""
    channels: Tensor


@dataclass(frozen=True)
class Result:
    """What a call gives besides the gradients in `.grad`."""

    loss: Tensor
    token_losses: Tensor | None = None


Run = Callable[[Inputs], Result]


class CannotRunError(Exception):
    """A peer that is installed but does not run on this machine."""


def make_inputs(case: Case, seed: int, dtype: torch.dtype = torch.float32) -> Inputs:
    """Logits of deviation 2, and targets whose frequencies fall as in text."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(case.num_rows, case.width, generator=generator)
    weight = torch.randn(case.vocabulary, case.width, generator=generator) * (2 / math.sqrt(case.width))
    ranks = torch.rand(case.num_rows, generator=generator).mul(math.log(case.vocabulary)).exp()
    targets = (ranks - 1).long().clamp(max=case.vocabulary - 1)
    ignored = torch.randperm(case.num_rows, generator=generator)[case.num_targets :]
    targets[ignored] = IGNORED
    return Inputs(
        hidden.to(dtype).requires_grad_(),
        weight.to(dtype).requires_grad_(),
        targets,
        torch.full((case.num_rows,), 1 / case.num_targets),
        torch.randint(NUM_CHANNELS, (case.num_rows,), generator=generator),
    )


# --- variants ---------------------------------------------------------------------------------------------


def run_ours(inputs: Inputs, **options: Any) -> Result:
    """With token weights and channels."""
    output = linear_cross_entropy(
        inputs.hidden, inputs.weight, inputs.targets, token_weights=inputs.token_weights, **options
    )
    sums = torch.zeros(NUM_CHANNELS, dtype=torch.float64)
    sums.index_add_(0, inputs.channels, output.token_losses.double())
    output.loss.backward()
    return Result(output.loss.detach(), output.token_losses)


def run_eager(inputs: Inputs) -> Result:
    """Full logits."""
    logits = F.linear(inputs.hidden, inputs.weight).float()
    loss = F.cross_entropy(logits, inputs.targets, ignore_index=IGNORED)
    loss.backward()
    return Result(loss.detach())


def run_torch(inputs: Inputs, chunk: int | None = None, reduction: str = "mean") -> Result:
    """Chunks of torch, gradients in forward unless the reduction is "none"."""
    options = nn.LinearCrossEntropyOptions()
    if chunk is not None:
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, chunking_method=None)
    loss = F.linear_cross_entropy(
        inputs.hidden, inputs.weight, inputs.targets, reduction=reduction, options=options
    )
    token_losses = None
    if reduction == "none":
        token_losses = loss.detach()
        loss = (loss * inputs.token_weights).sum()
    loss.backward()
    return Result(loss.detach(), token_losses)


def load_cut_cross_entropy() -> Run:
    """Its kernels are Triton's; on CPU its `torch_compile` form, which has full logits of the valid rows."""
    from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy

    implementation = "cce" if torch.cuda.is_available() else "torch_compile"
    if implementation == "torch_compile" and not (shutil.which("g++") or shutil.which("clang++")):
        raise CannotRunError("torch.compile needs a C++ compiler")

    def run(inputs: Inputs) -> Result:
        loss = cut_cross_entropy(inputs.hidden, inputs.weight, inputs.targets, impl=implementation)
        loss.backward()
        return Result(loss.detach())

    return run


def load_liger() -> Run:
    """liger-kernel's fused linear cross entropy, Triton only."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    if not torch.cuda.is_available():
        raise CannotRunError("its kernels need a GPU")

    def run(inputs: Inputs) -> Result:
        loss = liger_fused_linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets)
        loss.backward()
        return Result(loss.detach())

    return run


def load_torchtitan() -> Run:
    """The ChunkedLossWrapper of torchtitan with its default of 8 chunks."""
    from torchtitan.components.loss import ChunkedLossWrapper

    def run(inputs: Inputs) -> Result:
        # The head is a module there; a parameter on the same memory keeps the gradient in our hands.
        head = nn.Linear(inputs.weight.shape[1], inputs.weight.shape[0], bias=False, device="meta")
        head.weight = nn.Parameter(inputs.weight.detach())
        wrapper = ChunkedLossWrapper(ChunkedLossWrapper.Config())
        wrapper.set_lm_head(head)
        num_targets = (inputs.targets != IGNORED).sum()
        loss, _ = wrapper(inputs.hidden.unsqueeze(0), inputs.targets.unsqueeze(0), num_targets)
        loss.backward()
        inputs.weight.grad = head.weight.grad
        return Result(loss.detach())

    return run


def load_trl(*, compact: bool) -> Run:
    """The kernel under TRL's fused head, with the three outputs that SFTTrainer asks for.

    On CPU its head computes every row; `compact` is what it does on a GPU.
    """
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    from trl.trainer import utils

    chunk_size = utils._CHUNKED_LOGPROB_CHUNK_SIZE

    def run(inputs: Inputs) -> Result:
        mask = inputs.targets != IGNORED
        log_probs, *_ = ChunkedLogProbFunction.apply(
            inputs.hidden[mask] if compact else inputs.hidden,
            inputs.weight,
            None,
            inputs.targets[mask] if compact else inputs.targets.clamp(min=0),
            1.0,
            chunk_size,
            None,
            1.0,
            ("log_probs", "entropy", "is_top1"),
        )
        if compact:
            log_probs = log_probs.new_zeros(mask.shape).masked_scatter(mask, log_probs)
        else:
            log_probs = log_probs.masked_fill(~mask, 0)
        loss = -log_probs.sum() / mask.sum()
        loss.backward()
        return Result(loss.detach(), -log_probs.detach())

    return run


def loaded(run: Run) -> Run:
    """A loader of what needs no import."""
    return run


VARIANTS: Mapping[str, Callable[[], Run]] = {
    "ours": partial(loaded, run_ours),
    "ours, gradients in backward": partial(loaded, partial(run_ours, gradients="backward")),
    "ours, chunk 512": partial(loaded, partial(run_ours, chunk_size=512)),
    "eager": partial(loaded, run_eager),
    "torch, default chunk": partial(loaded, run_torch),
    "torch, chunk 512": partial(loaded, partial(run_torch, chunk=512)),
    "torch, chunk 1024": partial(loaded, partial(run_torch, chunk=1024)),
    "torch, chunk 512, token losses": partial(loaded, partial(run_torch, chunk=512, reduction="none")),
    "cut-cross-entropy": load_cut_cross_entropy,
    "liger-kernel": load_liger,
    "torchtitan, 8 chunks": load_torchtitan,
    "trl": partial(load_trl, compact=False),
    "trl, valid rows": partial(load_trl, compact=True),
}


def choose_variants(runs: Mapping[str, Run], case: Case) -> dict[str, Run]:
    """Those that say something at this case."""
    default_rows = case.num_rows * case.width // case.vocabulary  # as torch 2.13 chooses, to a factor of 2
    left_out = set()
    if default_rows < FEWEST_ROWS:
        left_out.add("torch, default chunk")
    if case.ignored_frac == 0:
        left_out.add("trl, valid rows")  # the same as "trl"
    return {name: run for name, run in runs.items() if name not in left_out}


def make_option_variants(case: Case) -> dict[str, Run]:
    """Ours with each option; extra inputs are made here, outside the timed call."""
    generator = torch.Generator().manual_seed(17)
    n, vocabulary, rank = case.num_rows, case.vocabulary, 16
    bias = torch.randn(vocabulary, generator=generator)
    full = torch.randn(n, vocabulary, generator=generator)
    a, b = torch.randn(n, rank, generator=generator), torch.randn(vocabulary, rank, generator=generator)

    def with_gradients(inputs: Inputs, *extra: Tensor, **options: Any) -> Result:
        for tensor in extra:
            tensor.requires_grad_().grad = None
        result = run_ours(inputs, **options)
        for tensor in extra:
            tensor.grad = None
            tensor.requires_grad_(False)
        return result

    narrow = make_inputs(case, 19, torch.bfloat16)

    def with_bfloat16(inputs: Inputs) -> Result:
        result = run_ours(replace(narrow, targets=inputs.targets))
        clear(narrow)
        return result

    return {
        "ours": run_ours,
        "bfloat16 parameters": with_bfloat16,
        "bias": partial(run_ours, bias=bias),
        "bias, trained": lambda inputs: with_gradients(inputs, bias, bias=bias),
        "full bias": partial(run_ours, bias=full),
        "full bias, trained": lambda inputs: with_gradients(inputs, full, bias=full),
        "factored bias, rank 16": partial(run_ours, bias_factors=(a, b)),
        "factored bias, trained": lambda inputs: with_gradients(inputs, a, b, bias_factors=(a, b)),
        "softcap": partial(run_ours, softcap=30.0),
        "logit scale": partial(run_ours, logit_scale=0.5),
        "label smoothing": partial(run_ours, label_smoothing=0.1),
        "z-loss": partial(run_ours, z_loss=1e-4),
    }


def make_kernel_variants(case: Case) -> dict[str, Run]:
    """The kernels that share the chunk loop: log-probabilities (4 products) and distillation."""
    generator = torch.Generator().manual_seed(18)
    teacher_hidden = torch.randn(case.num_rows, case.width, generator=generator)
    teacher_weight = torch.randn(case.vocabulary, case.width, generator=generator) / math.sqrt(case.width)
    ids = torch.rand(case.num_rows, case.vocabulary, generator=generator).topk(8).indices
    log_probs = torch.randn(case.num_rows, 8, generator=generator).log_softmax(-1)
    teacher = TeacherLogits(teacher_hidden, teacher_weight)

    def run_log_probs(inputs: Inputs) -> Result:
        values = linear_log_probs(inputs.hidden, inputs.weight, inputs.targets)
        loss = -(values * inputs.token_weights).sum()
        loss.backward()
        return Result(loss.detach(), -values.detach())

    def run_divergence(inputs: Inputs, teacher: TeacherLogits | TeacherTopK, direction: str) -> Result:
        output = linear_kl_divergence(
            inputs.hidden,
            inputs.weight,
            teacher,
            inputs.targets,
            token_weights=inputs.token_weights,
            direction=direction,
        )
        output.loss.backward()
        return Result(output.loss.detach(), output.token_losses)

    top = TeacherTopK(ids, log_probs)
    return {
        "log-probabilities, 4 products": run_log_probs,
        "forward KL, 4 products": partial(run_divergence, teacher=teacher, direction="forward"),
        "reverse KL, 4 products": partial(run_divergence, teacher=teacher, direction="reverse"),
        "forward KL, top 8": partial(run_divergence, teacher=top, direction="forward"),
        "reverse KL, top 8": partial(run_divergence, teacher=top, direction="reverse"),
    }


def load_variants(wanted: Sequence[str] | None) -> tuple[dict[str, Run], dict[str, str]]:
    """What runs here, and why the rest does not.

    Args:
        wanted: beginnings of names, or None for all.
    """
    runs: dict[str, Run] = {}
    missing: dict[str, str] = {}
    for name, load in VARIANTS.items():
        if wanted is not None and not any(name.startswith(start) for start in wanted):
            continue
        try:
            runs[name] = load()
        except (ImportError, AttributeError) as error:
            missing[name] = f"not importable: {error}"
        except CannotRunError as error:
            missing[name] = str(error)
    return runs, missing


# --- time -------------------------------------------------------------------------------------------------


class Floor:
    """The three products over a number of rows, into memory that is there before."""

    def __init__(self, case: Case, num_rows: int) -> None:
        self.logits = torch.zeros(num_rows, case.vocabulary)
        self.grad_hidden = torch.zeros(num_rows, case.width)
        self.grad_weight = torch.zeros(case.vocabulary, case.width)

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> None:
        """Logits, gradient of hidden, gradient of the weight."""
        hidden = inputs.hidden[: self.logits.shape[0]]
        torch.mm(hidden, inputs.weight.T, out=self.logits)
        torch.mm(self.logits, inputs.weight, out=self.grad_hidden)
        torch.mm(self.logits.T, hidden, out=self.grad_weight)


def clear(inputs: Inputs) -> None:
    """Drop the gradients."""
    inputs.hidden.grad = inputs.weight.grad = None


def time_case(
    case: Case, runs: Mapping[str, Run], arguments: argparse.Namespace, *, are_ours: bool = False
) -> dict[str, Any]:
    """Seconds and ratios of every variant at one case."""
    sets = [make_inputs(case, seed) for seed in range(arguments.sets)]
    floor = Floor(case, case.num_targets)
    whole = Floor(case, case.num_rows) if case.ignored_frac else floor
    floor(sets[0])
    calls: dict[str, Callable[[int], object]] = {"floor": lambda number: floor(sets[number % len(sets)])}
    if case.ignored_frac:
        calls["floor of all rows"] = lambda number: whole(sets[number % len(sets)])
    for name, run in runs.items():
        # Small first, for what is loaded or compiled then.
        run_or_fit(run, Case(max(8, min(64, case.num_rows)), case.width, 64, case.ignored_frac))
        calls[name] = partial(timed_with_gradients_dropped, run, sets)
    reference = "floor of all rows" if case.ignored_frac else "floor"

    def takes_part(name: str, done: Sequence[Mapping[str, Timing]]) -> bool:
        if are_ours or name in ("floor", "floor of all rows", "ours") or not done:
            return True
        return len(done) < MOST_ROUNDS and done[0][name].cpu_s < SLOWEST * done[0][reference].cpu_s

    rounds = time_rounds(calls, arguments.repeats, takes_part, twice=frozenset({"floor"}))
    return {
        "foreign_frac": asdict(spread([foreign_load(round_) for round_ in rounds])),
        "floor_s": spread([round_["floor"].wall_s for round_ in rounds]).median,
        "rows": {name: summarise(name, rounds) for name in calls},
    }


def timed_with_gradients_dropped(run: Run, sets: Sequence[Inputs], number: int) -> None:
    """The call and the release of its gradients, which the next call must make again."""
    inputs = sets[number % len(sets)]
    run(inputs)
    clear(inputs)


def run_or_fit(run: Run, case: Case) -> None:
    """A first call on a small problem; option variants, whose extra inputs have one size, need none."""
    try:
        run(make_inputs(case, 0))
    except ValueError:
        return


def summarise(name: str, rounds: Sequence[Mapping[str, Timing]]) -> dict[str, Any]:
    """Medians and quartiles over the rounds in which it took part."""
    rounds = [round_ for round_ in rounds if name in round_]
    wall = [round_[name].wall_s / round_["floor"].wall_s for round_ in rounds]
    cpu = [round_[name].cpu_s / round_["floor"].cpu_s for round_ in rounds]
    return {
        "wall_s": spread([round_[name].wall_s for round_ in rounds]).median,
        "wall_ratio": asdict(spread(wall)),
        "cpu_ratio": asdict(spread(cpu)),
    }


# --- memory -----------------------------------------------------------------------------------------------


def measure_memory(name: str, case: Case, threads: int) -> float:
    """MiB of one call above its inputs; to be run in a fresh process."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    run = VARIANTS[name]()
    for _ in range(2):
        run(make_inputs(Case(64, case.width, 64, case.ignored_frac), 0))

    def prepare() -> Callable[[], object]:
        inputs = make_inputs(case, 1)
        return lambda: (run(inputs), inputs.hidden.grad, inputs.weight.grad)

    return peak_memory_mib(prepare)


def memory_goal_mib(case: Case) -> float:
    """One chunk of logits and the gradients, in float32."""
    chunk = chunk_rows(case.num_targets, case.width)
    return 4 * (chunk * case.vocabulary + case.vocabulary * case.width + case.num_rows * case.width) / 2**20


# --- error ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """The same quantities in float64."""

    loss: Tensor
    token_losses: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


@torch.no_grad()
def compute_reference(inputs: Inputs, block: int = 256) -> Reference:
    """By the definition, in blocks of rows."""
    weight = inputs.weight.double()
    valid = (inputs.targets != IGNORED).nonzero().squeeze(1)
    token_losses = weight.new_zeros(inputs.targets.shape)
    grad_hidden = weight.new_zeros(inputs.hidden.shape)
    grad_weight = torch.zeros_like(weight)
    for rows in valid.split(block):
        hidden, targets = inputs.hidden[rows].double(), inputs.targets[rows].unsqueeze(1)
        log_probs = (hidden @ weight.T).log_softmax(-1)
        token_losses[rows] = -log_probs.gather(1, targets).squeeze(1)
        gradient = log_probs.exp_()
        gradient.scatter_add_(1, targets, weight.new_full(targets.shape, -1.0))
        gradient.div_(valid.numel())
        grad_hidden[rows] = gradient @ weight
        grad_weight.addmm_(gradient.T, hidden)
    return Reference(token_losses.sum() / valid.numel(), token_losses, grad_hidden, grad_weight)


def relative_error(value: Tensor | None, reference: Tensor) -> float:
    """Largest difference over the largest value; NaN where there is no value."""
    if value is None:
        return math.nan
    return float((value.double() - reference).abs().max() / reference.abs().max())


def measure_errors(case: Case, runs: Mapping[str, Run]) -> dict[str, dict[str, float]]:
    """Of loss, token losses and both gradients."""
    inputs = make_inputs(case, 0)
    reference = compute_reference(inputs)
    errors = {}
    for name, run in runs.items():
        result = run(inputs)
        errors[name] = {
            "loss": relative_error(result.loss, reference.loss),
            "token_losses": relative_error(result.token_losses, reference.token_losses),
            "grad_hidden": relative_error(inputs.hidden.grad, reference.grad_hidden),
            "grad_weight": relative_error(inputs.weight.grad, reference.grad_weight),
        }
        clear(inputs)
    return errors


def measure_bfloat16(quick: bool) -> list[dict[str, Any]]:
    """Error of bfloat16 parameters' gradients, by the number of chunks."""
    case = Case(256, 32, 400, 0.0) if quick else Case(4096, 128, 4000, 0.0)
    inputs = make_inputs(case, 0, torch.bfloat16)
    reference = compute_reference(inputs)
    largest = reference.grad_weight.abs().amax(1)
    is_seen = largest > 0

    def errors(name: str, num_chunks: int, run: Run) -> dict[str, Any]:
        result = run(inputs)
        assert inputs.weight.grad is not None
        difference = (inputs.weight.grad.double() - reference.grad_weight).abs().amax(1)
        row = {
            "variant": name,
            "chunks": num_chunks,
            "loss": relative_error(result.loss, reference.loss),
            "grad_weight": relative_error(inputs.weight.grad, reference.grad_weight),
            "worst_class": float((difference[is_seen] / largest[is_seen]).max()),
        }
        clear(inputs)
        return row

    rows = [errors("eager", 1, run_eager)]
    for num_chunks in (2, 16, 128):
        size = case.num_rows // num_chunks
        rows.append(errors("ours", num_chunks, partial(run_ours, chunk_size=size)))
        rows.append(errors("torch", num_chunks, partial(run_torch, chunk=size)))
    return rows


# --- report -----------------------------------------------------------------------------------------------


def show(value: float, form: str = ".2f") -> str:
    """A dash where there is no number."""
    return "-" if math.isnan(value) else format(value, form)


def report_case(case: Mapping[str, Any], missing: Mapping[str, str]) -> None:
    """One table."""
    time, memory, errors = (case.get(part, {}) for part in ("time", "memory", "error"))
    timed = time.get("rows", {})
    rows = []
    for name in dict.fromkeys([*timed, *memory, *errors]):
        cells = [name, "-", "-", "-"]
        if name in timed:
            ratios = [Spread(**timed[name][key]) for key in ("wall_ratio", "cpu_ratio")]
            cells = [name, f"{timed[name]['wall_s']:.3f}", *map(str, ratios)]
        cells.append(show(memory.get(name, math.nan), ".0f"))
        cells += [
            show(errors.get(name, {}).get(key, math.nan), ".0e")
            for key in ("loss", "token_losses", "grad_hidden", "grad_weight")
        ]
        rows.append(cells)
    title = case["title"]
    if time:
        title += f" Other programs had {Spread(**time['foreign_frac'])} of the machine; time: {time['how']}."
    columns = ["variant", "s", "time / floor", "CPU time / floor", "MiB"]
    columns += ["error of loss", "token losses", "grad hidden", "grad weight"]
    print_table(title, columns, rows)
    for name, reason in missing.items():
        print(f"{name}: {reason}")


def report_bfloat16(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table of accuracy."""
    print_table(
        "bfloat16 parameters: error against float64 of the same numbers",
        ["variant", "chunks", "loss", "grad weight", "worst class of grad weight"],
        [
            [
                row["variant"],
                str(row["chunks"]),
                *(f"{row[key]:.1e}" for key in ("loss", "grad_weight", "worst_class")),
            ]
            for row in rows
        ],
    )


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Bars of time and memory by case; says so where plotly is not installed."""
    try:
        from plotly import graph_objects
        from plotly.subplots import make_subplots
    except ImportError as error:
        print(f"no plot: {error}")
        return
    figure = make_subplots(rows=2, cols=1, subplot_titles=("time / bare products", "peak memory, MiB"))
    cases = document["cases"]
    names = dict.fromkeys(
        name for case in cases.values() for part in ("memory", "time") for name in _bars(case, part)
    )
    colours = ["#1b6ca8", "#5aa9d6", "#8cc6e7", "#b9def2", "#555555", "#b5651d", "#d08c4a", "#e0ab78"]
    colours += ["#efcfae", "#8f4f12", "#4a8f4a", "#9c5fb5", "#c0504d", "#d98886", "#e9b9b8"]
    for number, name in enumerate(names):
        for place, part in enumerate(("time", "memory"), start=1):
            figure.add_trace(
                graph_objects.Bar(
                    name=name,
                    legendgroup=name,
                    showlegend=place == 1,
                    marker_color=colours[number % len(colours)],
                    x=list(cases),
                    y=[_bars(case, part).get(name) for case in cases.values()],
                ),
                row=place,
                col=1,
            )
    figure.add_hline(y=1.0, line_dash="dot", row=1, col=1)
    machine = document["machine"]
    figure.update_layout(title=f"Linear cross entropy, {machine['cpu']}, {machine['date']}", height=1000)
    figure.write_html(path, include_plotlyjs=True)
    print(f"plot: {path}")


def _bars(case: Mapping[str, Any], part: str) -> dict[str, float]:
    if part == "memory":
        return dict(case.get("memory", {}))
    rows = case.get("time", {"rows": {}})["rows"]
    return {name: row["wall_ratio"]["median"] for name, row in rows.items() if not name.startswith("floor")}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", help="ROWSxWIDTHxVOCABULARY; default: the three of the docs")
    parser.add_argument("--ignored", nargs="+", type=float, default=IGNORED_FRACS, help="shares of the rows")
    parser.add_argument("--variants", nargs="+", help=f"beginnings of: {'; '.join(VARIANTS)}")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=5, help="rounds of ours; of options and kernels, all")
    parser.add_argument("--sets", type=int, default=3, help="of random inputs, in rotation")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: all cores")
    parser.add_argument("--quick", action="store_true", help="small shapes, two rounds")
    parser.add_argument("--output", type=Path, help="folder for results.json and plot.html")
    arguments = parser.parse_args(argv)
    shapes = SHAPES
    if arguments.quick:
        shapes, arguments.repeats, arguments.ignored = QUICK_SHAPES, 2, [0.75]
        arguments.variants = arguments.variants or QUICK_VARIANTS
    if arguments.shapes:
        shapes = tuple(tuple(map(int, shape.split("x"))) for shape in arguments.shapes)
    arguments.cases = [Case(*shape, ignored) for shape in shapes for ignored in arguments.ignored]
    return arguments


def measure_case(case: Case, runs: Mapping[str, Run], arguments: argparse.Namespace) -> dict[str, Any]:
    """The parts that are asked for."""
    chunk = chunk_rows(case.num_targets, case.width)
    measured: dict[str, Any] = {
        "title": f"{case}. Ours in {-(-case.num_targets // chunk)} chunks of {chunk} rows; one chunk and the "
        f"gradients are {memory_goal_mib(case):.0f} MiB."
    }
    runs = choose_variants(runs, case)
    if "memory" in arguments.parts:
        if arguments.quick:  # nothing that a process start is worth
            measured["memory"] = {"ours": measure_memory("ours", case, arguments.threads)}
        else:
            measured["memory"] = {
                name: in_fresh_process(measure_memory, name, case, arguments.threads) for name in runs
            }
    if "time" in arguments.parts:
        measured["time"] = time_case(case, runs, arguments) | {"how": describe_run(arguments)}
    if "error" in arguments.parts:
        measured["error"] = measure_errors(case, runs)
    return measured


def describe_run(arguments: argparse.Namespace) -> str:
    """What a number depends on besides the case."""
    date = describe_machine()["date"]
    return f"{date}, {arguments.threads} threads, {arguments.repeats} rounds"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables, write the results."""
    arguments = parse(argv)
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")  # peers warn about options that are meant to be so
    document: dict[str, Any] = {"cases": {}, "options": {}, "kernels": {}, "bfloat16": []}
    path = None
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        path = arguments.output / "results.json"
        if path.exists():
            document = json.loads(path.read_text(encoding="utf-8"))
    document["machine"] = describe_machine(PEERS)
    print(" | ".join(f"{key}: {value}" for key, value in document["machine"].items()), flush=True)

    runs, missing = load_variants(arguments.variants)
    for case in arguments.cases:
        if {"time", "memory", "error"} & set(arguments.parts):
            shown = document["cases"].setdefault(str(case), {})
            shown |= measure_case(case, runs, arguments)
            report_case(shown, missing)
        for part, make in (("options", make_option_variants), ("kernels", make_kernel_variants)):
            if part in arguments.parts:
                time = time_case(case, make(case), arguments, are_ours=True)
                time["how"] = describe_run(arguments)
                document[part][str(case)] = {"title": f"{part}: {case}.", "time": time}
                report_case(document[part][str(case)], {})
        if path is not None:
            path.write_text(json.dumps(document, indent=1), encoding="utf-8")
    if "bfloat16" in arguments.parts:
        document["bfloat16"] = measure_bfloat16(arguments.quick)
        report_bfloat16(document["bfloat16"])
    if path is not None:
        path.write_text(json.dumps(document, indent=1), encoding="utf-8")
        print(f"\nresults: {path}")
        draw(document, arguments.output / "plot.html")


if __name__ == "__main__":
    main()
