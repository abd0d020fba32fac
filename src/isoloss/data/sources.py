"""Reads sources: JSONL, JSON, Parquet, and folders of them or of Hugging Face datasets."""

import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import datasets
import numpy as np

from isoloss.data.errors import DataError, RowError
from isoloss.data.rows import check_row

_READERS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """One source of a mixture."""

    name: str
    """Channel of rows that do not name one."""
    path: str
    """File, folder, or a glob pattern of files."""
    weight: float | None = None
    """Share of the mixture, relative to the other sources."""


@final
class Source:
    """The rows of one source, memory-mapped.

    Args:
        spec: where they are.

    Raises:
        DataError: no file, no row, or a file that cannot be read; names file and line.
    """

    def __init__(self, spec: SourceSpec) -> None:
        self.spec = spec
        self._files, self.rows = _open(spec)
        if len(self.rows) == 0:
            raise DataError(
                f"{spec.path}: source {spec.name!r} has no row; give it rows or remove the source"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> dict[str, Any]:
        """A row as it is in the file; fields that it lacks are None or absent."""
        row: dict[str, Any] = self.rows[index]
        return row

    def channels(self) -> list[str]:
        """Names of the channels of the rows, in order of appearance."""
        columns = [name for name in ("channel", "source") if name in self.rows.column_names]
        if not columns:
            return [self.spec.name]
        named: dict[str, None] = {}
        table = self.rows.select_columns(columns)
        for row in table:
            named.setdefault(self.channel(row))
        return list(named)

    def channel(self, row: dict[str, Any]) -> str:
        """The row's `channel`, else its `source`, else the name of the source."""
        for field in ("channel", "source"):
            value = row.get(field)
            if value is not None:
                return str(value)
        return self.spec.name

    def check(self, *, loss_on: str) -> None:
        """Look at the shape of every row before anything is trained.

        Raises:
            DataError: up to ten rows at fault, each with file, line and fix.
        """
        faults = []
        for index, row in enumerate(self.rows):
            try:
                check_row(row, loss_on=loss_on)
            except RowError as error:
                faults.append(f"{self.place(index)}: {error}")
                if len(faults) == 10:
                    faults.append("... and perhaps more")
                    break
        if faults:
            raise DataError("\n".join(faults))

    def place(self, index: int) -> str:
        """File and line (JSONL) or file and row of a row."""
        for path in self._files:
            if Path(path).suffix not in (".jsonl", ".ndjson", ".json"):
                break
            with open(path, encoding="utf-8") as file:
                first = file.read(1)
                file.seek(0)
                if first == "[":
                    break
                for number, line in enumerate(file, 1):
                    if line.strip():
                        if index == 0:
                            return f"{path}:{number}"
                        index -= 1
        name = self._files[0] if len(self._files) == 1 else self.spec.path
        return f"{name}: row {index}"

    def split(self, *, seed: int, eval_fraction: float) -> tuple[np.ndarray, np.ndarray]:
        """Row indices for training and for evaluation; which are held out depends on name and seed alone.

        At least one row is held out of a source that has two, and at least one is left to train on.
        """
        count = len(self.rows)
        held_out = 0
        if eval_fraction > 0 and count > 1:
            held_out = min(max(1, round(count * eval_fraction)), count - 1)
        order = generator(seed, "held out", self.spec.name).permutation(count)
        return np.sort(order[held_out:]), np.sort(order[:held_out])


def generator(*key: object) -> np.random.Generator:
    """Random numbers that depend on `key` alone, the same on every machine."""
    digest = hashlib.sha256(json.dumps(key).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))


def _open(spec: SourceSpec) -> tuple[list[str], datasets.Dataset]:
    path = Path(spec.path)
    if (path / "state.json").is_file():  # Dataset.save_to_disk
        return [str(path)], datasets.load_from_disk(str(path))
    if (path / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(str(path))
        if "train" not in splits:
            raise DataError(
                f"{path}: the dataset has splits {', '.join(splits)} and no train; give the folder of one"
            )
        return [str(path / "train")], splits["train"]
    files = _files(spec)
    kinds = {_READERS[Path(name).suffix] for name in files}
    if len(kinds) > 1:
        raise DataError(f"{spec.path}: it holds JSON and Parquet files; put each kind in a source of its own")
    for name in files:
        if os.path.getsize(name) == 0:
            raise DataError(f"{name}: the file is empty; give it rows or remove it from source {spec.name!r}")
    try:
        rows = datasets.load_dataset(kinds.pop(), data_files=files, split="train", keep_in_memory=False)
    except (
        datasets.exceptions.DatasetGenerationError,
        datasets.exceptions.DatasetGenerationCastError,
    ) as error:
        raise DataError("\n".join(_why_unreadable(files, error))) from error
    return files, rows


def _files(spec: SourceSpec) -> list[str]:
    path = Path(spec.path)
    if path.is_dir():
        found = sorted(str(file) for file in path.rglob("*") if file.suffix in _READERS)
    elif path.is_file():
        found = [str(path)]
    else:
        found = sorted(name for name in glob.glob(spec.path, recursive=True) if os.path.isfile(name))
    if not found:
        raise DataError(
            f"{spec.path}: source {spec.name!r} finds no file there; paths start at the working directory, "
            f"{Path.cwd()}"
        )
    for name in found:
        if Path(name).suffix not in _READERS:
            raise DataError(
                f"{name}: files ending in {Path(name).suffix or 'nothing'} are not read; use one of "
                f"{', '.join(_READERS)}"
            )
    return found


def _why_unreadable(files: Sequence[str], error: Exception) -> Iterator[str]:
    """The lines that are no JSON objects, or what the library said."""
    found = 0
    for name in files:
        if Path(name).suffix == ".parquet":
            continue
        text = Path(name).read_bytes()
        if text.lstrip().startswith(b"["):
            try:
                json.loads(text)
            except ValueError as fault:
                found += 1
                yield f"{name}: the file starts as a JSON list but is none: {fault}"
            continue
        for number, line in enumerate(text.split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except UnicodeDecodeError as fault:
                found += 1
                yield f"{name}:{number}: the line is not UTF-8 ({fault.reason}); save the file as UTF-8"
            except json.JSONDecodeError as fault:
                found += 1
                yield (
                    f"{name}:{number}:{fault.colno}: the line is no JSON: {fault.msg}; write one object "
                    "a line, with double quotes"
                )
            else:
                if not isinstance(value, dict):
                    found += 1
                    yield (
                        f"{name}:{number}: expected an object, got {type(value).__name__}; write one object "
                        'a line, such as {"text": "..."}'
                    )
            if found == 10:
                return
    if not found:
        cause = error.__cause__ or error
        yield (
            f"{files[0]}: the rows do not fit together: {cause}. A field must have one type in all rows of a "
            "source (a list of messages, a string, a number)"
        )
