"""Policy gradient losses of tokens, from log-probabilities and advantages."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyOutput:
    """What `clipped_policy_losses` returns, one entry per token."""

    losses: Tensor
    """Differentiable."""

    ratios: Tensor
    """Probability under the policy over that when the token was sampled, detached."""

    is_clipped: Tensor
    """bool: the bound holds, so the token has no gradient."""

    kl: Tensor
    """(r - 1) - log r, detached: never negative, and in the mean over sampled tokens
    KL(sampling policy || policy); the estimator k3 of J. Schulman, "Approximating KL divergence", 2020."""


def clipped_policy_losses(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> PolicyOutput:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) of each token, r = exp(log_probs - old_log_probs).

    The clipped surrogate of PPO (arXiv:1707.06347, equation 7); two bounds as in DAPO (arXiv:2503.14476).
    A weighted mean over tokens, or over answers, is what a term makes of it: "token" or "sample".

    Args:
        log_probs: of the sampled tokens under the policy, [...], differentiable.
        old_log_probs: of the same tokens when they were sampled, [...]; `log_probs.detach()` while the policy
            is the one that sampled: every ratio is 1, and the gradient is that of -A log p.
        advantages: A, [...]; constants, in any unit.
        clip_low: how far below 1 the ratio counts, in [0, 1].
        clip_high: how far above 1 the ratio counts, from 0.

    Raises:
        ValueError: shapes differ, or a bound is out of its range.
    """
    if not log_probs.shape == old_log_probs.shape == advantages.shape:
        raise ValueError(
            "expected one log-probability, old log-probability and advantage per token, got shapes "
            f"{list(log_probs.shape)}, {list(old_log_probs.shape)} and {list(advantages.shape)}"
        )
    if not 0 <= clip_low <= 1 or not clip_high >= 0:
        raise ValueError(f"clip_low must be in [0, 1] and clip_high from 0, got {clip_low} and {clip_high}")
    advantages = advantages.detach().to(log_probs.dtype)
    log_ratios = log_probs - old_log_probs.detach().to(log_probs.dtype)
    ratios = log_ratios.exp()
    bounded = ratios.clamp(1 - clip_low, 1 + clip_high)
    losses = -torch.minimum(ratios * advantages, bounded * advantages)
    with torch.no_grad():
        is_clipped = bounded * advantages < ratios * advantages
        kl = torch.expm1(log_ratios) - log_ratios
    return PolicyOutput(losses, ratios.detach(), is_clipped, kl)
