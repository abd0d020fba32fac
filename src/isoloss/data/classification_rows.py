"""Rows of classification: text with a label of the whole, or tokens with a label each."""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from isoloss.batch.document import IGNORE_INDEX, Document
from isoloss.batch.packed_batch import PackedBatch
from isoloss.data.errors import RowError
from isoloss.data.row_format import RowFormat
from isoloss.data.rows import Conversation, Tokens, check_row, row_weight
from isoloss.data.tokenising import Tokeniser
from isoloss.objectives.classification import (
    CLASSIFICATION_TERM,
    VALUES_EXTRA,
    ProblemType,
    label_documents,
)

Level = Literal["sequence", "token"]
LABEL_FIELD = {"sequence": "label", "token": "labels"}

MAX_COLLECTED_CLASSES = 100_000
"""A larger index in rows is taken for something else than a class."""

_LABEL, _WEIGHT, _TOKEN_LABELS = "label", "label_weight", "token_labels"


def classification_format(
    tokenizer: PreTrainedTokenizerBase,
    classes: Sequence[str],
    *,
    level: Level = "sequence",
    problem_type: ProblemType = "single_label_classification",
) -> RowFormat:
    """Rows with a label: of all their text, or of each token.

    Sequence level: `label` beside `text`, `messages`, `conversations`, `prompt` or `input_ids`. The document
    holds the tokens that the tokenizer makes of it and no other, so that the trained model can be asked in
    the same way. Token level: `labels` beside `input_ids`, one each, or beside `tokens`, the words of a text
    that are joined by spaces and whose first token carries the label; null and -100 are no label.

    Args:
        tokenizer: of the model.
        classes: names in the order of the head's rows; a label is a name, or an index. Empty for numbers.
        level: see above.
        problem_type: classes or numbers.
    """
    reader = _Labels(classes, problem_type)
    tokeniser = Tokeniser(tokenizer, "all")
    identity: dict[str, Any] = {"objective.level": level, "objective.labels": list(classes)}
    if level == "sequence":
        return RowFormat(
            terms=(CLASSIFICATION_TERM,),
            check=partial(_check_sequence, labels=reader, vocabulary_size=len(tokenizer)),
            documents=partial(
                _sequence, labels=reader, tokeniser=tokeniser, pad_token_id=tokenizer.pad_token_id
            ),
            complete=_complete_sequences,
            identity=identity,
        )
    return RowFormat(
        terms=(CLASSIFICATION_TERM,),
        check=partial(_check_tokens, labels=reader, vocabulary_size=len(tokenizer)),
        documents=partial(_tokens, labels=reader, tokeniser=tokeniser),
        complete=_complete_tokens,
        identity=identity,
    )


def collect_classes(rows: Iterable[Mapping[str, Any]], level: Level) -> tuple[str, ...]:
    """The classes that rows name, sorted; of indices 0, 1, ... up to the largest.

    Rows at fault are passed over: `RowFormat.check` names them.

    Raises:
        ValueError: there are fewer than two, or names stand beside indices.
    """
    names: set[str] = set()
    highest = -1
    has_numbers = False
    for row in rows:
        value = row.get(LABEL_FIELD[level])
        for label in value if isinstance(value, list) else [value]:
            if isinstance(label, str):
                names.add(label)
            elif isinstance(label, int) and not isinstance(label, bool):
                highest = max(highest, label)
            has_numbers |= isinstance(label, float)
    if has_numbers:
        raise ValueError(
            f"objective.labels: rows hold numbers with a fraction in `{LABEL_FIELD[level]}`, which are no "
            "classes; set objective.problem_type: regression, or give names or indices"
        )
    if highest >= MAX_COLLECTED_CLASSES:
        raise ValueError(
            f"objective.labels: rows hold the index {highest}, which would be {highest + 1} classes; write "
            "names in the rows, or list the classes in objective.labels in the order of the indices"
        )
    if names and highest >= 0:
        raise ValueError(
            f"objective.labels: rows hold names ({sorted(names)[0]!r}, ...) and indices ({highest}, ...); "
            "list the names in objective.labels in the order of the indices, or use one of the two"
        )
    classes = tuple(sorted(names)) or tuple(str(number) for number in range(highest + 1))
    if len(classes) < 2:
        raise ValueError(
            f"objective.labels: the rows name {len(classes)} classes in `{LABEL_FIELD[level]}`, at least 2 "
            "are needed; add the field, or list the classes in objective.labels"
        )
    return classes


class _Labels:
    """What a label of a row means."""

    def __init__(self, classes: Sequence[str], problem_type: ProblemType) -> None:
        self._classes = tuple(classes)
        self._index = {name: index for index, name in enumerate(self._classes)}
        self.are_numbers = problem_type == "regression"

    def read(self, label: object, field: str) -> float | int:
        """The index of a class, or a number.

        Raises:
            RowError: it is neither, with what would be.
        """
        if self.are_numbers:
            if isinstance(label, bool) or not isinstance(label, int | float) or not math.isfinite(label):
                raise RowError(
                    f"{field} must be a finite number, got {label!r}; objective.problem_type is regression"
                )
            return float(label)
        if isinstance(label, str):
            if label in self._index:
                return self._index[label]
            near = difflib.get_close_matches(label, self._classes, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RowError(f"{field} is {label!r}, which is none of the classes {self._named()}{hint}")
        if isinstance(label, bool) or not isinstance(label, int):
            raise RowError(
                f"{field} must be the name or index of a class, got {label!r}; classes are {self._named()}"
            )
        if not 0 <= label < len(self._classes):
            raise RowError(
                f"{field} is {label}, outside the {len(self._classes)} classes {self._named()}; use an index "
                f"from 0 to {len(self._classes) - 1}, or add the class to objective.labels"
            )
        return label

    def _named(self) -> str:
        shown = ", ".join(self._classes[:12])
        return f"({shown}, ...)" if len(self._classes) > 12 else f"({shown})"


def _without_labels(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the tokens are made of: `labels` of text would be read as tokens to predict."""
    kept = {name: value for name, value in row.items() if name not in ("label", "labels")}
    prompt = kept.get("prompt")
    if prompt is not None and kept.get("completion") is None:  # all there is: the label is the answer
        del kept["prompt"]
        kept.setdefault("messages" if isinstance(prompt, list) else "text", prompt)
    return kept


def _row_label(row: Mapping[str, Any], labels: _Labels) -> float | int:
    if row.get("label") is None:
        raise RowError("label is missing; a row holds text, messages, prompt or input_ids, and its label")
    return labels.read(row["label"], "label")


def _check_sequence(row: Mapping[str, Any], *, labels: _Labels, vocabulary_size: int) -> bool:
    _row_label(row, labels)
    content = check_row(_without_labels(row), loss_on="all", vocabulary_size=vocabulary_size)
    return isinstance(content, Conversation)


def _sequence(
    row: Mapping[str, Any],
    source: int,
    *,
    labels: _Labels,
    tokeniser: Tokeniser,
    pad_token_id: int | None,
) -> list[Document]:
    label = _row_label(row, labels)
    ids = tokeniser.encode(_without_labels(row))
    if ids[-1] == pad_token_id:
        raise RowError(
            f"the last token of the row is {ids[-1]}, the tokenizer's padding token; transformers' "
            "classification takes the last token that is none, so the exported model would be asked at "
            "another token than was trained: give the tokenizer a padding token of its own, or end the row "
            "otherwise"
        )
    dtype = torch.float64 if labels.are_numbers else torch.int64
    extras = {_LABEL: torch.tensor(label, dtype=dtype), _WEIGHT: torch.tensor(row_weight(row))}
    return [_unlabelled(ids, source, document_extras=extras)]


def _complete_sequences(batch: PackedBatch) -> PackedBatch:
    labels, weights = batch.document_extras[_LABEL], batch.document_extras[_WEIGHT]
    return label_documents(batch, labels, weights=None if bool((weights == 1).all()) else weights)


def _check_tokens(row: Mapping[str, Any], *, labels: _Labels, vocabulary_size: int) -> bool:
    _token_labels(row, labels)
    if "tokens" not in row:
        content = check_row(_without_labels(row), loss_on="all", vocabulary_size=vocabulary_size)
        if not isinstance(content, Tokens):
            raise RowError("a row holds input_ids, or tokens (the words of a text), and labels, one each")
    row_weight(row)
    return False


def _token_labels(row: Mapping[str, Any], labels: _Labels) -> list[float | int | None]:
    field = "tokens" if row.get("tokens") is not None else "input_ids"
    parts, given = row.get(field), row.get("labels")
    if not isinstance(parts, list) or not parts or not isinstance(given, list):
        raise RowError(
            f"{field} and labels must be lists of the same length, at least one entry long; text is given as "
            "tokens (its words) or as input_ids"
        )
    if len(parts) != len(given):
        raise RowError(
            f"labels has {len(given)} entries for {len(parts)} {field}; give one each, null for none"
        )
    read = [
        None if label is None or label == IGNORE_INDEX else labels.read(label, f"labels[{number}]")
        for number, label in enumerate(given)
    ]
    if all(label is None for label in read):
        raise RowError("labels has no label, so the row has no target; leave the row out")
    if field == "tokens" and not all(isinstance(word, str) and word for word in parts):
        raise RowError("tokens must be words: strings that are not empty")
    return read


def _tokens(row: Mapping[str, Any], source: int, *, labels: _Labels, tokeniser: Tokeniser) -> list[Document]:
    read = _token_labels(row, labels)
    if row.get("tokens") is not None:
        ids, places = tokeniser.encode_words(row["tokens"])
        spread: list[float | int | None] = [None] * len(ids)
        for place, label in zip(places, read, strict=True):
            spread[place] = label
        read = spread
    else:
        ids = tokeniser.encode(_without_labels(row))
    dtype, none = (torch.float64, math.nan) if labels.are_numbers else (torch.int64, IGNORE_INDEX)
    column = torch.tensor([none if label is None else label for label in read], dtype=dtype)
    weight = torch.full((len(ids),), row_weight(row))
    return [_unlabelled(ids, source, token_extras={_TOKEN_LABELS: column, _WEIGHT: weight})]


def _complete_tokens(batch: PackedBatch) -> PackedBatch:
    labels, weights = batch.token_extras[_TOKEN_LABELS], batch.token_extras[_WEIGHT]
    belongs = batch.document_ids >= 0
    extras = {
        name: values for name, values in batch.token_extras.items() if name not in (_TOKEN_LABELS, _WEIGHT)
    }
    if labels.is_floating_point():
        is_target = belongs & ~labels.isnan()
        targets = torch.where(is_target, 0, IGNORE_INDEX)
        extras[VALUES_EXTRA] = torch.where(is_target, labels, 0.0)
    else:
        targets = torch.where(belongs, labels, IGNORE_INDEX)
        is_target = targets != IGNORE_INDEX
    own = {}
    if bool((weights[is_target] != 1).any()):
        own[CLASSIFICATION_TERM] = torch.where(is_target, weights, 0.0)
    return PackedBatch(
        batch.input_ids, {CLASSIFICATION_TERM: targets}, batch.layout, own, extras, batch.document_extras
    )


def _unlabelled(ids: Sequence[int], source: int, **extras: Any) -> Document:
    """A document whose tokens are no targets themselves."""
    return Document(
        torch.tensor(ids, dtype=torch.int32),
        torch.full((len(ids),), IGNORE_INDEX, dtype=torch.int32),
        source=source,
        **extras,
    )
