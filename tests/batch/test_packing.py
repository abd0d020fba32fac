"""`Packer` and `pack`: every row accounted for, every target once, windows well filled, in linear time."""

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from types import FrameType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batch.strategies import documents
from isoloss import IGNORE_INDEX, Document, PackedBatch
from isoloss.batch.packing import Packer, pack
from isoloss.batch.packing_record import PackingRecord

IGN = IGNORE_INDEX
POLICIES = ("truncate", "split", "drop")
POOL = torch.arange(1, 40_001)


def log_normal_documents(number: int, window: int = 4096, seed: int = 0) -> Iterator[Document]:
    """Median 300 tokens, sigma 1.2, cut at the window; all of them views of one tensor."""
    draw = random.Random(seed)
    for _ in range(number):
        length = min(window, max(1, int(draw.lognormvariate(5.703782, 1.2))))
        yield Document(POOL[:length])


@st.composite
def rows(draw: st.DrawFn) -> list[list[Document]]:
    """Single documents and groups, some with a shared prefix; every token id occurs once in the stream."""
    stream = []
    next_id = 1
    for number in range(draw(st.integers(0, 12))):
        group = draw(st.booleans())
        row = []
        for index in range(draw(st.integers(2, 3)) if group else 1):
            document = draw(documents(max_tokens=30))
            parent = 0 if group and index > 0 and draw(st.booleans()) else None
            first = next_id
            next_id += len(document)
            labels = document.labels
            if labels is not None:
                labels = [IGN if label == IGN else first + place for place, label in enumerate(labels)]
            row.append(
                Document(
                    list(range(first, first + len(document))),
                    labels,
                    document.source,
                    document.weight,
                    f"group {number}" if group else None,
                    parent,
                    document.term_labels,
                )
            )  # fmt: skip
        if any(document.parent == 0 for document in row):
            row[0] = Document(row[0].input_ids, source=row[0].source, group=row[0].group)
        stream.append(row)
    return stream


def plain_targets(document: Document, start: int, stop: int) -> Counter[tuple[int, float]]:
    """(label, weight) of every target of the tokens `start` to `stop` on their own."""
    labels = document.input_ids if document.labels is None else document.labels
    found: Counter[tuple[int, float]] = Counter()
    for place in range(start + 1, stop):
        if labels[place] != IGN:
            weight = document.weight if isinstance(document.weight, float) else document.weight[place]
            found[labels[place], weight] += 1
    return found


def seen_targets(batch: PackedBatch) -> Counter[tuple[int, float]]:
    targets = batch.targets["text"].tolist()
    weights = batch.weights["text"].tolist() if "text" in batch.weights else [1.0] * len(batch)
    return Counter(
        (label, weight) for label, weight in zip(targets, weights, strict=True) if label != IGN
    )  # fmt: skip


@given(
    rows(),
    st.sampled_from([(16, 1), (16, 4), (24, 8), (20, 8), (64, 8)]),
    st.integers(1, 6),
    st.sampled_from(POLICIES),
)
def test_every_row_is_packed_whole_truncated_split_or_dropped_and_every_target_appears_once(
    stream: list[list[Document]], sizes: tuple[int, int], lookahead: int, policy: str
) -> None:
    window, alignment = sizes
    longest = window // alignment * alignment
    packer: Packer[str] = Packer(window, alignment=alignment, lookahead=lookahead, long_documents=policy)
    windows = []
    for number, row in enumerate(stream):
        packer.add(row, f"row {number}")
        while packer.ready:
            windows.append(packer.pop())
        counts = packer.record.counts()
        assert counts["rows_in"] == number + 1
        assert counts["tokens_in"] == (
            counts["tokens_packed"]
            + counts["tokens_truncated"]
            + counts["tokens_dropped"]
            + packer.buffered_tokens
        )
    while not packer.empty:
        windows.append(packer.pop())

    # what ought to have become of each row
    expected: dict[str, list[tuple[int, int]]] = {}
    fates: Counter[str] = Counter()
    targets: Counter[tuple[int, float]] = Counter()
    truncated = dropped = 0
    for number, row in enumerate(stream):
        lengths = [len(document) for document in row]
        strides = sum(-(-length // alignment) * alignment for length in lengths)
        prefix = any(document.parent == 0 for document in row)
        if 0 in lengths or (strides > longest and (len(row) > 1 or policy == "drop")):
            fates["dropped"] += 1
            dropped += sum(lengths)
            continue
        edges = [(0, sum(lengths))]
        fate = "whole"
        if strides > longest:
            fate = {"truncate": "truncated", "split": "split"}[policy]
            edges = [(start, min(start + longest, lengths[0])) for start in range(0, lengths[0], longest)]
            if policy == "truncate":
                edges = edges[:1]
                truncated += lengths[0] - longest
        fates[fate] += 1
        expected[f"row {number}"] = edges
        for index, document in enumerate(row):
            if index == 0 and prefix:
                continue
            for start, stop in edges if len(row) == 1 else [(0, len(document))]:
                targets += plain_targets(document, start, stop)

    counts = packer.record.counts()
    assert {name: counts[f"rows_{name}"] for name in ("whole", "truncated", "split", "dropped")} == {
        name: fates[name] for name in ("whole", "truncated", "split", "dropped")
    }
    assert counts["rows_in"] == len(stream) == sum(fates.values())
    assert (counts["tokens_truncated"], counts["tokens_dropped"]) == (truncated, dropped)
    assert counts["tokens_in"] == counts["tokens_packed"] + truncated + dropped
    assert counts["pieces"] == sum(len(edges) for edges in expected.values())
    events = packer.record.take_events()
    assert Counter(event.action for event in events) == fates - Counter(whole=fates["whole"])

    # what is in the windows
    pieces: dict[str, list[tuple[int, int]]] = {key: [] for key in expected}
    for taken in windows:
        layout = taken.batch.layout
        assert layout.physical_tokens == window
        assert layout.alignment == alignment
        index = 0
        for placed in taken.placed:
            row = stream[int(placed.key.removeprefix("row "))]
            start, stop = expected[placed.key][placed.piece]
            assert (placed.pieces, placed.num_tokens) == (len(expected[placed.key]), stop - start)
            pieces[placed.key].append((start, stop))
            first = index
            for document in row:
                tokens = list(document.input_ids)[start:stop] if len(row) == 1 else document.input_ids
                slot = layout.document_starts[index]
                assert taken.batch.input_ids[slot : slot + len(tokens)].tolist() == tokens
                assert layout.document_lengths[index] == len(tokens)
                assert layout.document_sources[index] == document.source
                parent = layout.document_parents[index]
                assert parent == (-1 if document.parent is None else first + document.parent)
                grouped = layout.document_groups[index]
                assert (grouped == -1) == (len(row) == 1)
                index += 1
            assert len(set(layout.document_groups[first:index])) == 1, "a group has one number"
        assert index == len(layout.document_lengths)
        used = [number for number in layout.document_groups if number != -1]
        assert sorted(set(used)) == list(range(len(set(used)))), "groups are numbered from 0 in each window"
    assert {key: sorted(found) for key, found in pieces.items()} == expected
    assert sum((seen_targets(taken.batch) for taken in windows), Counter()) == targets


@given(rows(), st.integers(1, 6))
def test_packing_is_deterministic_and_pack_equals_the_packer(
    stream: list[list[Document]], lookahead: int
) -> None:
    flat = [document for row in stream for document in row]
    one, two = (
        [
            (batch.input_ids.tolist(), batch.layout, batch.targets["text"].tolist())
            for batch in pack(flat, 32, alignment=4, lookahead=lookahead, long_documents="split")
        ]
        for _ in range(2)
    )
    packer: Packer[int] = Packer(32, alignment=4, lookahead=lookahead, long_documents="split")
    three = []
    for number, row in enumerate(stream):
        packer.add(row, number)
        while packer.ready:
            three.append(packer.pop().batch)
    while not packer.empty:
        three.append(packer.pop().batch)
    assert one == two
    assert one == [
        (batch.input_ids.tolist(), batch.layout, batch.targets["text"].tolist()) for batch in three
    ]


def fill(batches: Sequence[PackedBatch]) -> float:
    physical = sum(batch.layout.physical_tokens for batch in batches)
    return sum(batch.layout.source_tokens for batch in batches) / physical


def test_windows_of_log_normal_lengths_are_at_least_98_percent_full() -> None:
    record = PackingRecord()
    batches = list(pack(log_normal_documents(3000), 4096, alignment=8, record=record))
    assert fill(batches) >= 0.98
    assert record.rows_whole == record.rows_in == 3000
    # the bound can fail: a buffer that holds little more than one window does not reach it
    assert fill(list(pack(log_normal_documents(1000), 4096, alignment=8, lookahead=1))) < 0.98


def test_the_oldest_unit_opens_the_window_and_the_largest_that_fit_follow() -> None:
    packer: Packer[str] = Packer(16, alignment=1, lookahead=10)
    for key, length in {"a": 5, "b": 3, "c": 9, "d": 7, "e": 3, "f": 2, "g": 2, "h": 16}.items():
        packer.add([Document(range(1, length + 1))], key)
    order = []
    while not packer.empty:
        order.append([placed.key for placed in packer.pop().placed])
    # 5 opens, 9 fits and leaves 2; then 3 opens, 7 and 3 fit (b is older than e), 2 fits; 16 is alone
    assert order == [["a", "c", "f"], ["b", "d", "e", "g"], ["h"]]


def test_no_unit_waits_longer_than_as_many_windows_as_units_were_before_it() -> None:
    packer: Packer[int] = Packer(64, alignment=1, lookahead=8)
    draw = random.Random(1)
    bounds: dict[int, int] = {}
    number_of_windows = 0
    for key in range(500):
        # large documents arrive all the time, and small ones would be passed over without the rule
        packer.add([Document(range(1, draw.choice([3, 40, 62, 64]) + 1))], key)
        bounds[key] = number_of_windows + len(packer)
        while packer.ready:
            number_of_windows += 1
            for placed in packer.pop().placed:
                assert number_of_windows <= bounds.pop(placed.key)


def test_pack_does_not_read_ahead_of_its_buffer() -> None:
    read = 0

    def endless() -> Iterator[Document]:
        nonlocal read
        while True:
            read += 1
            yield Document([1, 2, 3])

    windows = pack(endless(), 16, alignment=4, lookahead=6)
    assert read == 0
    next(windows)
    assert read == 7, "6 in the buffer and the one that shows that no group goes on"
    next(windows)
    assert read == 11


def test_ready_waits_for_a_window_of_slots_as_well() -> None:
    packer: Packer[int] = Packer(32, alignment=8, lookahead=2)
    for key in range(3):
        packer.add([Document([1])], key)
        assert not packer.ready
    packer.add([Document([1])], 3)
    assert packer.ready
    assert len(packer) == 4
    assert packer.buffered_tokens == 4
    packer.pop()
    assert packer.empty and not packer.ready


def test_a_long_document_is_truncated_to_its_first_tokens() -> None:
    record = PackingRecord()
    [batch] = pack([Document(range(1, 13), weight=[float(i) for i in range(12)])], 8, record=record)
    assert batch.input_ids.tolist() == list(range(1, 9))
    assert batch.targets["text"].tolist() == [2, 3, 4, 5, 6, 7, 8, IGN]
    assert batch.weights["text"].tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    [event] = record.take_events()
    assert (event.key, event.action, event.num_tokens, event.kept_tokens, event.pieces) == (
        0,
        "truncated",
        12,
        8,
        1,
    )
    assert event.reason == "a document of 16 slots is longer than the window of 8"
    assert record.take_events() == []


def test_pieces_of_a_split_document_are_documents_with_all_that_belongs_to_them() -> None:
    document = Document(
        torch.arange(1, 21),
        labels=[IGN if token % 3 == 0 else token for token in range(1, 21)],
        source=2,
        weight=[0.5] * 10 + [2.0] * 10,
        term_labels={"class": [IGN] * 19 + [4]},
        token_extras={"place": torch.arange(20).float().unsqueeze(-1)},
        document_extras={"value": 7},
    )
    packer: Packer[str] = Packer(8, alignment=4, long_documents="split")
    packer.add([document], "long")
    [event] = packer.record.take_events()
    assert (event.action, event.kept_tokens, event.pieces) == ("split", 20, 3)
    taken = [packer.pop() for _ in range(3)]
    assert packer.empty
    assert [[(p.key, p.piece, p.pieces, p.num_tokens) for p in window.placed] for window in taken] == [
        [("long", 0, 3, 8)],
        [("long", 1, 3, 8)],
        [("long", 2, 3, 4)],
    ]
    batches = [window.batch for window in taken]
    assert [batch.targets["text"].tolist() for batch in batches] == [
        [2, IGN, 4, 5, IGN, 7, 8, IGN],
        [10, 11, IGN, 13, 14, IGN, 16, IGN],  # 9 is the first token: no target in its own document
        [IGN, 19, 20, IGN, IGN, IGN, IGN, IGN],
    ]
    assert batches[1].weights["text"].tolist() == [0.5, 2.0, 0.0, 2.0, 2.0, 0.0, 2.0, 0.0]
    assert [batch.layout.document_sources for batch in batches] == [(2,)] * 3
    assert batches[2].targets["class"].tolist() == [IGN, IGN, IGN, 4, IGN, IGN, IGN, IGN]
    assert [batch.token_extras["place"].squeeze(-1).tolist() for batch in batches] == [
        list(range(8)),
        list(range(8, 16)),
        [16, 17, 18, 19, 0, 0, 0, 0],
    ]
    assert [batch.document_extras["value"] for batch in batches] == [[7]] * 3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_group_that_is_too_long_is_dropped_whole(policy: str) -> None:
    record = PackingRecord()
    pair = [Document(range(1, 6), group=7), Document(range(1, 4), group=7)]
    fits = [Document([1, 2], group=8), Document([3], group=8)]
    batches = list(
        pack([*pair, *fits], 8, alignment=4, long_documents=policy, record=record)  # type: ignore[arg-type]
    )
    assert [batch.layout.document_lengths for batch in batches] == [(2, 1)]
    [event] = record.take_events()
    assert (event.key, event.action, event.num_tokens, event.kept_tokens, event.pieces) == (
        0,
        "dropped",
        8,
        0,
        0,
    )
    assert event.reason == "a group of 12 slots is longer than the window of 8"


def test_what_has_no_token_is_dropped_with_a_reason() -> None:
    record = PackingRecord()
    empty = [Document([]), Document([1, 2], group=0), Document([], group=0), Document([5])]
    [batch] = pack(empty, 8, record=record)
    assert batch.layout.document_lengths == (1,)
    assert [(event.key, event.action, event.reason, event.num_tokens) for event in record.take_events()] == [
        (0, "dropped", "the document has no token", 0),
        (1, "dropped", "document 1 of the group has no token", 2),
    ]
    assert record.counts() == {
        "rows_in": 3,
        "rows_whole": 1,
        "rows_truncated": 0,
        "rows_split": 0,
        "rows_dropped": 2,
        "pieces": 1,
        "tokens_in": 3,
        "tokens_packed": 1,
        "tokens_truncated": 0,
        "tokens_dropped": 2,
    }


def test_a_document_that_names_a_group_of_its_own_is_a_group() -> None:
    record = PackingRecord()
    batches = list(
        pack([Document(range(9), group="a"), Document([1], group="b"), Document([2])], 8, record=record)
    )
    assert record.rows_dropped == 1, "a group is not truncated"
    assert [batch.layout.document_groups for batch in batches] == [(0,), (-1,)]


def test_neighbours_with_the_same_group_are_one_row() -> None:
    stream = [Document([1]), Document([2], group=0), Document([3], group=0), Document([4], group=1)]
    [batch] = pack([*stream, Document([5]), Document([6])], 64)
    assert batch.layout.document_groups == (-1, 0, 0, 1, -1, -1)
    assert list(pack([], 64)) == []


def test_a_refused_row_changes_nothing() -> None:
    packer: Packer[int] = Packer(16)
    with pytest.raises(ValueError, match=r"document 3 has 2 tokens and 1 labels; give one for each token"):
        packer.add([Document([1, 2], labels=[1])], 3)
    assert packer.empty
    assert set(packer.record.counts().values()) == {0}


def test_the_record_keeps_the_newest_events_and_counts_those_it_lost() -> None:
    record = PackingRecord(max_events=2)
    packer: Packer[int] = Packer(8, record=record)
    for key in range(5):
        packer.add([Document([])], key)
    assert record.events_lost == 3
    assert [event.key for event in record.take_events()] == [3, 4]
    assert record.rows_dropped == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 7}, r"a window of 7 slots does not hold one document at alignment 8"),
        ({"window": 8, "alignment": 0}, r"alignment 0; both are at least 1"),
        ({"window": 8, "lookahead": 0}, r"lookahead is 0; the buffer needs at least 1 unit"),
        (
            {"window": 8, "long_documents": "cut"},
            r"long_documents is 'cut'; use one of truncate, split, drop",
        ),
    ],
)
def test_settings_are_checked_at_once(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack([], **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        Packer(**options)  # type: ignore[arg-type]


def test_what_is_skipped_is_what_would_have_been_packed() -> None:
    packers = [Packer[int](64, long_documents="split", lookahead=4) for _ in range(2)]
    for packer in packers:
        for number in range(30):
            packer.add([Document(range(1, 2 + 7 * number % 100))], number)
    while not packers[0].empty:
        assert packers[1].skip() == packers[0].pop().placed
    assert packers[1].empty and packers[1].record.counts() == packers[0].record.counts()


def test_an_empty_packer_gives_no_window() -> None:
    with pytest.raises(
        ValueError, match=r"the packer is empty; add documents first, or use PackedBatch.empty"
    ):
        Packer(8).pop()


def packing_work(number: int, lookahead: int) -> tuple[float, float]:
    """Interpreter instructions and CPU seconds per document that ``pack`` spends on ``number`` of them."""
    draw = random.Random(0)
    stream = [Document(POOL[: draw.randint(1, 64)]) for _ in range(number)]
    instructions = 0

    def count(frame: FrameType, event: str, _argument: object) -> Callable[..., object]:
        nonlocal instructions
        frame.f_trace_opcodes = True
        instructions += event == "opcode"
        return count

    def consume() -> None:
        for _ in pack(stream, 256, alignment=8, lookahead=lookahead):
            pass

    seconds = []
    for _ in range(3):
        start = time.process_time()
        consume()
        seconds.append(time.process_time() - start)
    before = sys.gettrace()
    sys.settrace(count)
    try:
        consume()
    finally:
        sys.settrace(before)
    return instructions / number, min(seconds) / number


@pytest.mark.parametrize("lookahead", [64, 10_000])
def test_work_is_linear_in_the_number_of_documents(lookahead: int) -> None:
    # Instructions repeat exactly; seconds, which alone see what runs in C, vary with the machine, hence
    # the wide bound: sixteen times the documents would take sixteen times as long each in quadratic time.
    few_instructions, few_seconds = packing_work(300, lookahead)
    many_instructions, many_seconds = packing_work(4800, lookahead)
    assert many_instructions <= 1.25 * few_instructions
    assert many_seconds <= 5 * few_seconds


def test_without_a_record_the_first_loss_is_told_and_then_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    long = Document(range(20))
    list(pack([Document([1, 2])] * 5, 8))
    list(pack([long], 8, long_documents="split"))
    list(pack([long], 8, record=PackingRecord()))
    assert caplog.messages == []
    list(pack([Document([1, 2]), long, long, Document([])], 8, lookahead=1))
    first, last = caplog.messages
    assert "row 1 of the stream was truncated: a document of 24 slots is longer than the window of 8" in first
    assert last.endswith("of 4 rows, 2 were truncated (24 tokens lost) and 1 dropped (0 tokens)")


def test_a_group_that_comes_back_after_it_has_ended_is_an_error() -> None:
    """The two sides of a pair, all chosen ones first: they would have become two groups."""
    sides = [Document([1, 2], group=name) for name in ("a", "b", "a", "b")]
    message = "document 2 of the stream belongs to group 'a', whose last document was 0; put"
    with pytest.raises(ValueError, match=message):
        list(pack(sides, 16))
    list(pack([sides[0], sides[2], Document([3]), sides[1], sides[3]], 16))


def test_what_is_no_document_is_named() -> None:
    with pytest.raises(TypeError, match=r"at position 1, holds a list; packing takes Document objects"):
        list(pack([Document([1]), [2, 3]], 16))  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"unit 'row' holds a Tensor"):
        Packer[str](16).add([torch.arange(3)], "row")  # type: ignore[list-item]


@pytest.mark.parametrize(
    "weight",
    [np.float32(0.5), np.float64(0.5), torch.tensor(0.5), Fraction(1, 2)],
    ids=lambda w: type(w).__name__,
)
def test_a_weight_may_be_any_number(weight: float) -> None:
    [batch] = pack([Document([1, 2, 3], weight=weight)], 8)
    assert batch.weights["text"][:2].tolist() == [0.5, 0.5]
