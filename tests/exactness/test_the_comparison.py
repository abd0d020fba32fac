"""The comparison with the oracle can fail: small faults, each in one place, are named."""

import pytest
import torch

from exactness.driving import (
    CHANNELS,
    Wrapped,
    build_window,
    compare,
    draw_documents,
    full_gradients,
    run_step,
    wrap,
)
from oracle.models import build_model
from oracle.single_process import Answer, PlainDocument, aligned_tokens, answer


def right_step() -> tuple[Wrapped, dict[str, float], list[PlainDocument]]:
    documents = draw_documents()
    wrapped = wrap(build_model(), "alone", 1)
    return wrapped, run_step(wrapped, [build_window(documents, padded_length=144)]), documents


def differences(
    wrapped: Wrapped, metrics: dict[str, float], expected: Answer, documents: list[PlainDocument]
) -> list[str]:
    return compare(
        metrics,
        full_gradients(wrapped.inner),
        expected,
        aligned=aligned_tokens(documents, 1),
        physical=144,
    )


def test_one_wrong_gradient_element_is_named() -> None:
    wrapped, metrics, documents = right_step()
    expected = answer(build_model(), documents, num_channels=len(CHANNELS))
    assert not differences(wrapped, metrics, expected, documents)
    gradient = wrapped.inner.get_decoder().layers[1].self_attn.q_norm.weight.grad
    gradient[3] += 1e-9 * gradient.abs().max()
    (found,) = differences(wrapped, metrics, expected, documents)
    assert "layers.1.self_attn.q_norm" in found


def test_a_gradient_that_is_not_a_number_is_named() -> None:
    wrapped, metrics, documents = right_step()
    expected = answer(build_model(), documents, num_channels=len(CHANNELS))
    next(wrapped.inner.parameters()).grad[0, 0] = torch.nan
    (found,) = differences(wrapped, metrics, expected, documents)
    assert "embed_tokens" in found


@pytest.mark.parametrize("reduction", ["sample", "square"])
def test_another_reduction_is_seen(reduction: str) -> None:
    wrapped, metrics, documents = right_step()
    expected = answer(build_model(), documents, reduction=reduction, num_channels=len(CHANNELS))
    found = "; ".join(differences(wrapped, metrics, expected, documents))
    assert "train/loss" in found and "channel_loss/code" in found and "gradient" in found


def test_a_moved_document_is_seen() -> None:
    """A document counted for another channel changes no loss, and yet shows."""
    wrapped, metrics, documents = right_step()
    documents[1].channel = 1 - documents[1].channel
    expected = answer(build_model(), documents, num_channels=len(CHANNELS))
    found = "; ".join(differences(wrapped, metrics, expected, documents))
    assert "channel_documents" in found and "train/loss" not in found
