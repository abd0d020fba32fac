"""Preference losses in every layout against the oracle: loss, every gradient element, rewards, counts.

Rows 10, 20 and 29; cases A42 to A44.
"""

import math
import random
from collections.abc import Sequence
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
from isoloss import Document, Ledger, LossModel, PackedBatch, Term, Topology
from isoloss.batch.collation import build_batch
from isoloss.losses.preference import preference_losses
from isoloss.objectives.preference import Preference, pair_places
from isoloss.parallel.wrap import wrap_model
from oracle.mixture import build_moe
from oracle.models import VOCABULARY, build_model, decoder_layers, with_float64_norms
from oracle.preference import PairAnswer, PlainPair, preference_answer
from oracle.single_process import PlainDocument

CHANNELS = ("code", "docs", "chat")
WINDOW = 336
BETA = 0.4


def draw_pairs(seed: int = 0) -> list[PlainPair]:
    """Very unequal sides, a one-token answer, identical sides, one longer than a shard, weights."""
    draw = random.Random(seed)
    pairs = []
    for number, (prompt, chosen, rejected) in enumerate(
        ((5, 1, 30), (12, 17, 2), (3, 4, 4), (1, 1, 1), (40, 61, 7), (2, 9, 23))
    ):
        tokens = [[draw.randrange(3, VOCABULARY) for _ in range(n)] for n in (prompt, chosen, rejected)]
        if number == 2:
            tokens[2] = tokens[1]
        sides = [
            PlainDocument(tokens[0] + answer, [-100] * prompt + answer, channel=number % 2)
            for answer in tokens[1:]
        ]
        pairs.append(PlainPair(*sides, weight=(1.0, 0.5, 1.0, 2.0, 1.0, 1.0)[number], channel=number % 2))
    return pairs


def prompt_length(pair: PlainPair) -> int:
    return pair.chosen.labels.count(-100)


def units_of(
    pairs: Sequence[PlainPair], *, shared: bool = False, references: PairAnswer | None = None
) -> list[list[Document]]:
    """Each pair as one group; with `shared`, its prompt as a prefix."""
    units = []
    for number, pair in enumerate(pairs):
        prompt = prompt_length(pair)
        shares = shared and prompt > 1
        start = prompt - 1 if shares else 0
        unit = []
        if shares:
            unit.append(
                Document(pair.chosen.tokens[:start], source=pair.channel, group=number, weight=pair.weight)
            )
        for name, side in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            extras: dict[str, Any] = {}
            if references is not None:
                value = references.measured[number][f"logps/{name}"]
                extras["reference_log_prob"] = torch.tensor(value, dtype=torch.float64)
            unit.append(
                Document(
                    side.tokens[start:],
                    side.labels[start:],
                    source=pair.channel,
                    weight=pair.weight,
                    group=number,
                    parent=0 if shares else None,
                    document_extras=extras,
                )
            )
        units.append(unit)
    return units


def shared(pairs: Sequence[PlainPair]) -> list[PlainPair]:
    return [
        PlainPair(one.chosen, one.rejected, one.weight, one.channel, max(prompt_length(one) - 1, 0))
        for one in pairs
    ]


def expect(answer: PairAnswer) -> Expected:
    metrics = {
        "train/loss": answer.loss,
        "loss/preference": answer.loss,
        "tokens/loss": answer.loss_tokens,
        "tokens/source": answer.source_tokens,
        "documents": answer.documents,
        **answer.measures,
    }
    for channel, loss in answer.channel_losses.items():
        metrics[f"channel_loss/{CHANNELS[channel]}"] = loss
        for name, values in answer.channel_measures.items():
            metrics[f"channel_{name}/{CHANNELS[channel]}"] = values[channel]
    return Expected(metrics, answer.gradients, absent=("channel_loss/chat", "channel_rewards/margins/chat"))


def build(kind: str, seed: int, norms: bool = False) -> nn.Module:
    if kind == "moe":
        return build_moe("qwen3-moe", seed=seed)
    options: dict[str, Any] = {"vocab_size": 67} if kind == "uneven" else {}
    model = build_model(
        "qwen3-untied" if kind == "uneven" else kind, seed=seed, num_key_value_heads=4, **options
    )
    return with_float64_norms(model) if norms else model


def frozen(kind: str, topology: Topology, norms: bool) -> nn.Module:
    reference = build(kind, 1, norms).requires_grad_(False).eval()
    return wrap_model(LossModel(reference), decoder_layers(reference), topology)


def objective(kind: str, options: dict[str, Any], norms: bool, topology: Topology) -> Preference:
    reference = options.get("reference", "frozen")
    given = frozen(kind, topology, norms) if reference == "frozen" else reference
    return Preference(**{"beta": BETA, **options, "reference": given})


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: (options of ours, options of the oracle)
    "dpo": ({}, {}),
    "ipo-mean": ({"loss_type": "ipo", "length_normalized": True}, {"kind": "ipo", "mean": True}),
    "hinge": ({"loss_type": "hinge"}, {"kind": "hinge"}),
    "smooth-free": ({"label_smoothing": 0.2, "reference": None}, {"smoothing": 0.2}),
    "data": ({"reference": "data"}, {}),
}


@cache
def trial(kind: str, name: str, is_shared: bool = False) -> tuple[str, Trial, Expected]:
    ours, theirs = OPTIONS[name]
    pairs = draw_pairs()
    # a prefix gets the gradients of both answers in one sum: see `Float64Norm`
    model, other = build(kind, 0, is_shared), build(kind, 1, is_shared)
    reference = None if ours.get("reference", "frozen") is None else other
    counted = shared(pairs) if is_shared else pairs
    answer = preference_answer(model, reference, counted, beta=BETA, **theirs)
    stored = preference_answer(other, None, pairs, beta=BETA) if name == "data" else None
    units = units_of(pairs, shared=is_shared, references=stored)
    made = Trial(
        partial(build, kind, 0, is_shared),
        units,
        WINDOW,
        CHANNELS,
        partial(objective, kind, ours, is_shared),
        "preference",
    )
    return f"{kind} {name}{' shared' if is_shared else ''}", made, expect(answer)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_row_29_every_layout_gives_the_answer_of_the_oracle(ranks: int) -> None:
    """Rows 10, 20 and 29: pairs are the denominator, whatever the lengths; prompts packed once or twice."""
    trials = [trial("qwen3-tied", "dpo"), trial("uneven", "ipo-mean"), trial("qwen3-tied", "dpo", True)]
    if ranks < 4:
        trials += [trial("qwen3-tied", name) for name in ("hinge", "smooth-free", "data")]
    check_layouts(ranks, trials)


def test_a_mixture_of_experts_on_expert_ranks() -> None:
    check_layouts(2, [trial("moe", "dpo")], MIXTURE_SETTINGS)


def test_row_20_a_shared_prompt_saves_tokens_and_nothing_else() -> None:
    """Source tokens fall by the tokens shared; targets, pairs, attribution, rewards and gradients do not."""
    _, whole, expected = trial("qwen3-tied", "dpo")
    _, once, _ = trial("qwen3-tied", "dpo", True)
    first, _ = run_trial(whole, SETTINGS["alone"])
    second, _ = run_trial(once, SETTINGS["alone"])
    saved = sum(max(prompt_length(pair) - 1, 0) for pair in draw_pairs())
    assert second["tokens/source"] == first["tokens/source"] - saved
    changed = ("tokens/", "packing/", "channel_source_tokens/")
    for name in expected.metrics:
        if not name.startswith(changed):
            # rewards are differences of log-probabilities, norms round in float32
            assert second[name] == pytest.approx(first[name], rel=1e-6, abs=1e-6), name
    assert second["tokens/loss"] == first["tokens/loss"]


def test_row_10_a_pair_of_two_sides_has_three_targets() -> None:
    """Labels [1, 2, 3, 4, 5] in sides of 3 and 2 tokens: the boundary between them is no target."""
    documents = [Document([1, 2, 3], [1, 2, 3], group=0), Document([4, 5], [4, 5], group=0)]
    batch = build_batch([documents], 8, alignment=1, term="preference")
    assert batch.targets["preference"].tolist() == [2, 3, -100, 5, -100, -100, -100, -100]
    assert int(batch.counts["preference"].num_targets.sum()) == 3
    one = build_batch([[Document([1, 2, 3, 4, 5])]], 8, alignment=1)
    assert int(one.counts["text"].num_targets.sum()) == 4


def test_the_order_and_packing_of_pairs_changes_nothing() -> None:
    _, made, expected = trial("qwen3-tied", "dpo")
    for seed in range(3):
        units = list(made.units)
        random.Random(seed).shuffle(units)
        other = Trial(made.build_model, units, WINDOW, CHANNELS, made.build_objective, "preference")
        for name in ("alone", "alone x 3"):
            assert differences(*run_trial(other, SETTINGS[name]), expected) == []


def test_a_loss_over_tokens_instead_of_pairs_would_show() -> None:
    """Mutant: a mean over micro-batches, each with a mean of its own pairs."""
    pairs = draw_pairs()
    model, reference = build("qwen3-tied", 0), build("qwen3-tied", 1)
    halves = [preference_answer(model, reference, part, beta=BETA).loss for part in (pairs[:2], pairs[2:])]
    whole = preference_answer(model, reference, pairs, beta=BETA).loss
    assert abs(sum(halves) / 2 - whole) > 1e-3


def test_a42_pairs_of_accumulated_micro_batches() -> None:
    """Pair losses 0.2 and 0.6 in two micro-batches, completions of 100 and 2 tokens."""
    ledger = Ledger([Term("preference", "group")])
    lengths = (100, 2)
    batches = [
        build_batch(
            [[Document([1] * (n + 1), group=0), Document([1] * (n + 1), group=0)]], 256, term="preference"
        )
        for n in lengths
    ]
    gain = torch.ones((), requires_grad=True)
    with ledger.step(batches) as step:
        for batch, loss in zip(step, (0.2, 0.6), strict=True):
            step.add_groups(None, gain * torch.tensor([loss]), batch).backward()
    assert step.metrics()["train/loss"] == pytest.approx(0.4)
    assert gain.grad is not None
    assert gain.grad.item() == pytest.approx(0.4)


def test_a43_log_probabilities_are_no_mean_over_padding() -> None:
    sides = [torch.tensor([value], dtype=torch.float64) for value in (-2.0, -4.0, -2.5, -3.5)]
    assert preference_losses(*sides, beta=0.1).losses.item() == pytest.approx(0.644397, abs=1e-6)


def test_a44_no_wrapped_token_enters_the_sum() -> None:
    """ids [p, a, b], answer [a, b]: the sum is that of a after p and of b after a."""
    table = torch.full((4, 4), -torch.inf, dtype=torch.float64)
    table[:, 0] = 0.0
    for before, after, value in ((1, 2, -0.5), (2, 3, -1.5), (3, 1, -7.0)):
        table[before, after], table[before, 0] = value, math.log(1 - math.exp(value))
    document = Document([1, 2, 3], [-100, 2, 3], group=0)
    batch = build_batch([[document, document]], 8, alignment=1, term="preference")
    ledger = Ledger([Term("preference", "group")])
    with ledger.step([batch]) as step:
        hidden = nn.functional.one_hot(batch.input_ids, 4).to(torch.float64)
        log_probs = step.log_probs(
            hidden * 0, torch.eye(4, dtype=torch.float64), batch, bias=table[batch.input_ids]
        )
        sums = step.sum_by_document(log_probs, batch)
        step.add_groups(None, sums[:1], batch)
    assert sums.tolist() == pytest.approx([-2.0, -2.0])


def test_a_step_without_pairs_is_exactly_zero() -> None:
    model = LossModel(build("qwen3-tied", 0))
    preference = Preference(reference=None)
    ledger = Ledger(preference.terms, measures=preference.measures)
    with ledger.step([PackedBatch.empty(32)]) as step:
        for batch in step:
            model(step, batch, preference).backward()
    metrics = step.metrics()
    assert metrics["train/loss"] == 0
    assert "rewards/margins" not in metrics
    assert all(bool((p.grad == 0).all()) for p in model.parameters() if p.grad is not None)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ([[Document([1, 2])]], "belongs to no group"),
        ([[Document([1, 2], group=0)]], "holds 1 documents"),
        ([[Document([1, 2], group=0)] * 3], "holds 3 documents"),
    ],
)
def test_a_group_that_is_no_pair_is_named(units: list[list[Document]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pair_places(build_batch(units, 32, term="preference").layout)


def test_identical_sides_cost_ln_2() -> None:
    document = Document([5, 6, 7], [-100, 6, 7], group=0)
    model = LossModel(build("qwen3-tied", 0))
    preference = Preference(reference=None)
    ledger = Ledger(preference.terms, measures=preference.measures)
    with ledger.step([build_batch([[document, document]], 32, term="preference")]) as step:
        for batch in step:
            model(step, batch, preference).backward()
    metrics = step.metrics()
    assert metrics["train/loss"] == pytest.approx(math.log(2))
    assert metrics["rewards/accuracies"] == 0
