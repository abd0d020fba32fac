"""This rank's part of the opening vector: what its windows contain."""

import ctypes
import zlib
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from isoloss.batch.packed_batch import PackedBatch
from isoloss.batch.weighting import weigh_documents
from isoloss.reduction.record import Declaration


def count_windows(
    declaration: Declaration, windows: Sequence[PackedBatch], known_channels: Collection[int]
) -> Tensor:
    """The opening vector of `windows`, without the flags that do not come from data; float64, CPU.

    Args:
        declaration: declared terms and channels.
        windows: whole windows, before sharding.
        known_channels: undeclared channel indices that all ranks have been told of already.
    """
    schema = declaration.opening
    vector = schema.zeros()
    weights = schema.block(vector, "weights")
    targets = schema.block(vector, "targets")
    tokens = schema.block(vector, "tokens")
    documents = schema.block(vector, "documents")
    channel_weights = schema.block(vector, "channel_weights")
    channel_counts = schema.block(vector, "channel_counts")
    declared = {term.name for term in declaration.terms}
    known = torch.tensor(sorted(known_channels), dtype=torch.int64)
    for window in windows:
        layout = window.layout
        sources = torch.tensor(layout.document_sources, dtype=torch.int64)
        channels = channel_indices(sources, declaration)
        for index, term in enumerate(declaration.terms):
            counts = window.counts.get(term.name)
            if counts is None:
                continue
            document_weights = weigh_documents(counts, term.reduction, layout)
            weights[index] += document_weights.sum()
            targets[index] += counts.num_targets.sum()
            if declaration.channels:
                channel_weights[index].index_add_(0, channels, document_weights)
        tokens += torch.stack(
            [
                window.loss_tokens.sum(),
                torch.tensor(layout.source_tokens),
                torch.tensor(layout.aligned_tokens),
                torch.tensor(layout.physical_tokens),
            ]
        )
        documents += layout.num_documents
        schema.block(vector, "digest").add_(digest_documents(window))
        schema.block(vector, "unknown_term").add_(
            sum(
                int(counts.num_targets.sum())
                for name, counts in window.counts.items()
                if name not in declared
            )
        )
        if declaration.channels:
            lengths = torch.tensor(layout.document_lengths, dtype=torch.float64)
            counted = ~torch.tensor(layout.is_prefix, dtype=torch.bool)
            for row, values in enumerate((window.loss_tokens, lengths, counted)):
                channel_counts[row].index_add_(0, channels, values.to(torch.float64))
            unknown = (sources >= len(declaration.channels)) & ~torch.isin(sources, known)
            schema.block(vector, "unknown_channel").add_(unknown.sum())
            schema.block(vector, "missing_channel").add_((sources < 0).sum())
    return vector


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
