"""This rank's part of the opening vector: what its windows contain."""

import ctypes
import math
import zlib
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from isoloss.batch.packed_batch import PackedBatch
from isoloss.batch.weighting import weigh_documents
from isoloss.reduction.record import Declaration
from isoloss.reduction.terms import Term


def count_windows(
    declaration: Declaration, windows: Sequence[PackedBatch], known_channels: Collection[int]
) -> Tensor:
    """The opening vector of `windows`, without the flags that do not come from data; float64, CPU.

    Args:
        declaration: declared terms and channels.
        windows: whole windows, before sharding.
        known_channels: undeclared channel indices that all ranks have been told of already.
    """
    layouts = [window.layout for window in windows]
    sources = [source for layout in layouts for source in layout.document_sources]
    channels = _channel_rows(sources, declaration)
    blocks: dict[str, list[float]] = {"weights": [], "targets": [], "channel_weights": []}
    # Plain numbers: on some tens of documents each operation on a tensor would cost more than the sum.
    for term in declaration.terms:
        weights = [weight for window in windows for weight in _term_weights(window, term).tolist()]
        blocks["weights"].append(math.fsum(weights))
        blocks["targets"].append(
            blocks["weights"][-1]
            if term.reduction == "source"
            else sum(window.num_targets(term.name) for window in windows)
        )
        blocks["channel_weights"] += _by_channel(weights, channels, declaration)
    declared = {term.name for term in declaration.terms}
    loss_tokens = [count for window in windows for count in _loss_tokens(window, declared).tolist()]
    blocks["tokens"] = [
        sum(loss_tokens),
        sum(layout.source_tokens for layout in layouts),
        sum(layout.aligned_tokens for layout in layouts),
        sum(layout.physical_tokens for layout in layouts),
    ]
    blocks["documents"] = [sum(layout.num_documents for layout in layouts)]
    blocks["digest"] = [sum(digest_documents(window) for window in windows)]
    blocks["unknown_term"] = [
        sum(window.num_targets(name) for window in windows for name in window.counts if name not in declared)
    ]
    if declaration.channels:
        lengths = [length for layout in layouts for length in layout.document_lengths]
        counted = [not prefix for layout in layouts for prefix in layout.is_prefix]
        blocks["channel_counts"] = [
            count
            for column in (loss_tokens, lengths, counted)
            for count in _by_channel(column, channels, declaration)
        ]
        new = undeclared_channels(declaration, windows).difference(known_channels)
        blocks["unknown_channel"] = [sum(source in new for source in sources) if new else 0]
        blocks["missing_channel"] = [sum(source < 0 for source in sources)]
    return declaration.opening.vector(blocks)


def _channel_rows(sources: Sequence[int], declaration: Declaration) -> list[int]:
    """As `channel_indices`, of documents."""
    other = len(declaration.channels)
    return [source if 0 <= source < other else other for source in sources]


def _by_channel(values: Sequence[float], channels: Sequence[int], declaration: Declaration) -> list[float]:
    """The sum of the documents' values in each channel; empty without channels."""
    sums = [0.0] * len(declaration.channel_names)
    if sums:
        for channel, value in zip(channels, values, strict=True):
            sums[channel] += value
    return sums


def _term_weights(window: PackedBatch, term: Term) -> Tensor:
    """Weight of each document of the window in the term's denominator; zeros where the term has no target."""
    if term.reduction == "source":
        return torch.tensor(window.layout.document_lengths, dtype=torch.float64)
    counts = window.counts.get(term.name)
    if counts is None:
        return torch.zeros(len(window.layout.document_lengths), dtype=torch.float64)
    return weigh_documents(counts, term.reduction, window.layout)


def _loss_tokens(window: PackedBatch, declared: set[str]) -> Tensor:
    """Slots of each document that are a target of a declared term; what is not declared is not trained."""
    if declared.issuperset(window.targets):
        return window.loss_tokens
    return window.count_loss_tokens(declared.intersection(window.targets))


def channel_indices(sources: Tensor, declaration: Declaration) -> Tensor:
    """Row of each source in the channel blocks; what is not declared falls into the last one, "other"."""
    declared = (sources >= 0) & (sources < len(declaration.channels))
    return torch.where(declared, sources, len(declaration.channels))


def undeclared_channels(declaration: Declaration, windows: Sequence[PackedBatch]) -> set[int]:
    """Channel indices in `windows` beyond the declared ones."""
    return {
        source
        for window in windows
        for source in window.layout.document_sources
        if source >= len(declaration.channels)
    }


def digest_documents(window: PackedBatch) -> int:
    """Sum of the CRC-32 of every document's tokens: the same for the same documents in any order."""
    ids = window.input_ids.to("cpu", torch.int64).contiguous()
    size = ids.element_size()
    # Their bytes as they lie in memory: a view through numpy would need numpy, which torch does not.
    data = memoryview(ctypes.string_at(ids.data_ptr(), ids.numel() * size))
    layout = window.layout
    return sum(
        zlib.crc32(data[start * size : (start + length) * size])
        for start, length in zip(layout.document_starts, layout.document_lengths, strict=True)
    )
