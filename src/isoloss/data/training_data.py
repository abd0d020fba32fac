"""Windows for every step of a run, for any number of data ranks."""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from transformers import PreTrainedTokenizerBase

from isoloss.batch.document import Document
from isoloss.batch.packed_batch import PackedBatch
from isoloss.batch.packing import LongDocuments, Packer
from isoloss.data.errors import DataError, RowError
from isoloss.data.lanes import Key, Lane, MixtureSpec, Permutations
from isoloss.data.row_format import RowFormat, text_format
from isoloss.data.rows import row_channel
from isoloss.data.shards import MAX_FAULTS
from isoloss.data.sources import Source, SourceSpec

MAX_CHANNELS = 1000
"""More are taken for a field that is no channel, such as the address of each document."""

_TRIED_ROWS = 100
"""Rows of each source that are tokenised before the run starts, to meet errors of a template early."""

_CACHED_TOKENS = 2**23
"""Tokens of documents kept for the next pass, 32 to 96 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """What windows depend on, besides the rows themselves."""

    sources: tuple[SourceSpec, ...]
    window: int
    alignment: int
    windows_per_step: int
    seed: int
    long_documents: LongDocuments = "truncate"
    weight_by: Literal["token", "document"] = "token"
    small_sources: Literal["error", "repeat"] = "error"
    eval_fraction: float = 0.0
    num_passes: int | None = None


@final
class TrainingData:
    """The sources of a run as windows, for one data rank.

    Args:
        settings: what windows depend on.
        tokenizer: of the model.
        row_format: how rows become documents; None: `text_format`, assistant turns being targets.
        data_rank: this rank's place among those that read different windows.
        data_size: how many such ranks there are.

    Raises:
        DataError: rows at fault (with file and line), an empty source, or sources too small for the mixture.
    """

    def __init__(
        self,
        settings: DataSettings,
        tokenizer: PreTrainedTokenizerBase,
        row_format: RowFormat | None = None,
        *,
        data_rank: int,
        data_size: int,
    ) -> None:
        self._settings = settings
        self._format = text_format(tokenizer, "assistant") if row_format is None else row_format
        self._data_rank = data_rank
        self._data_size = data_size
        self._fingerprint = _fingerprint(tokenizer)
        self._pad_token_id = tokenizer.pad_token_id or 0
        weights = _weights(settings.sources)
        self._sources = _open_sources(settings.sources)
        surveys = [source.survey(self._format.check) for source in self._sources]
        _raise_faults(
            [fault for survey in surveys for fault in survey.faults], sum(s.num_faults for s in surveys)
        )
        self._digests = {
            source.spec.name: survey.digest for source, survey in zip(self._sources, surveys, strict=True)
        }
        self.channels = tuple(dict.fromkeys(name for survey in surveys for name in survey.channels))
        """Names of the channels, in the same order on every rank."""
        if len(self.channels) > MAX_CHANNELS:
            raise DataError(
                f"data.sources: the rows name {len(self.channels)} channels, such as "
                f"{', '.join(self.channels[:3])}; at most {MAX_CHANNELS} can be told apart. Where `source` "
                "is something else, give the rows a `channel`, or leave `source` out"
            )
        self._channel_index = {name: index for index, name in enumerate(self.channels)}
        self._documents: OrderedDict[Key, Sequence[Document]] = OrderedDict()
        self._cached_tokens = 0
        self._try_rows([survey.first_conversation for survey in surveys])
        splits = [
            source.split(seed=settings.seed, eval_fraction=settings.eval_fraction) for source in self._sources
        ]
        self._train_rows = [train for train, _ in splits]
        self._eval_rows = [held_out for _, held_out in splits]
        self._mixture = MixtureSpec(
            names=tuple(spec.name for spec in settings.sources),
            row_counts=tuple(len(rows) for rows in self._train_rows),
            weights=weights,
            weight_by=settings.weight_by,
            num_lanes=settings.windows_per_step,
            seed=settings.seed,
            num_passes=settings.num_passes,
        )
        small = self._mixture.short_sources()
        if small and settings.small_sources == "error":
            raise DataError(
                f"data.sources: {'; '.join(small)} documents to train on, fewer than the "
                f"{settings.windows_per_step} windows of a step, so some windows could not have their "
                "share. Set data.small_sources: repeat to repeat documents, lower "
                "train.windows_per_step, or leave the weights out"
            )
        self._lanes = self._make_lanes()
        self.eval_windows = self._make_eval_windows()
        """This rank's held-out windows, as many as every other rank's; empty without eval_fraction."""

    # -- training

    def next_step(self) -> tuple[list[PackedBatch], bool]:
        """This rank's windows of the next step, and whether its lanes have windows for another.

        Lanes d, d + D, ... of G; where D does not divide G, and where a lane has ended, a window is empty.
        """
        windows = [
            self._empty() if lane.exhausted else self._format.complete(lane.pop())
            for lane in self._lanes.values()
        ]
        missing = -(-self._settings.windows_per_step // self._data_size) - len(windows)
        windows += [self._empty()] * missing
        return windows, any(not lane.exhausted for lane in self._lanes.values())

    def count_steps(self) -> int:
        """Steps until this rank's lanes end. Reads everything once; needs `num_passes`."""
        counts = [0]
        for lane in self._make_lanes().values():
            count = 0
            while not lane.exhausted:
                lane.skip()
                count += 1
            counts.append(count)
        return max(counts)

    def take_events(self) -> list[dict[str, Any]]:
        """Rows that were truncated, split or dropped on this rank since the last call, and why."""
        return [
            {
                "source": self._mixture.names[event.key[0]],
                "place": self._sources[event.key[0]].place(event.key[1]),
                "action": event.action,
                "reason": event.reason,
                "tokens": event.num_tokens,
                "kept_tokens": event.kept_tokens,
                "pieces": event.pieces,
            }
            for lane in self._lanes.values()
            for event in lane.record.take_events()
        ]

    def lane_states(self) -> dict[int, Any]:
        """Lane number -> state, JSON; the lanes of all ranks together are the state of the data."""
        return {number: lane.state_dict() for number, lane in self._lanes.items()}

    def identity(self) -> dict[str, Any]:
        """What windows depend on, to compare with on resume; JSON."""
        settings = self._settings
        return {
            "train.windows_per_step": settings.windows_per_step,
            "data.window": settings.window,
            "data.alignment": settings.alignment,
            "train.seed": settings.seed,
            **self._format.identity,
            "data.long_documents": settings.long_documents,
            "data.weight_by": settings.weight_by,
            "data.eval_fraction": settings.eval_fraction,
            "data.sources": [
                {"name": source.spec.name, "weight": source.spec.weight, "rows": len(source)}
                for source in self._sources
            ],
            "digests": self._digests,
            "data.tokenizer": self._fingerprint,
            "channels": list(self.channels),
        }

    def load(self, identity: Mapping[str, Any], lanes: Mapping[int, Any]) -> None:
        """Go on from the saved states of all lanes, saved by any number of ranks.

        Raises:
            DataError: windows would differ from those of the saved run; shows both values.
        """
        now = self.identity()
        changed = [
            f"{name} is {now[name]!r}, the checkpoint was made with {identity.get(name)!r}"
            for name in now
            if identity.get(name) != now[name] and name != "digests"
        ]
        if not changed:
            changed = [
                f"the rows of source {name!r} are not what they were, although as many; restore them"
                for name, digest in self._digests.items()
                if identity.get("digests", {}).get(name) != digest
            ]
        if changed:
            raise DataError(
                "the run cannot be resumed on other windows: "
                + "; ".join(changed)
                + ". Set the saved values, or start a new run in another train.output_dir"
            )
        expected = set(range(self._settings.windows_per_step))
        if set(lanes) != expected:
            raise DataError(
                f"the checkpoint holds lanes {sorted(lanes)}, a step has {sorted(expected)}; it was not "
                "written whole, resume from an earlier one"
            )
        self._lanes = self._make_lanes()
        for number, lane in self._lanes.items():
            try:
                lane.load_state_dict(lanes[number])
            except ValueError as error:
                raise DataError(f"lane {number} of the checkpoint cannot go on: {error}") from error

    def _make_lanes(self) -> dict[int, Lane]:
        permutations = Permutations(self._mixture)
        return {
            number: Lane(
                number,
                self._mixture,
                permutations,
                self._packer(),
                self._read,
                lambda source, position: int(self._train_rows[source][position]),
            )
            for number in range(self._data_rank, self._settings.windows_per_step, self._data_size)
        }

    def _packer(self) -> Packer[Key]:
        return Packer(
            self._settings.window,
            alignment=self._settings.alignment,
            long_documents=self._settings.long_documents,
            pad_token_id=self._pad_token_id,
            term=self._format.terms[0],
        )

    def _read(self, key: Key) -> Sequence[Document]:
        """The documents of a row, from the cache or the file."""
        documents = self._documents.pop(key, None)
        if documents is None:
            documents = self._make_documents(key)
            self._cached_tokens += sum(map(len, documents))
        self._documents[key] = documents
        while self._cached_tokens > _CACHED_TOKENS and len(self._documents) > 1:
            self._cached_tokens -= sum(map(len, self._documents.popitem(last=False)[1]))
        return documents

    def _make_documents(self, key: Key) -> Sequence[Document]:
        source = self._sources[key[0]]
        try:
            row = source.read(key[1])
            return self._format.documents(row, self._channel_index[row_channel(row, source.spec.name)])
        except RowError as error:
            raise DataError(error.at(source.place(key[1]))) from error

    def _try_rows(self, conversations: Sequence[int | None]) -> None:
        """Tokenise a few rows of each source on every rank, so that all stop alike at a fault.

        Args:
            conversations: the first conversation of each source.
        """
        faults = []
        for number, (source, conversation) in enumerate(zip(self._sources, conversations, strict=True)):
            rows = set(range(min(_TRIED_ROWS, len(source))))
            for row in sorted(rows if conversation is None else rows | {conversation}):
                try:
                    self._read((number, row))
                except DataError as error:
                    faults.append(str(error))
        _raise_faults(faults, len(faults))

    def _empty(self) -> PackedBatch:
        return PackedBatch.empty(self._settings.window, self._format.terms, self._pad_token_id)

    # -- evaluation

    def _make_eval_windows(self) -> list[PackedBatch]:
        """All held-out documents in a fixed order, packed; window n belongs to data rank n modulo D."""
        packer = self._packer()
        for index, rows in enumerate(self._eval_rows):
            for row in rows:
                packer.add(self._read((index, int(row))), (index, int(row)))
        windows = []
        while not packer.empty:
            windows.append(self._format.complete(packer.pop().batch))
        mine = windows[self._data_rank :: self._data_size]
        missing = -(-len(windows) // self._data_size) - len(mine)
        return mine + [self._empty()] * missing


def _open_sources(specs: Sequence[SourceSpec]) -> list[Source]:
    names = Counter(spec.name for spec in specs)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise DataError(
            f"data.sources: the name {twice[0]!r} stands {names[twice[0]]} times; give each source a name of "
            "its own. Rows of two sources share a channel when they name it in `channel`"
        )
    sources, faults = [], []
    for spec in specs:
        try:
            sources.append(Source(spec))
        except DataError as error:
            faults.append(str(error))
    _raise_faults(faults, len(faults))
    return sources


def _raise_faults(faults: Sequence[str], count: int) -> None:
    """Raise the first faults of `count`, if there is any."""
    if not faults:
        return
    shown = list(faults[:MAX_FAULTS])
    if count > len(shown):
        shown.append(f"... and {count - len(shown)} more rows at fault")
    raise DataError("\n".join(shown))


_PROBE = "Zwölf Boxkämpfer (12 of 3,456) jagten 東京's\tcats:\n\n    return x_1 != 'naïve'  # 😀\r\n"
"""Words, numbers, scripts, symbols and white space: what tokenizers treat in different ways."""


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Changes when a text or a conversation would become other tokens."""
    parts = [
        repr(sorted(tokenizer.get_vocab().items())),
        repr(tokenizer(_PROBE).input_ids),
        repr(tokenizer.chat_template),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _weights(sources: Sequence[SourceSpec]) -> tuple[float, ...] | None:
    weights = [source.weight for source in sources if source.weight is not None]
    if not weights:
        return None
    if len(weights) < len(sources) or min(weights) < 0 or sum(weights) == 0:
        raise DataError(
            f"data.sources: weights are {[source.weight for source in sources]}; give every source one "
            "from 0, or none, and not all 0"
        )
    return tuple(weights)
