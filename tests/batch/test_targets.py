"""`shift_targets` against a loop over documents, and the faults seen when labels are shifted."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batch.strategies import layouts
from isoloss import IGNORE_INDEX, Document, Layout, shift_targets
from isoloss.batch.collation import build_batch
from isoloss.batch.targets import shift_values
from isoloss.sharding import shard_slots

IGN = IGNORE_INDEX


def shift_by_document(labels: list[int], layout: Layout, depth: int) -> list[int]:
    """Each document taken out, shifted and put back."""
    targets = [IGN] * layout.physical_tokens
    for start, length in zip(layout.document_starts, layout.document_lengths, strict=True):
        alone = labels[start : start + length]
        shifted = alone[depth:] + [IGN] * min(depth, length)
        targets[start : start + length] = shifted
    return targets


def lookup_gradient(ids: Tensor, targets: Tensor, vocabulary: int) -> tuple[float, Tensor]:
    """Mean loss and its gradient for logits = table[ids] with a table of zeros."""
    table = torch.zeros(vocabulary, vocabulary, dtype=torch.float64, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(table[ids], targets, ignore_index=IGN)
    (gradient,) = torch.autograd.grad(loss, table)
    return loss.item(), gradient


@given(layouts(), st.integers(0, 5), st.integers(1, 4), st.data())
def test_shifting_equals_shifting_each_document_alone(
    layout: Layout, depth: int, masked: int, data: st.DataObject
) -> None:
    slots = layout.physical_tokens
    offset = data.draw(st.integers(0, 3))
    labels = [IGN if (slot + offset) % masked else 100 + slot for slot in range(slots)]
    targets = shift_targets(torch.tensor(labels, dtype=torch.int64), layout, depth)
    assert targets.tolist() == shift_by_document(labels, layout, depth)
    assert targets.dtype == torch.int64


@given(layouts(), st.integers(1, 3))
def test_values_move_with_their_labels(layout: Layout, depth: int) -> None:
    values = torch.arange(layout.physical_tokens, dtype=torch.float32)
    shifted = shift_values(values, layout, depth, -1.0)
    targets = shift_targets(torch.arange(layout.physical_tokens), layout, depth)
    assert shifted.tolist() == [-1.0 if target == IGN else float(target) for target in targets.tolist()]


@pytest.mark.parametrize("alignment", [1, 4])
def test_a08_targets_are_counted_after_the_shift(alignment: int) -> None:
    batch = build_batch([[Document([0, 1, 2, 3, 0])], [Document([1, 2, 3, 0, 1])]], 16, alignment=alignment)
    assert int(batch.counts["text"].num_targets.sum()) == 8
    loss, _ = lookup_gradient(batch.input_ids, batch.targets["text"], 4)
    assert loss == pytest.approx(math.log(4), rel=1e-12)


def test_a09_aligned_labels_are_neither_shifted_nor_lost() -> None:
    ignored = [IGN] * 4
    documents = [
        Document([0, 0, 0, 0], ignored, term_labels={"decoder": labels})
        for labels in ([1, 2, 3, 1], [3, 2, 1, 1])
    ]
    batch = build_batch([[document] for document in documents], 8, alignment=4)
    assert batch.targets["decoder"].tolist() == [1, 2, 3, 1, 3, 2, 1, 1]
    assert int(batch.counts["decoder"].num_targets.sum()) == 8
    loss, _ = lookup_gradient(batch.input_ids, batch.targets["decoder"], 4)
    assert loss == pytest.approx(1.386294, abs=1e-6)


def test_a10_one_class_label_per_document_is_one_target_per_document() -> None:
    units = [
        [Document([5] * length, [IGN] * length, term_labels={"class": [IGN] * (length - 1) + [label]})]
        for length, label in ((3, 1), (1, 0), (7, 1), (2, 0))
    ]
    batch = build_batch(units, 16, alignment=1)
    assert batch.counts["class"].num_targets.tolist() == [1, 1, 1, 1]
    costs = torch.zeros(16)
    costs[batch.targets["class"] != IGN] = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert float(costs.sum() / batch.counts["class"].weight_sums.sum()) == 3.0


def test_row_8_a_class_on_the_only_token_of_a_document_is_a_target() -> None:
    batch = build_batch([[Document([5], [IGN], term_labels={"class": [2]})]], 8)
    assert batch.counts["class"].num_targets.tolist() == [1]
    assert batch.targets["class"].tolist() == [2] + [IGN] * 7
    assert batch.loss_tokens.tolist() == [1]


def test_row_10_targets_of_a_pair_of_documents_and_of_one_document() -> None:
    pair = [Document([1, 2, 3], group=0), Document([4, 5], group=0)]
    two = [Document([1, 2, 3]), Document([4, 5])]
    for units, expected in (([pair], 3), ([[two[0]], [two[1]]], 3), ([[Document([1, 2, 3, 4, 5])]], 4)):
        batch = build_batch(units, 8, alignment=1)
        assert int(batch.counts["text"].num_targets.sum()) == expected


def test_row_20_the_boundary_between_two_sides_of_a_pair_is_no_target() -> None:
    batch = build_batch([[Document([1, 2], group="pair"), Document([3, 4], group="pair")]], 4, alignment=1)
    assert batch.targets["text"].tolist() == [2, IGN, 4, IGN]


def test_a20_no_target_is_lost_at_a_shard_boundary() -> None:
    ids = torch.arange(1, 9)
    layout = Layout([8])
    targets = shift_targets(ids, layout)
    shards = [
        targets[shard_slots(layout, cp_size=1, cp_rank=0, sp_size=2, sp_rank=rank)].tolist()
        for rank in range(2)
    ]
    assert shards == [[2, 3, 4, 5], [6, 7, 8, IGN]]
    _, gradient = lookup_gradient(ids, targets, 16)
    assert gradient[4, 5].item() == pytest.approx(-0.133929, abs=1e-6)


def test_a21_targets_of_a_zigzag_split_are_those_of_the_whole() -> None:
    layout = Layout([8], alignment=8)
    targets = shift_targets(torch.arange(8), layout)
    slots = [shard_slots(layout, cp_size=2, cp_rank=rank, sp_size=1, sp_rank=0) for rank in range(2)]
    assert [held.tolist() for held in slots] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [targets[held].tolist() for held in slots] == [[1, 2, 7, IGN], [3, 4, 5, 6]]


def test_a27_labels_that_are_aligned_already_are_not_shifted_again() -> None:
    ids = [10, 11, 12, 13, 14]
    aligned = Document(ids, [IGN] * 5, term_labels={"shifted": [11, 12, 13, 14, IGN]})
    batch = build_batch([[aligned]], 8)
    plain = build_batch([[Document(ids)]], 8)
    assert batch.targets["shifted"].tolist() == plain.targets["text"].tolist()
    assert batch.counts["shifted"].num_targets.tolist() == [4]
    _, gradient = lookup_gradient(batch.input_ids, batch.targets["shifted"], 16)
    assert gradient[10, 11].item() == -0.234375
    assert gradient[10, 12].item() > 0


def test_a36_the_last_token_of_a_document_does_not_predict_the_next_document() -> None:
    batch = build_batch([[Document([1, 2, 3])], [Document([4, 5])]], 5, alignment=1)
    assert batch.targets["text"].tolist() == [2, 3, IGN, 5, IGN]
    _, gradient = lookup_gradient(batch.input_ids, batch.targets["text"], 8)
    assert gradient[1, 2].item() == pytest.approx(-0.291667, abs=1e-6)
    assert gradient[3].tolist() == [0.0] * 8


def test_a37_a_one_token_document_is_no_target_and_has_none() -> None:
    batch = build_batch([[Document([1, 2, 3])], [Document([4])], [Document([5, 6])]], 6, alignment=1)
    assert batch.targets["text"].tolist() == [2, 3, IGN, IGN, 6, IGN]
    assert batch.counts["text"].num_targets.tolist() == [2, 0, 1]


def test_a38_scored_tokens_leave_the_padding_out() -> None:
    batch = build_batch([[Document([1, 2, 3])], [Document([4, 5])]], 8, alignment=1)
    assert int(batch.loss_tokens.sum()) == 3


def test_a46_deeper_predictions_have_their_own_count() -> None:
    layout = Layout([5])
    counts = [int((shift_targets(torch.arange(5), layout, depth) != IGN).sum()) for depth in (1, 2)]
    assert counts == [4, 3]


def test_a47_positions_past_the_end_of_a_document_are_no_targets() -> None:
    targets = shift_targets(torch.tensor([1, 2, 3, 4, 5, 6]), Layout([3, 3]), depth=2)
    assert targets.tolist() == [3, IGN, IGN, 6, IGN, IGN]


def test_errors_say_what_came() -> None:
    with pytest.raises(ValueError, match=r"shape \[4\], got \[3\]"):
        shift_targets(torch.zeros(3, dtype=torch.int64), Layout([4]))
    with pytest.raises(ValueError, match=r"shape \[4\], got \[1, 4\]"):
        shift_targets(torch.zeros(1, 4, dtype=torch.int64), Layout([4]))
    with pytest.raises(ValueError, match="depth must be 0 or more tokens ahead, got -1"):
        shift_targets(torch.zeros(4, dtype=torch.int64), Layout([4]), depth=-1)
