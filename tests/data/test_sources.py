"""Files, folders and datasets as rows; what is said of those that cannot be read."""

import json
import multiprocessing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest

from data.corpora import write_rows
from isoloss.data import shards
from isoloss.data.errors import DataError
from isoloss.data.rows import Conversation, check_row
from isoloss.data.sources import Source, SourceSpec

ROWS: list[dict[str, Any]] = [{"text": "a"}, {"text": "b\u2028c", "channel": "x"}, {"text": "2024-01-01"}]
TABLE = [{"channel": None, **row} for row in ROWS]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def check_text(row: Mapping[str, Any]) -> bool:
    return isinstance(check_row(row, loss_on="assistant"), Conversation)


def source(path: Path | str) -> Source:
    return Source(SourceSpec(name="s", path=str(path)))


def rows(path: Path | str) -> list[dict[str, Any]]:
    found = source(path)
    return [found.read(index) for index in range(len(found))]


def _write_list(path: Path) -> None:
    path.write_text(json.dumps(ROWS, indent=1))


def _write_parquet(path: Path) -> None:
    datasets.Dataset.from_list(TABLE).to_parquet(path)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "lines.jsonl": lambda path: write_rows(path, ROWS),
    "lines.ndjson": lambda path: write_rows(path, ROWS),
    "lines.json": lambda path: write_rows(path, ROWS),
    "list.json": _write_list,
    "table.parquet": _write_parquet,
    "saved": lambda path: datasets.Dataset.from_list(TABLE).save_to_disk(path),
    "splits": lambda path: datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(TABLE), "test": datasets.Dataset.from_list(TABLE[:1])}
    ).save_to_disk(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_rows_as_they_were_written(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    assert rows(tmp_path / name) == ROWS
    survey = source(tmp_path / name).survey(check_text)
    assert list(survey.channels) == ["s", "x"]
    assert survey.faults == []


def test_a_large_file_is_mapped_and_gives_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}\r\n{"text":"c"}')
    small = rows(path)
    monkeypatch.setattr(shards, "_SMALL_FILE_BYTES", 0)
    assert rows(path) == small == [{"text": "a"}, {"text": "b"}, {"text": "c"}]
    assert [source(path).place(index) for index in range(3)] == [f"{path}:{line}" for line in (1, 4, 5)]
    path.write_bytes(b'{"text": "d"}\n')
    assert rows(path) == [{"text": "d"}]  # not what the cache holds of the file before


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_file_of_the_same_name_and_size_is_not_served_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(shards, "_SMALL_FILE_BYTES", 0)
    found, sizes = [], set()
    for text in ("aaa", "bbb"):
        path = tmp_path / name
        if path.suffix == ".jsonl":
            write_rows(path, [{"text": text}])
        else:
            datasets.Dataset.from_list([{"text": text}]).to_parquet(path)
        found += rows(path)
        sizes.add(path.stat().st_size)
    assert found == [{"text": "aaa"}, {"text": "bbb"}]
    assert len(sizes) == 1


def _count(path: Path, results: Any) -> None:
    results.put(len(source(path)))


def test_ranks_that_start_at_once_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_SMALL_FILE_BYTES", 0)
    path = write_rows(tmp_path / "a.jsonl", [{"text": "x" * 100}] * 20_000)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_count, args=(path, results)) for _ in range(4)]
    for process in processes:
        process.start()
    counts = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert counts == [20_000] * 4


def test_nested_fields_are_kept_as_they_are(tmp_path: Path) -> None:
    """A table would give each object the keys of the others, and one type to a field."""
    given = [
        {"messages": [{"role": "assistant", "tool_calls": [{"arguments": {"city": "x", "day": None}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "t"}]}]},
        {"messages": [{"role": "assistant", "content": "t"}], "prompt": 5, "text": "2024-01-01 10:00:00"},
    ]
    assert rows(write_rows(tmp_path / "a.jsonl", given)) == given


def test_a_row_of_a_table_has_only_its_own_fields(tmp_path: Path) -> None:
    given = [
        {"messages": [{"role": "user", "content": "a", "loss": None}], "n": 1},
        {"messages": [{"role": "user", "content": "a", "loss": True}], "n": 2},
    ]
    datasets.Dataset.from_list(given).to_parquet(tmp_path / "a.parquet")
    assert rows(tmp_path / "a.parquet") == [
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "user", "content": "a", "loss": True}]},
    ]


def test_places_name_file_and_line(tmp_path: Path) -> None:
    write_rows(tmp_path / "b.jsonl", ROWS)
    (tmp_path / "a.json").write_text('\n[{"text":\n"a"}, {"text": "b"},\n\n{"text": "c"}]\n')
    _write_parquet(tmp_path / "c.parquet")
    found = source(tmp_path)
    assert [found.place(index).removeprefix(f"{tmp_path}/") for index in range(9)] == [
        "a.json:2",
        "a.json:3",
        "a.json:5",
        "b.jsonl:1",
        "b.jsonl:2",
        "b.jsonl:3",
        "c.parquet: row 0",
        "c.parquet: row 1",
        "c.parquet: row 2",
    ]
    assert [found.read(index)["text"] for index in range(9)] == ["a", "b", "c"] + 2 * [
        row["text"] for row in ROWS
    ]


def test_folders_and_patterns_are_read_in_a_fixed_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / ".cache").mkdir()
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", ".cache/d.jsonl"):
        write_rows(tmp_path / name, [{"text": name}])
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / "README.md").write_text("hello")
    assert [row["text"] for row in rows(tmp_path)] == ["a.jsonl", "b.jsonl", "deep/c.jsonl"]
    assert [row["text"] for row in rows(f"{tmp_path}/[ab].jsonl")] == ["a.jsonl", "b.jsonl"]
    assert len(rows(f"{tmp_path}/**/*.jsonl")) == 3


def test_of_a_folder_with_splits_the_train_files_are_read_and_the_others_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write_rows(tmp_path / f"{name}.jsonl", [{"text": name}])
    assert [row["text"][:5] for row in rows(tmp_path)] == ["train", "train"]
    assert "test-00000-of-00001.jsonl" in caplog.text


def test_a_folder_whose_files_only_sound_like_splits_is_read_whole(tmp_path: Path) -> None:
    for name in ("training_notes", "latest", "greatest", "b"):
        write_rows(tmp_path / f"{name}.jsonl", [{"text": name}])
    assert len(rows(tmp_path)) == 4


def faults(path: Path | str) -> str:
    """What is said of a source, on opening it or on looking through it."""
    with pytest.raises(DataError) as caught:
        found = source(path).survey(check_text)
        raise DataError("\n".join(found.faults))
    return str(caught.value)


def test_malformed_lines_are_named_with_column_and_fix_all_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": b}\n\n["x"]\n{"text": "a"} {"text": "b"}\n{"txt": "a"}\n')
    lines = faults(path).splitlines()
    assert (
        lines[0]
        == f"{path}:2:10: the line is no JSON: Expecting value; write one object a line, with double quotes"
    )
    assert lines[1].startswith(f"{path}:4: expected an object, got list; write one object a line")
    assert lines[2].startswith(f"{path}:5:15: the line is no JSON: Extra data")
    assert lines[3].startswith(f"{path}:6: the row has the fields txt (did you mean text?)")
    assert len(lines) == 4


def test_ten_faults_are_shown_and_all_are_counted(tmp_path: Path) -> None:
    survey = source(write_rows(tmp_path / "a.jsonl", [{"text": ""}] * 25)).survey(check_text)
    assert (len(survey.faults), survey.num_faults) == (10, 25)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_what_json_reads_and_nobody_meant_is_named(tmp_path: Path, name: str) -> None:
    lines = [
        r'{"text": "a", "weight": 1, "text": "b"}',
        r'{"text": "half \ud83d of a character"}',
        r'{"text": "a whole one \ud83d\ude00, and \\ud83d as text"}',
        r'{"messages": [{"role": "assistant", "content": "x \uDE00"}]}',
        r'{"messages": [{"role": "user", "content": "x", "role": "assistant"}]}',
        '{"text": "a", "weight": ' + "1" * 5000 + "}",
        '{"text": "a", "weight": ' + "1" * 400 + "}",
    ]
    path = tmp_path / name
    text = "\n".join(lines) if name == "a.jsonl" else "[" + ",\n".join(lines) + "]"
    path.write_text(text)
    advice = "half of a character that JSON writes as two \\u escapes; write both, or leave it out"
    *named, digits, weight = faults(path).splitlines()
    assert digits.startswith(f"{path}:6: the row cannot be read (Exceeds the limit (4300 digits)")
    assert weight.startswith(f"{path}:7: weight must be a number from 0, got 1111")
    assert named == [
        f"{path}:1: the key 'text' stands 2 times in one object; keep one of them",
        f"{path}:2: the field 'text' holds '\\ud83d', {advice}",
        f"{path}:4: the field 'messages' holds '\\ude00', {advice}",
        f"{path}:5: the key 'role' stands 2 times in one object; keep one of them",
    ]


@pytest.mark.parametrize("small", [True, False])
def test_bytes_that_are_no_text_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    if not small:
        monkeypatch.setattr(shards, "_SMALL_FILE_BYTES", 0)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert faults(path).startswith(f"{path}:2: byte 11 of the line is not UTF-8")
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"text": "\xff"}]')
    assert faults(path).startswith(f"{path}:1: byte 12 of the line is not UTF-8")


def test_a_list_that_does_not_end_is_named_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"},\n {"text": "b"}\n {"text": "c"}]')
    assert faults(path).startswith(
        f"{path}:3:2: the file starts as a JSON list but is none: Expecting ',' delimiter"
    )
    path.write_text('[{"text": "a"},\n 5]')
    assert faults(path).startswith(f"{path}:2: expected an object, got int; write a list of objects")


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", ""), ("a.jsonl", "\n \n"), ("a.json", "[]"), ("a.json", "")]
)
def test_an_empty_file_is_an_error(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert faults(tmp_path / name) == (
        f"{tmp_path / name}: the file is empty; give it rows or take it out of the source"
    )


def test_empty_tables_and_datasets_are_errors(tmp_path: Path) -> None:
    empty = datasets.Dataset.from_dict({"text": []})
    empty.to_parquet(tmp_path / "a.parquet")
    assert "it cannot be read, or it is empty" in faults(tmp_path / "a.parquet")
    empty.save_to_disk(tmp_path / "saved")
    assert "it cannot be read, or it is empty" in faults(tmp_path / "saved")
    datasets.DatasetDict({"test": datasets.Dataset.from_list(TABLE)}).save_to_disk(tmp_path / "splits")
    assert "has the splits test and no train; give the folder of one" in faults(tmp_path / "splits")


def test_a_broken_table_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no table")
    assert faults(tmp_path / "a.parquet").startswith(f"{tmp_path}/a.parquet: it cannot be read")


def test_a_path_without_files_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "none.jsonl", tmp_path / "empty", f"{tmp_path}/*.jsonl"):
        assert "source 's' finds no file there" in faults(path)
    (tmp_path / "a.csv").write_text("a,b\n")
    assert "files ending in .csv are not read; use one of .jsonl" in faults(tmp_path / "a.csv")


def test_all_files_at_fault_are_named(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("")
    write_rows(tmp_path / "c.jsonl", ROWS)
    assert [line.split(":")[0] for line in faults(tmp_path).splitlines()] == [
        str(tmp_path / "a.jsonl"),
        str(tmp_path / "b.jsonl"),
    ]


def test_a_field_that_is_nearly_ours_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": "a", "weigth": 2}] * 3)
    source(tmp_path / "a.jsonl").survey(check_text)
    assert caplog.text.count("'weigth' is not read; did you mean 'weight'?") == 1


def test_the_progress_bars_of_the_user_are_left_alone(tmp_path: Path) -> None:
    before = datasets.are_progress_bars_disabled()
    source(write_rows(tmp_path / "a.jsonl", ROWS))
    assert datasets.are_progress_bars_disabled() == before


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.2, 0.99])
def test_held_out_rows_follow_from_seed_and_position(tmp_path: Path, fraction: float) -> None:
    whole = source(write_rows(tmp_path / "a.jsonl", [{"text": str(n)} for n in range(100)]))
    trained, held_out = whole.split(seed=1, eval_fraction=fraction)
    assert sorted([*trained, *held_out]) == list(range(100))
    assert len(held_out) == {0.0: 0, 0.01: 1, 0.2: 20, 0.99: 99}[fraction]
    again, other = (whole.split(seed=seed, eval_fraction=fraction)[1] for seed in (1, 2))
    assert list(again) == list(held_out)
    if 0 < fraction < 0.5:
        assert list(other) != list(held_out)


def test_rows_added_at_the_end_move_few_held_out_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": "a"}] * 100)
    write_rows(tmp_path / "b.jsonl", [{"text": "a"}] * 110)
    before, after = (
        set(source(tmp_path / name).split(seed=1, eval_fraction=0.2)[1]) for name in ("a.jsonl", "b.jsonl")
    )
    assert len(before - after) <= 5


def test_one_row_is_always_left_to_train_on(tmp_path: Path) -> None:
    one = source(write_rows(tmp_path / "a.jsonl", [{"text": "a"}]))
    assert [len(part) for part in one.split(seed=1, eval_fraction=0.5)] == [1, 0]
    two = source(write_rows(tmp_path / "b.jsonl", [{"text": "a"}] * 2))
    assert [len(part) for part in two.split(seed=1, eval_fraction=0.01)] == [1, 1]
