"""Pack documents into windows: streaming best fit over a look-ahead buffer.

[Note: packing] A window opens with the oldest unit of the buffer, so none waits longer than as many windows
as there were units before it. Then the largest unit that still fits is added, the oldest among equals, until
none fits. Nothing is random: the same units in the same order give the same windows.
"""

import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args

from isoloss.batch.collation import build_batch, check_document, check_unit, slice_document
from isoloss.batch.document import Document
from isoloss.batch.packed_batch import PackedBatch
from isoloss.batch.packing_record import PackingEvent, PackingRecord

logger = logging.getLogger(__name__)

K = TypeVar("K")

LongDocuments = Literal["truncate", "split", "drop"]

DEFAULT_LOOKAHEAD = 64
"""Measured on log-normal lengths (median a tenth of the window): fill 0.993, and 0.994 for any larger one."""

REMEMBERED_GROUPS = 100_000
"""Groups of a stream, the newest, of which `pack` notices when they come back after they have ended."""


@dataclass(frozen=True, slots=True)
class Placed(Generic[K]):
    """One unit in a window."""

    key: K
    """The key under which its row was added."""

    piece: int
    """Which piece of the row it is, from 0."""

    pieces: int
    """How many pieces the row was split into; 1: it was not."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class PackedWindow(Generic[K]):
    """A window and what it holds, in the order of its documents."""

    batch: PackedBatch
    placed: tuple[Placed[K], ...]


@dataclass(frozen=True, slots=True)
class _Unit(Generic[K]):
    documents: tuple[Document, ...]
    placed: Placed[K]
    blocks: int
    """Slots in multiples of the alignment."""

    row: int
    """Serial number of the row, the same for all of its pieces."""


class Packer(Generic[K]):
    """A look-ahead buffer of units, from which windows are taken.

    A unit is a document, a piece of a split document, or a whole group. Groups are neither split nor
    truncated, as a pair of which one side was cut compares something else than the data says: one that does
    not fit into a window is dropped and recorded.

        while not packer.empty or rows_left:
            while rows_left and not packer.ready:
                packer.add(documents_of(row), key=row)
            window = packer.pop()

    Args:
        window: T, the slots of a window.
        alignment: each document's stride is a multiple of this many slots.
        lookahead: units that the buffer holds before a window is taken. More give a better fill and move
            documents further from their place in the stream.
        long_documents: what becomes of a document that is longer than a window: "truncate" keeps its first
            tokens, "split" makes pieces, each a document of its own whose first token is no target, "drop"
            leaves it out.
        pad_token_id: token id of slots that hold no token.
        term: the loss term of `Document.labels`.
        record: where rows are counted; a new one by default.

    Raises:
        ValueError: a size below 1, a window smaller than the alignment, or an unknown policy.
    """

    def __init__(
        self,
        window: int,
        *,
        alignment: int = 8,
        lookahead: int = DEFAULT_LOOKAHEAD,
        long_documents: LongDocuments = "truncate",
        pad_token_id: int = 0,
        term: str = "text",
        record: PackingRecord | None = None,
    ) -> None:
        if alignment < 1 or window < alignment:
            raise ValueError(
                f"a window of {window} slots does not hold one document at alignment {alignment}; both are "
                "at least 1 and the window at least the alignment"
            )
        if lookahead < 1:
            raise ValueError(
                f"lookahead is {lookahead}; the buffer needs at least 1 unit, 64 fill windows well"
            )
        if long_documents not in get_args(LongDocuments):
            raise ValueError(
                f"long_documents is {long_documents!r}; use one of {', '.join(get_args(LongDocuments))}"
            )
        self.window = window
        self.alignment = alignment
        self.lookahead = lookahead
        self.long_documents: LongDocuments = long_documents
        self.pad_token_id = pad_token_id
        self.term = term
        self.record = PackingRecord() if record is None else record
        self._capacity = window // alignment
        self._rows = 0
        self._clear()

    def _clear(self) -> None:
        self._serial = 0
        self._blocks = 0
        self._units: OrderedDict[int, _Unit[K]] = OrderedDict()
        # Serial numbers of the units of each size, oldest first, and one bit for each size that has any:
        # the largest size that fits is one operation on integers, whatever the buffer holds.
        self._by_size: defaultdict[int, deque[int]] = defaultdict(deque)
        self._sizes = 0

    def __len__(self) -> int:
        """Units in the buffer."""
        return len(self._units)

    @property
    def empty(self) -> bool:
        """Whether the buffer holds nothing."""
        return not self._units

    @property
    def ready(self) -> bool:
        """Whether the buffer holds enough to fill a window well: `lookahead` units and a window of slots."""
        return len(self._units) >= self.lookahead and self._blocks >= self._capacity

    @property
    def buffered_tokens(self) -> int:
        """Tokens in the buffer."""
        return sum(unit.placed.num_tokens for unit in self._units.values())

    def add(self, documents: Sequence[Document], key: K) -> None:
        """Add one row: a document, or all documents of a group.

        Args:
            documents: one document, or several of the same group, parents before those that continue them.
            key: names the row in the record, in `Placed`, in errors and in the state; never looked into.

        Raises:
            ValueError: no document, documents of different groups, values that are not one per token, or a
                prefix with targets. Nothing has been added or counted then.
        """
        check_unit(documents, key, self.term)
        units, event = self._cut(tuple(documents), key)
        if event is None:
            self.record.admit(units[0].placed.num_tokens)
        else:
            self.record.note(event)
        for unit in units:
            self._insert(unit)

    def _cut(self, documents: tuple[Document, ...], key: K) -> tuple[list[_Unit[K]], PackingEvent | None]:
        """The units that a row becomes, and the event where it is not packed whole."""
        lengths = [len(document) for document in documents]
        tokens = sum(lengths)
        row = self._rows
        self._rows += 1
        is_group = len(documents) > 1 or documents[0].group is not None
        if 0 in lengths:
            which = f"document {lengths.index(0)} of the group" if is_group else "the document"
            return [], PackingEvent(key, "dropped", f"{which} has no token", tokens, 0, 0)
        blocks = sum(-(-length // self.alignment) for length in lengths)
        if blocks <= self._capacity:
            return [_Unit(documents, Placed(key, 0, 1, tokens), blocks, row)], None
        slots = blocks * self.alignment
        what = "group" if is_group else "document"
        reason = f"a {what} of {slots} slots is longer than the window of {self.window}"
        if is_group or self.long_documents == "drop":
            return [], PackingEvent(key, "dropped", reason, tokens, 0, 0)
        longest = self._capacity * self.alignment
        starts = range(0, tokens, longest) if self.long_documents == "split" else range(1)
        units = []
        for piece, start in enumerate(starts):
            stop = min(start + longest, tokens)
            part = (slice_document(documents[0], start, stop),)
            placed = Placed(key, piece, len(starts), stop - start)
            units.append(_Unit(part, placed, -(-(stop - start) // self.alignment), row))
        if self.long_documents == "split":
            return units, PackingEvent(key, "split", reason, tokens, tokens, len(starts))
        return units, PackingEvent(key, "truncated", reason, tokens, longest, 1)

    def _insert(self, unit: _Unit[K]) -> None:
        self._units[self._serial] = unit
        self._by_size[unit.blocks].append(self._serial)
        self._sizes |= 1 << unit.blocks
        self._blocks += unit.blocks
        self._serial += 1

    def _take(self, blocks: int) -> _Unit[K]:
        """Remove the oldest unit of this size."""
        serials = self._by_size[blocks]
        unit = self._units.pop(serials.popleft())
        if not serials:
            del self._by_size[blocks]
            self._sizes ^= 1 << blocks
        self._blocks -= blocks
        return unit

    def _select(self) -> list[_Unit[K]]:
        """Remove the units of the next window. See [Note: packing]."""
        if not self._units:
            raise ValueError(
                "the packer is empty; add documents first, or use PackedBatch.empty for a window of padding"
            )
        room = self._capacity
        blocks = next(iter(self._units.values())).blocks
        chosen = []
        while blocks:
            chosen.append(self._take(blocks))
            room -= blocks
            fitting = self._sizes & ((1 << (room + 1)) - 1)
            blocks = max(fitting.bit_length() - 1, 0)
        return chosen

    def pop(self) -> PackedWindow[K]:
        """Take the next window out of the buffer. It is fuller when the packer is `ready`.

        Raises:
            ValueError: the buffer is empty, or its documents do not fit together (a token extra that only
                some of them have).
        """
        units = self._select()
        batch = build_batch(
            [unit.documents for unit in units],
            self.window,
            alignment=self.alignment,
            pad_token_id=self.pad_token_id,
            term=self.term,
            keys=[unit.placed.key for unit in units],
        )
        return PackedWindow(batch, self._note(units))

    def skip(self) -> tuple[Placed[K], ...]:
        """Take the next window out of the buffer without building it; what it would have held.

        Raises:
            ValueError: the buffer is empty.
        """
        return self._note(self._select())

    def _note(self, units: Sequence[_Unit[K]]) -> tuple[Placed[K], ...]:
        for unit in units:
            self.record.pack(unit.placed.num_tokens)
        return tuple(unit.placed for unit in units)

    def _settings(self) -> dict[str, Any]:
        return {
            "window": self.window,
            "alignment": self.alignment,
            "lookahead": self.lookahead,
            "long_documents": self.long_documents,
            "pad_token_id": self.pad_token_id,
            "term": self.term,
        }

    def state_dict(self) -> dict[str, Any]:
        """What the buffer holds, as keys and plain values (JSON where the keys are), without tokens.

        Returns:
            "settings"; "rows", what the buffer holds of each row, oldest first, as (key, pieces it was cut
            into, [(piece, its tokens), ...] of those left); "record", the counters.
        """
        rows: dict[int, tuple[K, int, list[tuple[int, int]]]] = {}
        for unit in self._units.values():
            placed = unit.placed
            _, _, left = rows.setdefault(unit.row, (placed.key, placed.pieces, []))
            left.append((placed.piece, placed.num_tokens))
        return {
            "settings": self._settings(),
            "rows": list(rows.values()),
            "record": self.record.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], read: Callable[[K], Sequence[Document]]) -> None:
        """Fill the buffer as it was; every later window is then the same.

        Args:
            state: what `state_dict` returned.
            read: gives the documents of a row by its key, as they were added. Called once for each entry of
                `state["rows"]`, in order.

        Raises:
            ValueError: the packer has other settings, or a row is not what it was.
        """
        for name, value in self._settings().items():
            saved = state["settings"][name]
            if saved != value:
                raise ValueError(
                    f"the state was saved with {name}={saved!r}, this packer has {value!r}; windows would "
                    f"differ: resume with {name}={saved!r}"
                )
        self._clear()
        for key, pieces, left in state["rows"]:
            documents = read(key)
            check_unit(documents, key, self.term)
            units, _ = self._cut(tuple(documents), key)
            lengths = [unit.placed.num_tokens for unit in units]
            if len(units) != pieces or any(lengths[piece] != num_tokens for piece, num_tokens in left):
                raise ValueError(
                    f"row {key!r} had {pieces} pieces, with (piece, tokens) {left} to come, and now gives "
                    f"pieces of {lengths} tokens; the data has changed since, restore it or start anew"
                )
            for piece, _ in left:
                self._insert(units[piece])
        self.record.load_state_dict(state["record"])


def pack(
    documents: Iterable[Document],
    window: int,
    *,
    alignment: int = 8,
    lookahead: int = DEFAULT_LOOKAHEAD,
    long_documents: LongDocuments = "truncate",
    pad_token_id: int = 0,
    term: str = "text",
    record: PackingRecord | None = None,
) -> Iterator[PackedBatch]:
    """Pack a stream of documents into windows. See `Packer` for the arguments.

    Documents that follow one another with the same group are one row and share a window. In `record` a row is
    called by the position of its first document in the stream. Without a `record` the first document that is
    truncated or dropped is logged as a warning, and at the end of the stream how many there were.

    Raises:
        TypeError: while iterating, something in the stream is no Document.
        ValueError: as `Packer`; while iterating, a document does not fit in itself, or a group comes back
            after other documents, within the last 100,000 groups.

    Example:
        >>> documents = [Document(range(10, 13)), Document(range(20, 25)), Document([30])]
        >>> [batch] = pack(documents, window=16, alignment=4)
        >>> batch.targets["text"].tolist()
        [11, 12, -100, -100, 21, 22, 23, 24, -100, -100, -100, -100, -100, -100, -100, -100]
    """
    packer: Packer[int] = Packer(
        window,
        alignment=alignment,
        lookahead=lookahead,
        long_documents=long_documents,
        pad_token_id=pad_token_id,
        term=term,
        record=record,
    )
    return _windows(packer, documents, warns=record is None)


def _windows(packer: Packer[int], documents: Iterable[Document], warns: bool) -> Iterator[PackedBatch]:
    record = packer.record
    for position, row in _rows(documents):
        before = record.rows_truncated + record.rows_dropped
        packer.add(row, position)
        if warns and before == 0 and record.rows_truncated + record.rows_dropped:
            event = record.take_events()[-1]
            logger.warning(
                "isoloss: row %d of the stream was %s: %s. Further ones are counted and told at the end; "
                "pass record=PackingRecord() for each of them, or choose long_documents= (%s)",
                position,
                event.action,
                event.reason,
                ", ".join(get_args(LongDocuments)),
            )
        while packer.ready:
            yield packer.pop().batch
    while not packer.empty:
        yield packer.pop().batch
    if warns and record.rows_truncated + record.rows_dropped:
        logger.warning(
            "isoloss: of %d rows, %d were truncated (%d tokens lost) and %d dropped (%d tokens)",
            record.rows_in,
            record.rows_truncated,
            record.tokens_truncated,
            record.rows_dropped,
            record.tokens_dropped,
        )


def _rows(documents: Iterable[Document]) -> Iterator[tuple[int, list[Document]]]:
    """The documents as rows: neighbours with the same group together, each with its first position."""
    row: list[Document] = []
    first = 0
    ended: OrderedDict[int | str, int] = OrderedDict()
    for position, document in enumerate(documents):
        check_document(document, f"the stream, at position {position},")
        if row and (document.group is None or document.group != row[0].group):
            yield first, row
            if row[0].group is not None:
                ended[row[0].group] = position - 1
                if len(ended) > REMEMBERED_GROUPS:
                    ended.popitem(last=False)
            row = []
        if document.group is not None and document.group in ended:
            raise ValueError(
                f"document {position} of the stream belongs to group {document.group!r}, whose last document "
                f"was {ended[document.group]}; put the documents of a group one after the other, or they "
                "would not share a window (in a further pass over the data, give groups new names)"
            )
        if not row:
            first = position
        row.append(document)
    if row:
        yield first, row
