"""This rank's part of the opening vector: what its windows contain."""

import ctypes
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
    schema = declaration.opening
    vector = schema.zeros()
    layouts = [window.layout for window in windows]
    if not layouts:
        return vector
    # One pass over the documents of all windows: many small operations would cost more than the counting.
    sources = torch.tensor([source for layout in layouts for source in layout.document_sources])
    channels = channel_indices(sources.to(torch.int64), declaration)
    weights = schema.block(vector, "weights")
    targets = schema.block(vector, "targets")
    channel_weights = schema.block(vector, "channel_weights")
    for index, term in enumerate(declaration.terms):
        document_weights = torch.cat([_term_weights(window, term) for window in windows])
        weights[index] = document_weights.sum()
        if term.reduction == "source":
            targets[index] = weights[index]
        else:
            targets[index] = sum(_num_targets(window, term.name) for window in windows)
        if declaration.channels:
            channel_weights[index].index_add_(0, channels, document_weights)
    declared = {term.name for term in declaration.terms}
    loss_tokens = torch.cat([_loss_tokens(window, declared) for window in windows])
    schema.block(vector, "tokens").copy_(
        torch.tensor(
            [
                int(loss_tokens.sum()),
                sum(layout.source_tokens for layout in layouts),
                sum(layout.aligned_tokens for layout in layouts),
                sum(layout.physical_tokens for layout in layouts),
            ]
        )
    )
    schema.block(vector, "documents").fill_(sum(layout.num_documents for layout in layouts))
    schema.block(vector, "digest").fill_(sum(digest_documents(window) for window in windows))
    schema.block(vector, "unknown_term").fill_(
        sum(
            _num_targets(window, name) for window in windows for name in window.counts if name not in declared
        )
    )
    if declaration.channels:
        lengths = torch.tensor([length for layout in layouts for length in layout.document_lengths])
        counted = torch.tensor([not prefix for layout in layouts for prefix in layout.is_prefix])
        channel_counts = torch.stack([loss_tokens, lengths, counted]).to(torch.float64)
        schema.block(vector, "channel_counts").index_add_(1, channels, channel_counts)
        new = undeclared_channels(declaration, windows).difference(known_channels)
        if new:
            schema.block(vector, "unknown_channel").fill_(sum(source in new for source in sources.tolist()))
        schema.block(vector, "missing_channel").fill_((sources < 0).sum())
    return vector


def _term_weights(window: PackedBatch, term: Term) -> Tensor:
    """Weight of each document of the window in the term's denominator; zeros where the term has no target."""
    if term.reduction == "source":
        return torch.tensor(window.layout.document_lengths, dtype=torch.float64)
    counts = window.counts.get(term.name)
    if counts is None:
        return torch.zeros(len(window.layout.document_lengths), dtype=torch.float64)
    return weigh_documents(counts, term.reduction, window.layout)


def _num_targets(window: PackedBatch, term: str) -> int:
    counts = window.counts.get(term)
    return 0 if counts is None else int(counts.num_targets.sum())


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
