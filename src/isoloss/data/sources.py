"""Sources: which files a path means, their rows, and which rows are held out."""

import glob
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np

from isoloss.data.errors import DataError, RowError
from isoloss.data.ordering import choose
from isoloss.data.rows import near_misses, row_channel
from isoloss.data.shards import MAX_FAULTS, Row, Shard, open_file, open_saved

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
_METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_SPLIT = re.compile(
    r"(?<![a-z])(?:(train|training)|test|testing|eval|evaluation|valid|validation|dev)(?![a-z])",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """One source of a mixture."""

    name: str
    """Channel of rows that do not name one."""
    path: str
    """File, folder, or a glob pattern of files."""
    weight: float | None = None
    """Share of the mixture, relative to the other sources."""


@dataclass(slots=True)
class Survey:
    """What a look at every row has found."""

    channels: dict[str, None] = field(default_factory=dict)
    """Names of the channels, in order of appearance."""

    first_conversation: int | None = None
    """Position of the first row that is a conversation."""

    faults: list[str] = field(default_factory=list)
    """The first few rows at fault, each with file, line and fix."""

    num_faults: int = 0

    digest: int = 0
    """CRC-32 of all rows as they stand in the files: another one, other rows."""


@final
class Source:
    """The rows of one source, read by position.

    Args:
        spec: where they are.

    Raises:
        DataError: no file, no row, or a file that cannot be read; names file and line.
    """

    def __init__(self, spec: SourceSpec) -> None:
        self.spec = spec
        self._shards = _open(spec)
        # row n belongs to the last shard that starts at or before n
        self._starts = np.cumsum([0, *(shard.count for shard in self._shards)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _find(self, index: int) -> tuple[Shard, int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._shards[number], index - int(self._starts[number])

    def read(self, index: int) -> Row:
        """A row as it is in the file.

        Raises:
            RowError: it is no object.
        """
        shard, position = self._find(index)
        return shard.parse(shard.fetch(position))

    def place(self, index: int) -> str:
        """File and line of a row (JSON), or file and position in it."""
        shard, position = self._find(index)
        return shard.place(position)

    def survey(self, check: Callable[[Row], bool]) -> Survey:
        """Look at every row, before anything is trained.

        Args:
            check: raises `RowError` for a row at fault, and says whether the chat template renders it.
        """
        found = Survey()
        doubtful: dict[str, None] = {}
        for index, (shard, position, raw) in enumerate(self._scan()):
            written = raw if isinstance(raw, str) else repr(raw)
            found.digest = zlib.crc32(written.encode() + b"\n", found.digest)
            try:
                row = shard.parse(raw)
                is_conversation = check(row)
                found.channels.setdefault(row_channel(row, self.spec.name))
            except RowError as error:
                found.num_faults += 1
                if found.num_faults <= MAX_FAULTS:
                    found.faults.append(error.at(shard.place(position)))
                continue
            if found.first_conversation is None and is_conversation:
                found.first_conversation = index
            if index < 1000:
                doubtful.update(dict.fromkeys(near_misses(row)))
        for hint in doubtful:
            logger.warning("isoloss: source %r: %s", self.spec.name, hint)
        return found

    def rows(self) -> Iterator[Row]:
        """Every row in its order; those that are no object are left out, as `survey` names them."""
        for shard, _, raw in self._scan():
            try:
                yield shard.parse(raw)
            except RowError:
                continue

    def _scan(self) -> Iterator[tuple[Shard, int, Any]]:
        for shard in self._shards:
            for position, raw in enumerate(shard.scan()):
                yield shard, position, raw

    def split(self, *, seed: int, eval_fraction: float) -> tuple[np.ndarray, np.ndarray]:
        """Row positions to train on and to evaluate on; from the name, the seed and the positions alone.

        At least one row is held out of a source that has two, and at least one is left to train on.
        """
        count = len(self)
        held_out = 0
        if eval_fraction > 0 and count > 1:
            held_out = min(max(1, round(count * eval_fraction)), count - 1)
        evaluated, trained = choose(count, held_out, seed, "held out", self.spec.name)
        return trained, evaluated


def _open(spec: SourceSpec) -> list[Shard]:
    path = os.path.expanduser(spec.path)
    if any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json")):
        return [open_saved(path)]
    shards, faults = [], []
    for name in _files(spec, path):
        try:
            shards.append(open_file(name))
        except DataError as error:
            faults.append(str(error))
    if faults:
        raise DataError("\n".join(faults))
    return shards


def _files(spec: SourceSpec, path: str) -> list[str]:
    """The files of a path in a fixed order."""
    if os.path.isdir(path):
        found = _files_of_folder(spec, Path(path))
    elif os.path.isfile(path):
        found = [path]
    else:
        found = sorted(name for name in glob.glob(path, recursive=True) if os.path.isfile(name))
    if not found:
        raise DataError(
            f"{spec.path}: source {spec.name!r} finds no file there ({', '.join(SUFFIXES)}); paths start at "
            f"the working directory, {Path.cwd()}"
        )
    for name in found:
        if Path(name).suffix not in SUFFIXES:
            raise DataError(
                f"{name}: files ending in {Path(name).suffix or 'nothing'} are not read; use one of "
                f"{', '.join(SUFFIXES)}"
            )
    return found


def _files_of_folder(spec: SourceSpec, folder: Path) -> list[str]:
    names = sorted(
        str(file.relative_to(folder))
        for file in folder.rglob("*")
        if file.suffix in SUFFIXES and file.name not in _METADATA and file.is_file()
    )
    names = [name for name in names if not any(part.startswith(".") for part in Path(name).parts)]
    splits = {name: _SPLIT.search(name) for name in names}
    of_train = [name for name, split in splits.items() if split is not None and split[1] is not None]
    others = [name for name, split in splits.items() if split is not None and split[1] is None]
    if of_train and others:
        # the folder of a dataset with splits, as the Hugging Face Hub stores it
        logger.warning(
            "isoloss: source %r: %s holds several splits; %d files of train are read, %d others are not (%s)",
            spec.name,
            folder,
            len(of_train),
            len(names) - len(of_train),
            ", ".join(name for name in names if name not in of_train),
        )
        names = of_train
    return [str(folder / name) for name in names]
