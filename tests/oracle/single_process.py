"""The independent answer: one process, float64, one document at a time, sums written by hand.

Nothing here is imported from the package, and nothing is packed, padded, sharded, fused or reduced. The
model is a plain transformers model with its own attention; the loss is `torch.nn.functional.cross_entropy`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

IGNORED = -100


@dataclass
class PlainDocument:
    """One document as plain lists; entry i of each list belongs to token i."""

    tokens: list[int]
    labels: list[int]
    """Unshifted: `labels[i]` is token i where it is to be predicted, else -100."""
    weights: list[float] = field(default_factory=list)
    """Of the labels; empty where all are 1."""
    channel: int = 0
    shared_tokens: int = 0
    """Leading tokens that another document of the data holds too and that are counted there."""

    def targets(self) -> list[tuple[int, int, float]]:
        """(place that predicts, label, weight) of every target: the token before it predicts it."""
        found = []
        for place in range(len(self.tokens) - 1):
            label = self.labels[place + 1]
            if label != IGNORED:
                found.append((place, label, self.weights[place + 1] if self.weights else 1.0))
        return found


@dataclass
class Answer:
    """What a step on the documents must give, however it is split."""

    loss: float
    gradients: dict[str, Tensor]
    weight: float
    """The denominator W."""
    channel_losses: dict[int, float]
    """Loss sum over weight sum, of channels with weight."""
    channel_shares: dict[int, float]
    """Loss sum over W, of every channel; empty if W is 0."""
    loss_tokens: int
    source_tokens: int
    documents: int
    channel_tokens: list[int]
    channel_source_tokens: list[int]
    channel_documents: list[int]


def target_weight(reduction: str, num_targets: int) -> float:
    if reduction == "token":
        return 1.0
    if reduction == "sample":
        return 1.0 / num_targets
    assert reduction == "square", reduction
    return 1.0 / math.sqrt(num_targets)


def answer(
    model: nn.Module, documents: Sequence[PlainDocument], *, reduction: str = "token", num_channels: int = 1
) -> Answer:
    """Loss, gradients and counts of one step on `documents`."""
    weight_total = 0.0
    channel_weights = [0.0] * num_channels
    channel_tokens = [0] * num_channels
    channel_source_tokens = [0] * num_channels
    channel_documents = [0] * num_channels
    for document in documents:
        targets = document.targets()
        for _, _, weight in targets:
            factor = weight * target_weight(reduction, len(targets))
            weight_total += factor
            channel_weights[document.channel] += factor
        channel_tokens[document.channel] += len(targets)
        channel_source_tokens[document.channel] += len(document.tokens) - document.shared_tokens
        channel_documents[document.channel] += 1

    model.zero_grad(set_to_none=True)
    loss_sum = 0.0
    channel_sums = [0.0] * num_channels
    for document in documents:
        targets = document.targets()
        if not targets:
            continue
        logits = model(input_ids=torch.tensor([document.tokens]), use_cache=False).logits[0]
        total = torch.zeros((), dtype=torch.float64)
        for place, label, weight in targets:
            one = nn.functional.cross_entropy(logits[place], torch.tensor(label))
            total = total + one * weight * target_weight(reduction, len(targets))
        loss_sum += total.item()
        channel_sums[document.channel] += total.item()
        if weight_total > 0.0:
            # The loss is divided, not the gradients afterwards: norms compute in float32 inside a float64
            # model and round differently for gradients of another size.
            (total / weight_total).backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    return Answer(
        loss=loss_sum / weight_total if weight_total else 0.0,
        gradients=gradients,
        weight=weight_total,
        channel_losses={
            channel: channel_sums[channel] / weight
            for channel, weight in enumerate(channel_weights)
            if weight > 0.0
        },
        channel_shares=(
            {channel: total / weight_total for channel, total in enumerate(channel_sums)}
            if weight_total
            else {}
        ),
        loss_tokens=sum(channel_tokens),
        source_tokens=sum(channel_source_tokens),
        documents=len(documents),
        channel_tokens=channel_tokens,
        channel_source_tokens=channel_source_tokens,
        channel_documents=channel_documents,
    )


def aligned_tokens(documents: Sequence[PlainDocument], alignment: int) -> int:
    """Slots that the documents take when each starts at a multiple of `alignment`."""
    return sum(
        math.ceil((len(document.tokens) - document.shared_tokens) / alignment) * alignment
        for document in documents
    )


def worst_difference(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, str]:
    """The largest max|difference| / max|reference| of any parameter, and its name.

    A parameter whose reference gradient is all zeros must have exactly zeros.
    """
    assert gradients.keys() == reference.keys(), sorted(gradients.keys() ^ reference.keys())
    worst, where = 0.0, ""
    for name, expected in reference.items():
        difference = (gradients[name] - expected).abs().max().item()
        size = expected.abs().max().item()
        relative = difference / size if size else (math.inf if difference else 0.0)
        if not relative <= worst:  # NaN counts as worst
            worst, where = relative, name
            if math.isnan(relative):
                return math.inf, name
    return worst, where
