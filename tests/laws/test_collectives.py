"""The counter of collectives counts what CommDebugMode counts."""

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.tensor.debug import CommDebugMode

from laws.collectives import CollectiveCounter
from ranks import run_on_ranks


def test_the_counter_agrees_with_commdebugmode() -> None:
    def body() -> tuple[int, int]:
        def communicate() -> None:
            values = torch.ones(2)
            dist.all_reduce(values)
            dist.all_reduce(values, async_op=True).wait()
            dist.all_gather_into_tensor(torch.empty(4), values)
            dist.reduce_scatter_tensor(torch.empty(1), values)
            dist.broadcast(values, src=0)
            all_reduce(values, "sum", dist.group.WORLD).sum()
            dist.all_gather_object([None, None], "text")
            (values * 2).sum()

        with CollectiveCounter() as counter:
            communicate()
        with CommDebugMode() as comms:
            communicate()
        return counter.total, comms.get_total_counts()

    for ours, theirs in run_on_ranks(2, body):
        assert ours == theirs >= 8  # an object gather is several
