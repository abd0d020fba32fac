"""Distillation and policy gradients in every layout against the oracle: losses, gradients, counts.

Rows 21 and 29; case A33.
"""

import math
import random
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from exactness.driving import CHANNELS, draw_documents
from exactness.objective_driving import (
    MIXTURE_SETTINGS,
    SETTINGS,
    Expected,
    Trial,
    check_layouts,
    differences,
    run_trial,
)
from isoloss import Document, LossModel, PackedBatch, Term, Topology
from isoloss.objectives.distillation import Distillation
from isoloss.objectives.policy_gradient import PolicyGradient
from isoloss.parallel.wrap import wrap_frozen
from oracle.distillation import (
    TokenAnswer,
    distillation_answer,
    policy_answer,
    stored_top_k,
    target_log_probs,
)
from oracle.mixture import build_moe
from oracle.models import VOCABULARY, build_model, decoder_layers
from oracle.single_process import PlainDocument

WINDOW = 256
TOP_K = 5


def draw() -> list[PlainDocument]:
    """Unequal documents, weights, one longer than a shard."""
    draw = random.Random(1)
    tokens = [draw.randrange(3, VOCABULARY) for _ in range(81)]
    return [PlainDocument(tokens, [-100] * 50 + tokens[50:], channel=1), *draw_documents()]


def build(kind: str, seed: int = 0) -> nn.Module:
    if kind == "moe":
        return build_moe("qwen3-moe", seed=seed)
    options: dict[str, Any] = {"num_key_value_heads": 4}
    if kind == "uneven":
        kind, options["vocab_size"] = "qwen3-untied", 67
    if kind == "teacher":  # another width and depth than the student's
        return build_model("llama", seed=seed, hidden_size=48, num_hidden_layers=1, **options)
    return build_model(kind, seed=seed, **options)


def units_of(documents: Sequence[PlainDocument], extras: Sequence[dict[str, Any]]) -> list[list[Document]]:
    return [
        [
            Document(
                one.tokens,
                one.labels,
                source=one.channel,
                weight=torch.tensor(one.weights) if one.weights else 1.0,
                token_extras=more,
            )
        ]
        for one, more in zip(documents, extras, strict=True)
    ]


def expect(answer: TokenAnswer) -> Expected:
    metrics = {
        "train/loss": answer.total,
        "tokens/loss": answer.num_targets,
        **{f"loss/{name}": loss for name, loss in answer.losses.items()},
        **answer.measures,
    }
    for channel, loss in answer.channel_losses.items():
        metrics[f"channel_loss/{CHANNELS[channel]}"] = loss
    return Expected(metrics, answer.gradients)


def distillation(
    reduction: str, options: dict[str, Any], teacher: str | None, topology: Topology
) -> Distillation:
    frozen = None
    if teacher is not None:
        model = build(teacher, 1)
        frozen = wrap_frozen(LossModel(model), decoder_layers(model), topology)
    return Distillation(reduction, teacher=frozen, **options)  # type: ignore[arg-type]


def with_cross_entropy(batch: PackedBatch) -> PackedBatch:
    """The labels once more, for the term beside the divergence."""
    targets = batch.targets | {"text": batch.targets["distillation"]}
    weights = batch.weights | ({"text": batch.weights["distillation"]} if batch.weights else {})
    return PackedBatch(batch.input_ids, targets, batch.layout, weights, batch.token_extras)


@cache
def distilled(kind: str, name: str) -> tuple[str, Trial, Expected]:
    ours, theirs, reduction = {
        "forward": ({"temperature": 2.0, "ce_coefficient": 0.3}, {"temperature": 2.0, "ce": 0.3}, "token"),
        "reverse": ({"direction": "reverse"}, {"reverse": True}, "sample"),
        "top forward": ({"temperature": 1.5}, {"temperature": 1.5, "top_k": TOP_K}, "square"),
        "top reverse": ({"direction": "reverse"}, {"reverse": True, "top_k": TOP_K}, "token"),
    }[name]
    documents = draw()
    teacher = kind if kind in ("uneven", "moe") else "teacher"
    answer = distillation_answer(
        build(kind), build(teacher, 1), documents, reduction=reduction, num_channels=3, **theirs
    )
    extras: list[dict[str, Any]] = [{} for _ in documents]
    if name.startswith("top"):
        for one, more in zip(documents, extras, strict=True):
            more["teacher_ids"], more["teacher_log_probs"] = stored_top_k(build(teacher, 1), one, TOP_K)
    made = Trial(
        partial(build, kind),
        units_of(documents, extras),
        WINDOW,
        CHANNELS,
        partial(distillation, reduction, ours, None if name.startswith("top") else teacher),
        "distillation",
        with_cross_entropy if "ce" in theirs else lambda batch: batch,
    )
    return f"{kind} {name}", made, expect(answer)


def policy(reduction: str, options: dict[str, Any], topology: Topology) -> PolicyGradient:
    return PolicyGradient(Term("policy", reduction), **options)  # type: ignore[arg-type]


@cache
def sampled(kind: str, name: str) -> tuple[str, Trial, Expected]:
    """Old log-probabilities are those of another model; where nothing was sampled NaN stands (A33)."""
    options, reduction = {
        "on-policy": ({}, "token"),
        "off-policy": ({"clip_low": 0.1, "clip_high": 0.3}, "token"),
        "answers": ({}, "sample"),
    }[name]
    documents = draw()
    generator = random.Random(2)
    advantages = [[generator.uniform(-2, 2) for _ in one.targets()] for one in documents]
    old = None
    if name != "on-policy":
        # a little off the policy itself, so that some ratios are bounded and some are not
        old = [
            [value + generator.uniform(-0.4, 0.4) for value in target_log_probs(build(kind), one)]
            for one in documents
        ]
    bounds = {"low": options.get("clip_low", 0.2), "high": options.get("clip_high", 0.2)}
    answer = policy_answer(
        build(kind), documents, advantages, old, reduction=reduction, num_channels=3, **bounds
    )
    extras = []
    for number, one in enumerate(documents):
        columns = {"advantages": advantages[number]} | ({} if old is None else {"old_log_probs": old[number]})
        more = {}
        for column, values in columns.items():
            more[column] = torch.full((len(one.tokens),), math.nan, dtype=torch.float64)
            for (place, _, _), value in zip(one.targets(), values, strict=True):
                more[column][place] = value
        extras.append(more)
    made = Trial(
        partial(build, kind),
        units_of(documents, extras),
        WINDOW,
        CHANNELS,
        partial(policy, reduction, options),
        "policy",
    )
    return f"{kind} {name}", made, expect(answer)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_row_29_distillation_gives_the_answer_of_the_oracle_in_every_layout(ranks: int) -> None:
    """Rows 21 and 29: a teacher of another shape beside the student, or its stored classes."""
    trials = [distilled("qwen3-tied", "forward"), distilled("uneven", "top forward")]
    if ranks < 4:
        trials += [distilled("uneven", "reverse"), distilled("qwen3-tied", "top reverse")]
    check_layouts(ranks, trials)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_row_29_policy_gradients_give_the_answer_of_the_oracle_in_every_layout(ranks: int) -> None:
    """Rows 21 and 29; case A33."""
    trials = [sampled("qwen3-tied", "off-policy"), sampled("uneven", "answers")]
    if ranks < 4:
        trials.append(sampled("qwen3-tied", "on-policy"))
    check_layouts(ranks, trials)


def test_mixtures_of_experts_on_expert_ranks() -> None:
    check_layouts(2, [distilled("moe", "forward"), sampled("moe", "off-policy")], MIXTURE_SETTINGS)


@pytest.mark.parametrize(
    "made", [partial(distilled, "qwen3-tied", "forward"), partial(sampled, "qwen3-tied", "answers")]
)
def test_the_order_and_packing_of_documents_changes_nothing(made: Any) -> None:
    _, trial, expected = made()
    units = list(trial.units)
    random.Random(4).shuffle(units)
    other = Trial(
        trial.build_model, units, WINDOW, CHANNELS, trial.build_objective, trial.term, trial.complete
    )
    for layout in ("alone", "alone x 3"):
        assert differences(*run_trial(other, SETTINGS[layout]), expected) == []


def test_a_mean_over_the_wrong_tokens_would_show() -> None:
    """Mutant: advantages moved by one token."""
    documents = [one for one in draw() if len(one.targets()) > 2]
    generator = random.Random(2)
    advantages = [[generator.uniform(-2, 2) for _ in one.targets()] for one in documents]
    moved = [values[1:] + values[:1] for values in advantages]
    model = build("qwen3-tied")
    left, right = (
        policy_answer(model, documents, given, None, num_channels=3) for given in (advantages, moved)
    )
    assert left.total == pytest.approx(right.total, abs=0.5)
    assert (
        max((left.gradients[name] - right.gradients[name]).abs().max().item() for name in left.gradients)
        > 1e-3
    )


def test_what_windows_lack_is_named() -> None:
    documents = [Document([5, 6, 7])]
    for name, made, message in (
        ("policy", PolicyGradient(), "advantages"),
        ("distillation", Distillation(), "teacher_ids"),
    ):
        trial = Trial(
            partial(build, "qwen3-tied"),
            [documents],
            16,
            ("a",),
            lambda _, made=made: made,
            name,  # type: ignore[misc]
        )
        with pytest.raises(ValueError, match=message):
            run_trial(trial, SETTINGS["alone"])
