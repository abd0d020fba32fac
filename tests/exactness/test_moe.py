"""Mixtures of experts in every layout against the oracle: losses, every gradient element, expert counts.

Rows 25 and 26.
"""

import functools
import itertools
import logging
import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as checkpoint_files
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from exactness.driving import (
    CHANNELS,
    build_window,
    close,
    decoder_layers,
    draw_documents,
    full_gradients,
)
from isoloss import Ledger, LossModel, PackedBatch, Term, Topology, clip_grad_norm_, sum_gradients
from isoloss.parallel.experts import find_experts, shard_experts
from isoloss.parallel.routers import RouterLosses
from isoloss.parallel.wrap import wrap_model
from oracle.mixture import EXPERTS, MOE_KINDS, MixtureAnswer, build_moe, moe_answer
from oracle.single_process import PlainDocument, worst_difference
from ranks import on_ranks, run_on_ranks

BALANCE, Z = 0.3, 0.02
TERMS = (Term("text"), Term("moe_balance", "source", BALANCE), Term("moe_z", "source", Z))
WINDOW = 112
COUNTS = ("previous_step", "window", "micro_batch")
LAYOUTS = {
    # ranks: (sizes, whether dense parameters are under FSDP2)
    0: [({}, False)],
    2: [
        ({}, True),
        ({"dp_replicate_size": 2}, True),  # DDP
        ({"ep_size": 2}, True),
        ({"ep_size": 2}, False),
    ],
    4: [
        ({"ep_size": 4}, True),
        ({"ep_size": 2}, True),
        ({"ep_size": 2}, False),
        ({"dp_replicate_size": 2, "ep_size": 2}, True),
        ({"dp_replicate_size": 4, "ep_size": 2}, True),
        ({"cp_size": 2, "ep_size": 2}, True),
        ({"sp_size": 2, "ep_size": 2}, True),
    ],
}
Windows = tuple[tuple[PlainDocument, ...], ...]


@dataclass(frozen=True)
class Case:
    kind: str
    sizes: tuple[tuple[str, int], ...]
    wrapped: bool
    accumulation: int
    counts: str
    empty_rank: bool

    @property
    def topology_sizes(self) -> dict[str, int]:
        return dict(self.sizes)

    def data_size(self, ranks: int) -> int:
        sizes = self.topology_sizes
        shared = (sizes.get(axis, 1) for axis in ("cp_size", "sp_size", "tp_size"))
        return max(ranks, 1) // math.prod(shared)


def cases(ranks: int) -> list[Case]:
    """Every layout, accumulation and kind of counts on one and two ranks; on four, counts take turns."""
    found = []
    turn = itertools.count()
    for (sizes, wrapped), accumulation in itertools.product(LAYOUTS[ranks], (1, 3)):
        for counts in COUNTS if ranks < 4 else (COUNTS[next(turn) % len(COUNTS)],):
            kind = MOE_KINDS[len(found) % len(MOE_KINDS)]
            one = Case(kind, tuple(sizes.items()), wrapped, accumulation, counts, empty_rank=False)
            found.append(one)
            if one.data_size(ranks) > 1 and counts == "previous_step":
                found.append(replace(one, empty_rank=True))
    return found


def documents() -> list[PlainDocument]:
    return draw_documents(seed=3, weighted=False)


def windows_of(case: Case, ranks: int) -> list[list[list[int]]]:
    """[data rank][micro-batch] -> numbers of documents. The last rank may have none."""
    size = case.data_size(ranks)
    filled = size - 1 if case.empty_rank else size
    held = [[[] for _ in range(case.accumulation)] for _ in range(size)]
    for number in range(len(documents())):
        held[number % filled][number // filled % case.accumulation].append(number)
    return held


@functools.cache
def oracle(kind: str, groups: tuple[tuple[int, ...], ...], step: int | None) -> MixtureAnswer:
    """`step` 0 or 1: frequencies of the step before; None: each group has its own."""
    plain = documents()
    chosen = [[plain[number] for number in group] for group in groups]
    frequencies = None
    if step == 0:
        frequencies = [torch.full((2, EXPERTS), 1 / EXPERTS, dtype=torch.float64)] * len(groups)
    elif step == 1:
        counts = torch.tensor(oracle(kind, groups, 0).counts, dtype=torch.float64)
        frequencies = [counts / counts.sum(-1, keepdim=True)] * len(groups)
    return moe_answer(build_moe(kind), chosen, balance=BALANCE, z=Z, frequencies=frequencies)


def answers_of(case: Case, ranks: int) -> list[MixtureAnswer]:
    """Of two steps on the same documents without an update between."""
    held = windows_of(case, ranks)
    if case.counts == "previous_step":
        everything = tuple(range(len(documents())))
        return [oracle(case.kind, (everything,), step) for step in (0, 1)]
    if case.counts == "window":
        groups = [tuple(window) for rank in held for window in rank]
    else:
        groups = [tuple(itertools.chain(*micro)) for micro in zip(*held, strict=True)]
    return [oracle(case.kind, tuple(sorted(group for group in groups if group)), None)]


def build(case: Case, topology: Topology) -> tuple[LossModel, nn.Module]:
    loss_model = LossModel(build_moe(case.kind), RouterLosses(z="moe_z", counts=case.counts))
    if case.wrapped:
        return loss_model, wrap_model(loss_model, decoder_layers(loss_model.model), topology)
    shard_experts(loss_model, topology)
    return loss_model, loss_model


def run_cases(chosen: list[Case], answers: dict[Case, list[MixtureAnswer]], ranks: int) -> list[str]:
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # of our own full_tensor
    failures = []
    plain = documents()
    for case in chosen:
        topology = Topology(**case.topology_sizes)
        loss_model, outer = build(case, topology)
        failures += [f"{case}: {fault}" for fault in oversized_experts(loss_model, topology, case.wrapped)]
        gradients = sum_gradients(outer, topology) if ranks else None
        ledger = Ledger(TERMS, CHANNELS, topology, routing=loss_model.routing)
        mine = [
            build_window([plain[number] for number in window], alignment=4, padded_length=WINDOW)
            if window
            else PackedBatch.empty(WINDOW)
            for window in windows_of(case, ranks)[topology.data_rank]
        ]
        for number, expected in enumerate(answers[case]):
            loss_model.zero_grad(set_to_none=True)
            with ledger.step(mine, gradients=gradients) as step:
                for batch in step:
                    outer(step, batch).backward()
            counts = step.record.expert_counts
            differences = compare(loss_model, step.metrics(), counts, expected)
            failures += [f"{case}, step {number}: {difference}" for difference in differences]
    return failures


def oversized_experts(loss_model: LossModel, topology: Topology, wrapped: bool) -> list[str]:
    """Bytes of expert parameters on this rank must be 1 / ep, and of those FSDP2's part."""
    held = whole = 0
    for experts in find_experts(loss_model):
        for parameter in experts.parameters():
            whole += parameter.numel() * parameter.element_size()
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            held += local.numel() * local.element_size()
    parts = topology.ep_size
    if wrapped and (topology.ep_size > 1 or topology.dp_replicate_size == 1):
        parts = topology.world_size  # ep x expert_data
        if topology.ep_size > 1:
            parts //= topology.tp_size  # each tensor rank has whole experts then
    return [] if held * parts == whole else [f"{held} bytes of experts, expected {whole} / {parts}"]


def compare(
    loss_model: LossModel, metrics: dict[str, float], counts: list[list[int]], expected: MixtureAnswer
) -> list[str]:
    found = []
    floats = {
        "loss/text": expected.text,
        "loss/moe_balance": expected.balance,
        "loss/moe_z": expected.z,
        "train/loss": expected.text + BALANCE * expected.balance + Z * expected.z,
        "moe/max_violation": max(max(row) * EXPERTS / sum(row) - 1 for row in expected.counts),
        "health/books_balance": 1.0,
    }
    for name, value in floats.items():
        if not close(metrics[name], value):
            found.append(f"{name} is {metrics[name]!r}, expected {value!r}")
    if counts != expected.counts:
        found.append(f"expert counts are {counts}, expected {expected.counts}")
    gradients = full_gradients(loss_model.model)
    difference, where = worst_difference(gradients, expected.gradients)
    if difference > 1e-10:
        found.append(f"gradient of {where} differs by {difference:.3g} of its largest element")
    norm = clip_grad_norm_(loss_model, math.inf).item()
    squares = sum(gradient.square().sum().item() for gradient in expected.gradients.values())
    if not close(norm, math.sqrt(squares)):
        found.append(f"the norm is {norm!r}, expected {math.sqrt(squares)!r}")
    return found


@pytest.mark.parametrize("ranks", [0, 2, 4])
def test_row_25_row_26_every_layout_gives_the_answer_of_the_oracle(ranks: int) -> None:
    """row 25 (expert gradients without a factor, ep1, ep2, ep4), row 26 (all three kinds of counts)."""
    chosen = cases(ranks)
    answers = {case: answers_of(case, ranks) for case in chosen}
    outcomes = (
        run_on_ranks(ranks, run_cases, chosen, answers, ranks, timeout_s=240)
        if ranks
        else [run_cases(chosen, answers, ranks)]
    )
    for rank, failures in enumerate(outcomes):
        assert not failures, f"rank {rank}: {len(failures)} differences\n" + "\n".join(failures[:20])


def test_the_cases_hold_what_they_claim() -> None:
    everything = (tuple(range(len(documents()))),)
    for kind in MOE_KINDS:
        first, second = oracle(kind, everything, 0), oracle(kind, everything, 1)
        assert first.balance == pytest.approx(1.0) and second.balance > 1.01
        assert worst_difference(first.gradients, second.gradients)[0] > 1e-3
    for row in oracle("qwen3-moe-idle", everything, 0).counts:
        assert all(row[: EXPERTS // 2]) and not any(row[EXPERTS // 2 :])
    for ranks in LAYOUTS:
        assert {case.kind for case in cases(ranks)} == set(MOE_KINDS)
    assert any(case.empty_rank for case in cases(2)) and any(case.empty_rank for case in cases(4))


@pytest.mark.parametrize("recomputed", ["layers", "all"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_records_once(recomputed: str, reentrant: bool) -> None:
    """row 26; what is recomputed are routers, exchanges and the gradients of router losses with them."""
    plain = documents()
    case = Case("qwen3-moe", (("ep_size", 2),), True, 2, "micro_batch", empty_rank=False)
    [expected] = answers_of(case, 2)

    def body() -> None:
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
        topology = Topology(ep_size=2)
        loss_model, outer = build(case, topology)
        if recomputed == "layers":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # renamed in transformers 5.24
                loss_model.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        gradients = sum_gradients(outer, topology)
        ledger = Ledger(TERMS, CHANNELS, topology, routing=loss_model.routing)
        mine = windows_of(case, 2)[dist.get_rank()]
        windows = [build_window([plain[one] for one in window], padded_length=WINDOW) for window in mine]
        needs_gradient = torch.zeros((), requires_grad=True)
        with ledger.step(windows, gradients=gradients) as step:
            for batch in step:
                run = functools.partial(outer, step, batch)
                if recomputed == "all":
                    share = checkpoint(lambda _, run=run: run(), needs_gradient, use_reentrant=reentrant)
                else:
                    share = run()
                share.backward()
        assert compare(loss_model, step.metrics(), step.record.expert_counts, expected) == []

    run_on_ranks(2, body)


def mean_of_means(model: nn.Module, windows: Windows) -> dict[str, Tensor]:
    answers = [moe_answer(model, [window], balance=BALANCE, z=Z) for window in windows]
    return {name: sum(one.gradients[name] for one in answers) / len(answers) for name in answers[0].gradients}


def test_the_comparison_can_fail() -> None:
    """A mean of per-window losses is not the answer."""
    plain = documents()
    windows = tuple(tuple(plain[start::2]) for start in range(2))
    right = moe_answer(build_moe(), windows, balance=BALANCE, z=Z)
    assert worst_difference(mean_of_means(build_moe(), windows), right.gradients)[0] > 1e-3


def train_on(case: Case, ranks: int, steps: int, *, seed: int, save: str = "", load: str = "") -> list[float]:
    """Losses of AdamW steps with clipped gradients, after loading and before saving a checkpoint."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    plain = documents()
    topology = Topology(**case.topology_sizes)
    loss_model = LossModel(build_moe(case.kind, seed=seed))
    outer = wrap_model(loss_model, decoder_layers(loss_model.model), topology)
    optimizer = torch.optim.AdamW(outer.parameters(), lr=1e-2)
    gradients = sum_gradients(outer, topology)
    ledger = Ledger([Term("text")], CHANNELS, topology)

    def state() -> dict[str, Any]:
        return {
            "model": get_model_state_dict(outer),
            "optimizer": get_optimizer_state_dict(outer, optimizer),
        }

    if load:
        saved = state()
        checkpoint_files.load(saved, checkpoint_id=load)
        set_model_state_dict(outer, saved["model"])
        set_optimizer_state_dict(outer, optimizer, saved["optimizer"])
    mine = [
        build_window([plain[number] for number in window], padded_length=WINDOW)
        for window in windows_of(case, ranks)[topology.data_rank]
    ]
    losses = []
    for _ in range(steps):
        with ledger.step(mine, gradients=gradients) as step:
            for batch in step:
                outer(step, batch).backward()
        losses.append(step.metrics()["train/loss"])
        clip_grad_norm_(outer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if save:
        checkpoint_files.save(state(), checkpoint_id=save)
    return losses


@pytest.mark.filterwarnings("ignore:.*(ShardedTensor|TypedStorage|_get_pg_default_device|weights_only).*")
def test_a_run_moves_between_expert_layouts(tmp_path: Path) -> None:
    """Two steps on 2 ranks with ep 2, two more on 4 ranks with ep 2 x expert_data 2, against four in one."""

    def case(sizes: dict[str, int]) -> Case:
        return Case("qwen3-moe", tuple(sizes.items()), True, 1, "previous_step", empty_rank=False)

    files = str(tmp_path / "checkpoint")
    whole = run_on_ranks(2, functools.partial(train_on, case({}), 2, 4, seed=0))[0]
    spread = case({"ep_size": 2})
    first = run_on_ranks(2, functools.partial(train_on, spread, 2, 2, seed=0, save=files))[0]
    then = run_on_ranks(4, functools.partial(train_on, spread, 4, 2, seed=9, load=files))[0]
    assert whole[3] < whole[0] - 1
    # norms compute in float32, so rounding grows from step to step
    assert first + then == pytest.approx(whole, rel=1e-6)


@on_ranks(2)
def test_experts_within_their_layers_unit_are_refused() -> None:
    """The unit of a layer shards over all data ranks, which hold different experts."""
    topology = Topology(ep_size=2)
    model = build_moe()
    shard_experts(model, topology)
    with pytest.raises(RuntimeError, match="overlapping meshes"):
        fully_shard(decoder_layers(model)[0], mesh=topology.fsdp_mesh)
