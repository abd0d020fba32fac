"""Weights of documents under every reduction, against sums written by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batch.strategies import layouts
from isoloss import IGNORE_INDEX, Document, Layout
from isoloss.batch.collation import build_batch
from isoloss.batch.packed_batch import PackedBatch
from isoloss.batch.weighting import (
    REDUCTIONS,
    TOKEN_REDUCTIONS,
    Reduction,
    count_targets,
    reduction_factors,
    weigh_documents,
)

IGN = IGNORE_INDEX


def mean_cost(batch: PackedBatch, costs: list[float], reduction: Reduction) -> float:
    """Weighted mean of `costs`, one for each target in window order."""
    counts = batch.counts["text"]
    is_target = batch.targets["text"] != IGN
    factors = reduction_factors(counts.num_targets, reduction)[batch.document_ids[is_target]]
    weights = batch.weights["text"][is_target] if "text" in batch.weights else 1.0
    numerator = (factors * weights * torch.tensor(costs, dtype=torch.float64)).sum()
    return float(numerator / weigh_documents(counts, reduction, batch.layout).sum())


@given(layouts(), st.sampled_from(TOKEN_REDUCTIONS), st.integers(1, 3), st.booleans())
def test_row_27_document_weights_equal_the_sum_over_their_targets(
    layout: Layout, reduction: Reduction, masked: int, weighted: bool
) -> None:
    owners = layout.document_ids().tolist()
    targets = [slot if owner >= 0 and slot % masked == 0 else IGN for slot, owner in enumerate(owners)]
    weights = [0.25 * (slot % 5) for slot in range(len(owners))] if weighted else [1.0] * len(owners)
    given_weights = torch.tensor(weights) if weighted else None
    counts = count_targets(torch.tensor(targets, dtype=torch.int64), given_weights, layout)
    expected = []
    for document in range(len(layout.document_lengths)):
        mine = [slot for slot, owner in enumerate(owners) if owner == document and targets[slot] != IGN]
        number = len(mine)
        total = 0.0
        for slot in mine:
            factor = {"token": 1.0, "sample": 1.0 / number, "square": 1.0 / math.sqrt(number)}[reduction]
            total += weights[slot] * factor
        expected.append(total)
        assert counts.num_targets[document] == number
        assert counts.first_weights[document] == (weights[mine[0]] if mine else 0.0)
    result = weigh_documents(counts, reduction, layout)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)


def test_by_hand() -> None:
    layout = Layout([4, 1, 3, 2], document_groups=[0, 0, 1, -1], padded_length=12)
    targets = torch.tensor([1, 1, 1, IGN, IGN, 1, IGN, 1, 1, 1, IGN, IGN])
    weights = torch.tensor([0.5, 1.0, 0.0, 9.0, 9.0, 2.0, 9.0, 2.0, 3.0, 1.0, 9.0, 9.0])
    counts = count_targets(targets, weights, layout)
    assert counts.num_targets.tolist() == [3, 0, 2, 2]
    expected = {
        "token": [0.5 + 1.0 + 0.0, 0.0, 2.0 + 2.0, 3.0 + 1.0],
        "sample": [1.5 / 3, 0.0, 4.0 / 2, 4.0 / 2],
        "square": [1.5 / math.sqrt(3), 0.0, 4.0 / math.sqrt(2), 4.0 / math.sqrt(2)],
        "document": [0.5, 0.0, 2.0, 3.0],
        "group": [0.5, 0.0, 2.0, 3.0],
    }
    assert set(expected) == set(REDUCTIONS)
    for reduction in REDUCTIONS:
        result = weigh_documents(counts, reduction, layout)
        assert result.tolist() == pytest.approx(expected[reduction], rel=1e-15), reduction
        assert result.dtype == torch.float64


def test_a_group_weighs_once_at_its_first_document_with_targets() -> None:
    layout = Layout([2, 2, 2, 2, 1], document_groups=[3, 3, 3, -1, -1])
    targets = torch.tensor([IGN, IGN, 1, IGN, 1, IGN, 1, IGN, 1])
    counts = count_targets(targets, torch.tensor([9.0, 9, 0.5, 9, 4, 9, 2, 9, 3]), layout)
    assert weigh_documents(counts, "group", layout).tolist() == [0.0, 0.5, 0.0, 2.0, 3.0]
    assert weigh_documents(counts, "document", layout).tolist() == [0.0, 0.5, 4.0, 2.0, 3.0]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_without_targets_every_weight_is_zero_and_finite(reduction: Reduction) -> None:
    for layout in (Layout([], padded_length=4), Layout([3, 1])):
        counts = count_targets(torch.full((4,), IGN), None, layout)
        assert reduction_factors(counts.num_targets, reduction).tolist() == [0.0] * len(
            layout.document_lengths
        )
        assert weigh_documents(counts, reduction, layout).sum() == 0


def test_a26_token_weights_are_cut_with_their_targets() -> None:
    rows = [
        [Document([1, 2, 3, 4], weight=[9.0, 1.0, 0.0, 2.0])],
        [Document([5, 6, 7, 8], weight=[9.0, 0.5, 1.0, 0.0])],
    ]
    batch = build_batch(rows, 8, alignment=1)
    costs = torch.zeros(8, dtype=torch.float64)
    costs[batch.targets["text"] != IGN] = torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=torch.float64)
    for shards in (1, 2, 4):
        parts = zip(costs.chunk(shards), batch.weights["text"].chunk(shards), strict=True)
        assert sum(float((cost * weight).sum()) for cost, weight in parts) == 14.0
    assert float(weigh_documents(batch.counts["text"], "token", batch.layout).sum()) == 4.5
    assert mean_cost(batch, [1, 2, 3, 4, 5, 6], "token") == pytest.approx(3.111111, abs=1e-6)


@pytest.mark.parametrize("alignment", [1, 4])
def test_a40_a_sequence_mean_is_over_documents_not_over_the_row(alignment: int) -> None:
    batch = build_batch([[Document([1, 2])], [Document([1, 2, 3, 4, 5])]], 12, alignment=alignment)
    costs = [2.0, 1.0, 1.0, 1.0, 1.0]
    assert mean_cost(batch, costs, "sample") == pytest.approx(1.5, rel=1e-15)
    assert mean_cost(batch, costs, "token") == pytest.approx(1.2, rel=1e-15)


@pytest.mark.parametrize("packed", [True, False])
def test_a41_one_weight_for_each_document_of_a_flattened_row(packed: bool) -> None:
    # policy: a weighted mean divides by the weight
    units = [[Document([1, 2, 3], weight=2.0)], [Document([4, 5], weight=0.5)]]
    windows = [units] if packed else [[unit] for unit in units]
    costs = [[1.0, 1.0, 3.0]] if packed else [[1.0, 1.0], [3.0]]
    numerator = denominator = 0.0
    for window, window_costs in zip(windows, costs, strict=True):
        batch = build_batch(window, 8, alignment=1)
        is_target = batch.targets["text"] != IGN
        numerator += float((batch.weights["text"][is_target] * torch.tensor(window_costs)).sum())
        denominator += float(weigh_documents(batch.counts["text"], "token", batch.layout).sum())
    assert (numerator, denominator) == (5.5, 4.5)


def test_a_weight_of_zero_leaves_the_target_counted() -> None:
    batch = build_batch([[Document([1, 2, 3], weight=[1.0, 0.0, 3.0])]], 4, alignment=1)
    assert batch.counts["text"].num_targets.tolist() == [2], "n(d) counts labels, whatever their weight"
    assert weigh_documents(batch.counts["text"], "sample", batch.layout).tolist() == [1.5]
