"""What an objective is, and the plain one: next-token cross entropy."""

from typing import Any, Protocol, final

from torch import Tensor

from isoloss.batch.packed_batch import PackedBatch
from isoloss.objectives.loss_model import causal_lm
from isoloss.reduction.step import Step
from isoloss.reduction.terms import Term

TEXT_TERM = "text"
"""Name of the term of next-token cross entropy."""


class AbstractObjective(Protocol):
    """Turns what a model makes of a micro-batch into shares of its terms.

    It owns no loop, no denominator and no collective. Implementations are plain classes, not dataclasses:
    an objective is an argument of the wrapped forward, and FSDP2 rebuilds dataclasses there.
    """

    @property
    def terms(self) -> tuple[Term, ...]:
        """The loss terms to declare, in the same order on every rank."""

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of the numbers that it shows and does not train, for `Ledger(..., measures=...)`."""

    def __call__(self, model: Any, step: Step, batch: PackedBatch) -> Tensor:
        """This rank's share of the loss; runs inside the wrapped forward, in training and evaluation.

        Args:
            model: the model that `LossModel` holds.
            step: the open step.
            batch: a micro-batch that it yielded.
        """


@final
class CausalLM:
    """Next-token cross entropy.

    Args:
        term: which targets of a batch are meant, and how they are weighed.
        label_smoothing: see `linear_cross_entropy`.
        z_loss: coefficient of logsumexp^2; 0 is off.
    """

    def __init__(self, term: Term, *, label_smoothing: float = 0.0, z_loss: float = 0.0) -> None:
        self._term = term
        self._options = {"label_smoothing": label_smoothing, "z_loss": z_loss}

    @property
    def terms(self) -> tuple[Term, ...]:
        """One."""
        return (self._term,)

    @property
    def measures(self) -> tuple[str, ...]:
        """None."""
        return ()

    def __call__(self, model: Any, step: Step, batch: PackedBatch) -> Tensor:
        """Share of the cross entropy; see `causal_lm`."""
        return causal_lm(model, step, batch, term=self._term.name, **self._options)
