"""Cases A40, A41, A56, A57 and A26 without shards: weights, and what is shown. Rows 24, 27."""

import math

import pytest
import torch

from isoloss import Ledger, Term
from laws.gain import VIA, Gain, check_gain, cost_window, gain_step, run_windows


def test_a40_a_packed_row_is_many_sequences() -> None:
    documents = [[2.0], [1.0] * 4]
    check_gain([documents], 1.5, reduction="sample")
    check_gain([documents[:1], documents[1:]], 1.5, reduction="sample")
    check_gain([documents], 1.2, reduction="token")
    # square: (2 * 1 + 4 * 1/2) / (1 + 4 / 2)
    check_gain([documents], 4 / 3, reduction="square")


@pytest.mark.parametrize("via", VIA)
def test_a41_weights_of_documents_divide_by_the_total_weight(via: str) -> None:
    """The policy: a weight counts in the denominator too, 5.5 / 4.5, packed or not."""
    documents, weights = [[1.0, 1.0], [3.0]], [[2.0, 2.0], [0.5]]
    packed = [cost_window(documents, weights=weights)]
    apart = [cost_window([costs], weights=[row]) for costs, row in zip(documents, weights, strict=True)]
    padded = [cost_window(documents, weights=weights, alignment=4, padding=3)]
    for windows in (packed, apart, padded):
        metrics, gradients = run_windows(windows, module=Gain(via))
        assert math.isclose(metrics["train/loss"], 5.5 / 4.5, rel_tol=1e-12)
        assert math.isclose(gradients["gain"].item(), 5.5 / 4.5, rel_tol=1e-12)
        assert metrics["tokens/loss"] == 3


@pytest.mark.parametrize("via", VIA)
def test_a26_weights_of_tokens_stay_with_their_targets(via: str) -> None:
    documents, weights = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[1.0, 0.0, 2.0], [0.5, 1.0, 0.0]]
    for windows in (
        [cost_window(documents, weights=weights)],
        [cost_window([costs], weights=[row]) for costs, row in zip(documents, weights, strict=True)],
    ):
        metrics, gradients = run_windows(windows, module=Gain(via))
        assert math.isclose(metrics["train/loss"], 14 / 4.5, rel_tol=1e-12)
        assert math.isclose(gradients["gain"].item(), 14 / 4.5, rel_tol=1e-12)
        # a weight of 0 is still a target: n(d) counts it
        metrics, _ = run_windows(windows, module=Gain(via), terms=[Term("text", "sample")])
        assert metrics["tokens/loss"] == 6
        assert math.isclose(metrics["train/loss"], (7 / 3 + 7 / 3) / (3 / 3 + 1.5 / 3), rel_tol=1e-12)


@pytest.mark.parametrize("via", VIA)
def test_a56_the_log_shows_what_is_trained(via: str) -> None:
    """Row 24: all micro-batches, and the same number that is backpropagated."""
    loss, gradient = gain_step([[[1.0]], [[2.0]], [[3.0]], [[10.0]]], via=via)
    assert math.isclose(loss, 4.0, rel_tol=1e-12) and math.isclose(gradient, 4.0, rel_tol=1e-12)


def test_a56_shares_add_up_to_the_log() -> None:
    shares = []
    windows = [cost_window([[cost]]) for cost in (1.0, 2.0, 3.0, 10.0)]
    metrics, _ = run_windows(windows, backward=lambda share: shares.append(share.item()) or share.backward())
    assert shares == [0.25, 0.5, 0.75, 2.5] and sum(shares) == metrics["train/loss"]


def test_a57_eval_is_no_mean_of_batch_means() -> None:
    batches = [[3.0] * 2, [2.0] * 12]
    ledger = Ledger([Term("text")])
    whole = cost_window([[cost for costs in batches for cost in costs]])
    for windows in ([cost_window([costs]) for costs in batches], [whole]):
        with torch.no_grad(), ledger.step(windows, training=False) as step:
            for batch in step:
                Gain()(step, batch)
        metrics = step.metrics()
        assert math.isclose(metrics["eval/loss"], 30 / 14, rel_tol=1e-12)
        assert metrics["eval/tokens/loss"] == 14
    assert ledger.totals == dict.fromkeys(ledger.totals, 0), "evaluation counts nothing towards training"


def test_a57_records_of_several_passes_add_up() -> None:
    """A window of passes sums numerators and denominators."""
    ledger = Ledger([Term("text")])
    records = []
    for costs in ([3.0] * 2, [2.0] * 12):
        with torch.no_grad(), ledger.step([cost_window([costs])], training=False) as step:
            for batch in step:
                Gain()(step, batch)
        records.append(step.record)
    metrics = ledger.metrics(records[0] + records[1], training=False)
    assert math.isclose(metrics["eval/loss"], 30 / 14, rel_tol=1e-12)
