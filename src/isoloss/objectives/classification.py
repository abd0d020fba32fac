"""Labels of documents or of tokens: classes, or numbers."""

from typing import Any, Literal, cast, final

import torch
from torch import Tensor, nn

from isoloss.batch.document import IGNORE_INDEX
from isoloss.batch.packed_batch import PackedBatch
from isoloss.reduction.step import Step
from isoloss.reduction.terms import Term

CLASSIFICATION_TERM = "classification"
ACCURACY = "classification/accuracy"
ABSOLUTE_ERROR = "regression/absolute_error"
VALUES_EXTRA = "regression_values"
"""Name of the `token_extras` with the numbers to predict, float[T], at the slots that are targets."""

HEAD_NAMES = ("score", "classifier")
"""What transformers calls the head of a decoder that classifies."""

ProblemType = Literal["single_label_classification", "regression"]


@final
class Classification:
    """Cross entropy of classes, or squared error of numbers, at the slots that carry a label.

    The target of a slot is its own label and is never shifted: a label of a document stands at the slot that
    is pooled, its last token (`label_documents`), a label of a token at the token. So `tokens/loss` counts
    labelled documents, or labelled tokens, and they are the denominator. Works on any model with
    `base_model`, which gives hidden states, and a linear head: transformers' classes for sequence and token
    classification of decoders.

    Shown: how often the most probable class is the right one, or the mean absolute error.

    Args:
        term: whose targets are the classes; with numbers its targets are any class, and `token_extras`
            "regression_values" holds the numbers.
        problem_type: classes or numbers.
        label_smoothing: spread over all classes; classes only.
    """

    def __init__(
        self,
        term: Term | None = None,
        *,
        problem_type: ProblemType = "single_label_classification",
        label_smoothing: float = 0.0,
    ) -> None:
        self._term = Term(CLASSIFICATION_TERM) if term is None else term
        self._is_regression = problem_type == "regression"
        self._label_smoothing = label_smoothing

    @property
    def terms(self) -> tuple[Term, ...]:
        """One."""
        return (self._term,)

    @property
    def measures(self) -> tuple[str, ...]:
        """Accuracy, or absolute error."""
        return (ABSOLUTE_ERROR if self._is_regression else ACCURACY,)

    def __call__(self, model: Any, step: Step, batch: PackedBatch) -> Tensor:
        """Share of the loss of the window's labels.

        Raises:
            ValueError: the model has no such head, a window has targets and no numbers, or the head has more
                than one output for them.
        """
        head = classification_head(model)
        hidden = model.base_model(**batch.model_inputs(), use_cache=False).last_hidden_state[0]
        if self._is_regression:
            return self._squared_error(head(hidden), step, batch)
        name = self._term.name
        share = step.loss(
            hidden, head.weight, batch, term=name, bias=head.bias, label_smoothing=self._label_smoothing
        )
        with torch.no_grad():
            best = head(hidden).argmax(-1)
            targets = batch.targets[name].to(best.device) if name in batch.targets else torch.zeros_like(best)
            step.measure(ACCURACY, (best == targets).to(torch.float32), batch, term=name)
        return share

    def _squared_error(self, scores: Tensor, step: Step, batch: PackedBatch) -> Tensor:
        if scores.shape[-1] != 1:
            raise ValueError(f"regression takes a head of one output, got {scores.shape[-1]}")
        name = self._term.name
        predicted = scores.squeeze(-1).to(torch.promote_types(scores.dtype, torch.float32))
        values = torch.zeros_like(predicted)
        if VALUES_EXTRA in batch.token_extras:
            values = batch.token_extras[VALUES_EXTRA].to(predicted)
        elif batch.num_targets(name):
            raise ValueError(
                f"the window has targets of {name!r} and no token_extras[{VALUES_EXTRA!r}]; give the numbers "
                "to predict at their slots (label_documents does)"
            )
        error = torch.where(batch.is_target(name), predicted - values, 0.0)
        step.measure(ABSOLUTE_ERROR, error.abs(), batch, term=name)
        return step.add(name, error.square(), batch)


def classification_head(model: nn.Module) -> nn.Linear:
    """The linear layer that makes scores of hidden states.

    Raises:
        ValueError: the model has none under the names that transformers gives it.
    """
    children = dict(model.named_children())
    for name in HEAD_NAMES:
        if isinstance(children.get(name), nn.Linear):
            return cast(nn.Linear, children[name])
    raise ValueError(
        f"{type(model).__name__} has no linear layer {' or '.join(HEAD_NAMES)} beside its decoder, only "
        f"{', '.join(children)}; use a transformers class for sequence or token classification of a decoder"
    )


def label_documents(
    batch: PackedBatch,
    labels: Tensor,
    *,
    term: str = CLASSIFICATION_TERM,
    weights: Tensor | None = None,
) -> PackedBatch:
    """A whole window in which the last token of each document carries the document's label.

    Also of a document that was truncated: the label goes to the last token that is left.

    Args:
        batch: a whole window; other terms are kept.
        labels: one per document of the window (prefixes left out): classes, int, -100 for none, or numbers,
            floating, NaN for none.
        term: of the labels.
        weights: the data's weight of each document's label, float; None: all are one.

    Raises:
        ValueError: the number of labels is not that of the documents.
    """
    layout = batch.layout
    if len(labels) != layout.num_documents:
        raise ValueError(f"{len(labels)} labels for {layout.num_documents} documents; give one each")
    last = torch.tensor(
        [
            start + length - 1
            for start, length, prefix in zip(
                layout.document_starts, layout.document_lengths, layout.is_prefix, strict=True
            )
            if not prefix
        ],
        dtype=torch.int64,
    )
    targets = torch.full((len(batch),), IGNORE_INDEX)
    extras: dict[str, Tensor] = {}
    if labels.is_floating_point():
        is_labelled = ~labels.isnan()
        targets[last[is_labelled]] = 0
        extras[VALUES_EXTRA] = torch.zeros(len(batch), dtype=torch.float64)
        extras[VALUES_EXTRA][last[is_labelled]] = labels[is_labelled].to(torch.float64)
    else:
        targets[last] = labels.to(torch.int64)
    own_weights: dict[str, Tensor] = {}
    if weights is not None:
        own_weights[term] = torch.zeros(len(batch))
        own_weights[term][last] = weights.to(torch.float32)
    return batch.with_terms({term: targets}, own_weights, extras)
