"""Lanes: G independent streams of windows, which do not know how many ranks there are.

[Note: lanes]
Window j of step s is a function of the data, the seed and (s, j) alone. Pass p over a source is a permutation
from (seed, source, p), of which lane g takes the positions congruent to g modulo G. A lane draws, packs and
resumes by itself, so any number of ranks may share the lanes out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np

from isoloss.batch.document import Document
from isoloss.batch.packed_batch import PackedBatch
from isoloss.batch.packing import Packer
from isoloss.batch.packing_record import PackingRecord
from isoloss.data.sources import generator

Key = tuple[int, int]
"""(source, row): enough to read a document again."""


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


@final
class Permutations:
    """Orders of the sources in their passes, the last one of each kept; shared by the lanes of a process."""

    def __init__(self, mixture: MixtureSpec) -> None:
        self._mixture = mixture
        self._kept: dict[int, tuple[int, np.ndarray]] = {}

    def order(self, source: int, number: int) -> np.ndarray:
        """Row positions of a source in pass `number`; int64[rows]."""
        kept = self._kept.get(source)
        if kept is None or kept[0] != number:
            name, count = self._mixture.names[source], self._mixture.row_counts[source]
            kept = (number, generator(self._mixture.seed, "pass", name, number).permutation(count))
            self._kept[source] = kept
        return kept[1]


@final
class Cursor:
    """One lane's place in one source.

    A lane's part of a pass is the positions g, g + G, ... of its permutation; where the source has fewer rows
    than lanes and repeats, a lane without a part takes position g modulo the rows.
    """

    def __init__(
        self, mixture: MixtureSpec, permutations: Permutations, source: int, lane: int, repeats: bool
    ) -> None:
        count, lanes = mixture.row_counts[source], mixture.num_lanes
        self._permutations = permutations
        self._source = source
        self._first = lane % count if repeats and lane >= count else lane
        self._stride = lanes
        self.part = len(range(self._first, count, lanes)) if self._first < count else 0
        """Documents of this lane in a pass."""
        self.drawn = 0
        """Documents drawn, over all passes."""

    @property
    def num_passes(self) -> int:
        """Passes that are complete."""
        return self.drawn // self.part

    def draw(self) -> int:
        """Position of the next row."""
        number, place = divmod(self.drawn, self.part)
        self.drawn += 1
        return int(self._permutations.order(self._source, number)[self._first + place * self._stride])


@final
class Lane:
    """One stream of windows.

    Args:
        number: g, from 0.
        mixture: how sources are mixed.
        permutations: shared by the lanes of this process.
        packer: of this lane alone.
        read: the document of a (source, row) key.
        row_of: the row of a position in a source's training rows.
    """

    def __init__(
        self,
        number: int,
        mixture: MixtureSpec,
        permutations: Permutations,
        packer: Packer[Key],
        read: Callable[[Key], Document],
        row_of: Callable[[int, int], int],
    ) -> None:
        self._mixture = mixture
        self._packer = packer
        self._read = read
        self._row_of = row_of
        repeats = mixture.weights is not None
        self._cursors = [
            Cursor(mixture, permutations, source, number, repeats) for source in range(len(mixture.names))
        ]
        self._given = [0] * len(mixture.names)  # tokens, or documents, drawn from each source
        # Sources in the same debt come in an order of the lane's own, or all lanes would start alike.
        self._ties = [
            int(place) for place in generator(mixture.seed, "ties", number).permutation(len(mixture.names))
        ]
        self._number = number
        self._order: tuple[int, np.ndarray] | None = None

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

    def _fill(self) -> None:
        while not self._packer.ready:
            source = self._next_source()
            if source is None:
                return
            key = (source, self._row_of(source, self._cursors[source].draw()))
            document = self._read(key)
            self._given[source] += len(document) if self._mixture.weight_by == "token" else 1
            self._packer.add([document], key)

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
        """Without weights: the sources of this pass in a random order, each as often as it has documents."""
        part = sum(cursor.part for cursor in self._cursors)
        if part == 0:
            return None
        number, place = divmod(sum(cursor.drawn for cursor in self._cursors), part)
        if self._mixture.num_passes is not None and number >= self._mixture.num_passes:
            return None
        if self._order is None or self._order[0] != number:
            turns = np.repeat(np.arange(len(self._cursors)), [cursor.part for cursor in self._cursors])
            shuffled = generator(self._mixture.seed, "turns", self._number, number).permutation(turns)
            self._order = (number, shuffled)
        return int(self._order[1][place])

    def state_dict(self) -> dict[str, Any]:
        """Place in every source, what each has given, and the packer's buffer by key; JSON."""
        return {
            "drawn": [cursor.drawn for cursor in self._cursors],
            "given": list(self._given),
            "packer": self._packer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved place: every later window is the same."""
        for cursor, drawn in zip(self._cursors, state["drawn"], strict=True):
            cursor.drawn = drawn
        self._given = list(state["given"])
        self._packer.load_state_dict(state["packer"], lambda key: [self._read((key[0], key[1]))])


def empty_parts(mixture: MixtureSpec) -> Sequence[str]:
    """Sources with weights that leave a lane without a document."""
    if mixture.weights is None:
        return []
    return [
        f"{name} has {count}"
        for name, count, weight in zip(mixture.names, mixture.row_counts, mixture.weights, strict=True)
        if weight > 0 and count < mixture.num_lanes
    ]
