"""Classification by hand: one document at a time, its labels at the tokens they stand at, nothing shifted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Qwen3Config,
    Qwen3MoeConfig,
)

from oracle.models import VOCABULARY
from oracle.single_process import target_weight

CLASSES = 5


@dataclass
class LabelledDocument:
    """Tokens, and (place, class or number) of every label."""

    tokens: list[int]
    labels: list[tuple[int, float]]
    weight: float = 1.0
    channel: int = 0


@dataclass
class LabelAnswer:
    """What a step on the documents must give."""

    loss: float
    gradients: dict[str, Tensor]
    channel_losses: dict[int, float]
    measure: float
    channel_measures: dict[int, float]
    num_labels: int
    channel_labels: list[int]


def build_classifier(level: str, *, outputs: int = CLASSES, moe: bool = False, seed: int = 0) -> nn.Module:
    """A two-layer model with a head that classifies, in float64."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_labels": outputs,
        "pad_token_id": 0,
        "classifier_dropout": 0.0,
    }
    if moe:
        config = Qwen3MoeConfig(
            **options, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, intermediate_size=48
        )
        config._experts_implementation = "eager"
    else:
        config = Qwen3Config(**options, intermediate_size=48)
    kind = AutoModelForTokenClassification if level == "token" else AutoModelForSequenceClassification
    model = kind.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(torch.float64).train()


def label_answer(
    model: Any,
    documents: Sequence[LabelledDocument],
    *,
    reduction: str = "token",
    smoothing: float = 0.0,
    numbers: bool = False,
    num_channels: int = 1,
) -> LabelAnswer:
    """Loss, gradients, accuracy (of numbers the mean absolute error) and counts of one step."""

    def factor(document: LabelledDocument) -> float:
        return document.weight * target_weight(reduction, len(document.labels))

    weight_total = sum(factor(one) * len(one.labels) for one in documents if one.labels)
    model.zero_grad(set_to_none=True)
    sums, weights = [0.0] * num_channels, [0.0] * num_channels
    right, counts = [0.0] * num_channels, [0] * num_channels
    for document in documents:
        if not document.labels:
            continue
        hidden = model.base_model(
            input_ids=torch.tensor([document.tokens]), use_cache=False
        ).last_hidden_state
        scores = model.score(hidden)[0]
        total = torch.zeros((), dtype=torch.float64)
        for place, label in document.labels:
            if numbers:
                one = (scores[place, 0] - label) ** 2
                right[document.channel] += abs(scores[place, 0].item() - label)
            else:
                log_probs = torch.log_softmax(scores[place], -1)
                one = -(1 - smoothing) * log_probs[int(label)] - smoothing * log_probs.mean()
                right[document.channel] += float(int(log_probs.argmax()) == label)
            total = total + one * factor(document)
            weights[document.channel] += factor(document)
            counts[document.channel] += 1
        sums[document.channel] += total.item()
        (total / weight_total).backward()
    return LabelAnswer(
        loss=sum(sums) / weight_total if weight_total else 0.0,
        gradients={
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            for name, parameter in model.named_parameters()
        },
        channel_losses={c: sums[c] / weights[c] for c in range(num_channels) if weights[c]},
        measure=sum(right) / sum(counts),
        channel_measures={c: right[c] / counts[c] for c in range(num_channels) if counts[c]},
        num_labels=sum(counts),
        channel_labels=counts,
    )
