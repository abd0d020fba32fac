"""What stands where in the two vectors that a step sums over ranks.

Lengths and order follow from the declared terms and channels alone, never from data, so that every rank
always reduces the same vector.
"""

import math
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from isoloss.reduction.terms import Routing

METRICS_VERSION = 1
"""Version of the definitions of the metrics; stored with every run."""


@final
class VectorSchema:
    """Named blocks of one float64 vector. float64 counts exactly to 2^53."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self._places: dict[str, slice] = {}
        self.length = 0
        for name, shape in self.shapes.items():
            self._places[name] = slice(self.length, self.length + math.prod(shape))
            self.length += math.prod(shape)

    def zeros(self, device: torch.device | str = "cpu") -> Tensor:
        """A vector of zeros, float64[length]."""
        return torch.zeros(self.length, dtype=torch.float64, device=device)

    def block(self, vector: Tensor, name: str) -> Tensor:
        """The block `name` of `vector` in its shape; a view, so writing to it writes to the vector."""
        return vector[self._places[name]].view(self.shapes[name])

    def vector(self, blocks: Mapping[str, Sequence[float]]) -> Tensor:
        """A vector of the given blocks, each as flat as it lies, zeros elsewhere; float64[length], CPU."""
        values = [0.0] * self.length
        for name, block in blocks.items():
            values[self._places[name]] = block
        assert len(values) == self.length, "a block is not of its declared size"
        return torch.tensor(values, dtype=torch.float64)

    def read(self, values: Sequence[float], name: str) -> list[float]:
        """The block `name` of a vector that is on the host as a list, flat. Cheaper than from a tensor."""
        return list(values[self._places[name]])

    def read_table(self, values: Sequence[float], name: str) -> list[list[float]]:
        """As `read`, for a block of two dimensions: its rows."""
        rows, columns = self.shapes[name]
        start = self._places[name].start
        return [list(values[start + row * columns : start + (row + 1) * columns]) for row in range(rows)]


def opening_schema(num_terms: int, num_channels: int) -> VectorSchema:
    """What a step contains, known before its first forward. Each window is counted by its owner rank."""
    return VectorSchema(
        {
            "weights": (num_terms,),  # W of each term
            "targets": (num_terms,),
            "tokens": (4,),  # loss, source, aligned, physical
            "documents": (1,),
            "digest": (1,),  # sum of a checksum of every document: which documents the step trains on
            "channel_weights": (num_terms, num_channels),
            "channel_counts": (3, num_channels),  # loss tokens, source tokens, documents
            "has_more": (1,),  # ranks with data for the next step
            "unknown_channel": (1,),  # documents of a channel that was not declared, and is not known yet
            "missing_channel": (1,),  # documents without a channel although channels were declared
            "unknown_term": (1,),  # targets of a term that was not declared
        }
    )


def closing_schema(
    num_terms: int, num_channels: int, routing: Routing | None = None, num_measures: int = 0
) -> VectorSchema:
    """What the shares of a step summed up to. Every rank adds the losses of its own slots."""
    experts = (0, 0) if routing is None else (routing.num_layers, routing.num_experts)
    measures = (num_measures, max(num_channels, 1))  # one column without channels
    return VectorSchema(
        {
            "shares": (num_terms,),  # what was trained: coefficient * sum of w l / W
            "losses": (num_terms,),  # sum of w l
            "z_losses": (num_terms,),  # the part of `losses` that is z-loss
            "consumed": (num_terms,),  # sum of w over the targets whose loss was recorded
            "imbalance": (num_terms,),  # over ranks, the sum of |w recorded - w of the rank's own targets|
            "orphans": (num_terms,),  # sum of |l| where the term has no target
            "channel_losses": (num_terms, num_channels),
            "expert_counts": experts,  # tokens that each expert was chosen for
            "measure_sums": measures,
            "measure_counts": measures,
        }
    )
