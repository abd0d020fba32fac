"""One process: the block of a step, its shares against sums by hand, and what it refuses."""

import gc
import math
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from isoloss import Layout, Ledger, PackedBatch, Term

F64 = torch.float64


def window(lengths, targets, sources=None, term="text", weights=None, **layout):
    """A window whose slots hold the given targets; -100 where a document predicts nothing."""
    table = Layout(lengths, sources, padded_length=len(targets), **layout)
    return PackedBatch(
        torch.arange(len(targets)),
        {term: torch.tensor(targets)},
        table,
        weights=None if weights is None else {term: torch.tensor(weights)},
    )


def costs(*values):
    """Losses of slots, as a leaf whose gradient is the weight of each loss."""
    return torch.tensor(values, dtype=F64, requires_grad=True)


def close_one(ledger, batch, losses, term="text"):
    with ledger.step([batch]) as step:
        step.add(term, losses, batch).backward()
    return step


# -- shares


def test_a01_a56_what_is_shown_is_what_is_trained():
    """Four micro-batches of one token each with costs 1, 2, 3, 10: 4.0 is trained and shown."""
    batches = [window([2], [7, -100], [0]) for _ in range(4)]
    losses = [costs(cost, 0.0) for cost in (1.0, 2.0, 3.0, 10.0)]
    ledger = Ledger([Term("text")], channels=["docs"])
    trained = 0.0
    with ledger.step(batches) as step:
        for batch, loss in zip(step, losses, strict=True):
            share = step.add(None, loss, batch)
            share.backward()
            trained += share.item()
    assert step.metrics()["train/loss"] == trained == 4.0
    assert all(loss.grad.tolist() == [0.25, 0.0] for loss in losses)


@pytest.mark.parametrize(
    ("reduction", "weights"),
    [("token", [1, 1, 1, 1]), ("sample", [1 / 3, 1 / 3, 1 / 3, 1]), ("square", [3**-0.5] * 3 + [1])],
)
def test_reductions_against_sums_by_hand(reduction, weights):
    """Two documents with 3 targets and 1, the data's weights on top."""
    data_weights = [1.0, 0.5, 2.0, 0.0, 3.0, 0.0]
    batch = window([4, 2], [1, 2, 3, -100, 5, -100], [0, 1], weights=data_weights)
    ledger = Ledger([Term("text", reduction, coefficient=0.5)], channels=["a", "b"])
    losses = costs(1.0, 2.0, 4.0, 99.0, 8.0, 99.0)
    step = close_one(ledger, batch, losses)
    used = torch.tensor(weights, dtype=F64) * torch.tensor([1.0, 0.5, 2.0, 3.0], dtype=F64)
    total = used.sum()
    by_hand = used * torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=F64)
    metrics = step.metrics()
    torch.testing.assert_close(losses.grad[[0, 1, 2, 4]], 0.5 * used / total, rtol=1e-14, atol=0)
    assert losses.grad[[3, 5]].tolist() == [0.0, 0.0]
    assert metrics["train/loss"] == pytest.approx(0.5 * (by_hand.sum() / total).item(), rel=1e-14)
    assert metrics["loss/text"] == pytest.approx((by_hand.sum() / total).item(), rel=1e-14)
    assert metrics["channel_loss/a"] == pytest.approx((by_hand[:3].sum() / used[:3].sum()).item(), rel=1e-14)
    assert metrics["channel_loss_share/a"] == pytest.approx((by_hand[:3].sum() / total).item(), rel=1e-14)
    assert metrics["channel_loss/b"] == pytest.approx(8.0, rel=1e-14)


def test_a40_sample_and_token_mean_of_a_packed_row():
    batch = window([2, 5], [1, -100, 1, 1, 1, 1, -100])
    losses = [2.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    for reduction, right in (("sample", 1.5), ("token", 1.2)):
        step = close_one(Ledger([Term("text", reduction)]), batch, costs(*losses))
        assert step.metrics()["train/loss"] == pytest.approx(right, rel=1e-15)


def test_a33_nan_without_a_target_counts_nowhere_and_with_one_shows():
    ledger = Ledger([Term("text")])
    losses = costs(1.0, float("nan"), 3.0, 0.0)
    step = close_one(ledger, window([4], [1, -100, 1, -100]), losses)
    assert step.metrics()["train/loss"] == 2.0
    assert losses.grad.tolist() == [0.5, 0.0, 0.5, 0.0]
    step = close_one(ledger, window([4], [1, 1, 1, -100]), losses)
    assert step.metrics()["train/loss"] != step.metrics()["train/loss"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("call", ["loss", "loss_from_logits", "add", "add_documents"])
def test_a_target_of_weight_0_contributes_exactly_0_whatever_its_loss(call, bad):
    """A33 with weights: with any other weight it shows."""
    layout = Layout([2, 2], alignment=2)
    targets = {"text": torch.tensor([1, -100, 1, -100])}
    head = torch.zeros(3, 2, dtype=F64, requires_grad=True)
    for weight, shows in ((0.0, False), (0.5, True)):
        batch = PackedBatch(
            torch.arange(4), targets, layout, weights={"text": torch.tensor([weight, 0.0, 1.0, 0.0])}
        )
        values = torch.ones(2 if call == "add_documents" else 4, dtype=F64)
        if call.startswith("loss"):
            values = torch.ones(4, 3 if call == "loss_from_logits" else 2, dtype=F64)
        values[0] = bad
        values.requires_grad_()
        head.grad = None
        ledger = Ledger([Term("text", "document" if call == "add_documents" else "token")], channels=["a"])
        with ledger.step([batch]) as step:
            if call == "loss":
                share = step.loss(values, head, batch)
            elif call == "loss_from_logits":
                share = step.loss_from_logits(values, batch)
            elif call == "add":
                share = step.add(None, values, batch)
            else:
                share = step.add_documents(None, values, batch)
            share.backward()
        assert math.isfinite(share.item()) != shows
        assert math.isfinite(step.metrics()["train/loss"]) != shows
        assert bool(step.record.nonfinite()) == shows
        if not shows:
            assert values.grad[0].eq(0).all() and values.grad.isfinite().all()
            assert head.grad is None or head.grad.isfinite().all()
            assert step.metrics()["train/loss"] == share.item()


def test_loss_from_logits_ignores_nan_in_rows_without_target():
    logits = torch.zeros(3, 4, dtype=F64)
    logits[1] = float("nan")
    logits.requires_grad_()
    batch = window([3], [2, -100, -100])
    ledger = Ledger([Term("text")])
    with ledger.step([batch]) as step:
        step.loss_from_logits(logits, batch).backward()
    assert step.metrics()["train/loss"] == pytest.approx(torch.tensor(4.0).log().item(), rel=1e-6)
    assert logits.grad[0].tolist() == [0.25, 0.25, -0.75, 0.25]
    assert logits.grad[1:].eq(0).all()


def test_row_27_row_29_several_terms_have_their_own_denominators():
    """row 27, row 29: A46, an auxiliary head with fewer targets is divided by its own count."""
    layout = Layout([5])
    targets = {"text": torch.tensor([1, 1, 1, 1, -100]), "mtp_1": torch.tensor([1, 1, 1, -100, -100])}
    batch = PackedBatch(torch.arange(5), targets, layout)
    ledger = Ledger([Term("text"), Term("mtp_1", coefficient=0.3)])
    with ledger.step([batch]) as step:
        main = step.add("text", torch.ones(5, dtype=F64), batch)
        extra = step.add("mtp_1", torch.full((5,), 2.0, dtype=F64), batch)
        with pytest.raises(ValueError, match="several terms are declared"):
            step.add(None, torch.ones(5), batch)
    assert (main + extra).item() == pytest.approx(1.6, rel=1e-15)
    metrics = step.metrics()
    assert metrics["train/loss"] == pytest.approx(1.6, rel=1e-15)
    assert (metrics["targets/text"], metrics["targets/mtp_1"]) == (4, 3)
    assert metrics["tokens/loss"] == 4  # slots that are a target of any term


# -- documents and groups


def preference_window():
    """A prompt with two answers (group 0, prefix shared), a lone document, and one without a target."""
    layout = Layout(
        [2, 3, 2, 2, 1], [0, 0, 0, 1, 1], [0, 0, 0, -1, -1], [-1, 0, 0, -1, -1], alignment=2, padded_length=14
    )
    targets = torch.full((14,), -100)
    targets[torch.tensor([2, 3, 6, 8])] = 1  # two targets, one, one, none
    weights = torch.zeros(14)
    weights[torch.tensor([2, 3, 6, 8])] = torch.tensor([3.0, 5.0, 7.0, 0.5])
    return PackedBatch(torch.arange(14), {"text": targets}, layout, weights={"text": weights})


def test_sum_by_document_sums_the_slots_of_counted_documents():
    batch = preference_window()
    values = torch.arange(14, dtype=F64, requires_grad=True)
    with Ledger([Term("text", "document")]).step([batch]) as step:
        sums = step.sum_by_document(values, batch)
        assert sums.tolist() == [2 + 3 + 4, 6 + 7, 8 + 9, 10]
        (gradient,) = torch.autograd.grad(sums @ torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64), values)
        assert gradient.tolist() == [0, 0, 1, 1, 1, 0, 2, 2, 3, 3, 4, 0, 0, 0]
        with pytest.raises(ValueError, match="values has 3 entries, the batch 14 slots"):
            step.sum_by_document(torch.ones(3), batch)
        step.add_documents(None, torch.ones(4, dtype=F64), batch)


def test_reduction_document_against_sums_by_hand():
    batch = preference_window()
    ledger = Ledger([Term("text", "document", coefficient=2.0)], channels=["pairs", "rest"])
    losses = costs(1.0, 2.0, 4.0, 1e9)  # the last has no target: it does not count
    with ledger.step([batch]) as step:
        step.add_documents(None, losses, batch).backward()
        for call in (step.add, step.add_groups):
            with pytest.raises(ValueError, match="term 'text' has reduction 'document'"):
                call("text", losses, batch)
    # a document weighs what its first target weighs
    total = 3.0 + 7.0 + 0.5
    metrics = step.metrics()
    assert metrics["train/loss"] == pytest.approx(2 * (3 * 1 + 7 * 2 + 0.5 * 4) / total, rel=1e-15)
    assert losses.grad.tolist() == pytest.approx(
        [2 * 3 / total, 2 * 7 / total, 2 * 0.5 / total, 0], rel=1e-15
    )
    assert metrics["channel_loss/pairs"] == pytest.approx((3 + 14) / 10, rel=1e-15)
    assert metrics["channel_loss/rest"] == pytest.approx(4.0, rel=1e-15)
    assert metrics["channel_documents/pairs"] == 2  # the prefix is no document
    assert metrics["documents"] == 4


def test_row_20_reduction_group_against_sums_by_hand():
    """row 20: one loss a pair, with the source and the weight of the pair."""
    batch = preference_window()
    ledger = Ledger([Term("text", "group")], channels=["pairs", "rest"])
    losses = costs(1.0, 2.0, 1e9)  # the pair, the lone document, the one without target
    with ledger.step([batch]) as step:
        step.add_groups("text", losses, batch).backward()
        with pytest.raises(ValueError, match="losses has 2 entries, the window 3 groups"):
            step.add_groups("text", torch.ones(2), batch)
    metrics = step.metrics()
    assert metrics["train/loss"] == pytest.approx((3 * 1 + 0.5 * 2) / 3.5, rel=1e-15)
    assert losses.grad.tolist() == pytest.approx([3 / 3.5, 0.5 / 3.5, 0], rel=1e-15)
    assert metrics["channel_loss/pairs"] == pytest.approx(1.0, rel=1e-15)
    assert metrics["channel_loss/rest"] == pytest.approx(2.0, rel=1e-15)


def test_a_group_carries_the_weight_of_its_first_document_with_targets():
    layout = Layout([1, 1], [0, 0], [3, 3])
    batch = PackedBatch(
        torch.arange(2),
        {"text": torch.tensor([-100, 1])},
        layout,
        weights={"text": torch.tensor([9.0, 2.0])},
    )
    ledger = Ledger([Term("text", "group")], channels=["a"])
    with ledger.step([batch]) as step:
        step.add_groups(None, costs(5.0), batch)
    assert step.record.opened("weights") == [2.0]
    assert step.metrics()["train/loss"] == 5.0


def test_a42_mean_over_pairs_does_not_depend_on_accumulation():
    layout = Layout([1, 1], [0, 0], [0, 0])
    batches = [PackedBatch(torch.arange(2), {"text": torch.tensor([1, 1])}, layout) for _ in range(2)]
    ledger = Ledger([Term("text", "group")])
    with ledger.step(batches) as step:
        for batch, loss in zip(step, (0.2, 0.6), strict=True):
            step.add_groups(None, costs(loss), batch)
    assert step.metrics()["train/loss"] == pytest.approx(0.4, rel=1e-15)


# -- the block


def test_row_4_nothing_is_read_outside_the_block():
    """row 4"""
    batch = window([2], [1, -100])
    step = Ledger([Term("text")]).step([batch])
    losses = torch.ones(2, dtype=F64)
    uses = {
        "iterate": lambda: next(iter(step)),
        "loss": lambda: step.loss(torch.ones(2, 3), torch.ones(4, 3), batch),
        "loss_from_logits": lambda: step.loss_from_logits(torch.ones(2, 3), batch),
        "add": lambda: step.add(None, losses, batch),
        "sum_by_document": lambda: step.sum_by_document(losses, batch),
    }
    after = {"record": lambda: step.record, "metrics": step.metrics, "has_more": lambda: step.has_more}
    for use in (uses | after).values():
        with pytest.raises(RuntimeError):
            use()
    with step:
        for use in after.values():
            with pytest.raises(RuntimeError):
                use()
        step.add(None, losses, batch)
    for use in uses.values():
        with pytest.raises(RuntimeError, match="this step is not open"):
            use()
    assert step.metrics()["train/loss"] == 1.0


def test_row_4_row_14_nothing_is_read_after_an_exception_and_no_tensor_lives_on():
    """row 4, row 14: the original exception comes out, the page is gone."""
    batch = window([2], [1, -100])
    ledger = Ledger([Term("text")])
    step = ledger.step([batch])
    losses = torch.ones(2, dtype=F64, requires_grad=True)
    alive = weakref.ref(losses)
    fault = KeyError("from the forward")
    with pytest.raises(KeyError) as caught, step:
        step.add(None, losses, batch)
        raise fault
    assert caught.value is fault
    for use in (lambda: step.record, step.metrics, lambda: step.has_more, lambda: next(iter(step))):
        with pytest.raises(RuntimeError):
            use()
    with pytest.raises(RuntimeError, match="entered before"), step:
        pass
    assert ledger.totals["loss"] == 0
    del losses, caught, fault
    gc.collect()
    assert alive() is None


def test_a_step_is_entered_once():
    batch = window([2], [1, -100])
    step = Ledger([Term("text")]).step([batch])
    with step:
        step.add(None, torch.ones(2), batch)
        with pytest.raises(RuntimeError, match="entered before"), step:
            pass
    with pytest.raises(RuntimeError, match="entered before"), step:
        pass


def test_a_failed_close_leaves_no_record_and_no_count():
    batch = window([2], [1, -100])
    ledger = Ledger([Term("text")])
    step = ledger.step([batch])
    with pytest.raises(ValueError, match="term 'text'"), step:
        pass
    with pytest.raises(RuntimeError, match="no record"):
        step.metrics()
    with pytest.raises(RuntimeError, match="entered before"), step:
        pass
    assert ledger.totals == {"loss": 0, "source": 0, "aligned": 0, "physical": 0, "documents": 0}


def test_row_24_a_term_that_is_left_out_or_recorded_twice_is_an_error_that_names_it():
    """row 24"""
    layout = Layout([2])
    batch = PackedBatch(torch.arange(2), {n: torch.tensor([1, -100]) for n in ("text", "extra")}, layout)
    ledger = Ledger([Term("text"), Term("extra")])
    losses = torch.ones(2, dtype=F64)
    with pytest.raises(ValueError, match="term 'extra': .* left out") as caught, ledger.step([batch]) as step:
        step.add("text", losses, batch)
    assert "'text'" not in str(caught.value)
    with pytest.raises(ValueError, match="term 'text': .* weight 1, losses were recorded for 2"):
        with ledger.step([batch]) as step:
            for term in ("text", "text", "extra"):
                step.add(term, losses, batch)
    with pytest.raises(ValueError, match="term 'text'"), ledger.step([batch, batch]) as step:
        for micro_batch in step:
            step.add("text", losses, micro_batch)
            step.add("extra", losses, micro_batch)
            break


def test_row_5_row_2_a_term_without_targets_is_exactly_zero():
    """row 5, row 2, A30: zero with gradients of zeros; nobody has to feed it; a loss for it is an error."""
    batch = window([2, 1], [-100, -100, -100], [0, 1])
    ledger = Ledger([Term("text")], channels=["a", "b"])
    head = torch.ones(4, 3, requires_grad=True)
    hidden = torch.ones(3, 3, requires_grad=True)
    with ledger.step([batch]) as step:
        step.loss(hidden, head, batch).backward()
    assert head.grad.eq(0).all() and hidden.grad.eq(0).all()
    metrics = step.metrics()
    assert metrics["train/loss"] == metrics["loss/text"] == metrics["tokens/loss"] == 0
    assert "channel_loss/a" not in metrics and metrics["channel_tokens/a"] == 0
    assert all(value == value for value in metrics.values())
    with ledger.step([batch]):
        pass
    with pytest.raises(ValueError, match="term 'text': it has no target in this step"):
        close_one(ledger, batch, costs(0.0, 1.0, 0.0))


def test_undeclared_terms_and_wrong_shapes_are_named():
    batch = window([2], [1, -100])
    ledger = Ledger([Term("text")])
    with ledger.step([batch]) as step:
        with pytest.raises(ValueError, match="term 'image' is not declared; declared: text"):
            step.add("image", torch.ones(2), batch)
        with pytest.raises(ValueError, match="losses has 3 rows, the batch 2 slots"):
            step.add("text", torch.ones(3), batch)
        with pytest.raises(ValueError, match="hidden has 1 rows"):
            step.loss(torch.ones(1, 3), torch.ones(4, 3), batch)
        step.add("text", torch.ones(2), batch)
    with pytest.raises(TypeError, match=r"micro_batches\[1\] is a dict"):
        ledger.step([batch, {}])  # type: ignore[list-item]


def test_a_rank_without_windows_gets_one_empty_window():
    with Ledger([Term("text")]).step([]) as step:
        [batch] = list(step)
        assert batch.layout.num_documents == 0
    assert step.metrics()["tokens/physical"] == 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_row_19_recomputation_records_once(use_reentrant):
    """row 19: a checkpointed forward runs twice and is recorded the first time."""
    batch = window([3, 2], [1, 2, -100, 3, -100], [0, 1])
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 3, dtype=F64, generator=generator)
    weight = torch.randn(4, 3, dtype=F64, generator=generator)
    outcomes = []
    for recompute in (False, True):
        ledger = Ledger([Term("text")], channels=["a", "b"])
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        calls = []
        with ledger.step([batch]) as step:

            def forward(x, w, step=step, calls=calls):
                calls.append(None)
                return step.loss(x, w, batch)

            share = checkpoint(forward, x, w, use_reentrant=use_reentrant) if recompute else forward(x, w)
            share.backward()
        assert len(calls) == 1 + recompute
        outcomes.append((step.metrics(), x.grad, w.grad))
    assert outcomes[0][0] == outcomes[1][0]
    assert torch.equal(outcomes[0][1], outcomes[1][1]) and torch.equal(outcomes[0][2], outcomes[1][2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
def test_row_13_channels_change_no_bit(dtype):
    """row 13"""
    batch = window([3, 2], [1, 2, -100, 3, -100], [0, 1])
    outcomes = []
    for channels in ([], ["a", "b"]):
        torch.manual_seed(0)
        x, w = torch.randn(5, 3, dtype=dtype), torch.randn(4, 3, dtype=dtype)
        x.requires_grad_(), w.requires_grad_()
        with Ledger([Term("text", "square")], channels=channels).step([batch]) as step:
            share = step.loss(x, w, batch, z_loss=1e-3, label_smoothing=0.1)
            share.backward()
        outcomes.append((share.detach(), x.grad, w.grad))
    assert all(torch.equal(on, off) for on, off in zip(*outcomes, strict=True))
    assert outcomes[0][0].dtype == (F64 if dtype == F64 else torch.float32)


def test_evaluation_drives_no_gradients_and_counts_nothing():
    """A66: an evaluation between training steps leaves the totals alone."""
    batch = window([2], [1, -100], [0])
    ledger = Ledger([Term("text")], channels=["docs"])
    close_one(ledger, batch, costs(1.0, 0.0))
    before = ledger.state_dict()
    with torch.no_grad(), ledger.step([batch] * 5, training=False) as step:
        for micro_batch in step:
            step.add(None, torch.full((2,), 3.0, dtype=F64), micro_batch)
    assert ledger.state_dict() == before
    metrics = step.metrics()
    assert metrics["eval/loss"] == pytest.approx(3.0) and metrics["eval/channel_loss/docs"] == 3.0
    assert all(name.startswith("eval/") and "_total" not in name for name in metrics)


# -- measures: numbers that are shown beside the losses


def test_a_measure_is_the_mean_over_units_with_a_target_in_all_and_by_channel() -> None:
    """Row 21: accuracies and the like by channel, from the same vector as the losses."""
    layout = Layout([3, 2, 2], [0, 1, 1], [0, 0, -1])
    targets = torch.tensor([5, 6, -100, 7, -100, -100, -100])
    batch = PackedBatch(torch.zeros(7, dtype=torch.int64), {"text": targets, "pair": targets}, layout)
    ledger = Ledger(
        [Term("text"), Term("pair", "group")], channels=["a", "b"], measures=["accuracy", "margin", "unused"]
    )
    with ledger.step([batch]) as step:
        step.add("text", torch.ones(7), batch)
        step.add_groups("pair", torch.ones(2), batch)
        step.measure("accuracy", torch.tensor([1.0, 0.0, 9.0, 0.25, 9.0, 9.0, 9.0]), batch, term="text")
        step.measure("margin", torch.tensor([2.0, 9.0]), batch, term="pair")
        with pytest.raises(ValueError, match="measure 'acuracy' is not declared; declared: accuracy, margin"):
            step.measure("acuracy", torch.ones(7), batch, term="text")
        with pytest.raises(ValueError, match="values has 3 entries, the window 2 groups"):
            step.measure("margin", torch.ones(3), batch, term="pair")
    metrics = step.metrics()
    assert metrics["accuracy"] == pytest.approx(1.25 / 3)
    assert metrics["channel_accuracy/a"] == 0.5
    assert metrics["channel_accuracy/b"] == 0.25
    # the group's channel is that of its first document; the lone document has no target
    assert (metrics["margin"], metrics["channel_margin/a"]) == (2.0, 2.0)
    assert not {"channel_margin/b", "unused", "channel_unused/a"} & metrics.keys()
    with ledger.step([batch], training=False) as evaluation:
        evaluation.add("text", torch.ones(7), batch)
        evaluation.add_groups("pair", torch.ones(2), batch)
        evaluation.measure("margin", torch.tensor([3.0, 9.0]), batch, term="pair")
    assert evaluation.metrics()["eval/margin"] == 3.0
    both = ledger.metrics(step.record + evaluation.record)
    assert both["margin"] == 2.5  # sums over counts, not a mean of means


def test_a_measure_needs_no_channels() -> None:
    layout = Layout([2])
    batch = PackedBatch(torch.zeros(2, dtype=torch.int64), {"text": torch.tensor([1, -100])}, layout)
    ledger = Ledger([Term("text")], measures=["accuracy"])
    with ledger.step([batch]) as step:
        step.add("text", torch.ones(2), batch)
        step.measure("accuracy", torch.tensor([0.5, 7.0]), batch)
    assert step.metrics()["accuracy"] == 0.5
