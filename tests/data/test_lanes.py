"""Windows depend on data, seed and step alone; lanes resume on any number of ranks."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.corpora import numbered, open_data
from isoloss.batch.packed_batch import PackedBatch
from isoloss.data.errors import DataError
from isoloss.data.sources import SourceSpec
from isoloss.data.training_data import TrainingData

Digest = tuple[int, ...]


def documents(window: PackedBatch) -> list[Digest]:
    layout = window.layout
    return [
        tuple(window.input_ids[start : start + length].tolist())
        for start, length in zip(layout.document_starts, layout.document_lengths, strict=True)
    ]


def specs(folder: Path, counts: dict[str, int], weights: dict[str, float] | None = None) -> list[SourceSpec]:
    made = []
    for number, (name, count) in enumerate(counts.items()):
        path = folder / f"{name}.jsonl"
        if not path.exists():
            numbered(path, count, first=10_000 * number)
        made.append(SourceSpec(name=name, path=str(path), weight=weights[name] if weights else None))
    return made


def run_steps(parts: list[TrainingData], limit: int) -> list[list[list[Digest]]]:
    """Steps as lists of windows in lane order, from the data of all ranks."""
    steps = []
    more = True
    while more and len(steps) < limit:
        results = [part.next_step() for part in parts]
        more = any(has_more for _, has_more in results)
        lanes = {}
        for rank, (windows, _) in enumerate(results):
            for place, window in enumerate(windows):
                lanes[rank + place * len(parts)] = documents(window)
        steps.append([lanes[number] for number in sorted(lanes)])
    return steps


def on_ranks(folder: Path, size: int, counts: dict[str, int], **options: object) -> list[TrainingData]:
    weights = options.pop("weights", None)
    return [
        open_data(specs(folder, counts, weights), data_rank=rank, data_size=size, **options)  # type: ignore[arg-type]
        for rank in range(size)
    ]


COUNTS = {"a": 61, "b": 23, "c": 7}


@pytest.mark.parametrize("weights", [None, {"a": 1.0, "b": 2.0, "c": 0.5}])
def test_row_35_any_number_of_ranks_sees_the_same_windows_in_the_same_steps(
    tmp_path: Path, weights: dict[str, float] | None
) -> None:
    options = {"weights": weights, "num_passes": 2}
    reference = run_steps(on_ranks(tmp_path, 1, COUNTS, **options), 100)
    assert len(reference) > 3
    for size in (2, 3, 4):
        steps = run_steps(on_ranks(tmp_path, size, COUNTS, **options), 100)
        assert [step[:4] for step in steps] == reference
        assert all(not window for step in steps for window in step[4:])  # filled up with empty windows


@pytest.mark.parametrize("weights", [None, {"a": 1.0, "b": 2.0, "c": 0.5}])
def test_row_35_a_resume_at_any_step_on_other_ranks_changes_no_window(
    tmp_path: Path, weights: dict[str, float] | None
) -> None:
    options = {"weights": weights, "num_passes": 3}
    reference = run_steps(on_ranks(tmp_path, 1, COUNTS, **options), 100)
    saved = {}
    for size in (1, 2, 3):
        first = on_ranks(tmp_path, size, COUNTS, **options)
        for stop in range(1, len(reference)):
            assert [step[:4] for step in run_steps(first, 1)] == reference[stop - 1 : stop]
            states = {number: state for part in first for number, state in part.lane_states().items()}
            saved[size, stop] = json.dumps((first[0].identity(), states))
    others = {size: on_ranks(tmp_path, size, COUNTS, **options) for size in (1, 2, 3, 4)}
    for (size, stop), text in saved.items():
        identity, states = json.loads(text)
        second = others[1 + (size + stop) % 4]
        for part in second:
            part.load(identity, {int(number): state for number, state in states.items()})
        # to the end every fifth time: each comparison runs over all that is left
        left = run_steps(second, 3 if stop % 5 else 100)
        assert [step[:4] for step in left] == reference[stop : stop + len(left)], (size, stop)
        assert stop % 5 or stop + len(left) == len(reference)


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    lanes=st.integers(1, 6),
    passes=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_every_document_is_trained_exactly_once_per_pass(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], lanes: int, passes: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("data")
    counts = {f"s{number}": size for number, size in enumerate(sizes)}
    (data,) = on_ranks(folder, 1, counts, windows_per_step=lanes, num_passes=passes, seed=seed)
    seen = Counter(d for step in run_steps([data], 1000) for window in step for d in window)
    assert len(seen) == sum(sizes)
    assert set(seen.values()) == {passes}


def test_each_pass_has_an_order_of_its_own_and_so_has_each_seed(tmp_path: Path) -> None:
    (data,) = on_ranks(tmp_path, 1, {"a": 40}, num_passes=2, windows_per_step=1)
    order = [d for step in run_steps([data], 1000) for window in step for d in window]
    (other,) = on_ranks(tmp_path, 1, {"a": 40}, num_passes=2, windows_per_step=1, seed=4)
    assert order != [d for step in run_steps([other], 1000) for window in step for d in window]
    assert sorted(order[:40]) != order[:40]


def test_weights_by_token_are_kept_by_the_tokens_drawn(tmp_path: Path) -> None:
    weights = {"a": 3.0, "b": 1.0}
    (data,) = on_ranks(tmp_path, 1, {"a": 200, "b": 200}, weights=weights, windows_per_step=2)
    tokens: Counter[str] = Counter()
    for _ in range(40):
        windows, more = data.next_step()
        assert more
        for window in windows:
            for source, length in zip(
                window.layout.document_sources, window.layout.document_lengths, strict=True
            ):
                tokens[data.channels[source]] += length
    assert tokens["a"] / tokens.total() == pytest.approx(0.75, abs=0.02)


def test_weights_by_document_are_kept_by_the_documents_drawn(tmp_path: Path) -> None:
    numbered(tmp_path / "b.jsonl", 200, first=5000, length=20)
    made = specs(tmp_path, {"a": 200, "b": 200}, {"a": 1.0, "b": 1.0})
    data = open_data(made, weight_by="document", windows_per_step=2)
    for _ in range(20):
        data.next_step()
    for state in data.lane_states().values():
        first, second = state["given"]
        assert first > 20
        assert abs(first - second) <= 1


def test_with_weights_a_lane_ends_after_every_source_had_its_passes_and_smaller_ones_repeat(
    tmp_path: Path,
) -> None:
    weights = {"a": 1.0, "b": 1.0}
    (data,) = on_ranks(tmp_path, 1, {"a": 80, "b": 8}, weights=weights, num_passes=1)
    seen = Counter(d for step in run_steps([data], 1000) for window in step for d in window)
    assert len(seen) == 88
    big = [count for d, count in seen.items() if d[1] < 39]
    assert set(big) == {1}
    assert sum(seen.values()) > 120


def test_a_source_smaller_than_the_step_is_an_error_that_repeat_allows(tmp_path: Path) -> None:
    made = specs(tmp_path, {"a": 80, "b": 3}, {"a": 1.0, "b": 1.0})
    with pytest.raises(DataError, match=r"b has 3 documents.*4 windows of a step.*small_sources: repeat"):
        open_data(made)
    data = open_data(made, small_sources="repeat")
    for _ in range(5):
        for window in data.next_step()[0]:
            assert {0, 1} <= set(window.layout.document_sources)


def test_a_source_of_weight_zero_is_never_drawn(tmp_path: Path) -> None:
    data = open_data(specs(tmp_path, {"a": 80, "b": 80}, {"a": 1.0, "b": 0.0}))
    for _ in range(5):
        assert all(set(window.layout.document_sources) == {0} for window in data.next_step()[0])


def test_resuming_with_other_windows_is_an_error_that_shows_both_values(tmp_path: Path) -> None:
    saved = open_data(specs(tmp_path, COUNTS))
    for key, options in (
        ("train.windows_per_step is 6, the checkpoint was made with 4", {"windows_per_step": 6}),
        ("data.alignment is 4, the checkpoint was made with 8", {"alignment": 4}),
        ("data.window is 128, the checkpoint was made with 64", {"window": 128}),
        ("train.seed is 9", {"seed": 9}),
    ):
        other = open_data(specs(tmp_path, COUNTS), **options)
        with pytest.raises(DataError, match=key):
            other.load(saved.identity(), saved.lane_states())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_evaluation_holds_out_the_same_documents_and_never_trains_on_them(tmp_path: Path, size: int) -> None:
    parts = on_ranks(tmp_path, size, COUNTS, eval_fraction=0.2, num_passes=1)
    held_out = sorted(d for part in parts for window in part.eval_windows for d in documents(window))
    assert len({len(part.eval_windows) for part in parts}) == 1
    (alone,) = on_ranks(tmp_path, 1, COUNTS, eval_fraction=0.2, num_passes=1)
    assert held_out == sorted(d for window in alone.eval_windows for d in documents(window))
    assert len(held_out) == 12 + 5 + 1
    trained = {d for step in run_steps(parts, 1000) for window in step for d in window}
    assert not trained & set(held_out)
    assert len(trained) + len(held_out) == sum(COUNTS.values())


def test_count_steps_is_the_number_of_steps(tmp_path: Path) -> None:
    for size in (1, 2, 3):
        parts = on_ranks(tmp_path, size, COUNTS, num_passes=2)
        counted = max(part.count_steps() for part in parts)
        assert counted == len(run_steps(parts, 1000))
