"""Law: besides those of the gradients, a step costs one collective at its start and one at its end.

Rows 1, 2, 3 and 9. Counted by CommDebugMode, whatever the number of micro-batches, channels and terms, and
whatever the data.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from isoloss import Ledger, PackedBatch, Step, Term, Topology, sum_gradients
from laws.collectives import CollectiveCounter
from laws.gain import Gain, build_topology, cost_window, wrap_module
from ranks import run_on_ranks

SIZES = [(1, 1, 1), (16, 1, 1), (1, 100, 1), (1, 1, 5), (16, 100, 5)]
"""(micro-batches, channels, terms)"""


class Terms(nn.Module):
    """Adds every term; no parameter is trained unless it has a gain."""

    def __init__(self, terms: Sequence[Term]) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.terms = terms

    def forward(self, step: Step, batch: PackedBatch) -> Tensor:
        losses = self.gain * batch.token_extras["costs"]
        return torch.stack([step.add(term.name, losses, batch) for term in self.terms]).sum()


def count_step(
    micro_batches: int, channels: int, num_terms: int, wrapper: str, *, training: bool = True
) -> tuple[int, int, int, int]:
    """Collectives (on entering, in the loop, on leaving, by reading metrics)."""
    terms = [Term(f"term {number}") for number in range(num_terms)]
    topology = build_topology(wrapper)
    model = wrap_module(Terms(terms), wrapper, topology)
    ledger = Ledger(terms, channels=[f"channel {number}" for number in range(channels)], topology=topology)
    held = [term.name for term in terms]
    windows = [
        cost_window([[1.0, None, 2.0]], sources=[number % channels], terms=held)
        for number in range(micro_batches)
    ]
    gradients = sum_gradients(model, topology) if training else None
    step = ledger.step(windows, gradients=gradients, training=training)
    with CollectiveCounter() as entering:
        step.__enter__()
    with CollectiveCounter() as looping, torch.set_grad_enabled(training):
        for batch in step:
            share = model(step, batch)
            if training:
                share.backward()
    with CollectiveCounter() as leaving:
        step.__exit__(None, None, None)
    with CollectiveCounter() as reading:
        step.metrics()
    return tuple(mode.total for mode in (entering, looping, leaving, reading))  # type: ignore[return-value]


@pytest.mark.parametrize("size", SIZES)
def test_one_collective_at_each_end(size: tuple[int, int, int]) -> None:
    def body() -> None:
        # evaluation has no gradients: what is left is the whole cost
        assert count_step(*size, "plain", training=False) == (1, 0, 1, 0)
        # replicated parameters: their one coalesced SUM when the block ends
        assert count_step(*size, "plain") == (1, 0, 2, 0)
        # DDP reduces its one bucket in the last backward
        assert count_step(*size, "ddp") == (1, 1, 1, 0)

    run_on_ranks(2, body)


@pytest.mark.parametrize("micro_batches", [1, 16])
def test_under_fsdp_the_loop_holds_gathers_and_one_scatter_only(micro_batches: int) -> None:
    def body() -> None:
        entering, looping, leaving, reading = count_step(micro_batches, 3, 2, "fsdp")
        assert (entering, leaving, reading) == (1, 1, 0)
        assert looping == fsdp_alone(micro_batches)

    def fsdp_alone(micro_batches: int) -> int:
        """Collectives of the same wrapper around a model without a step."""
        topology = Topology()

        class Plain(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gain = nn.Parameter(torch.ones(1, dtype=torch.float64))

            def forward(self) -> Tensor:
                return self.gain.sum()

        model = wrap_module(Plain(), "fsdp", topology)
        with CollectiveCounter() as comms:
            for number in range(micro_batches):
                model.set_requires_gradient_sync(number == micro_batches - 1)
                model().backward()
        return comms.total

    run_on_ranks(2, body)


@pytest.mark.parametrize("size", SIZES)
def test_row_3_none_without_a_process_group(size: tuple[int, int, int]) -> None:
    assert not dist.is_initialized()
    assert count_step(*size, "plain") == (0, 0, 0, 0)


def test_ranks_with_different_data_issue_the_same_collectives() -> None:
    """Row 2: other terms, other channels, other numbers of windows, none at all."""

    def body() -> tuple[int, int]:
        topology = build_topology("plain")
        ledger = Ledger([Term("text"), Term("image")], channels=["a", "b"], topology=topology)
        windows = [
            [cost_window([[1.0]], sources=[0]), cost_window([[1.0]], sources=[1])],
            [cost_window([[1.0]], terms=("image",), sources=[1])],
            [],
        ][dist.get_rank()]
        model = Gain()
        gradients = sum_gradients(model, topology)
        with CollectiveCounter() as comms:
            with ledger.step(windows, gradients=gradients) as step:
                for batch in step:
                    losses = model.gain * batch.token_extras.get("costs", torch.zeros(len(batch)))
                    for term in ("text", "image"):
                        step.add(term, torch.where(torch.tensor(term in batch.targets), losses, 0.0), batch)
            step.metrics()
        return comms.total

    assert run_on_ranks(3, body, timeout_s=30) == [3, 3, 3]


def test_no_collective_after_an_exception() -> None:
    def body() -> None:
        topology = build_topology("plain")
        ledger = Ledger([Term("text")], topology=topology)
        model = Gain()
        step = ledger.step([cost_window([[1.0]])] * 2, gradients=sum_gradients(model, topology))
        step.__enter__()
        error = KeyError("in the forward")
        with CollectiveCounter() as comms:
            for batch in step:
                model(step, batch).backward()
                break
            assert not step.__exit__(KeyError, error, None), "the exception must go on"
        assert comms.total == 0

    run_on_ranks(2, body)


def test_mutant_a_reduction_per_micro_batch_is_caught() -> None:
    """The usual way: one all-reduce per term and micro-batch, 8 at accumulation 8 with one term."""

    def body() -> None:
        def usual_loop(reduce: Callable[[Tensor], object]) -> None:
            for _ in range(8):
                reduce(torch.ones(()))

        with CollectiveCounter() as comms:
            usual_loop(dist.all_reduce)
        assert comms.total == 8
        assert count_step(8, 1, 1, "plain", training=False) == (1, 0, 1, 0)

    run_on_ranks(2, body)
