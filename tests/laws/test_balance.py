"""Law: the books balance. Channels sum to the total, ranks to the world, losses belong to every target.

Rows 7, 18, 24.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from exactness.driving import CHANNELS, build_window, draw_documents, wrap
from isoloss import Layout, Ledger, PackedBatch, Step, Term, shift_targets
from laws.gain import Lookup, cost_window, lookup_window
from oracle.models import build_model
from ranks import run_on_ranks


@pytest.mark.parametrize("reduction", ["token", "sample", "square"])
def test_channels_sum_to_the_total_and_ranks_to_the_world(reduction: str) -> None:
    documents = draw_documents(seed=6)

    def body() -> tuple[float, dict[str, float]]:
        wrapped = wrap(build_model(), "fsdp", 2)
        ledger = Ledger([Term("text", reduction)], channels=CHANNELS, topology=wrapped.topology)
        own = 0.0
        held = documents[dist.get_rank() :: 2]
        windows = [build_window(half, padded_length=88) for half in (held[:3], held[3:])]
        with ledger.step(windows, gradients=wrapped.gradients) as step:
            for batch in step:
                share = wrapped.outer(step, batch)
                own += share.item()
                share.backward()
        return own, step.metrics()

    (first, metrics), (second, same) = run_on_ranks(2, body)
    assert metrics == same and first != second
    assert math.isclose(first + second, metrics["train/loss"], rel_tol=1e-12)
    shares = [metrics[f"channel_loss_share/{name}"] for name in CHANNELS]
    assert math.isclose(sum(shares), metrics["train/loss"], rel_tol=1e-12)
    totals = {"tokens": "tokens/loss", "source_tokens": "tokens/source", "documents": "documents"}
    for counter, total in totals.items():
        assert sum(metrics[f"channel_{counter}/{name}"] for name in CHANNELS) == metrics[total]
    counts = [metrics[f"tokens/{name}"] for name in ("loss", "source", "aligned", "physical")]
    assert counts == sorted(counts)


def test_row_18_a_source_of_empty_documents_keeps_its_place() -> None:
    """A source whose document has no target and one whose document has two report [0, 2]."""
    window = cost_window([[None], [1.0, 3.0]], sources=[0, 1])
    ledger = Ledger([Term("text")], channels=["empty", "full"])
    with ledger.step([window]) as step:
        for batch in step:
            step.add(None, batch.token_extras["costs"], batch)
    metrics = step.metrics()
    assert [metrics[f"channel_tokens/{name}"] for name in ledger.channels] == [0, 2]
    assert [metrics[f"channel_documents/{name}"] for name in ledger.channels] == [1, 1]
    assert "channel_loss/empty" not in metrics and metrics["channel_loss/full"] == 2.0
    assert metrics["channel_loss_share/empty"] == 0.0


class Loses(nn.Module):
    """Shifts each half of the labels by itself: the last slot of the first half predicts nothing."""

    def forward(self, step: Step, batch: PackedBatch) -> torch.Tensor:
        half = len(batch) // 2
        targets = torch.cat(
            [shift_targets(part, Layout([half])) for part in (batch.input_ids[:half], batch.input_ids[half:])]
        )
        local = PackedBatch(batch.input_ids, {"text": targets}, batch.layout)
        return step.loss_from_logits(torch.zeros(len(batch), 16, dtype=torch.float64), local)


def test_mutant_lost_boundary_target_is_caught() -> None:
    """A shift after the split loses the target at the boundary, and the books say so."""
    ledger = Ledger([Term("text")])
    with pytest.raises(
        ValueError, match="'text': the step holds targets of weight 7, losses were recorded for 6"
    ):
        with ledger.step([lookup_window([list(range(1, 9))])]) as step:
            for batch in step:
                Loses()(step, batch)


def test_mutant_count_before_the_shift_is_caught() -> None:
    """Denominators from unshifted labels, losses for shifted ones."""
    ids = torch.arange(1, 9)
    unshifted = PackedBatch(ids, {"text": ids}, Layout([8]))
    shifted = lookup_window([ids.tolist()])
    ledger = Ledger([Term("text")])
    with pytest.raises(ValueError, match="weight 8, losses were recorded for 7"):
        with ledger.step([unshifted]) as step:
            for _ in step:
                Lookup(16)(step, shifted)


def test_books_that_do_not_balance_raise_on_every_rank() -> None:
    """Also on those that lost nothing, before an optimizer could move."""

    def body() -> None:
        from isoloss import Topology

        ledger = Ledger([Term("text")], topology=Topology())
        with pytest.raises(ValueError, match="lost targets"):
            with ledger.step([lookup_window([list(range(1, 9))])]) as step:
                for batch in step:
                    (Loses() if dist.get_rank() else Lookup(16))(step, batch)
        assert ledger.totals == dict.fromkeys(ledger.totals, 0)

    run_on_ranks(2, body)
