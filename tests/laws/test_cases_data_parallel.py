"""Cases A12, A13 and A15 to A19: factors of the number of ranks. Rows 23 and 24."""

import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from isoloss import Ledger, PackedBatch, Term, sum_gradients
from laws.gain import (
    VIA,
    Costs,
    Gain,
    build_topology,
    check_gain,
    cost_window,
    different,
    run_windows,
    whole,
    wrap_module,
)
from ranks import run_on_ranks

WRAPPERS = ("plain", "ddp", "fsdp")


def check_costs(costs_by_rank: Sequence[Costs], expected: float) -> None:
    """One document on each rank, under every wrapper."""

    def body() -> None:
        for wrapper in WRAPPERS:
            check_gain([[costs_by_rank[dist.get_rank()]]], expected, wrapper=wrapper)

    run_on_ranks(len(costs_by_rank), body)


def test_a12_mean_of_rank_means() -> None:
    check_costs([[1.0] * 5, [7.0]], 2.0)


def test_a13_no_averaging_left_to_undo() -> None:
    check_costs([[2.0, 2.0], [4.0] * 4], 20 / 6)


def test_a15_one_process_per_device() -> None:
    check_costs([[3.0], [3.0, 3.0, 3.0]], 3.0)


def test_a12_and_a13_mutants_are_caught() -> None:
    """Each rank divides by its own count, or the wrapper averages shares of the global count."""

    def body() -> None:
        costs = [[1.0] * 5, [7.0]][dist.get_rank()]

        class MeanOfOwn(torch.nn.Module):
            """What a trainer without a step computes in forward."""

            def __init__(self, count: float) -> None:
                super().__init__()
                self.gain = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
                self.count = count

            def forward(self) -> torch.Tensor:
                return (self.gain * torch.tensor(costs, dtype=torch.float64)).sum() / self.count

        for count, wrong in ((float(len(costs)), 4.0), (6.0, 1.0)):
            mutant = MeanOfOwn(count)
            ddp = wrap_module(mutant, "ddp", build_topology("ddp"))  # dropped, it would not reduce
            ddp().backward()
            assert mutant.gain.grad is not None
            assert math.isclose(mutant.gain.grad.item(), wrong, rel_tol=1e-12)
            assert different(wrong, 2.0)

    run_on_ranks(2, body)


def test_a16_every_wrapper_sums_on_every_axis() -> None:
    def body() -> None:
        cost = float(dist.get_rank() + 1)
        for wrapper in ("ddp", "fsdp", "hsdp-2x4", "hsdp-4x2", "hsdp-8x1", "plain"):
            _, gradients = run_windows([cost_window([[cost]])], wrapper=wrapper)
            assert gradients["gain"].item() == 4.5, (wrapper, gradients["gain"].item())

    run_on_ranks(8, body)


def test_a17_the_whole_gradient_not_the_local_part() -> None:
    check_costs([[2.0], [6.0]], 4.0)


def test_a17_mutant_is_caught() -> None:
    """A loss that was all-reduced before backward carries the gradient of this rank alone."""

    def body() -> None:
        gain = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        local = gain * [2.0, 6.0][dist.get_rank()]
        reported = local.detach().clone()
        dist.all_reduce(reported)
        loss = (local + (reported - local.detach())) / 2
        loss.backward()
        assert gain.grad is not None
        dist.all_reduce(gain.grad)
        gain.grad /= 2  # what a wrapper that averages leaves
        assert loss.item() == 4.0 and gain.grad.item() == 2.0

    run_on_ranks(2, body)


@pytest.mark.parametrize("via", VIA)
def test_a18_eval_loss_has_no_factor(via: str) -> None:
    def body() -> None:
        topology = build_topology("fsdp")
        ledger = Ledger([Term("text")], topology=topology)
        with torch.no_grad(), ledger.step([cost_window([[1.5, 1.5]])], training=False) as step:
            for batch in step:
                Gain(via)(step, batch)
        assert math.isclose(step.metrics()["eval/loss"], 1.5, rel_tol=1e-12)

    run_on_ranks(4, body)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a19_a_rank_that_ran_out(wrapper: str) -> None:
    def body() -> None:
        topology = build_topology(wrapper)
        model = Gain()
        outer = wrap_module(model, wrapper, topology)
        gradients = sum_gradients(outer, topology)
        ledger = Ledger([Term("text")], topology=topology)
        data = [[[2.0], [4.0]], [[6.0]]][dist.get_rank()]
        results = []
        more = True
        while more:
            model.zero_grad()
            windows: list[PackedBatch] = [cost_window([data.pop(0)])] if data else []
            with ledger.step(windows, gradients=gradients, has_more=bool(data)) as step:
                for batch in step:
                    outer(step, batch).backward()
            results.append((step.metrics()["train/loss"], whole(model.gain.grad).item()))
            more = step.has_more
        assert results == [(4.0, 4.0), (4.0, 4.0)]

    run_on_ranks(2, body)
