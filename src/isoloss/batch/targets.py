"""The one place where labels are shifted into targets."""

from typing import TypeVar

import torch
from torch import Tensor

from isoloss.batch.document import IGNORE_INDEX
from isoloss.batch.layout import Layout

Fill = TypeVar("Fill", int, float)


def shift_targets(labels: Tensor, layout: Layout, depth: int = 1) -> Tensor:
    """The label that each slot predicts: that of the token `depth` places on in the same document.

    Targets are made once, before any sharding, so no shard boundary can lose or invent one.

    Args:
        labels: unshifted label of each slot, int[T], -100 where a token is no target.
        layout: the documents of the window; labels outside documents are ignored.
        depth: 1 for the next token; d + 1 for the multi-token prediction depth d; 0 drops only the labels
            outside documents.

    Returns:
        int64[T], -100 where nothing is predicted: in the last `depth` tokens of a document, in alignment and
        padding slots, and where the label is -100.

    Raises:
        ValueError: `labels` is not [T], or `depth` is negative.
    """
    return shift_values(labels.to(torch.int64), layout, depth, IGNORE_INDEX)


def shift_values(values: Tensor, layout: Layout, depth: int, fill: Fill) -> Tensor:
    """`values[t + depth]` where slots t and t + depth hold tokens of one document, else `fill`; [T]."""
    slots = layout.physical_tokens
    if values.shape != (slots,):
        raise ValueError(f"expected one value per slot, shape [{slots}], got {list(values.shape)}")
    if depth < 0:
        raise ValueError(f"depth must be 0 or more tokens ahead, got {depth}")
    shifted = torch.full_like(values, fill)
    documents = layout.document_ids().to(values.device)
    ahead = max(slots - depth, 0)
    same = (documents[:ahead] == documents[depth:]) & (documents[:ahead] >= 0)
    shifted[:ahead] = torch.where(same, values[depth:], shifted[:ahead])
    return shifted
