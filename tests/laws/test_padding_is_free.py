"""Law: alignment, tail padding, the pad token and empty windows change no loss, gradient or target count."""

import pytest

from exactness.driving import build_window, draw_documents, full_gradients, run_step, wrap
from isoloss import PackedBatch
from oracle.models import build_model
from oracle.single_process import worst_difference

TOLERANCE = 1e-10
COUNTS_SLOTS = ("tokens/aligned", "tokens/physical", "packing/fill", "packing/loss_fill")


@pytest.mark.parametrize("reduction", ["token", "sample", "square"])
def test_slots_without_tokens_change_nothing(reduction: str) -> None:
    documents = draw_documents(seed=3)
    wrapped = wrap(build_model(), "alone", 1)
    bare = run_step(wrapped, [build_window(documents)], reduction=reduction)
    gradients = {name: values.clone() for name, values in full_gradients(wrapped.inner).items()}
    assert bare["tokens/source"] == bare["tokens/physical"]
    for windows in (
        [build_window(documents, alignment=2)],
        [build_window(documents, alignment=8)],
        [build_window(documents, padded_length=128)],
        [build_window(documents, padded_length=81, pad_token_id=63)],
        [build_window(documents, alignment=16, padded_length=300, pad_token_id=7)],
        [build_window(documents), PackedBatch.empty(16)],
        [PackedBatch.empty(1), build_window(documents, alignment=4), PackedBatch.empty(16, pad_token_id=9)],
    ):
        metrics = run_step(wrapped, windows, reduction=reduction)
        difference, where = worst_difference(full_gradients(wrapped.inner), gradients)
        assert difference < TOLERANCE, (windows, where)
        for name, value in bare.items():
            if not name.startswith(COUNTS_SLOTS):
                assert metrics[name] == pytest.approx(value, rel=TOLERANCE), (windows, name)
        slots = sum(len(window) for window in windows)
        assert metrics["tokens/physical"] == slots
        assert metrics["packing/fill"] == metrics["tokens/source"] / slots


def test_a38_padding_is_no_token() -> None:
    window = build_window([d for d in draw_documents() if len(d.tokens) in (3, 2)][:2], padded_length=8)
    metrics = run_step(wrap(build_model(), "alone", 1), [window])
    assert (metrics["tokens/source"], metrics["tokens/physical"], metrics["documents"]) == (5, 8, 2)


def test_a39_a_window_that_is_full_has_no_empty_document() -> None:
    documents = [d for d in draw_documents() if len(d.tokens) in (12, 16)]
    window = build_window(documents, alignment=4, padded_length=28)
    assert window.layout.cu_seqlens.tolist() == [0, 12, 28]
    metrics = run_step(wrap(build_model(), "alone", 1), [window])
    assert (metrics["documents"], metrics["tokens/source"], metrics["packing/fill"]) == (2, 28, 1.0)


def test_mutant_padding_in_the_denominator_is_caught() -> None:
    """Divided by the slots, as a mean over a padded loss tensor does: the loss depends on the padding."""
    documents = draw_documents(seed=3, weighted=False)
    wrapped = wrap(build_model(), "alone", 1)
    losses = []
    for padded_length in (88, 128):
        metrics = run_step(wrapped, [build_window(documents, padded_length=padded_length)])
        losses.append(metrics["train/loss"] * metrics["tokens/loss"] / metrics["tokens/physical"])
    assert abs(losses[0] / losses[1] - 1.0) > 0.1
