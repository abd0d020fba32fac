"""What a window contains: the only truth about document boundaries.

[Note: slots]
A window of T token slots holds documents one after the other. A document of `length` tokens occupies
`stride` slots, the length rounded up to a multiple of `alignment`; the slots after the last stride are
padding. Slots that hold no token belong to no document (id -1).

    document      0 0 0 . 1 1 1 1 2 . . . - - - -      lengths 3, 4, 1; alignment 4; T = 16
    cu_seqlens    0       4       8       12
"""

import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any, SupportsIndex, final

import torch
from torch import Tensor


@final
class Layout:
    """Immutable table of the documents of one window. It holds integers only.

    FSDP2 casts floating tensors and rebuilds dataclasses that pass through a wrapped forward; a plain class
    of integers is left alone.

    Args:
        document_lengths: true length of each document in tokens, each >= 1. Empty: a window of padding.
        document_sources: index of each document's channel, -1 where it is not known. None: none is known.
        document_groups: documents with the same non-negative number form a group (the two sides of a
            preference pair); -1 or None: the document is a group of its own.
        document_parents: -1, or the index of an earlier document of the same group, all of which this
            document attends to and whose positions it continues.
        alignment: each document's stride is a multiple of this many slots.
        padded_length: T, the number of slots of the window. None: no padding after the last stride.

    Raises:
        ValueError: a length below 1, lists of different lengths, a parent that is not an earlier document
            of the same group, or strides that do not fit into `padded_length`.
    """

    document_lengths: tuple[int, ...]
    document_sources: tuple[int, ...]
    document_groups: tuple[int, ...]
    document_parents: tuple[int, ...]
    alignment: int
    physical_tokens: int

    def __init__(
        self,
        document_lengths: Sequence[int] | Tensor,
        document_sources: Sequence[int] | Tensor | None = None,
        document_groups: Sequence[int] | Tensor | None = None,
        document_parents: Sequence[int] | Tensor | None = None,
        *,
        alignment: int = 1,
        padded_length: int | None = None,
    ) -> None:
        lengths = _integers("document_lengths", document_lengths)
        count = len(lengths)
        sources = _column("document_sources", document_sources, count)
        groups = _column("document_groups", document_groups, count)
        parents = _column("document_parents", document_parents, count)
        if alignment < 1:
            raise ValueError(f"alignment must be at least 1 slot, got {alignment}")
        for index, length in enumerate(lengths):
            if length < 1:
                raise ValueError(
                    f"document_lengths[{index}] is {length}; a document has at least 1 token, "
                    "leave empty documents out of the layout"
                )
        for index, parent in enumerate(parents):
            if parent != -1 and not (0 <= parent < index and groups[parent] == groups[index] != -1):
                raise ValueError(
                    f"document_parents[{index}] is {parent}; a parent is an earlier document of the same "
                    f"group (document {index} has group {groups[index]}), or -1"
                )
        aligned = sum(-(-length // alignment) * alignment for length in lengths)
        physical = aligned if padded_length is None else padded_length
        if aligned > physical:
            raise ValueError(
                f"the documents need {aligned} slots at alignment {alignment}, padded_length is {physical}; "
                "pack fewer documents or use a larger window"
            )
        fields = {
            "document_lengths": lengths,
            "document_sources": sources,
            "document_groups": groups,
            "document_parents": parents,
            "alignment": alignment,
            "physical_tokens": physical,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Layout is immutable; make a new one instead of setting {name}")

    def _key(self) -> tuple[Any, ...]:
        return (
            self.document_lengths,
            self.document_sources,
            self.document_groups,
            self.document_parents,
            self.alignment,
            self.physical_tokens,
        )

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._key()

    def __repr__(self) -> str:
        return (
            f"Layout({len(self.document_lengths)} documents, {self.source_tokens} source, "
            f"{self.aligned_tokens} aligned, {self.physical_tokens} physical tokens)"
        )

    @cached_property
    def source_tokens(self) -> int:
        """Tokens of the documents, without alignment and padding."""
        return sum(self.document_lengths)

    @cached_property
    def document_strides(self) -> tuple[int, ...]:
        """Slots of each document: its length rounded up to a multiple of `alignment`."""
        return tuple(-(-length // self.alignment) * self.alignment for length in self.document_lengths)

    @cached_property
    def aligned_tokens(self) -> int:
        """Slots of the documents, alignment included, padding not."""
        return sum(self.document_strides)

    @cached_property
    def document_starts(self) -> tuple[int, ...]:
        """First slot of each document."""
        starts, slot = [], 0
        for stride in self.document_strides:
            starts.append(slot)
            slot += stride
        return tuple(starts)

    @cached_property
    def is_prefix(self) -> tuple[bool, ...]:
        """Whether a document is the parent of another. A prefix has no targets and is not counted."""
        used = set(self.document_parents)
        return tuple(index in used for index in range(len(self.document_lengths)))

    @cached_property
    def num_documents(self) -> int:
        """Documents that are no prefix of another."""
        return len(self.document_lengths) - sum(self.is_prefix)

    @cached_property
    def max_document_length(self) -> int:
        """Tokens of the longest document, 0 without documents."""
        return max(self.document_lengths, default=0)

    @cached_property
    def counted_sources(self) -> tuple[int, ...]:
        """`document_sources` of the documents that `num_documents` counts."""
        return tuple(
            source for source, prefix in zip(self.document_sources, self.is_prefix, strict=True) if not prefix
        )

    @cached_property
    def document_contexts(self) -> tuple[int, ...]:
        """Tokens before each document's first: those of its parent and of the parent's own context."""
        contexts: list[int] = []
        for parent in self.document_parents:
            contexts.append(0 if parent == -1 else contexts[parent] + self.document_lengths[parent])
        return tuple(contexts)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Slot offsets of the documents and the end of the last, int32[documents + 1], on the CPU."""
        return torch.tensor([*self.document_starts, self.aligned_tokens], dtype=torch.int32)

    def document_ids(self) -> Tensor:
        """Index of each slot's document, int64[T], -1 where a slot holds no token. Prefixes have an index."""
        return self._document_ids.clone()

    def counted_document_ids(self) -> Tensor:
        """As `document_ids`, numbered over the `num_documents` counted documents; -1 in a prefix."""
        numbers, count = [], 0
        for prefix in self.is_prefix:
            numbers.append(-1 if prefix else count)
            count += not prefix
        return self._per_token(numbers)

    def token_sources(self) -> Tensor:
        """Channel index of each slot's document, int64[T], -1 where there is none."""
        return self._per_token(self.document_sources)

    def position_ids(self) -> Tensor:
        """Position of each slot in its document, int64[T], after its parent's; 0 where no token is."""
        firsts = [
            start - context
            for start, context in zip(self.document_starts, self.document_contexts, strict=True)
        ]
        positions = torch.arange(self.physical_tokens) - self._per_token(firsts)
        return positions.masked_fill_(self._document_ids < 0, 0)

    def is_token(self) -> Tensor:
        """Whether a slot holds a token of a document, bool[T]."""
        return self._document_ids >= 0

    def _per_token(self, values: Sequence[int]) -> Tensor:
        """`values[d]` at the tokens of document d, -1 elsewhere, int64[T]."""
        return torch.tensor([*values, -1])[self._document_ids]

    @cached_property
    def _document_ids(self) -> Tensor:
        runs, owners = [], []
        for index, (length, stride) in enumerate(
            zip(self.document_lengths, self.document_strides, strict=True)
        ):
            runs += [length, stride - length]
            owners += [index, -1]
        runs.append(self.physical_tokens - self.aligned_tokens)
        owners.append(-1)
        return torch.repeat_interleave(torch.tensor(owners), torch.tensor(runs))


def _rebuild(
    lengths: tuple[int, ...],
    sources: tuple[int, ...],
    groups: tuple[int, ...],
    parents: tuple[int, ...],
    alignment: int,
    physical: int,
) -> Layout:
    return Layout(lengths, sources, groups, parents, alignment=alignment, padded_length=physical)


def _integers(name: str, values: Sequence[int] | Tensor) -> tuple[int, ...]:
    listed = values.tolist() if isinstance(values, Tensor) else list(values)
    if set(map(type, listed)) <= {int}:  # nearly always, and asking each for a protocol is slow
        return tuple(listed)
    for index, value in enumerate(listed):
        if isinstance(value, bool) or not isinstance(value, SupportsIndex):
            raise TypeError(f"{name}[{index}] must be an integer, got {value!r} of {type(value).__name__}")
    return tuple(operator.index(value) for value in listed)


def _column(name: str, values: Sequence[int] | Tensor | None, count: int) -> tuple[int, ...]:
    if values is None:
        return (-1,) * count
    column = _integers(name, values)
    if len(column) != count:
        raise ValueError(f"{name} has {len(column)} entries for {count} documents; give one per document")
    if min(column, default=-1) >= -1:
        return column
    for index, value in enumerate(column):
        if value < -1:
            raise ValueError(f"{name}[{index}] is {value}; use an index from 0, or -1 for none")
    return column
