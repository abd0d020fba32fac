"""Classification in every layout against the oracle: loss, every gradient element, accuracy, counts.

Rows 8, 10, 21 and 29; cases A09, A10 and A45.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from exactness.objective_driving import (
    MIXTURE_SETTINGS,
    SETTINGS,
    Expected,
    Trial,
    check_layouts,
    differences,
    run_trial,
)
from isoloss import Document, Layout, Ledger, LossModel, PackedBatch, Step, Term, Topology
from isoloss.batch.collation import build_batch
from isoloss.objectives.classification import VALUES_EXTRA, Classification, label_documents
from oracle.classification import CLASSES, LabelAnswer, LabelledDocument, build_classifier, label_answer
from oracle.models import VOCABULARY

CHANNELS = ("code", "docs", "chat")
WINDOW = 256
TERM = "classification"


def draw(level: str, *, numbers: bool = False, seed: int = 0) -> list[LabelledDocument]:
    """One-token documents, some without a label, one longer than a shard, weights."""
    generator = random.Random(seed)
    found = []
    for number, length in enumerate((1, 2, 37, 1, 5, 90, 3, 14, 8)):
        tokens = [generator.randrange(3, VOCABULARY) for _ in range(length)]
        places = [length - 1]
        if level == "token":
            places = [place for place in range(length) if generator.random() < 0.6]
        if number in (4, 8):
            places = []
        labels = [
            (place, generator.uniform(-2, 2) if numbers else float(generator.randrange(CLASSES)))
            for place in places
        ]
        found.append(LabelledDocument(tokens, labels, (1.0, 0.5, 3.0)[number % 3], channel=number % 2))
    return found


def units_of(documents: Sequence[LabelledDocument], level: str, *, numbers: bool) -> list[list[Document]]:
    """Each label at its token; of the sequence level with the documents, for `label_documents`."""
    units = []
    for document in documents:
        extras: dict[str, Any] = {"label_weight": torch.tensor(document.weight)}
        empty = math.nan if numbers else -100
        column = [empty] * len(document.tokens)
        for place, label in document.labels:
            column[place] = label if numbers else int(label)
        if level == "sequence":
            extras["label"] = torch.tensor(column[-1], dtype=torch.float64 if numbers else torch.int64)
            per_token = {}
        else:
            per_token = {"labels": torch.tensor(column, dtype=torch.float64 if numbers else torch.int64)}
        units.append(
            [
                Document(
                    document.tokens,
                    [-100] * len(document.tokens),
                    source=document.channel,
                    document_extras=extras,
                    token_extras=per_token,
                )
            ]
        )
    return units


def complete_sequences(batch: PackedBatch) -> PackedBatch:
    extras = batch.document_extras
    return label_documents(batch, extras["label"], weights=extras["label_weight"])


def complete_tokens(batch: PackedBatch) -> PackedBatch:
    labels = batch.token_extras["labels"]
    weights = torch.tensor([float(w) for w in batch.document_extras["label_weight"]])[batch.document_ids]
    is_target = (batch.document_ids >= 0) & (
        labels == labels if labels.is_floating_point() else labels != -100
    )
    targets = torch.where(is_target, 0 if labels.is_floating_point() else labels, -100)
    extras = {VALUES_EXTRA: torch.where(is_target, labels, 0.0)} if labels.is_floating_point() else {}
    return PackedBatch(
        batch.input_ids, {TERM: targets}, batch.layout, {TERM: torch.where(is_target, weights, 0.0)}, extras
    )


def expect(answer: LabelAnswer, *, numbers: bool) -> Expected:
    measure = "regression/absolute_error" if numbers else "classification/accuracy"
    metrics = {
        "train/loss": answer.loss,
        f"loss/{TERM}": answer.loss,
        "tokens/loss": answer.num_labels,
        measure: answer.measure,
    }
    for channel, loss in answer.channel_losses.items():
        metrics[f"channel_loss/{CHANNELS[channel]}"] = loss
        metrics[f"channel_tokens/{CHANNELS[channel]}"] = answer.channel_labels[channel]
        metrics[f"channel_{measure}/{CHANNELS[channel]}"] = answer.channel_measures[channel]
    return Expected(metrics, answer.gradients, absent=("channel_loss/chat",))


def objective(reduction: str, options: dict[str, Any], topology: Topology) -> Classification:
    return Classification(Term(TERM, reduction), **options)  # type: ignore[arg-type]


def blocks(model: Any) -> list[nn.Module]:
    return list(model.base_model.layers)


@cache
def trial(
    level: str, reduction: str, kind: str = "classes", *, moe: bool = False
) -> tuple[str, Trial, Expected]:
    numbers = kind == "numbers"
    documents = draw(level, numbers=numbers)
    build = partial(build_classifier, level, outputs=1 if numbers else CLASSES, moe=moe)
    smoothing = 0.1 if kind == "smooth" else 0.0
    answer = label_answer(
        build(), documents, reduction=reduction, smoothing=smoothing, numbers=numbers, num_channels=3
    )
    options: dict[str, Any] = {"problem_type": "regression"} if numbers else {"label_smoothing": smoothing}
    made = Trial(
        build,
        units_of(documents, level, numbers=numbers),
        WINDOW,
        CHANNELS,
        partial(objective, reduction, options),
        "unused",
        complete_sequences if level == "sequence" else complete_tokens,
        blocks,
    )
    return f"{level} {reduction} {kind}", made, expect(answer, numbers=numbers)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_row_29_every_layout_gives_the_answer_of_the_oracle(ranks: int) -> None:
    """Rows 8, 10, 21 and 29: labels are the denominator, wherever their slots lie."""
    trials = [trial("sequence", "token"), trial("token", "sample")]
    if ranks < 4:
        trials += [
            trial("sequence", "token", "numbers"),
            trial("token", "square", "numbers"),
            trial("token", "token", "smooth"),
        ]
    check_layouts(ranks, trials)


def test_a_mixture_of_experts_on_expert_ranks() -> None:
    check_layouts(2, [trial("sequence", "token", moe=True)], MIXTURE_SETTINGS)


def test_the_order_and_packing_of_documents_changes_nothing() -> None:
    for name in ("sequence", "token"):
        _, made, expected = trial(name, "token")
        for seed in range(2):
            units = list(made.units)
            random.Random(seed).shuffle(units)
            other = Trial(
                made.build_model,
                units,
                WINDOW,
                CHANNELS,
                made.build_objective,
                "unused",
                made.complete,
                blocks,
            )
            for layout in ("alone", "alone x 3"):
                assert differences(*run_trial(other, SETTINGS[layout]), expected) == []


def test_a_shifted_label_would_show() -> None:
    """Mutant of A09: the label moved to the token before it."""
    documents = [one for one in draw("token") if len(one.tokens) > 1]
    moved = [
        LabelledDocument(one.tokens, [(place - 1, label) for place, label in one.labels if place], one.weight)
        for one in documents
    ]
    model = build_classifier("token")
    right, wrong = (label_answer(model, those, num_channels=3) for those in (documents, moved))
    assert abs(right.loss - wrong.loss) > 1e-3
    assert wrong.num_labels < right.num_labels


def _one_too_early(batch: PackedBatch) -> PackedBatch:
    belongs = (batch.document_ids >= 0) & (batch.document_ids.roll(-1) == batch.document_ids)
    return _with_targets(batch, torch.where(belongs, batch.targets[TERM].roll(-1), -100))


def _without_the_first(batch: PackedBatch) -> PackedBatch:
    targets = batch.targets[TERM].clone()
    targets[(targets != -100).nonzero()[:1]] = -100
    return _with_targets(batch, targets)


def _of_equal_weight(batch: PackedBatch) -> PackedBatch:
    return PackedBatch(batch.input_ids, batch.targets, batch.layout)


def _with_targets(batch: PackedBatch, targets: torch.Tensor) -> PackedBatch:
    return PackedBatch(batch.input_ids, {TERM: targets}, batch.layout, {TERM: (targets != -100).float()})


@pytest.mark.parametrize("mutant", [_one_too_early, _without_the_first, _of_equal_weight])
@pytest.mark.parametrize("level", ["sequence", "token"])
def test_the_comparison_sees_a_label_that_is_moved_lost_or_weighed_wrongly(
    mutant: Callable[[PackedBatch], PackedBatch], level: str
) -> None:
    _, made, expected = trial(level, "token")
    changed = dataclasses.replace(made, complete=lambda batch: mutant(made.complete(batch)))
    found = differences(*run_trial(changed, SETTINGS["alone"]), expected)
    assert any("train/loss" in line for line in found)
    assert any("gradient of" in line for line in found)


def test_row_6_text_and_labels_in_one_step() -> None:
    """Rows 6, 10 and 29: one window, a target of text for each token but the first and a label for each
    document, and each term has its own denominator."""
    documents = [one for one in draw("sequence") if one.labels]
    for document in documents:
        document.weight = 1.0
    model = build_classifier("sequence")
    head = nn.Linear(32, VOCABULARY, bias=False, dtype=torch.float64)
    text_sum, num_text = 0.0, 0
    with torch.no_grad():
        for document in documents:
            ids = torch.tensor([document.tokens])
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
            text_sum += nn.functional.cross_entropy(head(hidden[:-1]), ids[0, 1:], reduction="sum").item()
            num_text += len(document.tokens) - 1
    answer = label_answer(model, documents, num_channels=3)
    units = [[Document(one.tokens)] for one in documents]
    labels = torch.tensor([int(one.labels[0][1]) for one in documents])
    batch = label_documents(build_batch(units, WINDOW), labels)
    made = Classification()
    ledger = Ledger([Term("text"), *made.terms], measures=made.measures)

    def both(inner: Any, step: Step, window: PackedBatch) -> torch.Tensor:
        hidden = inner.base_model(**window.model_inputs(), use_cache=False).last_hidden_state[0]
        return made(inner, step, window) + step.loss(hidden, head.weight, window, term="text")

    with ledger.step([batch]) as step, torch.no_grad():
        LossModel(model)(step, batch, both)
    metrics = step.metrics()
    assert metrics["loss/text"] == pytest.approx(text_sum / num_text, rel=1e-10)
    assert metrics[f"loss/{TERM}"] == pytest.approx(answer.loss, rel=1e-10)
    assert metrics["tokens/loss"] == num_text + len(documents)


def test_a_model_without_a_head_for_it_is_named() -> None:
    made = Classification()
    batch = PackedBatch.empty(8)
    with Ledger(made.terms, measures=made.measures).step([batch]) as step:
        with pytest.raises(ValueError, match="Sequential has no linear layer score or classifier"):
            LossModel(nn.Sequential(nn.Linear(2, 2)))(step, batch, made)
        step.add(TERM, torch.zeros(8), batch)


def test_a10_labels_of_a_batch_are_not_a_sequence() -> None:
    """Four examples of costs 1, 2, 3, 6: N = 4, loss 3. Row 8: a one-token document counts one target."""
    layout = Layout([1, 1, 1, 1])
    batch = PackedBatch(torch.arange(4), {}, layout)
    batch = label_documents(batch, torch.zeros(4, dtype=torch.int64))
    gain = torch.ones((), requires_grad=True)
    ledger = Ledger([Term(TERM)])
    with ledger.step([batch]) as step:
        step.add(None, gain * torch.tensor([1.0, 2.0, 3.0, 6.0]), batch).backward()
    metrics = step.metrics()
    assert (metrics["train/loss"], metrics["tokens/loss"], metrics["documents"]) == (3.0, 4, 4)
    assert gain.grad is not None
    assert gain.grad.item() == 3.0


def test_a09_aligned_labels_lose_none() -> None:
    """Two rows of four aligned labels: N = 8."""
    layout = Layout([4, 4])
    batch = PackedBatch(torch.arange(8), {TERM: torch.arange(8)}, layout)
    ledger = Ledger([Term(TERM)])
    with ledger.step([batch]) as step:
        step.add(None, torch.full((8,), math.log(4.0)), batch)
    metrics = step.metrics()
    assert metrics["tokens/loss"] == 8
    assert metrics["train/loss"] == pytest.approx(math.log(4.0))


def test_a45_the_last_token_is_pooled_whatever_padding_lies_before_or_behind() -> None:
    """Class costs [9, 9, 9, 1] and [9, 9, 9, 3]: loss 2, N = 2."""
    layout = Layout([2, 4], alignment=4, padded_length=12)
    batch = PackedBatch(torch.tensor([5, 6, 0, 0, 7, 8, 9, 3, 0, 0, 0, 0]), {}, layout)
    batch = label_documents(batch, torch.zeros(2, dtype=torch.int64))
    assert (batch.targets[TERM] != -100).nonzero().squeeze(-1).tolist() == [1, 7]
    costs = torch.tensor([9.0, 1, 9, 9, 9, 9, 9, 3, 9, 9, 9, 9])
    ledger = Ledger([Term(TERM)])
    with ledger.step([batch]) as step:
        step.add(None, costs, batch)
    assert (step.metrics()["train/loss"], step.metrics()["tokens/loss"]) == (2.0, 2)


def test_a_step_without_labels_is_exactly_zero() -> None:
    for problem_type, name in (("single_label_classification", "accuracy"), ("regression", "absolute_error")):
        made = Classification(problem_type=problem_type)  # type: ignore[arg-type]
        model = LossModel(
            build_classifier("sequence", outputs=1 if problem_type == "regression" else CLASSES)
        )
        ledger = Ledger(made.terms, measures=made.measures)
        unlabelled = PackedBatch(torch.arange(16), {TERM: torch.full((16,), -100)}, Layout([16]))
        with ledger.step([unlabelled, PackedBatch.empty(16)]) as step:
            for batch in step:
                model(step, batch, made).backward()
        metrics = step.metrics()
        assert metrics["train/loss"] == 0
        assert metrics["tokens/loss"] == 0
        assert not any(name in metric for metric in metrics)
        assert all(p.grad is not None and bool((p.grad == 0).all()) for p in model.parameters())


def test_labels_that_do_not_fit_the_window() -> None:
    batch = PackedBatch(torch.arange(4), {}, Layout([2, 2]))
    with pytest.raises(ValueError, match="3 labels for 2 documents"):
        label_documents(batch, torch.zeros(3, dtype=torch.int64))


def test_numbers_that_are_missing_are_named() -> None:
    made = Classification(problem_type="regression")
    model = LossModel(build_classifier("sequence", outputs=1))
    batch = PackedBatch(torch.arange(2), {TERM: torch.tensor([-100, 0])}, Layout([2]))
    with Ledger(made.terms, measures=made.measures).step([batch]) as step:
        with pytest.raises(ValueError, match="regression_values"):
            model(step, batch, made)
        step.add(TERM, torch.zeros(2), batch)


@pytest.mark.parametrize("kind", ["sequence", "token", "numbers"])
def test_the_loss_of_transformers_on_one_device(kind: str) -> None:
    """float32, one batch of rows padded on the right for transformers, packed for us."""
    level = "token" if kind == "token" else "sequence"
    numbers = kind == "numbers"
    model = build_classifier(level, outputs=1 if numbers else CLASSES).to(torch.float32).eval()
    model.config.problem_type = "regression" if numbers else "single_label_classification"
    documents = [one for one in draw(level, numbers=numbers) if one.labels]
    for document in documents:
        document.weight = 1.0
    longest = max(len(one.tokens) for one in documents)
    ids = torch.tensor([one.tokens + [0] * (longest - len(one.tokens)) for one in documents])
    if level == "token":
        labels = torch.full(ids.shape, -100)
        for row, one in enumerate(documents):
            for place, label in one.labels:
                labels[row, place] = int(label)
    else:
        labels = torch.tensor([one.labels[0][1] for one in documents])
        labels = labels if numbers else labels.to(torch.int64)
    theirs = model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss
    theirs.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    options: dict[str, Any] = {"problem_type": "regression"} if numbers else {}
    made = Trial(
        lambda: model,
        units_of(documents, level, numbers=numbers),
        WINDOW,
        CHANNELS,
        partial(objective, "token", options),
        "unused",
        complete_sequences if level == "sequence" else complete_tokens,
        blocks,
    )
    metrics, ours = run_trial(made, SETTINGS["alone"])
    assert metrics["train/loss"] == pytest.approx(theirs.item(), rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-6)
