"""Models with sliding windows, capped scores and scaled logits against the oracle."""

import pytest

from exactness.driving import CHANNELS, build_window, compare, draw_documents, full_gradients, run_step, wrap
from oracle.models import build_special_model, with_float64_norms
from oracle.single_process import aligned_tokens, answer


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "granite", "cohere"])
def test_what_a_model_does_to_scores_and_logits_is_kept(kind: str) -> None:
    documents = draw_documents()
    expected = answer(
        with_float64_norms(build_special_model(kind)),
        documents,
        reduction="square",
        num_channels=len(CHANNELS),
    )
    wrapped = wrap(with_float64_norms(build_special_model(kind)), "alone", 1)
    windows = [
        build_window(documents[:4], alignment=8, padded_length=64),
        build_window(documents[4:], alignment=8, padded_length=96),
    ]
    metrics = run_step(wrapped, windows, reduction="square")
    differences = compare(
        metrics,
        full_gradients(wrapped.inner),
        expected,
        aligned=aligned_tokens(documents, 8),
        physical=64 + 96,
    )
    assert not differences, differences
