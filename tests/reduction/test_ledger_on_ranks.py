"""What all ranks must agree on, whatever only one of them has seen."""

import contextlib
import logging
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from isoloss import Layout, Ledger, PackedBatch, Term, Topology, sum_gradients
from isoloss.reduction.maxima import reduce_maxima
from ranks import on_ranks, run_on_ranks

F64 = torch.float64


def window(lengths, sources=None, term="text", alignment=1, padded_length=None):
    """A window in which every token but the last of a document has a target."""
    layout = Layout(lengths, sources, alignment=alignment, padded_length=padded_length)
    ids = torch.arange(layout.physical_tokens)
    targets = torch.full_like(ids, -100)
    for start, length in zip(layout.document_starts, layout.document_lengths, strict=True):
        targets[start : start + length - 1] = 1
    return PackedBatch(ids, {term: targets}, layout)


def run(ledger, *windows, cost=1.0, **options):
    with ledger.step(windows, **options) as step:
        for batch in step:
            step.add(None, torch.full((len(batch),), cost, dtype=F64), batch)
    return step


@on_ranks(3)
def test_row_17_an_undeclared_channel_on_one_rank_raises_on_all_in_strict_mode():
    """row 17"""
    rank = dist.get_rank()
    ledger = Ledger([Term("text")], channels=["a"], topology=Topology(), strict=True)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"documents of channel \[5\] were seen"):
            run(ledger, window([3, 4], [0, 5 if rank == 1 else 0]))
    assert ledger.totals["loss"] == 0
    assert run(ledger, window([3], [0])).metrics()["tokens/loss"] == 6  # the ranks are still in step


@on_ranks(3)
def test_row_17_an_undeclared_channel_is_counted_as_other_and_exchanged_once():
    """row 17: one object exchange (which CommDebugMode counts as two), only when one is new."""
    rank = dist.get_rank()
    ledger = Ledger([Term("text")], channels=["a"], topology=Topology())
    counts = []
    for source in (0, 5, 5, 6):
        with CommDebugMode() as communication:
            step = run(ledger, window([3, 4], [0, source if rank == 1 else 0]))
            metrics = step.metrics()
        counts.append(communication.get_total_counts())
    assert counts == [2, 4, 2, 4]
    assert metrics["channel_tokens/other"] == 3 and metrics["channel_tokens/a"] == 12
    assert metrics["channel_loss/other"] == 1.0
    assert ledger.channel_totals["other"] == {"tokens": 9, "source_tokens": 12, "documents": 3}


@on_ranks(2)
def test_row_9_metadata_missing_on_one_rank_suppresses_the_metric_on_all():
    """row 9"""
    rank = dist.get_rank()
    ledger = Ledger([Term("text")], channels=["a"], topology=Topology())
    with CommDebugMode() as communication:
        metrics = run(ledger, window([3], [-1 if rank else 0])).metrics()
    assert communication.get_total_counts() == 2
    assert metrics["health/metadata_complete"] == 0
    assert not any(name.startswith("channel_") for name in metrics)
    assert metrics["train/loss"] == 1.0 and metrics["tokens/loss"] == 4
    strict = Ledger([Term("text")], channels=["a"], topology=Topology(), strict=True)
    with pytest.raises(ValueError, match="1 documents have no channel"):
        run(strict, window([3], [-1 if rank else 0]))


@on_ranks(2)
def test_targets_of_an_undeclared_term_on_one_rank_raise_on_all_in_strict_mode():
    ledger = Ledger([Term("text")], topology=Topology(), strict=True)
    with pytest.raises(ValueError, match="2 targets belong to a term that is not declared"):
        run(ledger, window([3], term="image" if dist.get_rank() else "text"), cost=0.0)


@on_ranks(2)
def test_row_5_row_24_faults_of_one_rank_raise_on_all():
    """row 5, row 24: a term left out, recorded twice, or given a loss without a target, on rank 1 alone."""
    rank = dist.get_rank()
    ledger = Ledger([Term("text"), Term("extra")], topology=Topology())
    losses = torch.ones(3, dtype=F64)
    for times, fault in ((0, "recorded for 2"), (2, "recorded for 6")):
        batch = window([3])
        with pytest.raises(ValueError, match=f"term 'text': .* weight 4, losses were {fault}"):
            with ledger.step([batch]) as step:
                for _ in range(times if rank == 1 else 1):
                    step.add("text", losses, batch)
    with pytest.raises(ValueError, match="term 'extra': it has no target"), ledger.step([batch]) as step:
        step.add("text", losses, batch)
        step.add("extra", losses * rank, batch)
    assert ledger.totals["loss"] == 0
    with ledger.step([batch]) as step:
        step.add("text", losses, batch)
    assert step.metrics()["loss/extra"] == 0.0


@pytest.mark.parametrize("sizes", [{}, {"sp_size": 2}, {"cp_size": 2}])
@on_ranks(2)
def test_a_term_left_out_on_one_rank_and_recorded_twice_on_another_raises_on_all(sizes):
    """Over all ranks the weight recorded is W: only rank by rank is it wrong."""
    topology = Topology(**sizes)
    ledger = Ledger([Term("text", "sample"), Term("page", "document")], topology=topology)
    batch = window([5, 5, 5, 5], alignment=4, padded_length=32)
    batch = PackedBatch(
        batch.input_ids, {"text": batch.targets["text"], "page": batch.targets["text"]}, batch.layout
    )
    for text, page in (([1, 1], [1, 1]), ([0, 2], [1, 1]), ([1, 1], [0, 2])):
        if page != [1, 1] and sizes:
            continue  # a loss of a document is entered by one rank of the window
        with contextlib.ExitStack() as stack:
            if [text, page] != [[1, 1], [1, 1]]:
                name = "page" if page != [1, 1] else "text"
                match = rf"term '{name}': the step holds .* for (\d+) \(rank by rank they differ by \1\)"
                stack.enter_context(pytest.raises(ValueError, match=match))
            step = stack.enter_context(ledger.step([batch], training=False))
            for shard in step:
                for _ in range(text[dist.get_rank()]):
                    step.add("text", torch.ones(len(shard)), shard)
                for _ in range(page[dist.get_rank()]):
                    step.add_documents("page", torch.ones(4), shard)


@on_ranks(3)
def test_a35_a28_ranks_with_other_channels_show_the_same_keys():
    rank = dist.get_rank()
    ledger = Ledger([Term("text")], channels=["a", "b"], topology=Topology())
    windows = [[window([3], [0])], [window([4], [1])], []][rank]
    metrics = run(ledger, *windows, cost=(2.0, 3.0, 0.0)[rank]).metrics()
    gathered = [None] * 3
    dist.all_gather_object(gathered, metrics)
    assert gathered[0] == gathered[1] == gathered[2]
    assert (metrics["channel_loss/a"], metrics["channel_tokens/a"]) == (2.0, 2)
    assert (metrics["channel_loss/b"], metrics["channel_tokens/b"]) == (3.0, 3)
    assert metrics["train/loss"] == pytest.approx(13 / 5, rel=1e-15)


def _save(num_steps):
    ledger = Ledger([Term("text")], channels=["a"], topology=Topology())
    for _ in range(num_steps):
        run(ledger, window([3], [0]))
    return ledger.state_dict()


def _resume(state):
    ledger = Ledger([Term("text")], channels=["a"], topology=Topology())
    ledger.load_state_dict(state)
    run(ledger, window([3], [0]))
    return ledger.totals, ledger.channel_totals["a"]


def test_row_22_counts_are_resumed_on_another_number_of_ranks():
    """row 22"""
    first, second = run_on_ranks(2, _save, 5)
    assert first == second
    for totals, channel in run_on_ranks(3, _resume, first):
        assert totals["loss"] == channel["tokens"] == 5 * 2 * 2 + 3 * 2
        assert totals["documents"] == channel["documents"] == 5 * 2 + 3


@on_ranks(2)
def test_has_more_where_any_rank_has_more():
    rank = dist.get_rank()
    ledger = Ledger([Term("text")], topology=Topology())
    assert run(ledger, window([3]), has_more=rank == 1).has_more
    assert not run(ledger, window([3]), has_more=False).has_more


@on_ranks(2)
def test_row_7_maxima_join_in_one_reduction():
    """row 7: the longest document, with whatever else has a maximum."""
    rank = dist.get_rank()
    topology = Topology()
    values = {"packing/max_document_length": 10.0 - rank, "memory": float(rank)}
    if rank:
        values = dict(reversed(values.items()))
    with CommDebugMode() as communication:
        assert reduce_maxima(values, topology) == {"packing/max_document_length": 10.0, "memory": 1.0}
    assert communication.get_total_counts() == 1
    ledger = Ledger([Term("text")], topology=topology)
    step = run(ledger, window([3 + rank]))
    assert "packing/max_document_length" not in step.metrics()
    assert step.max_document_length == 3 + rank


def test_maxima_without_a_process_group_are_the_values():
    assert reduce_maxima({"a": 1.5}, Topology.single()) == {"a": 1.5}


@on_ranks(2)
def test_non_finite_losses_are_named_on_all_ranks():
    rank = dist.get_rank()
    ledger = Ledger([Term("text")], channels=["a", "b"], topology=Topology())
    step = run(ledger, window([3], [rank]), cost=float("nan") if rank else 1.0)
    assert step.record.nonfinite() == ["term 'text' in channel b"]
    assert math.isnan(step.metrics()["train/loss"])


@on_ranks(2)
def test_a65_a14_ranks_that_share_tokens_count_once():
    """Under tensor parallelism both ranks hold the same window and compute the same losses."""
    ledger = Ledger([Term("text")], channels=["a"], topology=Topology(tp_size=2))
    metrics = run(ledger, window([8], [0]), cost=3.0).metrics()
    assert metrics["tokens/loss"] == metrics["channel_tokens/a"] == 7
    assert metrics["train/loss"] == pytest.approx(3.0, rel=1e-15) == metrics["channel_loss/a"]
    assert metrics["health/books_balance"] == 1


@on_ranks(2)
def test_a22_a23_a26_a29_shards_of_a_window_add_up():
    """A sequence-sharded window counts once, whole; weights travel with their targets."""
    topology = Topology(sp_size=2)
    layout = Layout([3, 5], [0, 1])
    targets = torch.tensor([1, 1, -100, 1, 1, 1, 1, -100])
    weights = torch.tensor([1.0, 0.0, 9.0, 2.0, 0.5, 1.0, 0.0, 9.0])
    costs = torch.tensor([1.0, 2.0, 0.0, 3.0, 4.0, 5.0, 6.0, 0.0], dtype=F64)
    whole = PackedBatch(torch.arange(8), {"text": targets}, layout, weights={"text": weights})
    ledger = Ledger([Term("text", "sample")], channels=["a", "b"], topology=topology)
    with ledger.step([whole]) as step:
        for batch in step:
            losses = costs[batch.input_ids].requires_grad_()
            step.add(None, losses, batch).backward()
    total = 1 / 2 + 3.5 / 4
    metrics = step.metrics()
    assert metrics["train/loss"] == pytest.approx((1 / 2 + (6 + 2 + 5) / 4) / total, rel=1e-14)
    assert metrics["channel_loss/b"] == pytest.approx(13 / 3.5, rel=1e-14)
    assert metrics["tokens/loss"] == 6 and metrics["tokens/physical"] == 8
    factors = torch.tensor([1 / 2] * 3 + [1 / 4] * 5, dtype=F64) / total
    right = factors * weights * (targets != -100)
    torch.testing.assert_close(losses.grad, right[batch.input_ids], rtol=1e-14, atol=0)


@on_ranks(2)
def test_sum_by_document_is_complete_over_shards_and_enters_once():
    """Each shard hands the gradient to its own slots; the value is entered by one."""
    topology = Topology(sp_size=2)
    layout = Layout([3, 5], [0, 1])
    whole = PackedBatch(torch.arange(8), {"text": torch.tensor([1] * 8)}, layout)
    ledger = Ledger([Term("text", "document")], channels=["a", "b"], topology=topology)
    with CommDebugMode() as communication, ledger.step([whole]) as step:
        for batch in step:
            values = batch.input_ids.to(F64).requires_grad_()
            sums = step.sum_by_document(values, batch)
            assert sums.tolist() == [0 + 1 + 2, 3 + 4 + 5 + 6 + 7]
            step.add_documents(None, sums.square(), batch).backward()
    assert communication.get_total_counts() == 3  # the two of the step, and one SUM over the shards
    assert step.metrics()["train/loss"] == (3**2 + 25**2) / 2
    assert step.metrics()["channel_loss/a"] == 9
    # d/dv of (sum^2) / 2 is the sum, once
    assert values.grad.tolist() == [3.0 if slot < 3 else 25.0 for slot in batch.input_ids.tolist()]


@on_ranks(2)
def test_a_backward_that_nobody_sums_is_warned_of_once():
    ledger = Ledger([Term("text")], topology=Topology())
    model = nn.Linear(1, 1, bias=False, dtype=F64)
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("isoloss.reduction.book").addHandler(handler)
    for gradients in (None, None, sum_gradients(model, Topology())):
        with ledger.step([window([3])], gradients=gradients) as step:
            for batch in step:
                step.add(None, model(torch.ones(3, 1, dtype=F64)).squeeze(1), batch).backward()
    assert len(messages) == 1 and "without gradients=" in messages[0]
