"""Cases A08 to A11, A27, A36, A37: what is a target, and how many there are."""

import math

import pytest
import torch
from torch import Tensor

from isoloss import Layout, Ledger, PackedBatch, Step, Term
from laws.gain import Gain, Lookup, check_gain, cost_window, different, lookup_window, run_windows

LN4 = math.log(4)


def test_a08_counted_after_the_shift() -> None:
    rows = [[0, 1, 2, 3, 0], [3, 2, 1, 0, 3]]
    for windows in ([lookup_window(rows)], [lookup_window(rows[:1]), lookup_window(rows[1:])]):
        metrics, _ = run_windows(windows, module=Lookup(4))
        assert metrics["tokens/loss"] == 8
        assert math.isclose(metrics["train/loss"], LN4, rel_tol=1e-12)


def test_a08_mutant_is_caught() -> None:
    """A denominator counted before the shift: one per row too many."""
    rows = [[0, 1, 2, 3, 0], [3, 2, 1, 0, 3]]
    metrics, _ = run_windows([lookup_window(rows)], module=Lookup(4))
    wrong = metrics["train/loss"] * metrics["tokens/loss"] / sum(map(len, rows))
    assert math.isclose(wrong, 1.109035, abs_tol=1e-6) and different(wrong, LN4)


def test_a09_aligned_labels_are_not_shifted() -> None:
    """Labels of a decoder that are aligned with its slots are targets as they stand."""
    targets = torch.tensor([1, 2, 3, 0, 2, 2, 1, 3])
    batch = PackedBatch(torch.zeros(8, dtype=torch.int64), {"text": targets}, Layout([4, 4]))
    metrics, _ = run_windows([batch], module=Lookup(4))
    assert metrics["tokens/loss"] == 8
    assert math.isclose(metrics["train/loss"], LN4, rel_tol=1e-12)


class Classifier(torch.nn.Module):
    """One loss per document, w times its cost."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, step: Step, batch: PackedBatch) -> Tensor:
        losses = step.sum_by_document(self.gain * batch.token_extras["costs"], batch)
        return step.add_documents(None, losses, batch)


def test_a10_a_class_label_is_one_target() -> None:
    costs = [[1.0], [2.0], [3.0], [6.0]]
    check_gain([costs], 3.0)
    check_gain([costs[:1], costs[1:]], 3.0)
    # the class stands at one token of a longer document, here the last
    documents = [[None] * place + costs[place] for place in range(4)]
    for windows in ([documents], [documents[:3], documents[3:]]):
        batches = [cost_window(window) for window in windows]
        metrics, gradients = run_windows(
            batches, module=Classifier(), terms=[Term("text", "document")], channels=()
        )
        assert metrics["tokens/loss"] == metrics["documents"] == 4
        assert math.isclose(metrics["train/loss"], 3.0, rel_tol=1e-12)
        assert math.isclose(gradients["gain"].item(), 3.0, rel_tol=1e-12)


def test_a10_masked_language_model_labels_are_not_shifted() -> None:
    costs = [[None, 1.0, None, 5.0], [None, None, None, 3.0]]
    check_gain([costs], 3.0)
    check_gain([costs[:1], costs[1:]], 3.0)


def test_a11_counted_where_the_batch_is_made() -> None:
    """Labels that are rebuilt make a new batch, and what is counted is what is trained."""
    loaded = cost_window([[None, None, None]])
    rebuilt = PackedBatch(
        loaded.input_ids,
        {"text": torch.tensor([0, 0, 0])},
        loaded.layout,
        token_extras={"costs": torch.tensor([1.0, 2.0, 3.0])},
    )
    metrics, gradients = run_windows([rebuilt])
    assert (metrics["tokens/loss"], metrics["train/loss"], gradients["gain"].item()) == (3, 2.0, 2.0)


def test_a11_labels_changed_under_a_batch_are_an_error() -> None:
    batch = cost_window([[None, None, None]])
    batch.targets["text"] = torch.tensor([0, 0, 0])
    batch.token_extras["costs"] = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="'text'.*holds targets of weight 0, losses were recorded for 3"):
        run_windows([batch])


def test_a27_shifted_labels_are_never_shifted_again() -> None:
    """Row 15."""
    ids = torch.tensor([10, 11, 12, 13, 14])
    batch = PackedBatch(ids, {"text": torch.tensor([11, 12, 13, 14, -100])}, Layout([5]))
    metrics, gradients = run_windows([batch], module=Lookup(16))
    assert metrics["tokens/loss"] == 4
    assert math.isclose(gradients["table"][10, 11].item(), -0.234375, rel_tol=1e-12)
    assert gradients["table"][10, 12] > 0


def test_a36_no_target_crosses_a_document_boundary() -> None:
    window = lookup_window([[1, 2, 3], [4, 5]])
    assert window.targets["text"].tolist() == [2, 3, -100, 5, -100]
    metrics, gradients = run_windows([window], module=Lookup(8))
    assert metrics["tokens/loss"] == 3
    assert not gradients["table"][3].any()
    assert math.isclose(gradients["table"][1, 2].item(), -(7 / 8) / 3, rel_tol=1e-12)


def test_a36_mutant_is_caught() -> None:
    """A boundary that is lost: both documents as one."""
    _, gradients = run_windows([lookup_window([[1, 2, 3, 4, 5]])], module=Lookup(8))
    assert math.isclose(gradients["table"][1, 2].item(), -0.21875, rel_tol=1e-12)
    assert gradients["table"][3, 4] < 0


@pytest.mark.parametrize(("lengths", "targets"), [([3, 1, 2], 3), ([1, 1, 1], 0)])
def test_a37_one_token_documents_do_not_merge(lengths: list[int], targets: int) -> None:
    window = lookup_window([list(range(length)) for length in lengths])
    assert window.position_ids.tolist() == [place for length in lengths for place in range(length)]
    metrics, _ = run_windows([window], module=Lookup(4))
    assert (metrics["documents"], metrics["tokens/loss"]) == (3, targets)


def test_eval_and_training_count_alike() -> None:
    ledger = Ledger([Term("text")])
    window = cost_window([[1.0, None, 2.0]], padding=2)
    with torch.no_grad(), ledger.step([window], training=False) as step:
        for batch in step:
            Gain()(step, batch)
    assert step.metrics()["eval/tokens/loss"] == 2
