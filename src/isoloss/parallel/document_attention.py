"""Attention of pieces of documents to what they may see, without anything of size T x T.

[Note: row chunks]
`scaled_dot_product_attention` with is_causal=True aligns the diagonal top-left, which is right only where
queries and keys are the same tokens. Every other piece (the later part of a document, a document behind a
prefix, a sliding window, capped scores) is done in chunks of `CHUNK_ROWS` queries, each against just the keys
that it can see, under the bottom-right mask of that chunk alone. Autograd would keep every chunk's mask and
scores, T x T in all, so one autograd function runs all chunks and runs them again in backward.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from isoloss.batch.layout import Layout
from isoloss.sharding import DocumentPiece

CHUNK_ROWS = 128


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores come from queries and keys."""

    scaling: float | None
    """Factor on the products; None: 1 / sqrt(head_dim)."""
    sliding_window: int | None
    """A query sees that many tokens of its document, itself included; None: all."""
    softcap: float | None
    """Scores become softcap * tanh(scores / softcap)."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries and the keys that the last of them sees."""

    start: int
    rows: int
    seen: tuple[slice, ...]
    """Window slots: the document's context, then the document up to the piece's last token."""
    columns: int
    """Slots in `seen`; the last `rows` of them are the queries' own."""


def attend_pieces(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, pieces: Sequence[DocumentPiece], scores: Scores
) -> Tensor:
    """Each token attends to its document's context, then causally to its document.

    Args:
        query: [1, heads, n, head_dim], the slots of one context rank.
        key: [1, key_value_heads, T, head_dim], the whole window.
        value: [1, key_value_heads, T, value_dim], the whole window.
        layout: of the window.
        pieces: of its documents, in the order of `query`; see `document_pieces`.
        scores: options.

    Returns:
        [1, heads, n, value_dim], zeros in slots that are in no piece. Connected to all three inputs, also
        where there is no piece: with gradients of None instead of zeros a rank would leave the others alone
        in a reduction.
    """
    seen = [_seen(layout, piece) for piece in pieces]
    if seen and _has_variable_length(query, value, seen, scores):
        return _attend_variable_length(query, key, value, seen, scores)
    whole = [piece for piece in seen if _is_whole(piece, query, value, scores)]
    others = [piece for piece in seen if not _is_whole(piece, query, value, scores)]
    if others or not whole:
        output = _AttendInChunks.apply(query, key, value, tuple(others), scores)
    else:
        output = query.new_zeros(*query.shape[:3], value.shape[3])
    if not whole:
        return output
    spans = [(piece.start, piece.rows) for piece in whole]
    columns = [(piece.seen[0].start, piece.rows) for piece in whole]
    parts = zip(_cut(query, spans), _cut(key, columns), _cut(value, columns), strict=True)
    return _paste([_attend_whole(*part, scores) for part in parts], spans, output)


def _seen(layout: Layout, piece: DocumentPiece) -> _Piece:
    first = layout.document_starts[piece.document]
    slots = [slice(first, first + piece.first + piece.num_tokens)]
    ancestor = layout.document_parents[piece.document]
    while ancestor != -1:
        first = layout.document_starts[ancestor]
        slots.insert(0, slice(first, first + layout.document_lengths[ancestor]))
        ancestor = layout.document_parents[ancestor]
    columns = layout.document_contexts[piece.document] + piece.first + piece.num_tokens
    return _Piece(piece.place, piece.num_tokens, tuple(slots), columns)


def _is_whole(piece: _Piece, query: Tensor, value: Tensor, scores: Scores) -> bool:
    """Whether queries and keys are the same tokens, and a kernel does them without the matrix of scores."""
    has_kernel = query.shape[3] == value.shape[3] and (
        query.device.type == "cpu" or query.dtype != torch.float64
    )
    window = scores.sliding_window
    return (
        has_kernel
        and scores.softcap is None
        and piece.rows == piece.columns
        and (window is None or window >= piece.rows)
    )


def _attend_whole(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and query.device.type != "cpu":
        # Of CUDA's kernels one alone takes grouped heads; without it torch would build the scores.
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        scale=scores.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _cut(values: Tensor, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The spans (start, length) of the slots, ascending. One split, so that backward is one concatenation."""
    return list(values.split(_split_sizes(spans, values.shape[2]), dim=2)[1::2])


def _paste(parts: Sequence[Tensor], spans: Sequence[tuple[int, int]], onto: Tensor) -> Tensor:
    """`onto` [1, heads, n, width] with `parts` in the spans (start, length) of its slots."""
    pieces = list(onto.split(_split_sizes(spans, onto.shape[2]), dim=2))
    pieces[1::2] = parts
    return torch.cat(pieces, dim=2)


def _split_sizes(spans: Sequence[tuple[int, int]], slots: int) -> list[int]:
    """Sizes of gap, span, gap, span, ..., gap."""
    sizes, end = [], 0
    for start, length in spans:
        sizes += [start - end, length]
        end = start + length
    return [*sizes, slots - end]


@dataclass(frozen=True, slots=True)
class _Chunk:
    rows: slice
    """Of the query's slots."""
    seen: tuple[slice, ...]
    """Window slots between the first and the last that any of the rows sees."""


def _chunks(piece: _Piece, scores: Scores) -> Iterator[_Chunk]:
    before = piece.columns - piece.rows
    for row in range(0, piece.rows, CHUNK_ROWS):
        end = min(row + CHUNK_ROWS, piece.rows)
        first = 0 if scores.sliding_window is None else max(0, before + row + 1 - scores.sliding_window)
        yield _Chunk(
            slice(piece.start + row, piece.start + end), tuple(_clip(piece.seen, first, before + end))
        )


def _clip(slots: Sequence[slice], first: int, last: int) -> Iterator[slice]:
    """Entries first to last of the slots in `slots`, taken one slice after the other."""
    place = 0
    for part in slots:
        start, end = max(part.start, part.start + first - place), min(part.stop, part.start + last - place)
        if start < end:
            yield slice(start, end)
        place += part.stop - part.start


class _AttendInChunks(torch.autograd.Function):
    """Attention of `pieces`, zeros elsewhere. Keeps its inputs alone; see [Note: row chunks]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, pieces: tuple[_Piece, ...], scores: Scores
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.pieces, ctx.scores = pieces, scores
        output = query.new_zeros(*query.shape[:3], value.shape[3])
        # Inputs have their dtype by now; backward would not see autocast.
        with torch.autocast(query.device.type, enabled=False):
            for chunk in (chunk for piece in pieces for chunk in _chunks(piece, scores)):
                output[:, :, chunk.rows] = _attend(*_parts_of(chunk, query, key, value), scores)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        # A key gets a part of its gradient from every chunk; below 32 bits their sum would lose digits.
        wide = torch.promote_types(query.dtype, torch.float32)
        sums = [torch.zeros_like(part, dtype=wide) for part in (query, key, value)]
        with torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
            for chunk in (chunk for piece in ctx.pieces for chunk in _chunks(piece, ctx.scores)):
                parts = [part.detach().requires_grad_() for part in _parts_of(chunk, query, key, value)]
                output = _attend(parts[0], parts[1], parts[2], ctx.scores)
                found = torch.autograd.grad(output, parts, gradient[:, :, chunk.rows])
                sums[0][:, :, chunk.rows] += found[0]
                for total, columns in zip(sums[1:], found[1:], strict=True):
                    _add_to_slots(total, chunk.seen, columns)
        return (
            *(
                total.to(part.dtype) if needed else None
                for total, part, needed in zip(
                    sums, (query, key, value), ctx.needs_input_grad[:3], strict=True
                )
            ),
            None,
            None,
        )


def _parts_of(chunk: _Chunk, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query[:, :, chunk.rows], _gather(key, chunk.seen), _gather(value, chunk.seen)


def _gather(values: Tensor, slots: Sequence[slice]) -> Tensor:
    parts = [values[:, :, part] for part in slots]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _add_to_slots(total: Tensor, slots: Sequence[slice], values: Tensor) -> None:
    sizes = [part.stop - part.start for part in slots]
    for part, columns in zip(slots, values.split(sizes, dim=2), strict=True):
        total[:, :, part] += columns


def _has_variable_length(query: Tensor, value: Tensor, pieces: Sequence[_Piece], scores: Scores) -> bool:
    """Whether torch's kernel for documents of different lengths takes these inputs.

    It wants a copy of the keys for each piece. The two pieces of a document share some, 1 + 1 / (2 * cp_size)
    windows in all; behind a prefix with many children the copies would be more than linear.
    """
    copied = sum(piece.columns for piece in pieces)
    return (
        query.device.type == "cuda"
        and torch.version.cuda is not None
        and torch.__version__ >= "2.12"  # the first with grouped heads
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[3] == value.shape[3] <= 256
        and query.shape[3] % 8 == 0
        and scores.softcap is None
        and copied <= 2 * value.shape[2]
    )


def _attend_variable_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pieces: Sequence[_Piece],
    scores: Scores,
    kernel: Callable[..., Any] | None = None,
) -> Tensor:
    """All pieces in one call. Its causal mask is bottom-right, and a window counts the tokens before."""
    if kernel is None:
        # loads torch._dynamo: a second that only CUDA has use for
        from torch.nn.attention.varlen import varlen_attn

        kernel = varlen_attn
    device = query.device
    rows = copy_to_device(
        _slots_of([slice(piece.start, piece.start + piece.rows) for piece in pieces]), device
    )
    columns = copy_to_device(_slots_of([part for piece in pieces for part in piece.seen]), device)
    before = -1 if scores.sliding_window is None else scores.sliding_window - 1
    attended: Any = kernel(
        query[0].transpose(0, 1).index_select(0, rows),
        key[0].transpose(0, 1).index_select(0, columns),
        value[0].transpose(0, 1).index_select(0, columns),
        copy_to_device(_offsets([piece.rows for piece in pieces]), device),
        copy_to_device(_offsets([piece.columns for piece in pieces]), device),
        max(piece.rows for piece in pieces),
        max(piece.columns for piece in pieces),
        scale=scores.scaling,
        window_size=(before, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    output = query.new_zeros(query.shape[2], query.shape[1], value.shape[3]).index_copy(0, rows, attended)
    return output.transpose(0, 1).unsqueeze(0)


def _slots_of(spans: Sequence[slice]) -> Tensor:
    """Every slot of the spans, int64."""
    starts = torch.tensor([span.start for span in spans])
    lengths = torch.tensor([span.stop - span.start for span in spans])
    firsts = starts + lengths - lengths.cumsum(0)
    return torch.repeat_interleave(firsts, lengths) + torch.arange(
        sum(span.stop - span.start for span in spans)
    )


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` of the host on `device`, without waiting for it as a copy from pageable memory would."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def _attend(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Attention of the last tokens of a run to the run, bottom-right causal; at most `CHUNK_ROWS` queries."""
    heads, rows = query.shape[1:3]
    groups, columns = key.shape[1:3]
    places = torch.arange(columns, device=query.device)
    distance = places[columns - rows :, None] - places[None, :]
    visible = distance >= 0
    if scores.sliding_window is not None:
        visible &= distance < scores.sliding_window
    if scores.softcap is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=scores.scaling, enable_gqa=heads != groups
        )
    scaling = query.shape[3] ** -0.5 if scores.scaling is None else scores.scaling
    # Queries that share a key head are rows of one product, so that keys need not be repeated.
    products = query.reshape(1, groups, heads // groups * rows, -1) @ key.transpose(2, 3)
    capped = scores.softcap * torch.tanh(products * (scaling / scores.softcap))
    capped = capped.view(1, heads, rows, columns).masked_fill(~visible, float("-inf"))
    weights = torch.softmax(capped, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32))
    weights = weights.to(query.dtype).view(1, groups, -1, columns)
    return (weights @ value).view(1, heads, rows, -1)
