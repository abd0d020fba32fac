"""Maxima over ranks: the one reduction that joins the two sums, on the steps that are logged."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from isoloss.topology import Topology


def reduce_maxima(local_values: Mapping[str, float], topology: Topology) -> dict[str, float]:
    """The largest value of each name over all ranks (memory, the slowest rank, the longest document).

    Args:
        local_values: this rank's values; the same names on every rank, and every rank calls.
        topology: of the run.

    Collectives: one MAX all-reduce of one float64 vector over all ranks; none without a process group.
    Host syncs: one.
    """
    if topology.world_group is None:
        return dict(local_values)
    names = sorted(local_values)
    vector = torch.tensor([local_values[name] for name in names], dtype=torch.float64)
    vector = vector.to(topology.device)
    dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=topology.world_group)
    return dict(zip(names, vector.to("cpu").tolist(), strict=True))
