"""One document as a data source hands it to the packer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""The label that marks a token as no target, as in `torch.nn.functional.cross_entropy`."""

IntSequence = Sequence[int] | Tensor
FloatSequence = Sequence[float] | Tensor


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens of one document with what is to be predicted in them.

    Everything here is per document and before packing: nothing is shifted, padded or sharded.
    """

    input_ids: IntSequence
    """Token ids, int[n] with n >= 1."""

    labels: IntSequence | None = None
    """Label of each token, int[n], **unshifted**: `labels[i]` is token i as a target, -100 where token i is
    no target. None: every token is a target (of the token before it)."""

    source: int = -1
    """Index of the data source among the declared channels; -1 when it is not known."""

    weight: float | FloatSequence = 1.0
    """The data's weight of the document's targets: one number, or float[n] aligned with `labels`."""

    group: int | str | None = None
    """Documents that must share a window carry the same group and come one after the other."""

    parent: int | None = None
    """Position of the parent within the group (0 is the group's first document), or None. A document
    attends to all of its parent, and its positions continue after it."""

    term_labels: Mapping[str, IntSequence] = field(default_factory=dict)
    """Targets of further loss terms, int[n] each, **aligned**: entry i is what slot i predicts, and is never
    shifted (a class label belongs to the token that is pooled; one token is enough to hold it)."""

    token_extras: Mapping[str, Tensor] = field(default_factory=dict)
    """Further values per token, [n, ...] each; packed, padded and sharded like the tokens."""

    document_extras: Mapping[str, object] = field(default_factory=dict)
    """Further values per document (class label, regression value, pixels); never padded or sharded."""

    def __post_init__(self) -> None:
        weight = self.weight
        # a number of numpy's, or a tensor of one
        if not isinstance(weight, float):
            if isinstance(weight, Real) or (isinstance(weight, Tensor) and weight.ndim == 0):
                object.__setattr__(self, "weight", float(weight))

    def __len__(self) -> int:
        return len(self.input_ids)


def as_int64(values: IntSequence) -> Tensor:
    """`values` as an int64 tensor.

    Raises:
        TypeError: they are no integers; torch would cut the fractions off without a word.
    """
    tensor = torch.as_tensor(values)
    if tensor.is_floating_point() and tensor.numel():
        raise TypeError(f"expected integers, got {tensor.dtype}; give token ids and labels as integers")
    return tensor.to(torch.int64)
