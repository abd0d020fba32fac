"""Lanes: G independent streams of windows, which do not know how many ranks there are.

[Note: lanes]
Window j of step s is a function of the data, the seed and (s, j) alone. Pass p over a source is a permutation
from (seed, source, p), of which lane g takes the positions congruent to g modulo G. A lane draws, packs and
resumes by itself, so any number of ranks may share the lanes out. No random state is kept: every order is
made from its key when it is needed.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np

from isoloss.batch.document import Document
from isoloss.batch.packed_batch import PackedBatch
from isoloss.batch.packing import Packer
from isoloss.batch.packing_record import PackingRecord
from isoloss.data.errors import DataError
from isoloss.data.ordering import random_order

Key = tuple[int, int]
"""(source, row): enough to read the documents of a row again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSpec:
    """How sources are mixed; the same for all lanes."""

    names: tuple[str, ...]
    row_counts: tuple[int, ...]
    """Training rows of each source."""
    weights: tuple[float, ...] | None
    """Shares of the sources; None: every document once per pass."""
    weight_by: Literal["token", "document"]
    num_lanes: int
    seed: int
    num_passes: int | None
    """Passes after which a lane ends; None: never."""

    def short_sources(self) -> list[str]:
        """Sources with weights that leave a lane without a document, and how many they have."""
        return [
            f"{name} has {count}"
            for name, count, weight in zip(self.names, self.row_counts, self.weights or (), strict=False)
            if weight > 0 and count < self.num_lanes
        ]


@final
class Permutations:
    """Orders of the sources in their passes, shared by the lanes of a process.

    Lanes come to a new pass within a few steps of each other, so the last two orders of a source are kept.
    """

    def __init__(self, mixture: MixtureSpec) -> None:
        self._mixture = mixture
        self._kept: list[OrderedDict[int, np.ndarray]] = [OrderedDict() for _ in mixture.names]

    def part(self, source: int, number: int, first: int, stride: int) -> np.ndarray:
        """Positions `first`, `first + stride`, ... of the order of a source in pass `number`; uint32."""
        kept = self._kept[source]
        if number not in kept:
            name, count = self._mixture.names[source], self._mixture.row_counts[source]
            kept[number] = random_order(count, self._mixture.seed, "pass", name, number)
            while len(kept) > 2:
                kept.popitem(last=False)
        return kept[number][first::stride].copy()


@final
class Cursor:
    """One lane's place in one source.

    A lane's part of a pass is the positions g, g + G, ... of its permutation; where the source has fewer rows
    than lanes and repeats, a lane without a part takes position g modulo the rows.
    """

    def __init__(
        self, mixture: MixtureSpec, permutations: Permutations, source: int, lane: int, *, repeats: bool
    ) -> None:
        count, lanes = mixture.row_counts[source], mixture.num_lanes
        self._permutations = permutations
        self._source = source
        self._first = lane % count if repeats else lane
        self._stride = lanes
        self._part: tuple[int, np.ndarray] | None = None
        self.num_rows = len(range(self._first, count, lanes))
        """Rows of this lane in a pass."""
        self.drawn = 0
        """Rows drawn, over all passes."""

    @property
    def num_passes(self) -> int:
        """Passes that are complete."""
        return self.drawn // self.num_rows

    def draw(self) -> int:
        """Position of the next row."""
        number, place = divmod(self.drawn, self.num_rows)
        if self._part is None or self._part[0] != number:
            self._part = (number, self._permutations.part(self._source, number, self._first, self._stride))
        self.drawn += 1
        return int(self._part[1][place])


@final
class Lane:
    """One stream of windows.

    Args:
        number: g, from 0.
        mixture: how sources are mixed.
        permutations: shared by the lanes of this process.
        packer: of this lane alone.
        read: the documents of a (source, row) key; several are a group.
        row_of: the row of a position in a source's training rows.
    """

    def __init__(
        self,
        number: int,
        mixture: MixtureSpec,
        permutations: Permutations,
        packer: Packer[Key],
        read: Callable[[Key], Sequence[Document]],
        row_of: Callable[[int, int], int],
    ) -> None:
        self._number = number
        self._mixture = mixture
        self._packer = packer
        self._read = read
        self._row_of = row_of
        self._cursors = [
            Cursor(
                mixture,
                permutations,
                source,
                number,
                repeats=bool(mixture.weights and mixture.weights[source]),
            )
            for source in range(len(mixture.names))
        ]
        self._rows_per_pass = sum(cursor.num_rows for cursor in self._cursors)
        # tokens, or rows, that each source has given to windows
        self._given = [0] * len(mixture.names)
        # Sources in the same debt come in an order of the lane's own, or all lanes would start alike.
        self._ties = [int(rank) for rank in random_order(len(mixture.names), mixture.seed, "ties", number)]
        self._turns: tuple[int, np.ndarray] | None = None

    @property
    def record(self) -> PackingRecord:
        """What became of every row that the lane has read."""
        return self._packer.record

    @property
    def exhausted(self) -> bool:
        """Whether no window is left."""
        self._fill()
        return self._packer.empty

    def pop(self) -> PackedBatch:
        """The next window."""
        self._fill()
        return self._packer.pop().batch

    def skip(self) -> None:
        """Take the next window without building it."""
        self._fill()
        self._packer.skip()

    def _fill(self) -> None:
        dropped = 0
        while not self._packer.ready:
            source = self._next_source()
            if source is None:
                return
            key = (source, self._row_of(source, self._cursors[source].draw()))
            kept = self._add(key)
            self._given[source] += kept if self._mixture.weight_by == "token" else min(kept, 1)
            dropped = 0 if kept else dropped + 1
            if dropped > self._rows_per_pass:
                raise DataError(
                    f"data.sources: every row of {self._mixture.names[source]!r} is dropped, as none fits "
                    f"into data.window ({self._packer.window}); use a larger window, set "
                    "data.long_documents to truncate or split, or remove the source"
                )

    def _add(self, key: Key) -> int:
        """Give the packer a row; tokens of it that it keeps."""
        record = self.record
        before = record.tokens_in - record.tokens_truncated - record.tokens_dropped
        self._packer.add(self._read(key), key)
        return record.tokens_in - record.tokens_truncated - record.tokens_dropped - before

    def _next_source(self) -> int | None:
        if self._mixture.weights is None:
            return self._next_in_turn()
        weights = self._mixture.weights
        drawn_from = [source for source, weight in enumerate(weights) if weight > 0]
        limit = self._mixture.num_passes
        if limit is not None and all(self._cursors[source].num_passes >= limit for source in drawn_from):
            return None
        share = sum(weights)
        total = sum(self._given)
        debts = {source: weights[source] / share * total - self._given[source] for source in drawn_from}
        return max(drawn_from, key=lambda source: (debts[source], self._ties[source]))

    def _next_in_turn(self) -> int | None:
        """Without weights: the sources of this pass in a random order, each as often as it has rows."""
        if self._rows_per_pass == 0:
            return None
        number, place = divmod(sum(cursor.drawn for cursor in self._cursors), self._rows_per_pass)
        if self._mixture.num_passes is not None and number >= self._mixture.num_passes:
            return None
        if self._turns is None or self._turns[0] != number:
            sources = np.repeat(np.arange(len(self._cursors)), [cursor.num_rows for cursor in self._cursors])
            order = random_order(self._rows_per_pass, self._mixture.seed, "turns", self._number, number)
            self._turns = (number, sources[order])
        return int(self._turns[1][place])

    def state_dict(self) -> dict[str, Any]:
        """Place in every source, what each has given, and the packer's buffer by key; plain values."""
        return {
            "drawn": [cursor.drawn for cursor in self._cursors],
            "given": list(self._given),
            "packer": self._packer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place: every later window is the same.

        Args:
            state: what `state_dict` returned, also after a way through JSON.
        """
        for cursor, drawn in zip(self._cursors, state["drawn"], strict=True):
            cursor.drawn = drawn
        self._given = list(state["given"])
        packer = state["packer"]
        rows = [((key[0], key[1]), pieces, left) for key, pieces, left in packer["rows"]]
        self._packer.load_state_dict({**packer, "rows": rows}, self._read)
