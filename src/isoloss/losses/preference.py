"""Losses of preference pairs, from log-probabilities of both sides.

With c and r the log-probabilities of the chosen and the rejected side, each less that of the reference,
h = c - r the margin, beta the strength with which the policy is held to the reference and e the label
smoothing:

    sigmoid   -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)    DPO, arXiv:2305.18290; with e above 0
                                                                       known as conservative DPO
    hinge     max(0, 1 - beta h)                                       SLiC-HF's hinge, arXiv:2305.10425
    ipo       (h - 1 / (2 beta))^2                                     IPO, arXiv:2310.12036
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

PreferenceLoss = Literal["sigmoid", "hinge", "ipo"]


@dataclass(frozen=True, slots=True)
class PreferenceOutput:
    """What `preference_losses` returns, one entry per pair."""

    losses: Tensor
    """In nats for "sigmoid"; differentiable."""

    chosen_rewards: Tensor
    """beta * (policy - reference) of the chosen side, detached."""

    rejected_rewards: Tensor
    """The same of the rejected side, detached."""


def preference_losses(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor | None = None,
    reference_rejected: Tensor | None = None,
    *,
    loss_type: PreferenceLoss = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PreferenceOutput:
    """The loss of each pair; see the formulas above.

    Args:
        chosen: log-probability of each chosen side under the policy, in nats, [pairs]: a sum over its
            targets, or a mean where lengths are to count for nothing. Not scaled, and complete over shards.
        rejected: the same of the rejected sides.
        reference_chosen: the same under the reference; None: without a reference, as if it found all answers
            equally probable.
        reference_rejected: see there; both or none.
        loss_type: which of the formulas.
        beta: above 0.
        label_smoothing: chance that a pair is labelled the wrong way round, in [0, 0.5); "sigmoid" only.

    Raises:
        ValueError: shapes differ, one reference without the other, or an option out of its range.
    """
    if (reference_chosen is None) != (reference_rejected is None):
        raise ValueError("give log-probabilities of the reference for both sides, or for none")
    given = [rejected, *(one for one in (reference_chosen, reference_rejected) if one is not None)]
    if any(one.shape != chosen.shape for one in given):
        shapes = [list(one.shape) for one in (chosen, *given)]
        raise ValueError(f"expected one log-probability per pair on each side, got shapes {shapes}")
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be in [0, 0.5), got {label_smoothing}; 0.5 says nothing")
    if label_smoothing and loss_type != "sigmoid":
        raise ValueError(f"label_smoothing is of the loss 'sigmoid'; with {loss_type!r} set it to 0")
    chosen_ratio = chosen if reference_chosen is None else chosen - reference_chosen
    rejected_ratio = rejected if reference_rejected is None else rejected - reference_rejected
    margin = chosen_ratio - rejected_ratio
    match loss_type:
        case "sigmoid":
            losses = -functional.logsigmoid(beta * margin)
            if label_smoothing:
                losses = torch.lerp(losses, -functional.logsigmoid(-beta * margin), label_smoothing)
        case "hinge":
            losses = torch.relu(1 - beta * margin)
        case "ipo":
            losses = (margin - 1 / (2 * beta)).square()
        case other:
            raise ValueError(f"loss_type must be sigmoid, hinge or ipo, got {other!r}")
    return PreferenceOutput(losses, beta * chosen_ratio.detach(), beta * rejected_ratio.detach())
