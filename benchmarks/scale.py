"""What a run costs to plan: seconds and memory of everything that is built before and in its first step.

One process takes the place of one rank of thousands. The process group is torch's fake one, which knows sizes
and memberships and moves nothing; parameters and activations are fake tensors, which have shapes and no
storage. Everything else is what a real run does: topology, shard maps, the two vectors, `wrap_model` (tensor
plan, experts, FSDP2) and one step of the ledger with forward and backward of every layer.

    python benchmarks/scale.py                        both models at 1,024 and 16,384 ranks, first rank
    python benchmarks/scale.py --model moe --world-size 16384 --rank 8191
    python benchmarks/scale.py --laws                 what grows with ranks, channels, documents and terms
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from isoloss import (
    IGNORE_INDEX,
    Layout,
    Ledger,
    LossModel,
    PackedBatch,
    Term,
    Topology,
    shift_targets,
    sum_gradients,
)
from isoloss.parallel.experts import dispatched_experts, find_experts
from isoloss.parallel.wrap import wrap_model
from isoloss.reduction.opening import count_windows
from isoloss.reduction.record import Declaration
from isoloss.sharding import shard_slots
from isoloss.train.model import transformer_blocks

WINDOW = 8192
PLANNED_EXPERTS = "isoloss_planned"


@dataclass(frozen=True)
class Plan:
    """A model on a number of ranks."""

    config: Callable[..., transformers.PretrainedConfig]
    world_size: int
    sizes: Mapping[str, int]


def dense_config(**changes: Any) -> transformers.PretrainedConfig:
    """The shape of a dense model with 70 billion parameters."""
    shape: dict[str, Any] = {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    }
    return transformers.LlamaConfig(**shape | changes)


def moe_config(**changes: Any) -> transformers.PretrainedConfig:
    """The shape of a mixture of experts with 235 billion parameters."""
    shape: dict[str, Any] = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    }
    return transformers.Qwen3MoeConfig(**shape | changes)


PLANS = {
    ("dense", 1024): Plan(
        dense_config, 1024, {"dp_replicate_size": 2, "cp_size": 4, "sp_size": 2, "tp_size": 8}
    ),
    ("dense", 16384): Plan(
        dense_config, 16384, {"dp_replicate_size": 4, "cp_size": 8, "sp_size": 4, "tp_size": 8}
    ),
    ("moe", 1024): Plan(
        moe_config, 1024, {"dp_replicate_size": 2, "cp_size": 2, "sp_size": 4, "tp_size": 4, "ep_size": 16}
    ),
    ("moe", 16384): Plan(
        moe_config, 16384, {"dp_replicate_size": 4, "cp_size": 8, "sp_size": 4, "tp_size": 4, "ep_size": 32}
    ),
}


@contextmanager
def fake_run(world_size: int, rank: int) -> Iterator[None]:
    """This process as one rank of a run whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor remembers results on an equal mesh, whose groups are those of this run; the next has others.
        _clear_sharding_prop_cache()


def make_window(
    lengths: Sequence[int], sources: Sequence[int], terms: Sequence[str], *, window: int, alignment: int
) -> PackedBatch:
    """A window of these documents; all tokens but the first of each are targets of every term."""
    layout = Layout(list(lengths), list(sources), alignment=alignment, padded_length=window)
    input_ids = torch.arange(window) % 1000
    targets = shift_targets(input_ids, layout)
    return PackedBatch(input_ids, dict.fromkeys(terms, targets), layout)


def without_targets(window: int, alignment: int) -> PackedBatch:
    """Two documents that train nothing.

    The fake process group adds nothing up, so of a window on several ranks one rank would miss the losses of
    the others, and say so. Nothing is missing of nothing.
    """
    layout = Layout([window // 2 + 1, window // 4], alignment=alignment, padded_length=window)
    return PackedBatch(
        torch.zeros(window, dtype=torch.int64), {"text": torch.full((window,), IGNORE_INDEX)}, layout
    )


class Collectives(TorchDispatchMode):
    """Counts collectives by operation and dtype. The ledger's vectors are the only ones of float64."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, torch.dtype]] = Counter()
        self.ledger_lengths: list[int] = []
        """Numbers in each collective of float64."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.counts.total()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count `func` if it communicates, and run it."""
        if "c10d" in func.namespace and not func.__name__.startswith("wait_tensor"):
            first = args[0]
            while isinstance(first, list | tuple):
                first = first[0]
            self.counts[func.__name__.split(".")[0], first.dtype] += 1
            if first.dtype == torch.float64:
                self.ledger_lengths.append(first.numel())
        return func(*args, **(kwargs or {}))


class FakeModel:
    """A model without storage, wrapped as a rank of the run wraps it."""

    def __init__(self, config: transformers.PretrainedConfig, topology: Topology) -> None:
        self.topology = topology
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self.mode:
            self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            if find_experts(self.model):
                # Routing depends on data that do not exist: each expert is chosen equally often.
                ALL_EXPERTS_FUNCTIONS.register(PLANNED_EXPERTS, _balanced_experts)
                for experts in find_experts(self.model):
                    experts.config._experts_implementation = PLANNED_EXPERTS
            self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        loss_model = LossModel(self.model)
        # They are where they belong, and torch cannot move fake parameters.
        loss_model.to = lambda *_: loss_model  # type: ignore[method-assign]
        # outside the mode, in which a mesh cannot be asked for its ranks
        self.wrapped = wrap_model(loss_model, transformer_blocks(self.model), topology)

    def local_bytes(self) -> dict[str, int]:
        """Bytes of this rank's parameters by kind: vocabulary, experts, other."""
        kinds = {"vocabulary": 0, "experts": 0, "other": 0}
        for name, parameter in self.model.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            kind = "other"
            if "embed_tokens" in name or "lm_head" in name:
                kind = "vocabulary"
            elif "experts" in name:
                kind = "experts"
            kinds[kind] += local.numel() * local.element_size()
        return kinds

    def step(self, num_micro_batches: int = 1) -> Collectives:
        """Forward and backward of one step of the ledger; its collectives."""
        gradients = sum_gradients(self.wrapped, self.topology)
        ledger = Ledger([Term("text")], channels=["web"], topology=self.topology)
        window = without_targets(WINDOW, 2 * self.topology.cp_size)
        collectives = Collectives()
        with collectives, ledger.step([window] * num_micro_batches, gradients=gradients) as step:
            for batch in step:
                with self.mode, collectives, warnings.catch_warnings():
                    # the mode looks at .grad of the numbers that it takes over
                    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
                    self.wrapped(step, batch, _objective).backward()
        return collectives


def _objective(model: Any, step: Any, batch: PackedBatch) -> Tensor:
    hidden = model.get_decoder()(**batch.model_inputs(), use_cache=False).last_hidden_state[0]
    weight = model.get_output_embeddings().weight
    logits = hidden @ (weight.to_local() if isinstance(weight, DTensor) else weight).T
    losses = _WithStorage.apply(logits.float().logsumexp(-1))
    with unset_fake_temporarily():
        return step.add("text", losses, batch)


class _WithStorage(torch.autograd.Function):
    """Zeros in place of fake numbers, so that the ledger is a real one; backward the other way."""

    @staticmethod
    def forward(ctx: Any, fake: Tensor) -> Tensor:
        ctx.mode = fake.fake_mode
        with unset_fake_temporarily():
            return torch.zeros(fake.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.mode.from_tensor(gradient)


def _balanced_experts(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    with unset_fake_temporarily():
        chosen = torch.arange(top_k_index.numel()).view(top_k_index.shape) % experts.num_experts
        return dispatched_experts(experts, hidden, chosen, top_k_weights, local="eager")


def peak_mib() -> float:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def report_plan(name: str, world_size: int, rank: int) -> None:
    """One line per part of the plan: wall and CPU seconds, and MiB by which the peak of the process grew."""
    plan = PLANS[name, world_size]
    print(f"{name}, rank {rank} of {world_size}: {dict(plan.sizes)}")
    before, start, cpu = peak_mib(), time.perf_counter(), time.process_time()

    def line(part: str, what: str) -> None:
        nonlocal before, start, cpu
        seconds = f"{time.perf_counter() - start:>7.2f} s {time.process_time() - cpu:>7.2f} CPU s"
        print(f"  {part:<10} {seconds} {peak_mib() - before:>+7.0f} MiB   {what}", flush=True)
        before, start, cpu = peak_mib(), time.perf_counter(), time.process_time()

    with fake_run(world_size, rank):
        topology = Topology(**plan.sizes)
        line("topology", repr(topology))
        window = without_targets(WINDOW, 2 * topology.cp_size)
        slots = shard_slots(
            window.layout,
            cp_size=topology.cp_size,
            cp_rank=topology.cp_rank,
            sp_size=topology.sp_size,
            sp_rank=topology.sp_rank,
        )
        line("shard map", f"{len(slots)} of {WINDOW} slots")
        model = FakeModel(plan.config(), topology)
        line("model", f"{model.num_parameters / 1e9:.1f} billion parameters; bytes {model.local_bytes()}")
        collectives = model.step()
        line(
            "step", f"{len(collectives.ledger_lengths)} collectives of the ledger, {collectives.total} in all"
        )
    print(f"  process    {peak_mib():.0f} MiB at its peak, libraries included")


def report_laws() -> None:
    """Ratios, each of two measurements of one process."""
    for name, sizes in (("all axes", PLANS["moe", 1024].sizes), ("one axis", {})):
        print(f"topology, {name}: CPU seconds / those at 1,024 ranks")
        base = 0.0
        for world_size in (1024, 4096, 16384):
            seconds = statistics.median(_topology_s(world_size, sizes) for _ in range(5))
            base = base or seconds
            print(f"  {world_size:>6} ranks {seconds / base:>8.2f}")
    for what, terms, channels, documents in (
        ("channels", (1, 1, 1), (16, 256, 4096), (64, 64, 64)),
        ("terms", (1, 4, 16), (16, 16, 16), (64, 64, 64)),
        ("documents", (1, 1, 1), (16, 16, 16), (64, 256, 1024)),
    ):
        print(f"{what}: length of both vectors and CPU seconds to count a window, / those of the first row")
        first: tuple[float, float] | None = None
        for num_terms, num_channels, num_documents in zip(terms, channels, documents, strict=True):
            length, cost = _count(num_terms, num_channels, num_documents)
            first = first or (length, cost)
            value = {"channels": num_channels, "terms": num_terms, "documents": num_documents}[what]
            ratios = f"{length / first[0]:>8.2f} {cost / first[1]:>8.2f}"
            print(f"  {value:>6} {what:<10} {length:>8} numbers {ratios}")


def _topology_s(world_size: int, sizes: Mapping[str, int]) -> float:
    with fake_run(world_size, 0):
        start = time.process_time()
        Topology(**sizes)
        return time.process_time() - start


def _count(num_terms: int, num_channels: int, num_documents: int) -> tuple[int, float]:
    names = [f"term {number}" for number in range(num_terms)]
    channels = tuple(f"channel {number}" for number in range(num_channels))
    declaration = Declaration(tuple(map(Term, names)), channels)
    sources = [number % num_channels for number in range(num_documents)]
    lengths = [WINDOW // num_documents] * num_documents
    window = make_window(lengths, sources, names, window=WINDOW, alignment=8)
    seconds = []
    for _ in range(30):
        start = time.process_time()
        count_windows(declaration, [window], frozenset())
        seconds.append(time.process_time() - start)
    return declaration.opening.length + declaration.closing.length, statistics.median(seconds)


def main() -> None:
    """Print the plans, each in a process of its own, so that memory is that of one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=["dense", "moe"], help="default: both")
    parser.add_argument("--world-size", type=int, choices=[1024, 16384], help="default: both")
    parser.add_argument("--rank", type=int, default=0, help="the rank that this process stands for")
    parser.add_argument("--laws", action="store_true", help="print ratios instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.laws:
        report_laws()
        return
    if arguments.model and arguments.world_size:
        report_plan(arguments.model, arguments.world_size, arguments.rank)
        return
    for name, world_size in PLANS:
        if arguments.model in (None, name) and arguments.world_size in (None, world_size):
            command = [sys.executable, __file__, "--model", name, "--world-size", str(world_size)]
            subprocess.run([*command, "--rank", str(arguments.rank)], check=True, env=os.environ)


if __name__ == "__main__":
    main()
