"""Row 34: runs of 1,024 and 16,384 ranks, planned in one process under torch's fake process group.

The larger part, whole models of 70 and 235 billion parameters, carries the marker `slow`; here their depth
is one, which changes no shape.
"""

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from isoloss import Ledger, Term, Topology
from isoloss.reduction.opening import count_windows
from isoloss.reduction.record import Declaration
from isoloss.reduction.terms import Routing
from isoloss.sharding import shard_slots, slot_ranks


def load_benchmark() -> Any:
    """benchmarks/scale.py, which is in no package."""
    path = Path(__file__).parents[1] / "benchmarks" / "scale.py"
    spec = importlib.util.spec_from_file_location("benchmark_scale", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


scale = load_benchmark()
PLANS = sorted(scale.PLANS)


def ranks_of(world_size: int) -> tuple[int, ...]:
    """First, last, and two inside that lie on no edge of an axis."""
    return 0, world_size // 2 - 1, world_size // 3, world_size - 1


class Place:
    """Where a rank stands, by arithmetic alone: ((((replicate, shard), cp), sp), tp) as digits."""

    def __init__(self, rank: int, world_size: int, sizes: dict[str, int]) -> None:
        self.rank, self.world_size = rank, world_size
        self.tp, self.sp, self.cp = (sizes.get(f"{axis}_size", 1) for axis in ("tp", "sp", "cp"))
        self.replicate, self.ep = sizes.get("dp_replicate_size", 1), sizes.get("ep_size", 1)
        self.window = self.cp * self.sp * self.tp
        """Ranks that share windows and their tp copies: what one data rank is made of."""
        self.data = world_size // self.window
        self.shard = self.data // self.replicate
        self.data_rank = rank // self.window
        self.inside = rank % self.window

    def along(self, stride: int, size: int) -> list[int]:
        """The ranks that differ from this one in the digit of this stride alone."""
        digit = self.rank // stride % size
        return [self.rank + (other - digit) * stride for other in range(size)]

    def groups(self) -> dict[str, list[int]]:
        tp, sp, cp = self.tp, self.sp, self.cp
        first_data = self.data_rank * self.window
        replica = self.rank // (self.shard * self.window) * self.shard * self.window
        ep_rank = self.data_rank % self.ep
        return {
            "tp": self.along(1, tp),
            "sp": self.along(tp, sp),
            "cp": self.along(tp * sp, cp),
            "dp_shard": self.along(self.window, self.shard),
            "dp_replicate": self.along(self.window * self.shard, self.replicate),
            "window": list(range(first_data + self.rank % tp, first_data + self.window, tp)),
            "fsdp": list(range(replica + self.rank % tp, replica + self.shard * self.window, tp)),
            "loss": list(range(self.rank % tp, self.world_size, tp)),
            "world": list(range(self.world_size)),
            "ep": [
                (self.data_rank - ep_rank + other) * self.window + self.inside for other in range(self.ep)
            ],
            "expert_data": [
                data * self.window + inside
                for data in range(ep_rank, self.data, self.ep)
                for inside in range(self.rank % tp, self.window, tp)
            ],
        }


def groups_of(topology: Topology) -> dict[str, list[int]]:
    assert topology.mesh is not None and topology.fsdp_mesh is not None
    members = dist.get_process_group_ranks
    seen = {axis: members(topology.mesh[axis].get_group()) for axis in topology.mesh.mesh_dim_names or ()}
    for name in ("cp", "sp", "tp", "window", "loss", "world"):
        group = vars(topology)[f"{name}_group"]
        assert group is not None
        if name in seen:
            assert members(group) == seen[name]
        seen[name] = members(group)
    seen["fsdp"] = members(
        topology.fsdp_mesh["fsdp"].get_group()
        if topology.fsdp_mesh.ndim == 1
        else topology.fsdp_mesh.get_group(1)
    )
    if topology.ep_mesh is not None and topology.expert_data_mesh is not None:
        seen["ep"] = members(topology.ep_mesh.get_group())
        seen["expert_data"] = members(topology.expert_data_mesh.get_group())
    return seen


@pytest.mark.parametrize(("name", "world_size"), PLANS)
def test_row_34_every_group_is_what_arithmetic_says(name: str, world_size: int) -> None:
    sizes = scale.PLANS[name, world_size].sizes
    for rank in ranks_of(world_size):
        place = Place(rank, world_size, sizes)
        expected = place.groups()
        if place.ep == 1:
            del expected["ep"], expected["expert_data"]
        with scale.fake_run(world_size, rank):
            topology = Topology(**sizes)
            seen = groups_of(topology)
            assert topology.rank == rank
            assert topology.data_rank == place.data_rank and topology.data_size == place.data
            assert topology.ep_rank == place.data_rank % place.ep
            assert topology.owns_windows == (place.inside == 0)
            assert topology.owns_losses == (rank % place.tp == 0)
        assert {group: len(ranks) for group, ranks in seen.items()} == {
            group: len(ranks) for group, ranks in expected.items()
        }
        assert seen == expected


def test_the_arithmetic_tells_axes_apart() -> None:
    """With cp and sp exchanged, the formula disagrees in both groups, and in no group around them."""
    sizes = {"cp_size": 8, "sp_size": 4, "tp_size": 8}
    swapped = {"cp_size": 4, "sp_size": 8, "tp_size": 8}
    ours, theirs = (Place(5461, 16384, one).groups() for one in (sizes, swapped))
    assert {name for name in ours if ours[name] != theirs[name]} == {"cp", "sp"}


@pytest.mark.parametrize(("cp_size", "sp_size"), [(4, 2), (2, 4), (8, 4), (32, 16)])
def test_row_34_shard_maps(cp_size: int, sp_size: int) -> None:
    window = 8 * cp_size * sp_size
    whole = scale.make_window([window], [0], ["text"], window=window, alignment=2 * cp_size).layout
    piece, part = window // (2 * cp_size), window // (cp_size * sp_size)
    ranks, places = slot_ranks(whole, cp_size=cp_size, sp_size=sp_size)
    for cp_rank in range(cp_size):
        mirror = 2 * cp_size - 1 - cp_rank
        context = [*range(cp_rank * piece, (cp_rank + 1) * piece)]
        context += range(mirror * piece, (mirror + 1) * piece)
        for sp_rank in range(sp_size):
            slots = shard_slots(whole, cp_size=cp_size, cp_rank=cp_rank, sp_size=sp_size, sp_rank=sp_rank)
            assert slots.tolist() == context[sp_rank * part : (sp_rank + 1) * part]
            assert (ranks[slots] == cp_rank * sp_size + sp_rank).all()
            assert places[slots].tolist() == list(range(part))
    assert ranks.bincount().tolist() == [part] * (cp_size * sp_size)


def vector_lengths(num_terms: int, num_channels: int, routing: Routing | None = None) -> list[int]:
    """Numbers in the opening and the closing vector; one channel more than declared holds all others."""
    channels = num_channels + 1 if num_channels else 0
    experts = 0 if routing is None else routing.num_layers * routing.num_experts
    opening = 2 * num_terms + num_terms * channels + 3 * channels + 10
    return [opening, 6 * num_terms + num_terms * channels + experts]


@pytest.mark.parametrize("world_size", [1, 1024, 16384])
def test_row_34_two_collectives_whose_lengths_ranks_do_not_change(world_size: int) -> None:
    for rank in sorted({0, world_size - 1}):
        with scale.fake_run(world_size, rank):
            # Ranks that share no window: the fake group adds nothing up, so each has to balance by itself.
            topology = Topology(dp_replicate_size=math.gcd(world_size, 4))
            check_collectives(topology, 1, 0)
            check_collectives(topology, 1, 50)
            check_collectives(topology, 3, 1000)
            check_collectives(topology, 3, 50, Routing(94, 128))


def check_collectives(
    topology: Topology, num_terms: int, num_channels: int, routing: Routing | None = None
) -> None:
    names = [f"term {number}" for number in range(num_terms)]
    channels = [f"channel {number}" for number in range(num_channels)]
    ledger = Ledger(list(map(Term, names)), channels, topology, routing=routing)
    sources = [0, 1, 0] if channels else [-1] * 3
    for num_windows in (1, 3):
        window = scale.make_window([40, 1, 23], sources, names, window=96, alignment=8)
        collectives = scale.Collectives()
        with collectives, ledger.step([window] * num_windows) as step:
            for batch in step:
                for name in names:
                    step.add(name, torch.ones(len(batch)), batch)
        assert collectives.counts == {("allreduce_", torch.float64): 2}
        assert collectives.ledger_lengths == vector_lengths(num_terms, num_channels, routing)


def test_row_34_the_opening_vector_of_a_window() -> None:
    declaration = Declaration((Term("text"), Term("by document", "sample")), ("web", "code"))
    window = scale.make_window([40, 1, 23], [1, 0, 1], ["text", "by document"], window=96, alignment=8)
    vector = count_windows(declaration, [window], frozenset())
    block = {name: declaration.opening.block(vector, name).tolist() for name in declaration.opening.shapes}
    assert len(vector) == vector_lengths(2, 2)[0]
    assert block["targets"] == [61, 61] and block["weights"] == pytest.approx([61, 2])
    assert block["tokens"] == [61, 64, 72, 96] and block["documents"] == [3]
    assert block["channel_counts"] == [[0, 61, 0], [1, 63, 0], [1, 2, 0]]


def chunk(rows: int, size: int, index: int) -> int:
    """Rows of one of `size` ranks: all have the same number, the last ones what is left, if anything."""
    most = math.ceil(rows / size)
    return max(0, min(most, rows - index * most))


def expected_bytes(config: Any, place: Place) -> dict[str, int]:
    """bfloat16 bytes of vocabulary and experts on a rank."""
    groups = place.groups()
    fsdp = groups["fsdp"]
    vocabulary = chunk(
        chunk(config.vocab_size, place.tp, place.rank % place.tp), len(fsdp), fsdp.index(place.rank)
    )
    expected = {"vocabulary": 2 * 2 * vocabulary * config.hidden_size, "experts": 0}
    if place.ep > 1:
        same = groups["expert_data"]
        held = chunk(config.num_experts // place.ep, len(same), same.index(place.rank))
        matrices = 3 * config.moe_intermediate_size * config.hidden_size
        expected["experts"] = 2 * held * matrices * config.num_hidden_layers
    return expected


def plan_rank(plan: Any, rank: int, *, with_step: bool, **changes: Any) -> tuple[Any, Any]:
    """Check what a rank would hold; the model and the collectives of its step."""
    config = plan.config(**changes)
    with scale.fake_run(plan.world_size, rank):
        topology = Topology(**plan.sizes)
        model = scale.FakeModel(config, topology)
        held = model.local_bytes()
        collectives = model.step(num_micro_batches=2) if with_step else None
    del held["other"]
    assert held == expected_bytes(config, Place(rank, plan.world_size, plan.sizes))
    return model, collectives


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_row_34_bytes_per_rank_and_one_step(name: str) -> None:
    counts = []
    for world_size in (1024, 16384):
        plan = scale.PLANS[name, world_size]
        first, *others, last = ranks_of(world_size)
        for rank in (first, last):
            plan_rank(plan, rank, with_step=False, num_hidden_layers=1)
        _, collectives = plan_rank(plan, others[-1], with_step=True, num_hidden_layers=1)
        assert collectives.ledger_lengths == vector_lengths(1, 1)
        counts.append(collectives.counts)
    # more ranks on an axis make a collective larger, none more
    assert counts[0] == counts[1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "world_size"), PLANS)
def test_row_34_whole_models(name: str, world_size: int) -> None:
    plan = scale.PLANS[name, world_size]
    model, collectives = plan_rank(plan, world_size // 3, with_step=True)
    billions = {"dense": 70.6, "moe": 235.1}[name]
    assert model.num_parameters / 1e9 == pytest.approx(billions, abs=0.1)
    assert len(collectives.ledger_lengths) == 2
