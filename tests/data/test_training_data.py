"""What a run sees of its data besides the order: channels, books, faults, states."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest

from data.corpora import PLAIN, byte_tokenizer, numbered, open_data, write_rows
from isoloss.batch.document import Document
from isoloss.batch.packing import Packer
from isoloss.data import training_data
from isoloss.data.errors import DataError
from isoloss.data.lanes import Key, Lane, MixtureSpec, Permutations
from isoloss.data.ordering import random_order
from isoloss.data.sources import SourceSpec
from isoloss.data.training_data import DataSettings, TrainingData


def spec(path: Path, name: str = "", weight: float | None = None) -> SourceSpec:
    return SourceSpec(name=name or path.stem, path=str(path), weight=weight)


def lengths(path: Path, values: list[int]) -> Path:
    """Rows of `input_ids` with these lengths; no two are alike."""
    return write_rows(
        path, [{"input_ids": [n % 251] * (value - 1) + [n // 251]} for n, value in enumerate(values)]
    )


def states(*parts: TrainingData) -> dict[int, Any]:
    """The states of all lanes, as they come back from a file."""
    found = {number: state for part in parts for number, state in part.lane_states().items()}
    return {int(number): state for number, state in json.loads(json.dumps(found)).items()}


def totals(lanes: dict[int, Any]) -> Counter[str]:
    """The books of packing over all lanes."""
    added: Counter[str] = Counter()
    for state in lanes.values():
        added.update(
            {name: value for name, value in state["packer"]["record"].items() if isinstance(value, int)}
        )
    return added


def steps(parts: list[TrainingData], limit: int = 1000) -> list[list[list[int]]]:
    """The token ids of each window of each step, in the order of lanes, without the empty ones."""
    made = []
    more = True
    while more and len(made) < limit:
        results = [part.next_step() for part in parts]
        more = any(has_more for _, has_more in results)
        columns = zip(*(windows for windows, _ in results), strict=True)
        windows = [window for column in columns for window in column]
        made.append([window.input_ids.tolist() for window in windows if window.layout.num_documents])
    return made


LENGTHS = [5, 200, 64, 65, 1, 130, 9, 33, 70, 12, 300, 20] * 4


@pytest.mark.parametrize("policy", ["truncate", "split", "drop"])
def test_nothing_is_lost_whatever_becomes_of_long_documents(tmp_path: Path, policy: str) -> None:
    """Every row is whole, truncated, split or dropped, with an event for each that is not whole."""
    path = lengths(tmp_path / "a.jsonl", LENGTHS)
    data = open_data([spec(path)], long_documents=policy, num_passes=1)
    windows = steps([data])
    book = totals(states(data))
    long = [length for length in LENGTHS if length > 64]
    assert book["rows_in"] == len(LENGTHS)
    assert book[{"truncate": "rows_truncated", "split": "rows_split", "drop": "rows_dropped"}[policy]] == len(
        long
    )
    assert book["tokens_in"] == sum(LENGTHS)
    assert book["tokens_in"] == book["tokens_packed"] + book["tokens_truncated"] + book["tokens_dropped"]
    events = data.take_events()
    assert sorted(event["tokens"] for event in events) == sorted(long)
    assert {event["source"] for event in events} == {"a"}
    assert {event["place"] for event in events} == {
        f"{path}:{number}" for number, length in enumerate(LENGTHS, 1) if length > 64
    }
    assert data.take_events() == []
    kept = {
        "truncate": sum(min(n, 64) for n in LENGTHS),
        "split": sum(LENGTHS),
        "drop": sum(LENGTHS) - sum(long),
    }
    assert book["tokens_packed"] == kept[policy]
    assert windows


@pytest.mark.parametrize("policy", ["truncate", "split", "drop"])
def test_row_35_windows_and_books_survive_a_resume_on_other_ranks(tmp_path: Path, policy: str) -> None:
    """Also with pieces of a split document on both sides of the checkpoint."""
    path = lengths(tmp_path / "a.jsonl", LENGTHS)

    def ranks(size: int) -> list[TrainingData]:
        return [
            open_data([spec(path)], long_documents=policy, num_passes=2, data_rank=rank, data_size=size)
            for rank in range(size)
        ]

    alone = ranks(1)
    reference = steps(alone)
    for stop in (1, 2, len(reference) // 2, len(reference) - 1):
        first = ranks(3)
        windows = steps(first, stop)
        second = ranks(2)
        for part in second:
            part.load(first[0].identity(), states(*first))
        windows += steps(second)
        assert windows == reference
        assert totals(states(*second)) == totals(states(*alone))


@pytest.mark.parametrize("weight", [None, 1.0])
def test_a_source_of_which_every_row_is_dropped_is_an_error_and_no_endless_loop(
    tmp_path: Path, weight: float | None
) -> None:
    sources = [spec(lengths(tmp_path / "a.jsonl", [100] * 9), weight=weight)]
    if weight:
        sources.append(spec(lengths(tmp_path / "b.jsonl", [10] * 900), weight=weight))
    with pytest.raises(
        DataError, match=r"every row of 'a' is dropped.*data\.window \(64\).*data\.long_documents"
    ):
        open_data(sources, long_documents="drop").next_step()


def test_shares_are_kept_by_the_tokens_that_windows_hold(tmp_path: Path) -> None:
    """What is cut off a document does not count for its source."""
    long = lengths(tmp_path / "long.jsonl", [640] * 60)
    short = lengths(tmp_path / "short.jsonl", [16] * 900)
    data = open_data([spec(long, weight=1.0), spec(short, weight=1.0)])
    steps([data], 10)
    for state in data.lane_states().values():
        given = state["given"]
        assert abs(given[0] - given[1]) <= 64
        assert (
            sum(given)
            == state["packer"]["record"]["tokens_in"] - state["packer"]["record"]["tokens_truncated"]
        )


def test_row_17_channels_are_known_before_the_run_in_one_order_on_all_ranks(tmp_path: Path) -> None:
    """Row 17: a rank that never meets a channel declares it all the same."""
    write_rows(
        tmp_path / "a.jsonl",
        [
            {"text": "x", "channel": "web"},
            {"text": "x", "source": "books"},
            {"text": "x"},
            {"text": "x", "source": "web"},
        ],
    )
    write_rows(tmp_path / "b.jsonl", [{"text": "x", "channel": "books"}, {"text": "x"}])
    specs = [spec(tmp_path / "a.jsonl"), spec(tmp_path / "b.jsonl")]
    parts = [open_data(specs, data_rank=rank, data_size=4, num_passes=1) for rank in range(4)]
    assert {part.channels for part in parts} == {("web", "books", "a", "b")}
    seen: Counter[int] = Counter()
    for part in parts:
        for window in part.next_step()[0]:
            seen.update(window.layout.document_sources)
    assert seen == {0: 2, 1: 2, 2: 1, 3: 1}


def test_a_field_that_is_no_channel_is_an_error_and_not_a_thousand_curves(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": "x", "source": f"https://{n}"} for n in range(1001)])
    with pytest.raises(DataError, match=r"the rows name 1001 channels, such as https://0.*`channel`"):
        open_data([spec(tmp_path / "a.jsonl")])


def test_faults_of_all_sources_are_shown_at_once(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": "x"}, {"text": ""}])
    write_rows(tmp_path / "b.jsonl", [{"txt": "x"}] * 20)
    with pytest.raises(DataError) as caught:
        open_data([spec(tmp_path / "a.jsonl"), spec(tmp_path / "b.jsonl")])
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{tmp_path}/a.jsonl:2: text is empty")
    assert lines[1].startswith(f"{tmp_path}/b.jsonl:1: the row has the fields txt")
    assert lines[-1] == "... and 11 more rows at fault"
    assert len(lines) == 11
    with pytest.raises(DataError) as caught:
        open_data([spec(tmp_path / "c.jsonl"), spec(tmp_path / "d.jsonl")])
    assert ["'c'" in line or "'d'" in line for line in str(caught.value).splitlines()] == [True, True]


def test_token_ids_of_another_tokenizer_are_named_before_the_run(tmp_path: Path) -> None:
    size = len(byte_tokenizer())
    path = write_rows(tmp_path / "a.jsonl", [{"input_ids": [0, size - 1]}, {"input_ids": [0, size]}])
    with pytest.raises(DataError, match=rf"a\.jsonl:2: input_ids holds {size}, the vocabulary has {size} "):
        open_data([spec(path)])


def test_row_22_two_sources_never_have_one_name(tmp_path: Path) -> None:
    """Row 22: they would share a curve and an order."""
    path = numbered(tmp_path / "a.jsonl", 9)
    with pytest.raises(DataError, match="the name 'x' stands 2 times; give each source a name of its own"):
        open_data([spec(path, "x"), spec(path, "y"), spec(path, "x")])


@pytest.mark.parametrize("weights", [[1.0, None], [1.0, -1.0], [0.0, 0.0]])
def test_weights_that_do_not_work_are_an_error(tmp_path: Path, weights: list[float | None]) -> None:
    path = numbered(tmp_path / "a.jsonl", 9)
    sources = [spec(path, name, weight) for name, weight in zip("xy", weights, strict=True)]
    with pytest.raises(DataError, match=r"data\.sources: weights are .*; give every source one"):
        open_data(sources)


def settings(*sources: SourceSpec, **options: Any) -> DataSettings:
    return DataSettings(sources=sources, window=64, alignment=8, windows_per_step=2, seed=1, **options)


def chat(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]}


def test_a_conversation_without_a_chat_template_is_named_before_the_run(tmp_path: Path) -> None:
    """Also where it stands behind the rows that are tokenised beforehand."""
    rows = [{"text": "x"}] * (training_data._TRIED_ROWS + 50)
    path = write_rows(tmp_path / "a.jsonl", [*rows, chat("a")])
    with pytest.raises(
        DataError, match=rf"a\.jsonl:{len(rows) + 1}: .*no chat template.*data\.chat_template"
    ):
        TrainingData(settings(spec(path)), byte_tokenizer(None), data_rank=0, data_size=1)


PICKY = (
    "{% for m in messages %}{% if m['content'] == 'bad' %}{{ raise_exception('bad word') }}{% endif %}"
    "{% endfor %}"
) + PLAIN


def test_what_a_template_refuses_is_named_with_file_and_line(tmp_path: Path) -> None:
    rows = [chat("bad" if number in (3, 7) else "good") for number in range(20)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError) as caught:
        TrainingData(settings(spec(path)), byte_tokenizer(PICKY), data_rank=0, data_size=1)
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == [f"{path}:4", f"{path}:8"]
    late = write_rows(tmp_path / "b.jsonl", [chat("good")] * 300 + [chat("bad")])
    data = TrainingData(settings(spec(late), num_passes=1), byte_tokenizer(PICKY), data_rank=0, data_size=1)
    with pytest.raises(DataError, match=r"b\.jsonl:301: the chat template refuses the messages: bad word"):
        steps([data])


def test_another_tokenizer_on_resume_is_an_error(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", 40)
    made = [
        TrainingData(settings(spec(path)), byte_tokenizer(template), data_rank=0, data_size=1)
        for template in (PLAIN, PLAIN, PICKY)
    ]
    made[1].load(made[0].identity(), states(made[0]))
    with pytest.raises(DataError, match=r"data\.tokenizer is '.*', the checkpoint was made with '"):
        made[2].load(made[0].identity(), states(made[0]))


def test_other_rows_on_resume_are_an_error(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", 40)
    first = open_data([spec(path)])
    first.next_step()
    numbered(path, 41)
    with pytest.raises(DataError, match=r"data\.sources is .*'rows': 41.*'rows': 40"):
        open_data([spec(path)]).load(first.identity(), states(first))
    numbered(path, 40, length=30)  # as many rows, other tokens
    changed = open_data([spec(path)])
    with pytest.raises(DataError, match=r"rows of source 'a' are not what they were, although as many"):
        changed.load(first.identity(), states(first))
    with pytest.raises(DataError, match=r"lane 0 of the checkpoint cannot go on: .*the data has changed"):
        changed.load(first.identity() | {"digests": changed.identity()["digests"]}, states(first))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_a_word_of_the_same_length_changed_before_a_resume_is_an_error(tmp_path: Path, name: str) -> None:
    rows = [{"text": f"one of {number:02} rows"} for number in range(40)]

    def opened() -> TrainingData:
        path = tmp_path / name
        if name == "a.parquet":
            datasets.Dataset.from_list(rows).to_parquet(path)
        elif name == "a.json":
            path.write_text(json.dumps(rows))
        else:
            write_rows(path, rows)
        return open_data([spec(path, "web")])

    first = opened()
    first.next_step()
    opened().load(first.identity(), states(first))
    rows[39]["text"] = "One of 39 rows"
    changed = opened()
    with pytest.raises(DataError, match=r"rows of source 'web' are not what they were, although as many"):
        changed.load(first.identity(), states(first))


def test_a_checkpoint_without_all_lanes_is_an_error(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", 40)
    half = open_data([spec(path)], data_rank=0, data_size=2)
    with pytest.raises(DataError, match=r"holds lanes \[0, 2\], a step has \[0, 1, 2, 3\]"):
        open_data([spec(path)]).load(half.identity(), states(half))


def test_a_state_is_small_however_long_the_source(tmp_path: Path) -> None:
    sizes = []
    for count in (400, 4000):
        data = open_data([spec(numbered(tmp_path / f"{count}.jsonl", count), "a")], windows_per_step=2)
        steps([data], 5)
        sizes.append(len(json.dumps(data.lane_states())))
    assert sizes[1] < 1.2 * sizes[0] < 12_000


def test_a_rank_without_lanes_has_empty_windows(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", 40)
    data = open_data([spec(path)], windows_per_step=2, data_rank=2, data_size=3, num_passes=1)
    windows, has_more = data.next_step()
    assert [window.layout.num_documents for window in windows] == [0]
    assert not has_more
    assert data.count_steps() == 0


@pytest.mark.parametrize(("size", "expected"), [(1, 4), (2, 2), (3, 2), (4, 1), (5, 1)])
def test_every_rank_has_as_many_windows_as_any_other(tmp_path: Path, size: int, expected: int) -> None:
    path = numbered(tmp_path / "a.jsonl", 60)
    for rank in range(size):
        data = open_data([spec(path)], data_rank=rank, data_size=size, num_passes=1)
        more = True
        while more:
            windows, more = data.next_step()
            assert len(windows) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a34_every_rank_evaluates_as_many_windows(tmp_path: Path, size: int) -> None:
    """A34: a rank with fewer would leave the others in a collective of the forward."""
    path = numbered(tmp_path / "a.jsonl", 80)
    parts = [
        open_data([spec(path)], data_rank=rank, data_size=size, eval_fraction=0.5) for rank in range(size)
    ]
    assert len({len(part.eval_windows) for part in parts}) == 1
    assert sum(window.layout.num_documents for part in parts for window in part.eval_windows) == 40


def test_a_small_cache_changes_no_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lengths(tmp_path / "a.jsonl", LENGTHS)
    reference = steps([open_data([spec(path)], num_passes=3)])
    monkeypatch.setattr(training_data, "_CACHED_TOKENS", 150)
    data = open_data([spec(path)], num_passes=3)
    assert steps([data]) == reference
    assert data._cached_tokens == sum(
        len(document) for documents in data._documents.values() for document in documents
    )
    assert data._cached_tokens <= 150 or len(data._documents) == 1


def _pair(key: Key) -> list[Document]:
    return [Document([key[1], side, 1], group=key[1]) for side in (1, 2)]


def test_documents_of_a_group_stay_together() -> None:
    mixture = MixtureSpec(
        names=("a",), row_counts=(30,), weights=None, weight_by="token", num_lanes=2, seed=0, num_passes=1
    )
    seen: Counter[int] = Counter()
    for number in range(2):
        packer: Packer[Key] = Packer(32, alignment=1, lookahead=4)
        lane = Lane(number, mixture, Permutations(mixture), packer, _pair, lambda source, position: position)
        while not lane.exhausted:
            window = lane.pop()
            firsts = [int(window.input_ids[start]) for start in window.layout.document_starts]
            assert set(Counter(firsts).values()) == {2}
            seen.update(firsts)
    assert seen == {row: 2 for row in range(30)}


def test_lanes_in_different_passes_do_not_make_orders_over_and_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one lane is a pass ahead of another, each draw would sort the whole source again."""
    mixture = MixtureSpec(
        names=("a",), row_counts=(50,), weights=None, weight_by="token", num_lanes=2, seed=0, num_passes=None
    )
    calls: list[tuple[Any, ...]] = []

    def counted(*key: Any) -> Any:
        calls.append(key)
        return random_order(*key)

    monkeypatch.setattr("isoloss.data.lanes.random_order", counted)
    permutations = Permutations(mixture)
    for _ in range(100):
        permutations.part(0, 0, 0, 2)
        permutations.part(0, 1, 1, 2)
    assert len(calls) == 2
