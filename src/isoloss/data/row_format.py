"""How rows become documents: what differs between objectives, as plain functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from isoloss.batch.document import Document
from isoloss.batch.packed_batch import PackedBatch
from isoloss.data.rows import Conversation, LossOn, check_row
from isoloss.data.tokenising import Tokeniser
from isoloss.objectives.multi_token import depth_term, look_ahead
from isoloss.objectives.objective import TEXT_TERM


def unchanged(batch: PackedBatch) -> PackedBatch:
    """The window as it is."""
    return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """What the rows of a run hold, and which targets their windows carry."""

    terms: tuple[str, ...]
    """Every term that windows have targets of; the first is that of `Document.labels`."""

    check: Callable[[Mapping[str, Any]], bool]
    """Raises `RowError` for a row at fault, as far as can be told without a tokenizer; called for every row
    before the run starts. Returns whether the chat template will render the row."""

    documents: Callable[[Mapping[str, Any], int], Sequence[Document]]
    """(row, index of its channel) -> its documents; several are one group. Raises `RowError`."""

    complete: Callable[[PackedBatch], PackedBatch] = unchanged
    """Adds to a packed window what follows from the whole of it, such as the targets of further terms."""

    identity: Mapping[str, Any] = field(default_factory=dict)
    """Recipe key -> value, JSON: what documents depend on. A run is resumed on the same values only."""


def text_format(tokenizer: PreTrainedTokenizerBase, loss_on: LossOn, *, num_depths: int = 0) -> RowFormat:
    """Text, conversations, prompts with completions, and token ids, to be predicted token by token.

    Args:
        tokenizer: of the model.
        loss_on: which tokens are targets.
        num_depths: how many further depths of multi-token prediction windows have targets of.
    """
    tokeniser = Tokeniser(tokenizer, loss_on)
    depths = tuple(depth_term(depth) for depth in range(1, num_depths + 1))
    return RowFormat(
        terms=(TEXT_TERM, *depths),
        check=partial(_check_text, loss_on=loss_on, vocabulary_size=len(tokenizer)),
        documents=lambda row, source: [tokeniser.document(row, source)],
        complete=partial(look_ahead, num_depths=num_depths) if num_depths else unchanged,
        identity={"data.loss_on": loss_on},
    )


def _check_text(row: Mapping[str, Any], *, loss_on: LossOn, vocabulary_size: int) -> bool:
    content = check_row(row, loss_on=loss_on, vocabulary_size=vocabulary_size)
    return isinstance(content, Conversation)
