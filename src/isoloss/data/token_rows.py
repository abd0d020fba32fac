"""Rows whose targets carry numbers of another model: a teacher's most probable classes, or advantages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from isoloss.batch.document import IGNORE_INDEX, Document
from isoloss.batch.packed_batch import PackedBatch
from isoloss.data.errors import RowError
from isoloss.data.row_format import RowFormat, unchanged
from isoloss.data.rows import Conversation, LossOn, check_row
from isoloss.data.tokenising import Tokeniser
from isoloss.objectives.distillation import (
    DISTILLATION_TERM,
    TEACHER_IDS_EXTRA,
    TEACHER_LOG_PROBS_EXTRA,
)
from isoloss.objectives.objective import TEXT_TERM
from isoloss.objectives.policy_gradient import ADVANTAGES_EXTRA, OLD_LOG_PROBS_EXTRA, POLICY_TERM


def distillation_format(
    tokenizer: PreTrainedTokenizerBase,
    loss_on: LossOn,
    *,
    stored_classes: int | None = None,
    with_cross_entropy: bool = False,
) -> RowFormat:
    """Rows as for causal language modelling, whose targets are distilled.

    Args:
        tokenizer: of the model.
        loss_on: which tokens are targets.
        stored_classes: the size of the model's vocabulary where rows hold `input_ids`, and for each of them
            `teacher_token_ids` and `teacher_logprobs`, lists of k: what the teacher expects behind the token.
        with_cross_entropy: the labels are targets of a term "text" too.
    """
    tokeniser = Tokeniser(tokenizer, loss_on)
    return RowFormat(
        terms=(DISTILLATION_TERM, TEXT_TERM) if with_cross_entropy else (DISTILLATION_TERM,),
        check=partial(
            _check_distilled, loss_on=loss_on, vocabulary_size=len(tokenizer), classes=stored_classes
        ),
        documents=partial(_distilled, tokeniser=tokeniser, stored=stored_classes is not None),
        complete=_label_text if with_cross_entropy else unchanged,
        identity={
            "data.loss_on": loss_on,
            "objective.teacher": "model" if stored_classes is None else "rows",
        },
    )


def policy_format(tokenizer: PreTrainedTokenizerBase, loss_on: LossOn) -> RowFormat:
    """Rows of sampled answers: a prompt with its completion, messages, or `input_ids` with `labels`.

    `advantage` is one number for the answer, or a list with one for each of its tokens (its targets, the end
    included); `old_log_probs` a list likewise, or left out while the policy is the one that sampled. Lists
    have to fit the tokens, so rows with lists are best given as `input_ids` and `labels`.

    Args:
        tokenizer: of the model.
        loss_on: which tokens are targets.
    """
    tokeniser = Tokeniser(tokenizer, loss_on)
    return RowFormat(
        terms=(POLICY_TERM,),
        check=partial(_check_policy, loss_on=loss_on, vocabulary_size=len(tokenizer)),
        documents=partial(_sampled, tokeniser=tokeniser),
        identity={"data.loss_on": loss_on},
    )


def _label_text(batch: PackedBatch) -> PackedBatch:
    """The distilled labels, with their weights, as targets of the cross entropy too."""
    weights = {}
    if DISTILLATION_TERM in batch.weights:
        weights[TEXT_TERM] = batch.weights[DISTILLATION_TERM]
    return batch.with_terms({TEXT_TERM: batch.targets[DISTILLATION_TERM]}, weights)


def _check_distilled(
    row: Mapping[str, Any], *, loss_on: LossOn, vocabulary_size: int, classes: int | None
) -> bool:
    content = check_row(row, loss_on=loss_on, vocabulary_size=vocabulary_size)
    if classes is not None:
        _stored_classes(row, classes)
    return isinstance(content, Conversation)


def _distilled(row: Mapping[str, Any], source: int, *, tokeniser: Tokeniser, stored: bool) -> list[Document]:
    document = tokeniser.document(row, source)
    if not stored:
        return [document]
    ids, log_probs = _stored_classes(row, None)
    extras = {
        TEACHER_IDS_EXTRA: torch.tensor(ids, dtype=torch.int64),
        TEACHER_LOG_PROBS_EXTRA: torch.tensor(log_probs, dtype=torch.float32),
    }
    return [replace(document, token_extras=extras)]


def _stored_classes(
    row: Mapping[str, Any], vocabulary_size: int | None
) -> tuple[list[list[int]], list[list[float]]]:
    """The teacher's classes and log-probabilities behind each token; checked if the vocabulary is given."""
    ids, log_probs = row.get("teacher_token_ids"), row.get("teacher_logprobs")
    for name, column in (("teacher_token_ids", ids), ("teacher_logprobs", log_probs)):
        if column is None:
            raise RowError(
                f"{name} is missing, which distillation without objective.teacher needs; add it "
                "(recipes/precompute_teacher.py does), or name a teacher"
            )
    tokens = row.get("input_ids")
    if not isinstance(tokens, list):
        raise RowError("a row with teacher_token_ids needs input_ids: the tokens that the teacher saw")
    assert ids is not None and log_probs is not None
    if vocabulary_size is None:
        return ids, log_probs
    for name, column in (("teacher_token_ids", ids), ("teacher_logprobs", log_probs)):
        if not isinstance(column, list) or len(column) != len(tokens):
            raise RowError(f"{name} must be a list with an entry for each of the {len(tokens)} input_ids")
    width = len(ids[0]) if isinstance(ids[0], list) else 0
    for place, (classes, values) in enumerate(zip(ids, log_probs, strict=True)):
        for name, entry in (("teacher_token_ids", classes), ("teacher_logprobs", values)):
            if not isinstance(entry, list) or not entry or len(entry) != width:
                raise RowError(
                    f"{name}[{place}] must be a list of {max(width, 1)} entries, as all are; give every "
                    "token the same number of classes"
                )
        wrong = [one for one in classes if type(one) is not int or not 0 <= one < vocabulary_size]
        if wrong:
            raise RowError(
                f"teacher_token_ids[{place}] holds {wrong[0]!r}, the model's vocabulary has "
                f"{vocabulary_size} entries; the teacher has another vocabulary, use one with the student's"
            )
        if len(set(classes)) < width:
            raise RowError(f"teacher_token_ids[{place}] holds a class twice; give each once")
        for value in values:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and -math.inf < value <= 1e-3):
                raise RowError(
                    f"teacher_logprobs[{place}] holds {value!r}; give log-probabilities, finite and at most 0"
                )
    return ids, log_probs


def _check_policy(row: Mapping[str, Any], *, loss_on: LossOn, vocabulary_size: int) -> bool:
    content = check_row(row, loss_on=loss_on, vocabulary_size=vocabulary_size)
    advantage = row.get("advantage")
    if advantage is None:
        raise RowError(
            "advantage is missing; give the answer one number, or a list with one per sampled token"
        )
    _numbers(advantage if isinstance(advantage, list) else [advantage], "advantage")
    old = row.get("old_log_probs")
    if old is not None:
        if not isinstance(old, list):
            raise RowError(f"old_log_probs must be a list with one number per sampled token, got {old!r:.40}")
        if any(value > 0 for value in _numbers(old, "old_log_probs")):
            raise RowError(f"old_log_probs holds {max(old)}; log-probabilities are at most 0")
    return isinstance(content, Conversation)


def _numbers(values: Sequence[Any], name: str) -> list[float]:
    for place, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RowError(f"{name}[{place}] must be a finite number, got {value!r}")
    return [float(value) for value in values]


def _sampled(row: Mapping[str, Any], source: int, *, tokeniser: Tokeniser) -> list[Document]:
    document = tokeniser.document(row, source)
    labels = torch.as_tensor(document.input_ids if document.labels is None else document.labels)
    # the slot before a label predicts it
    places = (labels[1:] != IGNORE_INDEX).nonzero().squeeze(-1)
    advantage = row["advantage"]
    columns = {ADVANTAGES_EXTRA: advantage if isinstance(advantage, list) else [advantage] * len(places)}
    # None for one row and numbers for another would not pack together: NaN says that nothing was recorded.
    old = row.get("old_log_probs")
    columns[OLD_LOG_PROBS_EXTRA] = [math.nan] * len(places) if old is None else old
    extras = {}
    for (name, values), field in zip(columns.items(), ("advantage", "old_log_probs"), strict=True):
        if len(values) != len(places):
            raise RowError(
                f"{field} has {len(values)} entries for {len(places)} sampled tokens; give one for each "
                "target, the end of the answer included"
            )
        extras[name] = torch.zeros(len(document))
        extras[name][places] = torch.tensor(values, dtype=torch.float32)
    return [replace(document, token_extras=extras)]
