"""Preference pairs: which of two answers is the better one."""

from typing import Any, final

import torch
from torch import Tensor, nn

from isoloss.batch.layout import Layout
from isoloss.batch.packed_batch import PackedBatch
from isoloss.losses.preference import PreferenceLoss, preference_losses
from isoloss.objectives.loss_model import head_log_probs
from isoloss.reduction.step import Step
from isoloss.reduction.terms import Term

PREFERENCE_TERM = "preference"
REFERENCE_EXTRA = "reference_log_prob"
"""Name of the `document_extras` with each side's log-probability under the reference."""

MEASURES = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


@final
class Preference:
    """The loss of preference pairs; see `isoloss.losses.preference` for the formulas.

    The two sides of a pair are two documents of one group, the chosen one first; a prefix that both continue
    may stand before them. Log-probabilities are summed over each side's targets and complete over the shards
    of the window before anything that is not linear, so every layout computes the same loss. The
    denominator is the number, or the weight, of pairs in the step.

    Shown: rewards (beta times how far the policy has moved from the reference), their margins, how often the
    chosen side has the larger one, and log-probabilities as the loss takes them.

    Args:
        term: of reduction "group"; its targets are those of both sides.
        reference: a frozen model wrapped as the trained one is, "data" where documents carry
            `document_extras["reference_log_prob"]`, or None for no reference.
        loss_type: see `preference_losses`; as are beta and label_smoothing.
        beta: see there.
        label_smoothing: see there.
        length_normalized: mean instead of sum over a side's targets, of policy and reference alike.

    Raises:
        ValueError: the term has another reduction.
    """

    def __init__(
        self,
        term: Term | None = None,
        *,
        reference: nn.Module | str | None = None,
        loss_type: PreferenceLoss = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        length_normalized: bool = False,
    ) -> None:
        self._term = Term(PREFERENCE_TERM, "group") if term is None else term
        if self._term.reduction != "group":
            raise ValueError(
                f"term {self._term.name!r} has reduction {self._term.reduction!r}; a pair has one loss: "
                f"Term({self._term.name!r}, 'group')"
            )
        if isinstance(reference, str) and reference != "data":
            raise ValueError(f"reference must be a module, 'data' or None, got {reference!r}")
        self._reference = reference
        self._options: dict[str, Any] = {
            "loss_type": loss_type,
            "beta": beta,
            "label_smoothing": label_smoothing,
        }
        self._length_normalized = length_normalized

    @property
    def terms(self) -> tuple[Term, ...]:
        """One."""
        return (self._term,)

    @property
    def measures(self) -> tuple[str, ...]:
        """Rewards and log-probabilities."""
        return MEASURES

    def __call__(self, model: Any, step: Step, batch: PackedBatch) -> Tensor:
        """Share of the loss of the window's pairs.

        Raises:
            ValueError: a group is no pair, or documents lack what the reference needs.
        """
        chosen, rejected = pair_places(batch.layout)
        policy = self._by_side(head_log_probs(model, step, batch, term=self._term.name), step, batch)
        reference = self._reference_log_probs(step, batch)
        device = policy.device
        sides = torch.tensor([chosen, rejected], dtype=torch.int64).to(device, non_blocking=True)
        references: tuple[Tensor | None, Tensor | None] = (None, None)
        if reference is not None:
            reference = reference.to(policy)
            references = (reference[sides[0]], reference[sides[1]])
        log_probs = (policy[sides[0]], policy[sides[1]])
        output = preference_losses(*log_probs, *references, **self._options)
        values = (
            output.chosen_rewards,
            output.rejected_rewards,
            output.chosen_rewards - output.rejected_rewards,
            (output.chosen_rewards > output.rejected_rewards).to(policy.dtype),
            *log_probs,
        )
        for name, value in zip(MEASURES, values, strict=True):
            step.measure(name, value, batch, term=self._term.name)
        return step.add_groups(self._term.name, output.losses, batch)

    def _by_side(self, log_probs: Tensor, step: Step, batch: PackedBatch) -> Tensor:
        """Log-probability of each document of the window, complete over its shards."""
        return self._normalized(step.sum_by_document(log_probs, batch), batch)

    def _normalized(self, sums: Tensor, batch: PackedBatch) -> Tensor:
        if not self._length_normalized or self._term.name not in batch.counts:
            return sums
        is_counted = ~torch.tensor(batch.layout.is_prefix, dtype=torch.bool)
        counts = batch.counts[self._term.name].num_targets[is_counted].clamp(min=1)
        return sums / counts.to(sums.device, sums.dtype, non_blocking=True)

    def _reference_log_probs(self, step: Step, batch: PackedBatch) -> Tensor | None:
        if self._reference is None:
            return None
        if isinstance(self._reference, nn.Module):
            with torch.no_grad():
                log_probs = self._reference(step, batch, self._frozen_log_probs)
                return self._by_side(log_probs, step, batch)
        if batch.layout.num_documents == 0:
            return torch.zeros(0)
        stored = batch.document_extras.get(REFERENCE_EXTRA)
        if not isinstance(stored, Tensor):
            raise ValueError(
                f"documents without document_extras[{REFERENCE_EXTRA!r}], which reference='data' needs; give "
                "each side its log-probability under the reference as a tensor, or use another reference"
            )
        return self._normalized(stored, batch)

    def _frozen_log_probs(self, model: Any, step: Step, batch: PackedBatch) -> Tensor:
        return head_log_probs(model, step, batch, term=self._term.name)


def pair_places(layout: Layout) -> tuple[list[int], list[int]]:
    """Places of the chosen and of the rejected sides among the counted documents, pair by pair.

    Raises:
        ValueError: a group does not hold two documents, prefixes aside.
    """
    groups: dict[int, list[int]] = {}
    place = 0
    for group, is_prefix in zip(layout.document_groups, layout.is_prefix, strict=True):
        if is_prefix:
            continue
        if group == -1:
            raise ValueError(
                f"document {place} of the window belongs to no group; the sides of a pair are two documents "
                "of one group, the chosen one first"
            )
        groups.setdefault(group, []).append(place)
        place += 1
    for group, places in groups.items():
        if len(places) != 2:
            raise ValueError(
                f"group {group} of the window holds {len(places)} documents; a pair is two, the chosen one "
                "first"
            )
    pairs = list(groups.values())
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
