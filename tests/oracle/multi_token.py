"""Multi-token prediction by hand: one document at a time, each depth's input put together token by token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oracle.single_process import PlainDocument, target_weight


@dataclass
class DepthAnswer:
    """What a step must give; entry 0 of each list is the next token, entry d is depth d."""

    losses: list[float]
    total: float
    targets: list[int]
    channel_losses: list[dict[int, float]]
    gradients: dict[str, Tensor]
    loss_tokens: int
    """Slots with a target of any depth."""


def depth_targets(document: PlainDocument, depth: int) -> list[tuple[int, int, float]]:
    """(place, label, weight): the label d + 1 behind the place, if it lies in the document and is one."""
    found = []
    for place in range(len(document.tokens) - 1 - depth):
        label = document.labels[place + 1 + depth]
        if label != -100:
            weight = document.weights[place + 1 + depth] if document.weights else 1.0
            found.append((place, label, weight))
    return found


def multi_token_answer(
    model: Any,
    documents: Sequence[PlainDocument],
    *,
    reduction: str = "token",
    coefficient: float = 0.3,
    num_channels: int = 1,
) -> DepthAnswer:
    """Every depth's loss over its own weight, their gradients in one backward for each document."""
    depths = range(len(model.multi_token_depths) + 1)

    def weighed(document: PlainDocument, depth: int) -> list[tuple[int, int, float]]:
        targets = depth_targets(document, depth)
        return [
            (place, label, weight * target_weight(reduction, len(targets)))
            for place, label, weight in targets
        ]

    totals = [sum(w for one in documents for _, _, w in weighed(one, depth)) for depth in depths]
    model.zero_grad(set_to_none=True)
    sums = [0.0 for _ in depths]
    channel_sums = [[0.0] * num_channels for _ in depths]
    channel_weights = [[0.0] * num_channels for _ in depths]
    for document in documents:
        ids = torch.tensor([document.tokens])
        decoder = model.get_decoder()
        hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
        positions = torch.arange(ids.shape[1]).unsqueeze(0)
        table = model.get_input_embeddings().weight
        objective = torch.zeros((), dtype=torch.float64)
        states = hidden
        for depth in depths:
            scored = states
            if depth:
                module = model.multi_token_depths[depth - 1]
                rows = [
                    table[document.tokens[place + depth]]
                    if place + depth < len(document.tokens)
                    else torch.zeros_like(table[0])
                    for place in range(len(document.tokens))
                ]
                left, right = (
                    module.hidden_norm(states),
                    module.embedding_norm(torch.stack(rows).unsqueeze(0)),
                )
                width = left.shape[-1]
                matrix = module.projection.weight
                mixed = left @ matrix[:, :width].T + right @ matrix[:, width:].T
                states = module.block(
                    mixed,
                    attention_mask=None,
                    position_ids=positions,
                    position_embeddings=decoder.rotary_emb(mixed, positions),
                )
                states = states if isinstance(states, Tensor) else states[0]
                scored = module.norm(states)
            logits = model.get_output_embeddings()(scored)[0]
            for place, label, weight in weighed(document, depth):
                one = nn.functional.cross_entropy(logits[place], torch.tensor(label)) * weight
                sums[depth] += one.item()
                channel_sums[depth][document.channel] += one.item()
                channel_weights[depth][document.channel] += weight
                if totals[depth]:
                    objective = objective + one / totals[depth] * (coefficient if depth else 1.0)
        if objective.requires_grad:
            objective.backward()
    losses = [value / total if total else 0.0 for value, total in zip(sums, totals, strict=True)]
    return DepthAnswer(
        losses=losses,
        total=losses[0] + coefficient * sum(losses[1:]),
        targets=[sum(len(depth_targets(one, depth)) for one in documents) for depth in depths],
        channel_losses=[
            {
                channel: channel_sums[depth][channel] / channel_weights[depth][channel]
                for channel in range(num_channels)
                if channel_weights[depth][channel]
            }
            for depth in depths
        ],
        gradients={
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            for name, parameter in model.named_parameters()
        },
        loss_tokens=sum(
            len({place for depth in depths for place, _, _ in depth_targets(one, depth)}) for one in documents
        ),
    )
