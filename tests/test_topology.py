"""`Topology`: sizes, coordinates and groups, without a process group and on 2, 4 and 8 ranks."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from isoloss.topology import AXES, Topology, is_first_rank, resolve_sizes
from ranks import on_ranks, run_on_ranks

ONE = {"dp_replicate_size": 1, "cp_size": 1, "sp_size": 1, "tp_size": 1, "ep_size": 1}


def test_row_3_without_a_process_group_there_is_one_rank_and_no_group() -> None:
    for topology in (Topology(), Topology.single()):
        assert topology.mesh is None
        assert topology.world_group is topology.loss_group is topology.window_group is None
        assert topology.fsdp_mesh is None
        assert (topology.rank, topology.world_size, topology.data_size, topology.data_rank) == (0, 1, 1, 0)
        assert topology.owns_windows and topology.owns_losses
        assert topology.device == torch.device("cpu")
    assert repr(Topology()) == "Topology(one rank; rank 0 of 1, cpu)"
    assert is_first_rank()


def test_a_topology_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="make a new one instead of setting sp_size"):
        Topology().sp_size = 2


def test_the_device_is_taken() -> None:
    assert Topology(device="meta").device == torch.device("meta")


@pytest.mark.parametrize(
    ("world_size", "sizes", "expected"),
    [
        (8, {"dp_shard_size": -1}, (1, 8, 1, 1, 1)),
        (8, {"dp_shard_size": -1, "dp_replicate_size": 2, "sp_size": 2}, (2, 2, 1, 2, 1)),
        (8, {"dp_shard_size": 1, "dp_replicate_size": 8}, (8, 1, 1, 1, 1)),
        (8, {"dp_shard_size": 1, "cp_size": 2, "sp_size": 2, "tp_size": 2}, (1, 1, 2, 2, 2)),
        (8, {"dp_shard_size": 4, "dp_replicate_size": 2, "ep_size": 8}, (2, 4, 1, 1, 1)),
    ],
)
def test_sizes(world_size: int, sizes: dict[str, int], expected: tuple[int, ...]) -> None:
    assert resolve_sizes(world_size, **{**ONE, **sizes}) == expected


@pytest.mark.parametrize(
    ("world_size", "sizes", "message"),
    [
        (8, {"dp_shard_size": -1, "sp_size": 3}, r"sp_size 3 x tp_size 1 = 3 does not divide the 8 ranks"),
        (
            8,
            {"dp_shard_size": 2, "cp_size": 2},
            r"1 x cp_size 2 x .* x dp_shard_size 2 = 4, but the run has 8 ranks; .* start 4 processes",
        ),
        (4, {"dp_shard_size": 8}, r"= 8, but the run has 4 ranks; .* or start 8 processes"),
        (4, {"dp_shard_size": -1, "tp_size": 0}, r"tp_size is 0; an axis has at least 1 rank"),
        (4, {"dp_shard_size": 0}, r"dp_shard_size is 0; use a size from 1, or -1"),
        (4, {"dp_shard_size": -1, "ep_size": 3}, r"ep_size 3 is no factor of the 4 data ranks .* x dp_shard"),
        (4, {"dp_shard_size": -1, "sp_size": 2, "ep_size": 4}, r"ep_size 4 is no factor of the 2 data ranks"),
    ],
)
def test_errors_show_the_arithmetic(world_size: int, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_sizes(world_size, **{**ONE, **sizes})


def describe(sizes: dict[str, int]) -> dict[str, Any]:
    topology = Topology(**sizes)

    def members(group: dist.ProcessGroup | None) -> list[int] | None:
        return None if group is None else dist.get_process_group_ranks(group)

    assert topology.mesh is not None
    assert topology.mesh.mesh_dim_names == AXES
    return {
        "rank": topology.rank,
        "place": tuple(getattr(topology, f"{axis}_rank") for axis in AXES),
        "data": (topology.data_rank, topology.data_size),
        "world": members(topology.world_group),
        "loss": members(topology.loss_group),
        "window": members(topology.window_group),
        "fsdp": (
            topology.fsdp_mesh.mesh_dim_names,
            topology.fsdp_mesh.mesh.tolist(),
        ),
        "fsdp_members": members(topology.fsdp_mesh[topology.fsdp_mesh.mesh_dim_names[-1]].get_group())
        if topology.fsdp_mesh.ndim > 1
        else members(topology.fsdp_mesh.get_group()),
        "owns": (topology.owns_windows, topology.owns_losses),
        "first": is_first_rank(),
    }


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (2, {}),
        (2, {"dp_replicate_size": 2, "dp_shard_size": 1}),
        (2, {"sp_size": 2}),
        (4, {"dp_replicate_size": 2}),
        (4, {"cp_size": 2, "sp_size": 2}),
        (4, {"tp_size": 2, "ep_size": 2}),
        (8, {"dp_replicate_size": 2, "cp_size": 2, "sp_size": 2}),
        (8, {"dp_replicate_size": 2, "sp_size": 2, "tp_size": 2}),
        (8, {"dp_shard_size": 1, "cp_size": 2, "sp_size": 2, "tp_size": 2}),
    ],
)
def test_places_and_groups(world_size: int, sizes: dict[str, int]) -> None:
    axes = resolve_sizes(world_size, **{**ONE, "dp_shard_size": -1, **sizes})
    places = list(product(*map(range, axes)))  # rank r is at the r-th place, outermost axis first
    replicate_size, shard_size, cp_size, sp_size, tp_size = axes

    def alike(place: tuple[int, ...], fixed: tuple[int, ...]) -> list[int]:
        """Ranks that share the coordinates `fixed` with this place."""
        return [
            rank for rank, other in enumerate(places) if all(other[axis] == place[axis] for axis in fixed)
        ]

    for rank, seen in enumerate(run_on_ranks(world_size, describe, sizes)):
        place = places[rank]
        assert seen["rank"] == rank
        assert seen["place"] == place
        assert seen["data"] == (place[0] * shard_size + place[1], replicate_size * shard_size)
        assert seen["world"] == list(range(world_size))
        assert seen["loss"] == alike(place, (4,))
        assert seen["window"] == (alike(place, (0, 1, 4)) if cp_size * sp_size > 1 else None)
        assert seen["fsdp_members"] == alike(place, (0, 4))
        assert seen["fsdp"][0] == (("dp_replicate", "fsdp") if replicate_size > 1 else ("fsdp",))
        expected_mesh = alike(place, (0, 4))
        if replicate_size > 1:
            rows = [alike((row, *place[1:]), (0, 4)) for row in range(replicate_size)]
            assert seen["fsdp"][1] == rows
        else:
            assert seen["fsdp"][1] == expected_mesh
        assert seen["owns"] == (place[2] == place[3] == place[4] == 0, place[4] == 0)
        assert seen["first"] == (rank == 0)


def test_one_rank_of_each_window_owns_it() -> None:
    seen = run_on_ranks(8, describe, {"cp_size": 2, "tp_size": 2})
    assert [rank["data"][0] for rank in seen if rank["owns"][0]] == [0, 1]
    assert sum(rank["owns"][1] for rank in seen) == 4


@on_ranks(2)
def test_single_under_several_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"= 1, but the run has 2 ranks"):
        Topology.single()


@on_ranks(2)
def test_repr_names_what_is_split() -> None:
    rank = dist.get_rank()
    assert repr(Topology(sp_size=2)) == f"Topology(sp_size=2; rank {rank} of 2, cpu)"
