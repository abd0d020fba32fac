"""Files and saved datasets as rows, read by `datasets` and mapped into memory.

[Note: JSON] `datasets` has a reader of JSON, which guesses one type for a field from all of its rows: strings
that look like dates become dates, objects in a list get each other's keys with null in them, and a line with
two objects becomes two rows. A run must train on what the file says, so files are read as lines and each line
is parsed here. That also tells where a line goes wrong.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from isoloss.data.errors import DataError, RowError
from isoloss.data.rows import FIELDS, SHAPE_FIELDS

Row = dict[str, Any]

MAX_FAULTS = 10
"""Faults shown at once."""

_SMALL_FILE_BYTES = 2**24
"""Files up to this size are held in memory. Larger ones are mapped from a copy in the cache of `datasets`,
which the first of several ranks makes while the others wait at its lock."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows of one file or of one saved dataset."""

    path: str
    count: int
    fetch: Callable[[int], Any]
    """What stands in the file for a row."""

    scan: Callable[[], Iterator[Any]]
    """The same for all rows in their order, faster."""

    parse: Callable[[Any], Row]
    """The row; raises RowError."""

    place: Callable[[int], str]
    """File and line of a row, or file and position."""


def open_file(path: str) -> Shard:
    """The rows of one file.

    Raises:
        DataError: it cannot be read or holds no row. Single lines at fault raise when they are parsed.
    """
    suffix = Path(path).suffix
    if suffix == ".parquet":
        shard = _open_parquet(path)
    elif suffix == ".json" and _starts_with_bracket(path):
        shard = _open_list(path)
    else:
        shard = _open_lines(path)
    if shard.count == 0:
        raise DataError(f"{path}: the file is empty; give it rows or take it out of the source")
    return shard


def open_saved(path: str) -> Shard:
    """The rows of a folder that `Dataset.save_to_disk` wrote; of a `DatasetDict`, its split `train`."""
    with _reading(path):
        saved = datasets.load_from_disk(path)
    if isinstance(saved, datasets.DatasetDict):
        if "train" not in saved:
            raise DataError(
                f"{path}: the dataset has the splits {', '.join(saved)} and no train; give the folder of one"
            )
        saved = saved["train"]
    shard = _table(saved, path)
    if shard.count == 0:
        raise DataError(f"{path}: the dataset has no row; give it rows or remove the source")
    return shard


def _open_parquet(path: str) -> Shard:
    with _reading(path):
        table = datasets.Dataset.from_parquet(path)
    return _table(table, path)


def _table(table: datasets.Dataset, path: str) -> Shard:
    if any(name in SHAPE_FIELDS for name in table.column_names):
        # other columns may hold images or audio that would be decoded for nothing
        table = table.select_columns([name for name in table.column_names if name in FIELDS])
    table = table.with_format(None)

    def scan() -> Iterator[Row]:
        for batch in table.iter(1000):
            columns = [batch[name] for name in table.column_names]
            for values in zip(*columns, strict=True):
                yield dict(zip(table.column_names, values, strict=True))

    return Shard(
        path, len(table), table.__getitem__, scan, _without_nulls, lambda index: f"{path}: row {index}"
    )


def _without_nulls(value: Any) -> Any:
    """Without the fields that a table has in every row because some row has them."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(part) for part in value]
    return value


def _open_lines(path: str) -> Shard:
    try:
        with _reading(path):
            if Path(path).stat().st_size <= _SMALL_FILE_BYTES:
                text = Path(path).read_text(encoding="utf-8")
                lines = datasets.Dataset.from_dict({"text": text.split("\n")})
            else:
                lines = datasets.Dataset.from_text(path)
    except UnicodeDecodeError:
        raise DataError("\n".join(_undecodable_lines(path))) from None
    filled = np.fromiter((number for number, line in enumerate(_texts(lines)) if line.strip()), np.int64)
    return Shard(
        path,
        len(filled),
        lambda index: lines[int(filled[index])]["text"],
        lambda: (line for line in _texts(lines) if line.strip()),
        _parse_line,
        lambda index: f"{path}:{int(filled[index]) + 1}",
    )


def _texts(lines: datasets.Dataset) -> Iterator[str]:
    for batch in lines.iter(1000):
        yield from batch["text"]


def _parse_line(line: str) -> Row:
    try:
        return _parse_object(line.removeprefix("\ufeff"), "one object a line")
    except json.JSONDecodeError as fault:
        raise RowError(
            f"the line is no JSON: {fault.msg}; write one object a line, with double quotes", fault.colno
        ) from None


def _parse_object(text: str, wanted: str) -> Row:
    try:
        row = json.loads(text, object_pairs_hook=_without_duplicates)
    except (RowError, json.JSONDecodeError):
        raise
    except (ValueError, RecursionError) as fault:  # limits of Python's on digits and depth
        raise RowError(f"the row cannot be read ({fault}); shorten its numbers, or nest it less") from None
    if not isinstance(row, dict):
        raise RowError(
            f'expected an object, got {type(row).__name__}; write {wanted}, like {{"text": "..."}}'
        )
    if "\\ud" in text or "\\uD" in text:
        for name, value in row.items():
            _check_characters(name, value)
    return row


def _without_duplicates(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowError(f"the key {twice!r} stands {names.count(twice)} times in one object; keep one of them")
    return row


def _check_characters(name: str, value: object) -> None:
    """Raise where a field holds half of a surrogate pair, which is no character and has no UTF-8."""
    try:
        json.dumps({name: value}, ensure_ascii=False).encode()
    except UnicodeEncodeError as fault:
        half = fault.object[fault.start]
        raise RowError(
            f"the field {name!r} holds {half!r}, half of a character that JSON writes as two \\u escapes; "
            "write both, or leave it out"
        ) from None


def _undecodable_lines(path: str) -> Iterator[str]:
    found = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as fault:
                found += 1
                yield (
                    f"{path}:{number}: byte {fault.start + 1} of the line is not UTF-8 ({fault.reason}); "
                    "save the file as UTF-8"
                )
            if found == MAX_FAULTS:
                return


def _starts_with_bracket(path: str) -> bool:
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        while (character := file.read(1)).isspace():
            pass
    return character == "["


def _open_list(path: str) -> Shard:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        json.loads(text, parse_int=str)
    except UnicodeDecodeError:
        raise DataError("\n".join(_undecodable_lines(path))) from None
    except json.JSONDecodeError as fault:
        raise DataError(
            f"{path}:{fault.lineno}:{fault.colno}: the file starts as a JSON list but is none: {fault.msg}; "
            "write [{...}, {...}], or one object a line"
        ) from None
    elements = _elements(text)
    return Shard(
        path,
        len(elements),
        lambda index: elements[index][1],
        lambda: (element for _, element in elements),
        lambda element: _parse_object(element, "a list of objects"),
        lambda index: f"{path}:{elements[index][0]}",
    )


def _elements(text: str) -> Sequence[tuple[int, str]]:
    """The line at which each element of a JSON list starts, from 1, and its text."""
    decoder = json.JSONDecoder(parse_int=str)  # a number with too many digits is told with its row
    elements: list[tuple[int, str]] = []
    place, line = 0, 1
    end = text.index("[") + 1
    while True:
        start = end
        while text[start].isspace() or text[start] == ",":
            start += 1
        if text[start] == "]":
            return elements
        line += text.count("\n", place, start)
        place = start
        _, end = decoder.raw_decode(text, start)
        elements.append((line, text[start:end]))


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Let `datasets` read without progress bars, and say in our words what it could not do."""
    shows_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path}: it could not be read, or not cached in {datasets.config.HF_DATASETS_CACHE}: {error}; "
            "the environment variable HF_DATASETS_CACHE names another folder for the cache"
        ) from error
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, UnicodeDecodeError):
            raise error.__cause__ from None
        raise DataError(f"{path}: it cannot be read: {error.__cause__ or error}") from error
    except UnicodeDecodeError:
        raise
    except (ValueError, IndexError) as error:  # a broken table, or one without rows
        raise DataError(f"{path}: it cannot be read, or it is empty: {error}; write the file anew") from error
    finally:
        if shows_bars:
            datasets.enable_progress_bars()
