"""Every wrapper, number of ranks, accumulation and reduction against the oracle.

One set of documents has one answer per model and reduction; every way to lay it out must give that answer:
loss, every gradient element, every channel, every counter.

Rows 1, 5, 7, 18, 23, 27.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from exactness.driving import (
    CHANNELS,
    WRAPPERS,
    build_window,
    compare,
    draw_documents,
    full_gradients,
    has_targets,
    run_step,
    wrap,
)
from isoloss import PackedBatch
from oracle.models import MODEL_KINDS, build_model
from oracle.single_process import Answer, PlainDocument, aligned_tokens, answer
from ranks import run_on_ranks

REDUCTIONS = ("token", "sample", "square")
# a window holds any number of these documents, at any alignment below, and leaves a tail of padding
WINDOW = 144

SCENARIOS = (
    "even",
    "one rank without targets",
    "one micro-batch without targets",
    "an empty micro-batch",
    "a step without targets",
)


@functools.cache
def oracle(kind: str, reduction: str, scenario: str) -> Answer:
    return answer(build_model(kind), documents_of(scenario), reduction=reduction, num_channels=len(CHANNELS))


def documents_of(scenario: str) -> list[PlainDocument]:
    documents = draw_documents()
    if scenario == "a step without targets":
        return [document for document in documents if not has_targets(document)]
    return documents


def assign(
    documents: list[PlainDocument], scenario: str, ranks: int, accumulation: int
) -> list[list[list[PlainDocument]]]:
    """[rank][micro-batch] -> documents."""
    places = list(itertools.product(range(ranks), range(accumulation)))
    barren: set[tuple[int, int]] = set()  # hold documents without targets only
    empty: set[tuple[int, int]] = set()  # hold nothing
    if scenario == "one rank without targets" and ranks > 1:
        barren = {(0, micro) for micro in range(accumulation)}
    elif scenario == "one micro-batch without targets" and len(places) > 1:
        barren = {places[-1]}
    elif scenario == "an empty micro-batch" and len(places) > 1:
        empty = {places[len(places) // 2]}
    windows: dict[tuple[int, int], list[PlainDocument]] = {place: [] for place in places}
    fruitful = [place for place in places if place not in barren and place not in empty]
    open_to_rest = sorted(barren) or fruitful
    for number, document in enumerate(documents):
        if has_targets(document):
            windows[fruitful[number % len(fruitful)]].append(document)
        else:
            windows[open_to_rest[number % len(open_to_rest)]].append(document)
    return [[windows[rank, micro] for micro in range(accumulation)] for rank in range(ranks)]


@dataclass(frozen=True)
class Configuration:
    kind: str
    wrapper: str
    accumulation: int
    reduction: str
    scenario: str
    alignment: int


def configurations(ranks: int) -> Iterator[Configuration]:
    """Qwen3 with a tied head goes through everything, the other models through a part.

    Scenarios and alignments take turns, so that each wrapper meets all of them.
    """
    wrappers = [name for name, (_, worlds) in WRAPPERS.items() if ranks in worlds]
    for place, wrapper in enumerate(wrappers):
        turn = itertools.count(ranks + 2 * place)
        for accumulation, reduction in itertools.product((1, 2, 3), REDUCTIONS):
            number = next(turn)
            scenario = SCENARIOS[number % len(SCENARIOS)]
            yield Configuration("qwen3-tied", wrapper, accumulation, reduction, scenario, (1, 8)[number % 2])
        for kind in MODEL_KINDS[1:]:
            number = next(turn)
            scenario = SCENARIOS[number % len(SCENARIOS)]
            yield Configuration(kind, wrapper, 2, REDUCTIONS[number % 3], scenario, 8)
            yield Configuration(kind, wrapper, 1, REDUCTIONS[(number + 1) % 3], "even", 1)


def run_configurations(chosen: list[Configuration], answers: dict[Configuration, Answer]) -> list[str]:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    failures = []
    for (kind, wrapper), group in itertools.groupby(chosen, key=lambda one: (one.kind, one.wrapper)):
        wrapped = wrap(build_model(kind), wrapper, ranks)
        for one in group:
            documents = documents_of(one.scenario)
            mine = assign(documents, one.scenario, ranks, one.accumulation)[rank]
            windows = [
                build_window(held, alignment=one.alignment, padded_length=WINDOW)
                if held
                else PackedBatch.empty(WINDOW)
                for held in mine
            ]
            metrics = run_step(wrapped, windows, reduction=one.reduction)
            differences = compare(
                metrics,
                full_gradients(wrapped.inner),
                answers[one],
                aligned=aligned_tokens(documents, one.alignment),
                physical=WINDOW * ranks * one.accumulation,
            )
            failures += [f"{ranks} ranks, {one}: {difference}" for difference in differences]
    return failures


@pytest.mark.parametrize("ranks", [0, 1, 2, 3, 4])
def test_every_layout_gives_the_answer_of_the_oracle(ranks: int) -> None:
    """Rows 5, 7, 18, 23 and 27. 0 ranks: without a process group (row 3)."""
    chosen = list(configurations(max(ranks, 1)))
    if ranks == 0:
        chosen = [one for one in chosen if one.wrapper in ("alone", "plain")]
    # computed before the fork, so that the ranks inherit them
    answers = {one: oracle(one.kind, one.reduction, one.scenario) for one in chosen}
    outcomes = (
        run_on_ranks(ranks, run_configurations, chosen, answers, timeout_s=240)
        if ranks
        else [run_configurations(chosen, answers)]
    )
    for rank, failures in enumerate(outcomes):
        assert not failures, f"rank {rank}: {len(failures)} differences\n" + "\n".join(failures[:20])


def test_the_documents_hold_what_the_matrix_claims() -> None:
    documents = draw_documents()
    lengths = [len(document.tokens) for document in documents]
    assert lengths.count(1) >= 2 and max(lengths) >= 15
    assert any(document.weights and len(set(document.weights)) > 1 for document in documents)
    assert any(document.weights and len(set(document.weights)) == 1 for document in documents)
    for reduction in REDUCTIONS:
        expected = oracle("qwen3-tied", reduction, "even")
        assert expected.channel_tokens[2] == 0 < expected.channel_documents[2]
        assert expected.loss > 1.0
        assert all(gradient.abs().max() > 0 for gradient in expected.gradients.values())
    losses = {oracle("qwen3-tied", reduction, "even").loss for reduction in REDUCTIONS}
    assert len(losses) == 3, "the reductions must give different losses, or a mix-up could not show"
    barren = oracle("qwen3-tied", "token", "a step without targets")
    assert barren.loss == 0.0 and all(not gradient.any() for gradient in barren.gradients.values())


def test_the_matrix_is_full() -> None:
    """Ranks x accumulation x wrapper x reduction, and each wrapper with every scenario and model."""
    for ranks in (1, 2, 3, 4):
        chosen = list(configurations(ranks))
        wrappers = {name for name, (_, worlds) in WRAPPERS.items() if ranks in worlds}
        assert {(one.wrapper, one.accumulation, one.reduction) for one in chosen} == set(
            itertools.product(wrappers, (1, 2, 3), REDUCTIONS)
        )
        assert {(one.wrapper, one.scenario) for one in chosen} == set(itertools.product(wrappers, SCENARIOS))
        assert {(one.wrapper, one.kind) for one in chosen} == set(itertools.product(wrappers, MODEL_KINDS))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_assignments_are_partitions_of_the_documents(scenario: str) -> None:
    documents = documents_of(scenario)
    for ranks, accumulation in itertools.product((1, 2, 3, 4), (1, 2, 3)):
        windows = list(itertools.chain(*assign(documents, scenario, ranks, accumulation)))
        assert len(windows) == ranks * accumulation
        assert sorted(id(one) for window in windows for one in window) == sorted(id(one) for one in documents)
        if len(windows) == 1 or scenario in ("even", "a step without targets"):
            continue
        barren = [window for window in windows if not any(has_targets(one) for one in window)]
        assert barren or (scenario == "one rank without targets" and ranks == 1)
        if scenario == "an empty micro-batch":
            assert [] in windows


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_the_oracle_is_the_loss_of_transformers(kind: str) -> None:
    """Its hand-written sums against the loss that a transformers model returns for one document."""
    tokens = draw_documents()[0].tokens
    labels = [-100, -100, *tokens[2:]]
    expected = answer(build_model(kind), [PlainDocument(tokens, labels)])
    model = build_model(kind)
    loss = model(input_ids=torch.tensor([tokens]), labels=torch.tensor([labels]), use_cache=False).loss
    assert abs(loss.item() - expected.loss) < 1e-6  # transformers computes this loss in float32
