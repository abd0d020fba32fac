"""Distillation and policy gradients by hand: one document at a time, every probability written out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oracle.single_process import PlainDocument, target_weight


@dataclass
class TokenAnswer:
    """What a step with one loss per token must give."""

    losses: dict[str, float]
    """By term."""
    total: float
    gradients: dict[str, Tensor]
    channel_losses: dict[int, float]
    """Of the first term."""
    measures: dict[str, float]
    num_targets: int


def _logits(model: nn.Module, document: PlainDocument) -> Tensor:
    return model(input_ids=torch.tensor([document.tokens]), use_cache=False).logits[0]


def divergence(student: Tensor, teacher: Tensor, *, reverse: bool, temperature: float) -> Tensor:
    """KL of two rows of logits, times the temperature squared."""
    q, p = torch.softmax(student / temperature, -1), torch.softmax(teacher / temperature, -1)
    left, right = (q, p) if reverse else (p, q)
    return temperature**2 * (left * (left / right).log()).sum()


def top_divergence(
    student: Tensor, ids: Tensor, log_probs: Tensor, *, reverse: bool, temperature: float
) -> Tensor:
    """The same with k stored classes: p over them alone; q over all of them, in reverse over the k alone."""
    p = torch.softmax(log_probs / temperature, -1)
    if reverse:
        q = torch.softmax(student[ids] / temperature, -1)
        return temperature**2 * (q * (q / p).log()).sum()
    q = torch.softmax(student / temperature, -1)[ids]
    return temperature**2 * (p * (p / q).log()).sum()


def stored_top_k(teacher: nn.Module, document: PlainDocument, k: int) -> tuple[Tensor, Tensor]:
    """ids and log-probabilities [n, k] behind each token."""
    with torch.no_grad():
        best = torch.log_softmax(_logits(teacher, document), -1).topk(k, -1)
    return best.indices, best.values


def distillation_answer(
    model: nn.Module,
    teacher: nn.Module,
    documents: Sequence[PlainDocument],
    *,
    reduction: str = "token",
    reverse: bool = False,
    temperature: float = 1.0,
    ce: float = 0.0,
    top_k: int | None = None,
    num_channels: int = 1,
) -> TokenAnswer:
    """The divergence at every target, and with `ce` the cross entropy of its label beside it."""

    def weigh(document: PlainDocument, weight: float) -> float:
        return weight * target_weight(reduction, len(document.targets()))

    total_weight = sum(weigh(one, weight) for one in documents for _, _, weight in one.targets())
    model.zero_grad(set_to_none=True)
    kl_sum, ce_sum = 0.0, 0.0
    sums, weights = [0.0] * num_channels, [0.0] * num_channels
    for document in documents:
        if not document.targets():
            continue
        student = _logits(model, document)
        with torch.no_grad():
            other = _logits(teacher, document)
        stored = None if top_k is None else stored_top_k(teacher, document, top_k)
        total = torch.zeros((), dtype=torch.float64)
        for place, label, weight in document.targets():
            share = weigh(document, weight)
            if stored is None:
                one = divergence(student[place], other[place], reverse=reverse, temperature=temperature)
            else:
                ids, values = stored[0][place], stored[1][place]
                one = top_divergence(student[place], ids, values, reverse=reverse, temperature=temperature)
            cross = nn.functional.cross_entropy(student[place], torch.tensor(label))
            kl_sum += share * one.item()
            ce_sum += share * cross.item()
            sums[document.channel] += share * one.item()
            weights[document.channel] += share
            total = total + share * (one + ce * cross)
        (total / total_weight).backward()
    losses = {"distillation": kl_sum / total_weight}
    if ce:
        losses["text"] = ce_sum / total_weight
    return TokenAnswer(
        losses=losses,
        total=losses["distillation"] + ce * losses.get("text", 0.0),
        gradients=_gradients(model),
        channel_losses={c: sums[c] / weights[c] for c in range(num_channels) if weights[c]},
        measures={},
        num_targets=sum(len(one.targets()) for one in documents),
    )


def policy_answer(
    model: nn.Module,
    documents: Sequence[PlainDocument],
    advantages: Sequence[Sequence[float]],
    old: Sequence[Sequence[float]] | None,
    *,
    reduction: str = "token",
    low: float = 0.2,
    high: float = 0.2,
    num_channels: int = 1,
) -> TokenAnswer:
    """The clipped surrogate; `advantages[d]` and `old[d]` have an entry per target of document d."""
    total_weight = sum(
        weight * target_weight(reduction, len(one.targets()))
        for one in documents
        for _, _, weight in one.targets()
    )
    model.zero_grad(set_to_none=True)
    sums, weights = [0.0] * num_channels, [0.0] * num_channels
    ratios, clipped, kl = 0.0, 0, 0.0
    count = sum(len(one.targets()) for one in documents)
    for number, document in enumerate(documents):
        if not document.targets():
            continue
        logits = _logits(model, document)
        total = torch.zeros((), dtype=torch.float64)
        for index, (place, label, weight) in enumerate(document.targets()):
            log_prob = torch.log_softmax(logits[place], -1)[label]
            before = log_prob.item() if old is None else old[number][index]
            ratio = (log_prob - before).exp()
            advantage = advantages[number][index]
            bound = min(max(ratio.item(), 1 - low), 1 + high)
            is_clipped = bound * advantage < ratio.item() * advantage
            one = -torch.tensor(bound * advantage, dtype=torch.float64) if is_clipped else -ratio * advantage
            share = weight * target_weight(reduction, len(document.targets()))
            total = total + share * one
            sums[document.channel] += share * one.item()
            weights[document.channel] += share
            ratios += ratio.item()
            clipped += is_clipped
            kl += ratio.item() - 1 - (log_prob.item() - before)
        if total.requires_grad:
            (total / total_weight).backward()
    loss = sum(sums) / total_weight
    return TokenAnswer(
        losses={"policy": loss},
        total=loss,
        gradients=_gradients(model),
        channel_losses={c: sums[c] / weights[c] for c in range(num_channels) if weights[c]},
        measures={
            "policy/ratio": ratios / count,
            "policy/clip_fraction": clipped / count,
            "policy/approx_kl": kl / count,
        },
        num_targets=count,
    )


def target_log_probs(model: nn.Module, document: PlainDocument) -> list[float]:
    """Of every target of a document."""
    with torch.no_grad():
        logits = torch.log_softmax(_logits(model, document), -1)
    return [float(logits[place, label]) for place, label, _ in document.targets()]


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
