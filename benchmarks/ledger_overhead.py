"""What the loss path costs: a step with 50 channels against the same step with no loss path at all.

Both arms run the same wrapped model on the same windows through the same linear cross entropy and the same
optimizer. "ledger" opens and closes a step of the ledger with 50 channels and reads its metrics, every step.
"bare" has its token weights ready, calls the kernel with them, counts nothing and communicates nothing but
gradients. Arms alternate, in random order within a pair; a pair gives one ratio, and
the interval is a bootstrap of their median. CPU time is that of all ranks together: on a machine that does
other work it is the steadier number.

Blocks for each number of ranks: "step" is the real step. "alone" puts a model of a few numbers in its place,
so that what is left of the difference is the loss path, and relates it to the real bare step. "pack" is what
making the step's batches costs, counting included, in which a loader spends its time before the step; a loop
without a loss path makes batches too.

    python benchmarks/ledger_overhead.py                    one process, then two ranks under FSDP2
    python benchmarks/ledger_overhead.py --ranks 2 --wrapper ddp --pairs 60
"""

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from isoloss import (
    IGNORE_INDEX,
    GradientSum,
    Layout,
    Ledger,
    LossModel,
    PackedBatch,
    Term,
    Topology,
    linear_cross_entropy,
    shift_targets,
    sum_gradients,
)

VOCABULARY = 2048
WINDOW = 512
WINDOWS_PER_STEP = 4
NUM_CHANNELS = 50


@dataclass(frozen=True)
class Window:
    """What a packer has in hand before it makes a batch."""

    input_ids: Tensor
    targets: Tensor
    layout: Layout

    def batch(self) -> PackedBatch:
        """The batch, which counts itself when it is made."""
        return PackedBatch(self.input_ids, {"text": self.targets}, self.layout)


@dataclass(frozen=True)
class Timing:
    """One step of one arm."""

    wall_s: float
    cpu_s: float


def make_windows(count: int, vocabulary: int, generator: random.Random) -> list[Window]:
    """Full windows of documents with a median of some 60 tokens, from all channels; a third has no target."""
    windows = []
    for number in range(count):
        lengths: list[int] = []
        used = 0
        while used < WINDOW:
            length = min(max(2, int(generator.lognormvariate(4.1, 0.9))), WINDOW - used)
            lengths.append(length)
            used += -(-length // 8) * 8
        sources = [generator.randrange(NUM_CHANNELS) for _ in lengths]
        layout = Layout(lengths, sources, alignment=8, padded_length=WINDOW)
        torch.manual_seed(number)
        input_ids = torch.randint(vocabulary, (WINDOW,))
        labels = torch.where(torch.rand(WINDOW) < 1 / 3, IGNORE_INDEX, input_ids)
        windows.append(Window(input_ids, shift_targets(labels, layout), layout))
    return windows


class FewNumbers(nn.Module):
    """Takes no time, so that what surrounds it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, 1)
        self.head = nn.Linear(1, 2, bias=False)

    def get_decoder(self) -> Callable[..., Tensor]:
        """What gives the hidden states."""
        return lambda input_ids, **_: self.embedding(input_ids)

    def get_output_embeddings(self) -> nn.Linear:
        """The head."""
        return self.head


def build_model() -> nn.Module:
    """The model of the quickstart."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    return transformers.Qwen3ForCausalLM(config)


def wrap(model: LossModel, wrapper: str, topology: Topology) -> nn.Module:
    """The model under the wrapper that sums its gradients; itself on one rank."""
    if wrapper == "fsdp2":
        for layer in model.modules():
            if isinstance(layer, Qwen3DecoderLayer):
                fully_shard(layer, mesh=topology.fsdp_mesh)
        return fully_shard(model, mesh=topology.fsdp_mesh)
    if wrapper == "ddp":
        return DistributedDataParallel(model, process_group=topology.loss_group)
    return model


class Arms:
    """The two steps that are compared, on one wrapped model."""

    def __init__(self, wrapper: str, topology: Topology, *, alone: bool) -> None:
        loss_model = LossModel(FewNumbers() if alone else build_model())
        self.model = wrap(loss_model, wrapper, topology)
        self.gradients: GradientSum | None = None
        if topology.world_size > 1:
            self.gradients = sum_gradients(self.model, topology)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        channels = [f"source {number}" for number in range(NUM_CHANNELS)]
        self.ledger = Ledger([Term("text")], channels=channels, topology=topology)
        windows = make_windows(WINDOWS_PER_STEP, 2 if alone else VOCABULARY, random.Random(0))
        num_targets = sum(int((window.targets != IGNORE_INDEX).sum()) for window in windows)
        self.windows = windows[topology.data_rank :: topology.data_size]
        self.batches = [window.batch() for window in self.windows]
        self.token_weights = torch.full((WINDOW,), 1 / num_targets)

    def ledger_step(self) -> float:
        """With the whole loss path."""
        with self.ledger.step(self.batches, gradients=self.gradients) as step:
            for batch in step:
                self.model(step, batch).backward()
        self._update()
        return step.metrics()["train/loss"]

    def nothing(self) -> float:
        """What making batches is compared with."""
        return 0.0

    def make_batches(self) -> float:
        """The batches of one step."""
        self.batches = [window.batch() for window in self.windows]
        return 0.0

    def bare_step(self) -> float:
        """With gradients and nothing else."""
        gradients = self.gradients
        loss = torch.zeros(())
        if gradients is not None:
            gradients.begin()
        for place, batch in enumerate(self.batches):
            if gradients is not None:
                gradients.synchronise(place == len(self.batches) - 1)
            share = self.model(None, batch, self._bare_objective)
            share.backward()
            loss += share.detach()
        if gradients is not None:
            gradients.end()
        self._update()
        return loss.item()

    def _bare_objective(self, model: nn.Module, _: object, batch: PackedBatch) -> Tensor:
        output = model.get_decoder()(**batch.model_inputs(), use_cache=False)
        hidden = (output if isinstance(output, Tensor) else output.last_hidden_state)[0]
        weight = model.get_output_embeddings().weight
        targets = batch.targets["text"]
        return linear_cross_entropy(hidden, weight, targets, token_weights=self.token_weights).loss

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def time_step(step: Callable[[], float], steps: int) -> Timing:
    """Seconds of one step; CPU seconds are summed over the ranks."""
    gc.collect()
    if dist.is_initialized():
        dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    timing = (
        torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64) / steps
    )
    if dist.is_initialized():
        dist.all_reduce(timing[1:])
    return Timing(*timing.tolist())


def measure(
    ledger_step: Callable[[], float], bare_step: Callable[[], float], pairs: int, steps: int
) -> dict[str, list[Timing]]:
    """Timings of both arms, pair by pair; every rank takes the same order."""
    arm_steps = {"ledger": ledger_step, "bare": bare_step}
    for _ in range(3):  # warm up both
        for step in arm_steps.values():
            step()
    order = random.Random(1)
    timings: dict[str, list[Timing]] = {name: [] for name in arm_steps}
    for _ in range(pairs):
        for name in order.sample(list(arm_steps), 2):
            timings[name].append(time_step(arm_steps[name], steps))
    return timings


def interval(values: list[float], level: float = 0.95) -> tuple[float, float]:
    """Bootstrap percentile interval of the median."""
    generator = random.Random(2)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(4000))
    cut = int(len(medians) * (1 - level) / 2)
    return medians[cut], medians[-1 - cut]


def report(name: str, blocks: dict[str, dict[str, list[Timing]]]) -> None:
    """One line per block and clock."""
    for clock in ("wall_s", "cpu_s"):
        step_s = statistics.median(vars(timing)[clock] for timing in blocks["step"]["bare"])
        for block, timings in blocks.items():
            ours, bare = ([vars(timing)[clock] for timing in timings[arm]] for arm in ("ledger", "bare"))
            shares = paired(ours, bare, bare if block == "step" else [step_s] * len(bare))
            label = f"{name:<16} {clock.removesuffix('_s'):<5} {block:<5}"
            print_line(label, statistics.median(bare), statistics.median(ours), shares)


def paired(ours: list[float], bare: list[float], unit: list[float]) -> list[float]:
    """Difference of the arms in each pair, as a share of `unit`."""
    return [(a - b) / u for a, b, u in zip(ours, bare, unit, strict=True)]


def print_line(label: str, bare_s: float, ours_s: float, shares: list[float]) -> None:
    """Medians in milliseconds, the overhead as a share of the bare step, its interval."""
    low, high = interval(shares)
    print(
        f"{label} {1e3 * bare_s:>9.2f} ms {1e3 * ours_s:>9.2f} ms {statistics.median(shares):>+9.2%}  "
        f"[{low:+.2%}, {high:+.2%}]  {len(shares)}",
        flush=True,
    )


def run_rank(rank: int, arguments: argparse.Namespace, rendezvous: str) -> None:
    """Both blocks on one number of ranks."""
    torch.set_num_threads(arguments.threads)
    ranks = arguments.ranks
    if ranks > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    wrapper = arguments.wrapper if ranks > 1 else "none"
    topology = Topology(dp_replicate_size=ranks if wrapper == "ddp" else 1)
    real = Arms(wrapper, topology, alone=False)
    alone = Arms(wrapper, topology, alone=True)
    blocks = {
        "step": measure(real.ledger_step, real.bare_step, arguments.pairs, arguments.steps),
        "alone": measure(alone.ledger_step, alone.bare_step, 5 * arguments.pairs, 5),
        "pack": measure(real.make_batches, real.nothing, 5 * arguments.pairs, 1),
    }
    if rank == 0:
        report(f"{ranks} ranks, {wrapper}" if ranks > 1 else "1 process", blocks)
    if ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="default: 1, then 2")
    parser.add_argument(
        "--wrapper", choices=["fsdp2", "ddp", "none"], default="fsdp2", help="on several ranks"
    )
    parser.add_argument("--pairs", type=int, default=40, help="at least 30 for a fair interval")
    parser.add_argument("--steps", type=int, default=2, help="steps of an arm in a pair")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    arguments = parser.parse_args()
    print(
        f"{WINDOWS_PER_STEP} windows of {WINDOW} a step, {NUM_CHANNELS} channels, 4 layers x 128, "
        f"vocabulary {VOCABULARY}, {arguments.threads} thread(s) a rank"
    )
    columns = f"{'bare':>12} {'ledger':>12} {'overhead':>9}  95 % interval  pairs"
    print(f"{'':<16} clock block {columns}")
    for ranks in [1, 2] if arguments.ranks is None else [arguments.ranks]:
        arguments.ranks = ranks
        with tempfile.TemporaryDirectory() as directory:
            rendezvous = os.path.join(directory, "store")
            mp.start_processes(run_rank, (arguments, rendezvous), nprocs=ranks, start_method="spawn")


if __name__ == "__main__":
    main()
