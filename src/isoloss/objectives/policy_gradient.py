"""Policy gradient on tokens that were sampled before, with their advantages."""

from typing import Any, final

import torch
from torch import Tensor

from isoloss.batch.packed_batch import PackedBatch
from isoloss.losses.policy import clipped_policy_losses
from isoloss.objectives.loss_model import head_log_probs
from isoloss.reduction.step import Step
from isoloss.reduction.terms import Term

POLICY_TERM = "policy"
ADVANTAGES_EXTRA = "advantages"
OLD_LOG_PROBS_EXTRA = "old_log_probs"
"""Names of the `token_extras`, float[T]: entry t belongs to the token that slot t predicts. An old
log-probability of NaN is one that was not recorded: the policy itself has sampled the token."""

MEASURES = ("policy/ratio", "policy/clip_fraction", "policy/approx_kl")


@final
class PolicyGradient:
    """The clipped surrogate of PPO over the targets of a step; see `clipped_policy_losses`.

    Whoever samples brings the advantages, and the log-probabilities that the tokens had when they were
    sampled; nothing is sampled, rewarded or normalised here. With reduction "token" every sampled token of
    the step weighs the same, with "sample" every answer.

    Shown over the targets: the mean ratio, the fraction whose ratio is bounded, and an estimate of the KL
    divergence from the policy that sampled.

    Args:
        term: whose targets are the sampled tokens.
        clip_low: see `clipped_policy_losses`.
        clip_high: see there.
    """

    def __init__(self, term: Term | None = None, *, clip_low: float = 0.2, clip_high: float = 0.2) -> None:
        self._term = Term(POLICY_TERM) if term is None else term
        self._bounds = {"clip_low": clip_low, "clip_high": clip_high}

    @property
    def terms(self) -> tuple[Term, ...]:
        """One."""
        return (self._term,)

    @property
    def measures(self) -> tuple[str, ...]:
        """Ratio, clip fraction and KL."""
        return MEASURES

    def __call__(self, model: Any, step: Step, batch: PackedBatch) -> Tensor:
        """Share of the loss of the window's sampled tokens.

        Raises:
            ValueError: the window has targets and no advantages.
        """
        name = self._term.name
        log_probs = head_log_probs(model, step, batch, term=name)
        advantages, old = torch.zeros_like(log_probs), log_probs.detach()
        # Whatever stands where nothing was sampled: through exp, even 0 * NaN would reach the gradient.
        is_target = batch.is_target(name)
        if ADVANTAGES_EXTRA in batch.token_extras:
            advantages = batch.token_extras[ADVANTAGES_EXTRA].to(log_probs)
            advantages = torch.where(is_target, advantages, 0.0)
        elif batch.num_targets(name):
            raise ValueError(
                f"the window has targets of {name!r} and no token_extras[{ADVANTAGES_EXTRA!r}]; give each "
                "sampled token its advantage, at the slot that predicts it"
            )
        if OLD_LOG_PROBS_EXTRA in batch.token_extras:
            given = batch.token_extras[OLD_LOG_PROBS_EXTRA].to(log_probs)
            old = torch.where(is_target & ~given.isnan(), given, old)
        output = clipped_policy_losses(log_probs, old, advantages, **self._bounds)
        for measure, values in zip(
            MEASURES, (output.ratios, output.is_clipped.to(log_probs.dtype), output.kl), strict=True
        ):
            step.measure(measure, values, batch, term=name)
        return step.add(name, output.losses, batch)
