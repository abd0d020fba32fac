"""Weights of targets under each reduction, from integer counts.

With n(d) the number of targets of document d: "token" weighs a target 1, "sample" 1 / n(d), "square"
1 / sqrt(n(d)); "document" and "group" weigh one loss per document or per group. A weight given by the data
multiplies each.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from isoloss.batch.document import IGNORE_INDEX
from isoloss.batch.layout import Layout

Reduction = Literal["token", "sample", "square", "document", "group"]
TOKEN_REDUCTIONS: tuple[Reduction, ...] = ("token", "sample", "square")
REDUCTIONS: tuple[Reduction, ...] = (*TOKEN_REDUCTIONS, "document", "group")


@dataclass(frozen=True, slots=True)
class TargetCounts:
    """What one term finds in the documents of one whole window. CPU tensors, one entry per document."""

    num_targets: Tensor
    """n(d): labels other than -100, whatever their weight; int64[documents]."""

    weight_sums: Tensor
    """Sum of the data's weights over the targets; float64[documents]."""

    first_weights: Tensor
    """The data's weight of the first target, 0 without targets; float64[documents]."""


def count_targets(targets: Tensor, weights: Tensor | None, layout: Layout) -> TargetCounts:
    """Count and weigh the targets of each document of a whole window.

    Args:
        targets: int64[T] on the CPU, -100 where nothing is predicted.
        weights: the data's weights, float[T], or None where all are one.
        layout: the documents of the window.
    """
    count = len(layout.document_lengths)
    slots = (targets != IGNORE_INDEX).nonzero().squeeze(-1)
    owners = layout.document_ids()[slots]
    num_targets = torch.bincount(owners, minlength=count)
    if weights is None:
        present = (num_targets > 0).to(torch.float64)
        return TargetCounts(num_targets, num_targets.to(torch.float64), present)
    values = weights[slots].to(torch.float64)
    # of nothing, bincount gives int64 whatever the weights are
    weight_sums = torch.bincount(owners, values, minlength=count).to(torch.float64)
    first = torch.cumsum(num_targets, 0) - num_targets  # documents lie one after the other
    first_weights = torch.zeros(count, dtype=torch.float64)
    present = num_targets > 0
    first_weights[present] = values[first[present]]
    return TargetCounts(num_targets, weight_sums, first_weights)


def reduction_factors(num_targets: Tensor, reduction: Reduction) -> Tensor:
    """What the reduction multiplies a target's weight by, per document; float64, 0 without targets."""
    counts = num_targets.to(torch.float64)
    present = num_targets > 0
    if reduction == "sample":
        return torch.where(present, 1.0 / counts, 0.0)
    if reduction == "square":
        return torch.where(present, counts.rsqrt(), 0.0)
    return present.to(torch.float64)


def weigh_documents(counts: TargetCounts, reduction: Reduction, layout: Layout) -> Tensor:
    """Weight that each document adds to the term's denominator, float64[documents].

    The weight of a group stands at its first document with targets.
    """
    if reduction == "token":
        return counts.weight_sums
    if reduction in TOKEN_REDUCTIONS:
        return counts.weight_sums * reduction_factors(counts.num_targets, reduction)
    weights = counts.first_weights.clone()
    if reduction == "group":
        seen: set[int] = set()
        for index, group in enumerate(layout.document_groups):
            if group in seen:
                weights[index] = 0.0
            elif group != -1 and counts.num_targets[index] > 0:
                seen.add(group)
    return weights
