"""Law: the data twice gives the same mean loss and gradient, and twice the counts."""

import copy

import pytest

from exactness.driving import CHANNELS, build_window, draw_documents, full_gradients, run_step, wrap
from isoloss import PackedBatch
from oracle.models import build_model
from oracle.single_process import worst_difference

TOLERANCE = 1e-10


def halves() -> list[PackedBatch]:
    documents = draw_documents(seed=5)
    return [build_window(part, padded_length=88) for part in (documents[:4], documents[4:])]


@pytest.mark.parametrize("reduction", ["token", "sample", "square"])
def test_the_data_twice(reduction: str) -> None:
    documents = draw_documents(seed=5)
    wrapped = wrap(build_model(), "alone", 1)
    once = run_step(wrapped, halves(), reduction=reduction)
    gradients = {name: values.clone() for name, values in full_gradients(wrapped.inner).items()}
    for doubled in (
        halves() * 2,
        [*halves(), *copy.deepcopy(halves())[::-1]],
        [build_window(documents + documents, padded_length=352)],
    ):
        twice = run_step(wrapped, doubled, reduction=reduction)
        assert worst_difference(full_gradients(wrapped.inner), gradients)[0] < TOLERANCE
        for name, value in once.items():
            counts = name.startswith(("tokens/", "documents", "channel_tokens", "channel_source_tokens"))
            factor = 2 if counts or name.startswith("channel_documents") else 1
            if "aligned" not in name:
                assert twice[name] == pytest.approx(factor * value, rel=TOLERANCE), name


def test_mutant_denominator_of_one_copy_is_caught() -> None:
    """Denominators that are assigned instead of added: that of the last micro-batch stands for all."""
    wrapped = wrap(build_model(), "alone", 1)
    once = run_step(wrapped, halves())
    twice = run_step(wrapped, halves() * 2)
    wrong = twice["train/loss"] * twice["tokens/loss"] / once["tokens/loss"]
    assert wrong > 1.9 * once["train/loss"]


def test_totals_grow_by_the_counts_of_each_step() -> None:
    from isoloss import Ledger, LossModel, Term

    model = LossModel(build_model())
    ledger = Ledger([Term("text")], channels=CHANNELS)
    for number in range(1, 4):
        with ledger.step(halves()) as step:
            for batch in step:
                model(step, batch).backward()
        metrics = step.metrics()
        for name in ("tokens/loss", "tokens/source", "tokens/aligned", "tokens/physical", "documents"):
            assert metrics[f"{name}_total"] == number * metrics[name]
    assert sum(counts["tokens"] for counts in ledger.channel_totals.values()) == ledger.totals["loss"]
