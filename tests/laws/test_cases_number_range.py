"""Cases A74 and A75: counts beyond 32 bits, sums of bfloat16 losses."""

import dataclasses

import torch

from isoloss import Layout, Ledger, PackedBatch, Term
from laws.gain import Gain, cost_window

BILLION = 1_000_000_000


def test_a74_totals_pass_32_bits() -> None:
    """Three shards of a billion tokens: the last ten of them by a real step."""
    ledger = Ledger([Term("text")], channels=["web"])
    state = ledger.state_dict()
    state["totals"]["loss"] = state["totals"]["source"] = 3 * BILLION - 10
    state["channel_totals"]["web"]["tokens"] = 3 * BILLION - 10
    ledger.load_state_dict(state)
    model = Gain()
    with ledger.step([cost_window([[1.0] * 10], sources=[0])]) as step:
        for batch in step:
            model(step, batch).backward()
    metrics = step.metrics()
    assert metrics["tokens/loss_total"] == metrics["tokens/source_total"] == 3 * BILLION
    assert ledger.totals["loss"] == ledger.channel_totals["web"]["tokens"] == 3 * BILLION
    assert ledger.state_dict()["totals"]["source"] == 3 * BILLION


def test_a74_a_vector_sums_past_32_bits_exactly() -> None:
    """Counts of one step, as three ranks would add them, in the dtype that is reduced."""
    ledger = Ledger([Term("text")])
    with ledger.step([cost_window([[1.0]])]) as step:
        for batch in step:
            Gain()(step, batch).backward()
    opening = step.record.opening.clone()
    step.record.declaration.opening.block(opening, "tokens").fill_(BILLION + 1)
    record = dataclasses.replace(step.record, opening=opening)
    total = record + record + record
    assert ledger.metrics(total)["tokens/loss"] == 3 * BILLION + 3
    assert total.opening.dtype == torch.float64


def test_a75_losses_in_bfloat16_are_summed_in_more() -> None:
    ledger = Ledger([Term("text")])
    slots = 512
    windows = [
        PackedBatch(
            torch.zeros(1, dtype=torch.int64), {"text": torch.zeros(1, dtype=torch.int64)}, Layout([1])
        )
        for _ in range(slots)
    ]
    gain = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    with ledger.step(windows) as step:
        for batch in step:
            share = step.add(None, gain * torch.ones(1, dtype=torch.bfloat16), batch)
            assert share.dtype == torch.float32
            share.backward()
    metrics = step.metrics()
    assert (metrics["train/loss"], metrics["tokens/loss"]) == (1.0, slots)
    assert step.record.closed("losses") == [512.0]


def test_a75_one_window_of_bfloat16_losses() -> None:
    ledger = Ledger([Term("text")])
    batch = PackedBatch(
        torch.zeros(512, dtype=torch.int64), {"text": torch.zeros(512, dtype=torch.int64)}, Layout([512])
    )
    gain = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    with ledger.step([batch]) as step:
        for one in step:
            step.add(None, gain * torch.ones(512, dtype=torch.bfloat16), one).backward()
    assert step.metrics()["train/loss"] == 1.0
    assert gain.grad is not None and gain.grad.item() == 1.0


def test_a75_mutant_is_caught() -> None:
    """A running sum in bfloat16 stops at 256."""
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(512):
        total += 1.0
    assert total.item() == 256.0
