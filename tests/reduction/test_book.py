"""Counts, metrics, records of several steps, and what is saved."""

import dataclasses
import logging

import pytest
import torch

from isoloss import Layout, Ledger, PackedBatch, Term
from isoloss.reduction.schema import METRICS_VERSION

F64 = torch.float64


def window(lengths, sources=None, alignment=1, padded_length=None):
    """A window in which every token but the last of a document has a target."""
    layout = Layout(lengths, sources, alignment=alignment, padded_length=padded_length)
    ids = torch.arange(layout.physical_tokens)
    targets = torch.full_like(ids, -100)
    for start, length in zip(layout.document_starts, layout.document_lengths, strict=True):
        targets[start : start + length - 1] = 1
    return PackedBatch(ids, {"text": targets}, layout)


def run(ledger, *windows, cost=1.0, training=True, **options):
    with ledger.step(windows, training=training, **options) as step:
        for batch in step:
            step.add(None, torch.full((len(batch),), cost, dtype=F64), batch)
    return step


def test_row_7_row_18_counts_of_a_step():
    """row 7, row 18, A36 to A38: documents of 3, 1 and 2 tokens, alignment 4, two slots of padding."""
    ledger = Ledger([Term("text")], channels=["empty", "two", "unused"])
    step = run(ledger, window([1, 3, 2], [0, 1, 1], alignment=4, padded_length=14))
    metrics = step.metrics()
    assert {
        name: metrics[name] for name in metrics if name.startswith(("tokens/", "documents", "packing/"))
    } == {
        "tokens/loss": 3,
        "tokens/source": 6,
        "tokens/aligned": 12,
        "tokens/physical": 14,
        "documents": 3,
        "packing/fill": 6 / 14,
        "packing/loss_fill": 3 / 14,
        "packing/loss_density": 3 / 6,
        "packing/max_document_length": 3,
        "tokens/loss_total": 3,
        "tokens/source_total": 6,
        "tokens/aligned_total": 12,
        "tokens/physical_total": 14,
        "documents_total": 3,
    }
    assert [metrics[f"channel_tokens/{name}"] for name in ("empty", "two", "unused")] == [0, 3, 0]
    assert [metrics[f"channel_source_tokens/{name}"] for name in ("empty", "two", "unused")] == [1, 5, 0]
    assert [metrics[f"channel_documents/{name}"] for name in ("empty", "two", "unused")] == [1, 2, 0]
    assert metrics["health/metadata_complete"] == metrics["health/counts_ordered"] == 1
    assert metrics["health/books_balance"] == 1
    assert metrics["steps/skipped"] == 0


def test_a64_a65_metric_names_of_a_plain_step():
    metrics = run(Ledger([Term("text")], channels=["a/b"]), window([3], [0])).metrics()
    assert set(metrics) == {
        "train/loss",
        "loss/text",
        "channel_loss/a%2Fb",
        "channel_loss_share/a%2Fb",
        "channel_tokens/a%2Fb",
        "channel_source_tokens/a%2Fb",
        "channel_documents/a%2Fb",
        *(
            f"tokens/{kind}{total}"
            for kind in ("loss", "source", "aligned", "physical")
            for total in ("", "_total")
        ),
        "documents",
        "documents_total",
        "packing/fill",
        "packing/loss_fill",
        "packing/loss_density",
        "packing/max_document_length",
        "health/metadata_complete",
        "health/counts_ordered",
        "health/books_balance",
        "steps/skipped",
    }


def test_z_loss_is_part_of_the_loss_and_shown_apart():
    """A73: only where it is switched on."""
    ledger = Ledger([Term("text")])
    hidden, weight = torch.ones(3, 2, dtype=F64), torch.zeros(2, 2, dtype=F64)
    batch = window([3])
    values = []
    for z_loss in (0.0, 1e-2):
        with ledger.step([batch]) as step:
            step.loss(hidden, weight, batch, z_loss=z_loss)
        values.append(step.metrics())
    log2 = torch.tensor(2.0, dtype=F64).log().item()
    assert "z_loss/text" not in values[0] and values[0]["train/loss"] == pytest.approx(log2)
    assert values[1]["z_loss/text"] == pytest.approx(1e-2 * log2**2)
    assert values[1]["train/loss"] == pytest.approx(log2 + 1e-2 * log2**2)


def test_a57_records_of_several_steps_add_numerators_and_denominators():
    """Sums 6 over 2 targets and 24 over 12: 30/14, never the mean of 3 and 2."""
    ledger = Ledger([Term("text", coefficient=2.0)], channels=["a", "b"])
    first = run(ledger, window([3], [0]), cost=3.0)
    second = run(ledger, window([4, 10], [0, 1]), cost=2.0)
    record = first.record + second.record
    metrics = ledger.metrics(record)
    assert record.num_steps == 2
    assert metrics["loss/text"] == pytest.approx(30 / 14, rel=1e-15)
    assert metrics["train/loss"] == pytest.approx(2 * 30 / 14, rel=1e-15)
    assert metrics["channel_loss/a"] == pytest.approx(12 / 5, rel=1e-15)
    assert metrics["tokens/loss"] == 14 and metrics["documents"] == 3
    assert ledger.metrics(record, training=False)["eval/loss"] == metrics["train/loss"]


def test_a66_totals_survive_a_resume_and_ignore_evaluation():
    ledger = Ledger([Term("text")], channels=["a"])
    for _ in range(10):
        run(ledger, window([101], [0]))
    run(ledger, window([501], [0]), training=False)
    state = ledger.state_dict()
    resumed = Ledger([Term("text")], channels=["b", "a"])
    resumed.load_state_dict(state)
    for _ in range(5):
        step = run(resumed, window([101], [1]))
    assert step.metrics()["tokens/loss_total"] == resumed.totals["loss"] == 1500
    assert resumed.channel_totals["a"] == {"tokens": 1500, "source_tokens": 1515, "documents": 15}
    assert state["totals"]["loss"] == 1000  # the saved state is a copy


def test_targets_of_undeclared_terms_are_no_loss_tokens():
    targets = {
        "text": torch.tensor([5, -100, -100, -100]),
        "image": torch.tensor([1, 1, 1, -100]),
        "mtp": torch.tensor([-100, 5, -100, -100]),
    }
    batch = PackedBatch(torch.arange(4), targets, Layout([4], [0]))
    for names, expected in ((["text"], 1), (["text", "mtp"], 2), (["other"], 0), (["text", "image"], 3)):
        ledger = Ledger([Term(name) for name in names], channels=["a"])
        with ledger.step([batch]) as step:
            for name in names:
                step.add(name, torch.zeros(4), batch)
        metrics = step.metrics()
        assert metrics["tokens/loss"] == metrics["channel_tokens/a"] == ledger.totals["loss"] == expected


def test_every_step_shows_the_totals_of_its_own_end():
    ledger = Ledger([Term("text")])
    first = run(ledger, window([3]))
    ledger.skip_step()
    second = run(ledger, window([5]))
    ledger.skip_step()
    third = run(ledger, window([9]))
    shown = [step.metrics() for step in (third, first, second, third)]
    assert [values["tokens/source_total"] for values in shown] == [17, 3, 8, 17]
    assert [values["documents_total"] for values in shown] == [3, 1, 2, 3]
    assert [values["steps/skipped"] for values in shown] == [2, 1, 2, 2]
    assert ledger.metrics(first.record + second.record)["tokens/source_total"] == 17


def test_a74_totals_beyond_32_bits_are_exact():
    ledger = Ledger([Term("text")], channels=["a"])
    state = ledger.state_dict()
    state["totals"]["loss"] = 2**53
    state["channel_totals"]["a"]["tokens"] = 2**53
    ledger.load_state_dict(state)
    run(ledger, window([2], [0]))
    assert ledger.totals["loss"] == 2**53 + 1 == ledger.channel_totals["a"]["tokens"]


def test_loading_refuses_lost_channels_and_other_definitions():
    ledger = Ledger([Term("text")], channels=["a", "b"])
    run(ledger, window([2], [1]))
    state = ledger.state_dict()
    with pytest.raises(ValueError, match=r"counts of channels \['b'\]"):
        Ledger([Term("text")], channels=["a"]).load_state_dict(state)
    Ledger([Term("text")], channels=["b"]).load_state_dict(state)  # "a" was never counted
    with pytest.raises(ValueError, match=f"version {METRICS_VERSION + 1} of the metrics"):
        ledger.load_state_dict(state | {"metrics_version": METRICS_VERSION + 1})


def test_other_of_a_saved_ledger_is_not_a_source_of_that_name():
    ledger = Ledger([Term("text")], channels=["a"])
    run(ledger, window([2, 5], [0, 1]))
    assert ledger.channel_totals["other"]["tokens"] == 4
    resumed = Ledger([Term("text")], channels=["a", "other"])
    run(resumed, window([9], [1]))
    resumed.load_state_dict(ledger.state_dict())
    counts = {name: counts["tokens"] for name, counts in resumed.channel_totals.items()}
    assert counts == {"a": 1, "other": 0, "other_": 4}
    again = Ledger([Term("text")], channels=["a"])
    again.load_state_dict(resumed.state_dict())
    assert again.channel_totals == ledger.channel_totals
    run(resumed, window([9], [1]))
    with pytest.raises(ValueError, match=r"counts of channels \['other'\], which are not declared"):
        again.load_state_dict(resumed.state_dict())


@pytest.mark.parametrize("state", [{}, {"totals": {}}])
def test_loading_names_what_a_state_lacks(state):
    with pytest.raises(
        ValueError, match="expected what Ledger.state_dict returned, got .* without .*'num_st"
    ):
        Ledger([Term("text")]).load_state_dict(state)


@pytest.mark.parametrize("terms", [["text"], "text", Term("text"), {"text": 1.0}])
def test_terms_are_a_list_of_terms(terms):
    with pytest.raises(TypeError, match=r"a ledger takes a list of Term objects, got .*text.*write \[Term"):
        Ledger(terms)


def test_skipped_steps_are_counted_and_saved():
    ledger = Ledger([Term("text")])
    step = run(ledger, window([2]))
    ledger.skip_step()
    assert step.metrics()["steps/skipped"] == 1
    again = Ledger([Term("text")])
    again.load_state_dict(ledger.state_dict())
    again.skip_step()
    assert again.state_dict()["num_skipped"] == 2


def test_row_17_row_22_undeclared_channels_in_lenient_and_strict_mode(caplog):
    """row 17, row 22"""
    ledger = Ledger([Term("text")], channels=["a", "other"])
    with caplog.at_level(logging.WARNING):
        metrics = run(ledger, window([3, 2, 4], [0, 1, 7])).metrics()
    assert "documents of channel [7] were seen, but only 2 channels are declared" in caplog.text
    assert (
        metrics["channel_tokens/a"],
        metrics["channel_tokens/other"],
        metrics["channel_tokens/other_"],
    ) == (2, 1, 3)
    caplog.clear()
    run(ledger, window([3], [7]))
    assert caplog.text == ""  # said once
    strict = Ledger([Term("text")], channels=["a"], strict=True)
    for _ in range(2):  # every time
        with pytest.raises(ValueError, match=r"documents of channel \[7\]"):
            run(strict, window([3, 4], [0, 7]))
    assert strict.totals["loss"] == 0


def test_the_other_channel_shows_only_when_something_fell_into_it():
    ledger = Ledger([Term("text")], channels=["a"])
    assert not any(name.endswith("/other") for name in run(ledger, window([3], [0])).metrics())


def test_row_9_documents_without_a_channel_suppress_the_channel_metrics():
    """row 9"""
    ledger = Ledger([Term("text")], channels=["a"])
    metrics = run(ledger, window([3, 4], [0, -1])).metrics()
    assert metrics["health/metadata_complete"] == 0
    assert not any(name.startswith("channel_") for name in metrics)
    assert metrics["train/loss"] == 1.0 and metrics["tokens/loss"] == 5
    strict = Ledger([Term("text")], channels=["a"], strict=True)
    with pytest.raises(ValueError, match=r"1 documents have no channel \(source -1\)"):
        run(strict, window([3, 4], [0, -1]))
    # without channels nothing is missing
    assert "health/metadata_complete" not in run(Ledger([Term("text")]), window([3])).metrics()


def test_targets_of_an_undeclared_term_are_a_fault(caplog):
    layout = Layout([2])
    targets = {"text": torch.tensor([1, -100]), "image": torch.tensor([1, 1])}
    batch = PackedBatch(torch.arange(2), targets, layout)
    with caplog.at_level(logging.WARNING):
        run(Ledger([Term("text")]), batch)
    assert "2 targets belong to a term that is not declared (declared: 'text')" in caplog.text
    with pytest.raises(ValueError, match="2 targets belong to a term that is not declared"):
        run(Ledger([Term("text")], strict=True), batch)


def test_row_33_explain_says_what_each_denominator_is_made_of():
    """row 33"""
    ledger = Ledger([Term("text", "sample", coefficient=0.5), Term("image")], channels=["a/b", "c"])
    assert ledger.explain().startswith("No step has been read yet")
    with ledger.step([window([3, 2], [0, 1], alignment=4, padded_length=10)]) as step:
        for batch in step:
            step.add("text", torch.tensor([1.0, 3.0, 0, 0, 4.0, 0, 0, 0, 0, 0], dtype=F64), batch)
    step.metrics()
    assert ledger.explain().splitlines() == [
        "1 step",
        "  tokens: 3 loss <= 5 source <= 8 aligned <= 10 physical, in 2 documents",
        "  term 'text': W = 2 from 3 targets, reduction 'sample': each target weighs 1 / targets of its "
        "document, times the data's weight",
        "    loss = 6 / W = 3, coefficient 0.5, adds 1.5 to the loss",
        "    channel a%2Fb: weight 1 (50.0% of W), loss 2",
        "    channel c: weight 1 (50.0% of W), loss 4",
        "  term 'image': W = 0 from 0 targets, reduction 'token': each target weighs 1, times the data's "
        "weight",
        "    no target in the step: the term is exactly 0, and so are its gradients",
        "  train/loss = 1.5",
    ]


def test_a_non_finite_loss_names_its_term_and_channel():
    ledger = Ledger([Term("text"), Term("extra")], channels=["good", "bad"])
    layout = Layout([1, 1], [0, 1])
    batch = PackedBatch(torch.arange(2), {n: torch.tensor([1, 1]) for n in ("text", "extra")}, layout)
    for value in (float("nan"), float("inf")):
        with ledger.step([batch]) as step:
            step.add("text", torch.tensor([1.0, value]), batch)
            step.add("extra", torch.ones(2), batch)
        assert step.record.nonfinite() == ["term 'text' in channel bad"]
    with ledger.step([batch]) as step:
        step.add("text", torch.ones(2), batch)
        step.add("extra", torch.ones(2), batch)
    assert step.record.nonfinite() == []


def test_channels_that_do_not_add_up_are_said_aloud(caplog):
    ledger = Ledger([Term("text")], channels=["a"])
    step = run(ledger, window([3], [0]))
    closing = step.record.closing.clone()
    step.record.declaration.closing.block(closing, "channel_losses")[0, 0] += 1.0
    record = dataclasses.replace(step.record, closing=closing)
    with caplog.at_level(logging.ERROR):
        metrics = ledger.metrics(record)
    assert metrics["health/books_balance"] == 0
    assert "term 'text' sums to 2, its channels to 3" in caplog.text


def test_has_more_and_digest():
    ledger = Ledger([Term("text")])
    assert run(ledger, window([3])).has_more
    assert not run(ledger, window([3]), has_more=False).has_more
    # the documents count, not their order, window or padding
    together = run(ledger, window([3, 4])).record.digest
    ids = torch.arange(7)
    apart = [
        PackedBatch(ids[3:], {"text": torch.full((4,), -100)}, Layout([4])),
        PackedBatch(
            torch.cat([ids[:3], ids[:2]]), {"text": torch.full((5,), -100)}, Layout([3], padded_length=5)
        ),
    ]
    assert run(ledger, *apart, cost=0.0).record.digest == together
    assert run(ledger, window([4, 3])).record.digest != together
