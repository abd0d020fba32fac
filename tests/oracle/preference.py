"""Preference losses by hand: one pair at a time, each side a document of its own, formulas written out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from oracle.single_process import PlainDocument


@dataclass
class PlainPair:
    """Both sides hold the prompt and their answer; only the answer has labels."""

    chosen: PlainDocument
    rejected: PlainDocument
    weight: float = 1.0
    channel: int = 0
    shared_tokens: int = 0
    """Tokens of the prompt that are counted once for both."""


@dataclass
class PairAnswer:
    """What a step on the pairs must give."""

    loss: float
    gradients: dict[str, Tensor]
    channel_losses: dict[int, float]
    measures: dict[str, float]
    channel_measures: dict[str, dict[int, float]]
    loss_tokens: int
    source_tokens: int
    documents: int
    weight: float
    measured: list[dict[str, float]] = field(default_factory=list)


def side_log_prob(model: nn.Module, document: PlainDocument, *, mean: bool) -> Tensor:
    targets = document.targets()
    logits = model(input_ids=torch.tensor([document.tokens]), use_cache=False).logits[0]
    total = torch.zeros((), dtype=torch.float64)
    for place, label, _ in targets:
        total = total - nn.functional.cross_entropy(logits[place], torch.tensor(label))
    return total / len(targets) if mean else total


def pair_loss(kind: str, margin: Tensor, beta: float, smoothing: float) -> Tensor:
    if kind == "hinge":
        return torch.clamp(1 - beta * margin, min=0)
    if kind == "ipo":
        return (margin - 1 / (2 * beta)) ** 2
    assert kind == "sigmoid", kind
    right = torch.log(1 / (1 + torch.exp(-beta * margin)))
    wrong = torch.log(1 / (1 + torch.exp(beta * margin)))
    return -(1 - smoothing) * right - smoothing * wrong


def preference_answer(
    model: nn.Module,
    reference: nn.Module | None,
    pairs: Sequence[PlainPair],
    *,
    kind: str = "sigmoid",
    beta: float = 0.1,
    smoothing: float = 0.0,
    mean: bool = False,
) -> PairAnswer:
    """Loss, gradients, rewards and counts of one step on `pairs`."""
    weight_total = sum(pair.weight for pair in pairs)
    model.zero_grad(set_to_none=True)
    sums: dict[int, float] = {}
    weights: dict[int, float] = {}
    loss_sum = 0.0
    measured: list[dict[str, float]] = []
    for pair in pairs:
        sides = [side_log_prob(model, side, mean=mean) for side in (pair.chosen, pair.rejected)]
        references = [torch.zeros((), dtype=torch.float64)] * 2
        if reference is not None:
            with torch.no_grad():
                references = [
                    side_log_prob(reference, side, mean=mean) for side in (pair.chosen, pair.rejected)
                ]
        rewards = [beta * (side - other) for side, other in zip(sides, references, strict=True)]
        loss = pair_loss(kind, (rewards[0] - rewards[1]) / beta, beta, smoothing) * pair.weight
        if weight_total:
            (loss / weight_total).backward()
        loss_sum += loss.item()
        sums[pair.channel] = sums.get(pair.channel, 0.0) + loss.item()
        weights[pair.channel] = weights.get(pair.channel, 0.0) + pair.weight
        measured.append(
            {
                "rewards/chosen": rewards[0].item(),
                "rewards/rejected": rewards[1].item(),
                "rewards/margins": (rewards[0] - rewards[1]).item(),
                "rewards/accuracies": float(rewards[0].item() > rewards[1].item()),
                "logps/chosen": sides[0].item(),
                "logps/rejected": sides[1].item(),
            }
        )
    channels = sorted(weights)
    names = list(measured[0]) if measured else []

    def channel_mean(name: str, channel: int) -> float:
        values = [one[name] for one, pair in zip(measured, pairs, strict=True) if pair.channel == channel]
        return math.fsum(values) / len(values)

    both = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    return PairAnswer(
        loss=loss_sum / weight_total if weight_total else 0.0,
        gradients={
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            for name, parameter in model.named_parameters()
        },
        channel_losses={c: sums[c] / weights[c] for c in channels if weights[c]},
        measures={name: math.fsum(one[name] for one in measured) / len(measured) for name in names},
        channel_measures={
            name: {channel: channel_mean(name, channel) for channel in channels} for name in names
        },
        loss_tokens=sum(len(side.targets()) for side in both),
        source_tokens=sum(len(side.tokens) for side in both) - sum(pair.shared_tokens for pair in pairs),
        documents=len(both),
        weight=weight_total,
        measured=measured,
    )
