"""Losses of mixture-of-experts routers, one number per token, from router logits alone.

[Note: frequencies]
The balancing loss of a token is E * sum_e f_e p_e, with p its router probabilities and f the share of all
assignments that each of the E experts received, so that the f of a layer sum to 1. It is 1 where either is
uniform, whatever the number of experts and of experts per token. f is detached: it says which way to push,
and may come from another set of tokens than the one that is pushed.
"""

from typing import Literal

import torch
from torch import Tensor

RouterScores = Literal["softmax", "sigmoid"]
"""How a router makes scores of its logits: over all experts together, or for each alone."""


def router_probabilities(logits: Tensor, scores: RouterScores = "softmax") -> Tensor:
    """Probabilities p that sum to 1 over the experts, differentiable, [N, E].

    Args:
        logits: of the router, [N, E]; computed in float32 (float64 for float64 logits).
        scores: "softmax", or "sigmoid": each expert's sigmoid divided by the sum of all.
    """
    logits = logits.to(_compute_dtype(logits))
    if scores == "softmax":
        return logits.softmax(-1)
    shares = logits.sigmoid()
    return shares / shares.sum(-1, keepdim=True)


def expert_frequencies(counts: Tensor) -> Tensor:
    """Share of the assignments of each expert, float64[..., E]; uniform where nothing was assigned.

    Args:
        counts: assignments per expert, [..., E].
    """
    counts = counts.to(torch.float64)
    totals = counts.sum(-1, keepdim=True)
    # 1 / E where there is none, and never 0 / 0
    return torch.where(totals > 0, counts, 1.0) / torch.where(totals > 0, totals, counts.shape[-1])


def count_experts(experts: Tensor, num_experts: int, is_token: Tensor) -> Tensor:
    """Assignments of tokens per expert, float64[E]; slots that hold no token do not count.

    Args:
        experts: the experts chosen for each slot, int64[N, K].
        num_experts: E.
        is_token: whether a slot holds a token, bool[N].
    """
    counts = torch.zeros(num_experts, dtype=torch.float64, device=experts.device)
    ones = is_token.to(torch.float64).unsqueeze(-1).expand(experts.shape)
    # not bincount, for which the host waits on CUDA
    return counts.scatter_add_(0, experts.reshape(-1), ones.reshape(-1))


def balancing_loss(probabilities: Tensor, frequencies: Tensor) -> Tensor:
    """E * sum_e f_e p_e of each token, [N]; 1 where the frequencies are uniform, with gradient 0.

    Args:
        probabilities: of the router, [N, E], as `router_probabilities` makes them; differentiable.
        frequencies: share of the assignments of each expert, [E], summing to 1. Never differentiated. See
            [Note: frequencies].

    Raises:
        ValueError: the last dimensions differ.

    Example:
        >>> import torch
        >>> probabilities = torch.tensor([[0.8, 0.2], [0.4, 0.6]])
        >>> balancing_loss(probabilities, torch.tensor([0.5, 0.5])).mean().item()
        1.0
    """
    if frequencies.shape != probabilities.shape[-1:]:
        raise ValueError(
            f"frequencies has shape {list(frequencies.shape)}, probabilities {list(probabilities.shape)}; "
            "give one frequency per expert"
        )
    pull = expert_pull(frequencies).to(probabilities.dtype)
    return 1.0 + (probabilities * pull).sum(-1)


def expert_pull(frequencies: Tensor) -> Tensor:
    """E f_e - 1, detached, [..., E]: which way the balancing loss pushes each expert.

    As probabilities sum to 1, it gives the same loss as E f_e, and exactly no gradient at uniform f.
    """
    frequencies = frequencies.detach()
    num_experts = frequencies.shape[-1]
    # E * (1 / E) is not 1 for every E
    return torch.where(frequencies == 1.0 / num_experts, 0.0, num_experts * frequencies - 1.0)


def router_z_loss(logits: Tensor) -> Tensor:
    """Square of the logsumexp of each token's router logits, [N]; keeps logits small.

    Args:
        logits: of the router, [N, E], differentiable; computed in float32 (float64 for float64 logits).
    """
    return logits.to(_compute_dtype(logits)).logsumexp(-1).square()


def router_gradient(
    logits: Tensor, scores: RouterScores, *, push: Tensor | None, z_scale: Tensor | None
) -> Tensor:
    """Gradient of what the router losses of all tokens add up to, [N, E]; float32 or float64.

    In closed form, as it is needed inside a backward pass, where another one would be nested.

    Args:
        logits: of the router, [N, E].
        scores: how probabilities come from them.
        push: `expert_pull` times the scale of the balancing loss, [E]; None without it.
        z_scale: scale of the z-loss, a scalar; None without it.
    """
    logits = logits.to(_compute_dtype(logits))
    gradient = torch.zeros_like(logits)
    if push is not None:
        probabilities = router_probabilities(logits, scores)
        push = push.to(logits.dtype)
        centred = probabilities * (push - (probabilities * push).sum(-1, keepdim=True))
        # d log(sigmoid) is 1 - sigmoid
        gradient += centred if scores == "softmax" else centred * (1.0 - logits.sigmoid())
    if z_scale is not None:
        top = logits.logsumexp(-1, keepdim=True)
        gradient += (logits - top).exp() * (2.0 * z_scale.to(logits.dtype) * top)
    return gradient


def _compute_dtype(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32
