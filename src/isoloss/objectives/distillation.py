"""Distillation: the student's distribution of every target is drawn to that of a teacher."""

from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from isoloss.batch.packed_batch import PackedBatch
from isoloss.losses.linear_cross_entropy import TeacherLogits, TeacherTopK, linear_kl_divergence
from isoloss.objectives.loss_model import head_options, run_decoder
from isoloss.objectives.objective import TEXT_TERM
from isoloss.reduction.step import Step
from isoloss.reduction.terms import Term, TermReduction

DISTILLATION_TERM = "distillation"
TEACHER_IDS_EXTRA = "teacher_ids"
TEACHER_LOG_PROBS_EXTRA = "teacher_log_probs"
"""Names of the `token_extras` with a teacher's k most probable classes, [T, k]: entry t is the distribution
that slot t is to predict, behind the token of slot t."""


@final
class Distillation:
    """KL divergence from a teacher at every target; see `linear_kl_divergence` for the formulas.

    The teacher runs on the same window, or its most probable classes are stored with the data. Targets say
    where there is something to predict; which label stands there plays no part in the divergence, and is what
    the cross entropy beside it, if there is one, is trained on.

    Args:
        reduction: of both terms.
        teacher: a frozen model wrapped as the trained one is (`isoloss.parallel.wrap.wrap_frozen`), with the
            vocabulary of the trained one; None where windows carry `token_extras` "teacher_ids" and
            "teacher_log_probs".
        direction: "forward", KL(teacher || student), or "reverse".
        temperature: divides the logits of both.
        ce_coefficient: of the cross entropy of the data's labels, a term "text"; 0: there is none.
    """

    def __init__(
        self,
        reduction: TermReduction = "token",
        *,
        teacher: nn.Module | None = None,
        direction: str = "forward",
        temperature: float = 1.0,
        ce_coefficient: float = 0.0,
    ) -> None:
        terms = [Term(DISTILLATION_TERM, reduction)]
        if ce_coefficient:
            terms.append(Term(TEXT_TERM, reduction, ce_coefficient))
        self._terms = tuple(terms)
        self._teacher = teacher
        self._options: dict[str, Any] = {"direction": direction, "temperature": temperature}

    @property
    def terms(self) -> tuple[Term, ...]:
        """The divergence, and with a coefficient the cross entropy."""
        return self._terms

    @property
    def measures(self) -> tuple[str, ...]:
        """None."""
        return ()

    def __call__(self, model: Any, step: Step, batch: PackedBatch) -> Tensor:
        """Share of the divergence, and of the cross entropy beside it.

        Raises:
            ValueError: the window has targets and no stored classes, or the vocabularies differ.
        """
        hidden, head = run_decoder(model, batch)
        options = head_options(model, head)
        kernel = partial(linear_kl_divergence, teacher=self._ask(step, batch), **self._options)
        share = step.loss(hidden, head.weight, batch, term=DISTILLATION_TERM, kernel=kernel, **options)
        if len(self._terms) > 1:
            share = share + step.loss(hidden, head.weight, batch, term=TEXT_TERM, **options)
        return share

    def _ask(self, step: Step, batch: PackedBatch) -> TeacherLogits | TeacherTopK:
        if self._teacher is not None:
            with torch.no_grad():
                made: TeacherLogits = self._teacher(step, batch, _logits_of)
                return made
        extras = batch.token_extras
        if TEACHER_IDS_EXTRA not in extras or TEACHER_LOG_PROBS_EXTRA not in extras:
            if batch.num_targets(DISTILLATION_TERM):
                raise ValueError(
                    f"the window has targets and no token_extras {TEACHER_IDS_EXTRA!r} and "
                    f"{TEACHER_LOG_PROBS_EXTRA!r}; store the teacher's classes with the data, or give a "
                    "teacher"
                )
            nothing = torch.zeros(len(batch), 1, device=batch.input_ids.device)
            return TeacherTopK(nothing.to(torch.int64), nothing)
        return TeacherTopK(extras[TEACHER_IDS_EXTRA], extras[TEACHER_LOG_PROBS_EXTRA])


def _logits_of(model: Any, step: Step, batch: PackedBatch) -> TeacherLogits:
    """What the teacher's logits are made of; its head stays gathered, as `wrap_frozen` says."""
    hidden, head = run_decoder(model, batch)
    weight, options = step.own_classes(head.weight, head_options(model, head))
    return TeacherLogits(
        hidden[0],
        weight,
        bias=options["bias"],
        softcap=options.get("softcap"),
        logit_scale=options.get("logit_scale", 1.0),
    )
