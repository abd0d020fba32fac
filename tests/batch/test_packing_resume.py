"""A packer that is stopped and filled again from keys gives the same windows as one that was not."""

import io
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batch.test_packing import rows
from isoloss import Document
from isoloss.batch.packing import PackedWindow, Packer
from isoloss.batch.packing_record import PackingRecord

Rows = list[list[Document]]


class Stream:
    """Rows that are added as a packer asks for them, and read again by key."""

    def __init__(self, rows: Rows, packer: Packer[tuple[str, int]], position: int = 0) -> None:
        self.rows = rows
        self.packer = packer
        self.position = position

    def read(self, key: tuple[str, int]) -> Sequence[Document]:
        return self.rows[key[1]]

    def next_window(self) -> PackedWindow[tuple[str, int]] | None:
        while self.position < len(self.rows) and not self.packer.ready:
            self.packer.add(self.rows[self.position], ("source", self.position))
            self.position += 1
        return None if self.packer.empty else self.packer.pop()

    def all_windows(self) -> list[PackedWindow[tuple[str, int]]]:
        windows = []
        while (window := self.next_window()) is not None:
            windows.append(window)
        return windows


def digest(window: PackedWindow[tuple[str, int]]) -> object:
    batch = window.batch
    return (
        window.placed,
        batch.layout,
        batch.input_ids.tolist(),
        {term: values.tolist() for term, values in batch.targets.items()},
        {term: values.tolist() for term, values in batch.weights.items()},
    )


def packer(lookahead: int, **options: object) -> Packer[tuple[str, int]]:
    settings = {"alignment": 4, "lookahead": lookahead, "long_documents": "split", **options}
    return Packer(settings.pop("window", 20), **settings)  # type: ignore[arg-type]


@given(rows(), st.sampled_from([8, 20]), st.integers(1, 8), st.sampled_from(["split", "truncate", "drop"]))
@settings(max_examples=30)
def test_row_35_stopping_after_any_number_of_windows_changes_no_later_one(
    stream: Rows, window: int, lookahead: int, policy: str
) -> None:
    whole = Stream(stream, packer(lookahead, window=window, long_documents=policy))
    expected = whole.all_windows()
    events = whole.packer.record.take_events()
    for stop in range(len(expected) + 1):
        first = Stream(stream, packer(lookahead, window=window, long_documents=policy))
        for _ in range(stop):
            first.next_window()
        state = pickle.loads(pickle.dumps(first.packer.state_dict()))
        second = Stream(stream, packer(lookahead, window=window, long_documents=policy), first.position)
        second.packer.load_state_dict(state, second.read)
        assert second.packer.state_dict() == state
        assert second.packer.buffered_tokens == first.packer.buffered_tokens
        assert [digest(window) for window in second.all_windows()] == [
            digest(window) for window in expected[stop:]
        ]
        assert second.packer.record.counts() == whole.packer.record.counts()
        assert second.packer.record.take_events() == events, "events of before and after the stop"


LONG = [Document(range(1, 31)), Document([40, 41]), Document(range(50, 81)), Document([90])]


def test_the_state_names_what_is_left_of_each_row_and_holds_no_token() -> None:
    stream = Stream([[document] for document in LONG], packer(4))
    stream.next_window()
    state = stream.packer.state_dict()
    assert state["rows"] == [
        (("source", 0), 2, [(1, 10)]),
        (("source", 1), 1, [(0, 2)]),
        (("source", 2), 2, [(0, 20), (1, 11)]),
    ]
    stream.next_window()
    assert stream.packer.state_dict()["rows"] == [(("source", 2), 2, [(0, 20), (1, 11)])]
    assert "input_ids" not in json.dumps(state)


def test_each_row_is_read_once_and_in_order() -> None:
    stream = Stream([[document] for document in LONG], packer(100))
    stream.next_window()
    state = stream.packer.state_dict()
    asked = []

    def read(key: tuple[str, int]) -> list[Document]:
        asked.append(key)
        return stream.rows[key[1]]

    packer(100).load_state_dict(state, read)
    assert asked == [key for key, _, _ in state["rows"]]
    assert len(set(asked)) == len(asked) > 1


def test_the_same_key_twice_is_two_rows() -> None:
    one: Packer[str] = Packer(8, alignment=1, lookahead=10)
    for length in (5, 8, 2):
        one.add([Document(range(1, length + 1))], "same")
    assert [left for _, _, left in one.state_dict()["rows"]] == [[(0, 5)], [(0, 8)], [(0, 2)]]


def test_the_state_may_travel_as_json() -> None:
    stream = Stream([[document] for document in LONG], packer(4))
    stream.next_window()
    state = json.loads(json.dumps(stream.packer.state_dict()))
    resumed = packer(4)
    resumed.load_state_dict(state, stream.read)  # JSON has made lists of the keys
    assert len(resumed) == len(stream.packer) > 0
    assert torch.equal(resumed.pop().batch.input_ids, stream.packer.pop().batch.input_ids)
    assert resumed.record.counts() == stream.packer.record.counts()


@dataclass(frozen=True)
class RowKey:
    row: int


def test_keys_are_never_looked_into() -> None:
    one: Packer[RowKey] = Packer(8)
    one.add([Document([])], RowKey(3))
    one.add([Document([1])], RowKey(4))
    other: Packer[RowKey] = Packer(8)
    other.load_state_dict(one.state_dict(), lambda key: [Document([1])])
    assert [event.key for event in other.record.take_events()] == [RowKey(3)]
    assert other.pop().placed[0].key == RowKey(4)


def test_loading_replaces_what_the_buffer_held() -> None:
    one: Packer[int] = Packer(8)
    one.add([Document([1, 2])], 0)
    state = one.state_dict()
    other: Packer[int] = Packer(8)
    other.add([Document([9])], 5)
    other.load_state_dict(state, lambda key: [Document([1, 2])])
    assert other.pop().batch.input_ids.tolist() == [1, 2, 0, 0, 0, 0, 0, 0]
    assert other.empty
    assert other.record.rows_in == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("window", 24),
        ("alignment", 2),
        ("lookahead", 5),
        ("long_documents", "drop"),
        ("pad_token_id", 1),
        ("term", "other"),
    ],
)
def test_another_setting_is_an_error_that_shows_both(option: str, value: object) -> None:
    state = packer(4).state_dict()
    with pytest.raises(
        ValueError, match=rf"saved with {option}=.*, this packer has {value!r}; .* resume with"
    ):
        packer(**{"lookahead": 4, option: value}).load_state_dict(state, lambda key: [])  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [31, 25, 5, 0])
def test_a_row_that_has_changed_is_an_error_that_names_it(length: int) -> None:
    one = packer(4)
    one.add([Document(range(30))], ("source", 3))
    state = one.state_dict()
    with pytest.raises(ValueError, match=r"row \('source', 3\) had 2 pieces, .*the data has changed since"):
        packer(4).load_state_dict(state, lambda key: [Document(range(length))])


def test_a_record_continues() -> None:
    record = PackingRecord()
    one: Packer[int] = Packer(8, record=record)
    one.add([Document(range(1, 13))], 0)
    one.add([Document([1])], 1)
    one.pop()
    restored = PackingRecord()
    restored.load_state_dict(torch.load(_saved(record.state_dict()), weights_only=True))
    assert restored.counts() == record.counts()
    assert restored.take_events() == record.take_events() != []


def _saved(state: object) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer
