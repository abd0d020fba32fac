"""From documents to one packed window."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isoloss.batch.document import IGNORE_INDEX, Document, as_int64
from isoloss.batch.layout import Layout
from isoloss.batch.packed_batch import PackedBatch
from isoloss.batch.targets import shift_targets, shift_values


def check_unit(documents: Sequence[Document], key: object, term: str) -> None:
    """Raise, naming `key`, where the documents of one unit do not fit together or in themselves.

    Args:
        documents: one document, or all documents of one group.
        key: what the caller calls the unit.
        term: the term that `Document.labels` belong to.

    Raises:
        TypeError: something is no Document.
        ValueError: their values do not fit.
    """
    if not documents:
        raise ValueError(f"unit {key!r} has no document; add at least one, or leave the unit out")
    for document in documents:
        check_document(document, f"unit {key!r}")
    groups = {document.group for document in documents}
    if len(groups) > 1:
        raise ValueError(
            f"unit {key!r} has documents of the groups {sorted(map(repr, groups))}; add the documents of one "
            "group together and those of another group on their own"
        )
    parents = {document.parent for document in documents}
    for index, document in enumerate(documents):
        name = f"document {key!r}" if len(documents) == 1 else f"document {index} of unit {key!r}"
        parent = document.parent
        if parent is not None and not 0 <= parent < index:
            raise ValueError(
                f"{name} has parent {parent}; a parent is the position of an earlier document of the same "
                "group (0 is its first), or None"
            )
        _check_lengths(document, name, term)
        if index in parents:
            _check_prefix(document, name)


def check_document(document: object, name: str) -> None:
    """Raise TypeError, naming it, where something is no Document."""
    if not isinstance(document, Document):
        raise TypeError(
            f"{name} holds a {type(document).__name__}; packing takes Document objects: "
            "Document(token_ids, labels)"
        )


def _check_lengths(document: Document, name: str, term: str) -> None:
    expected = len(document)
    columns: dict[str, Any] = {"input_ids": document.input_ids}
    if document.labels is not None:
        columns["labels"] = document.labels
    for other, values in document.term_labels.items():
        columns[f"term_labels[{other!r}]"] = values
    if not isinstance(document.weight, int | float):
        columns["weight"] = document.weight
    elif not 0.0 <= document.weight < float("inf"):
        raise ValueError(f"{name} has weight {document.weight}; a weight is a finite number from 0")
    for column, values in columns.items():
        if isinstance(values, Tensor) and values.ndim != 1:
            raise ValueError(
                f"{name} has {column} of shape {list(values.shape)}; give one dimension, one value a token"
            )
    for extra, values in document.token_extras.items():
        columns[f"token_extras[{extra!r}]"] = values
    for column, values in columns.items():
        if len(values) != expected:
            raise ValueError(
                f"{name} has {expected} tokens and {len(values)} {column}; give one for each token"
            )
    if "weight" in columns:
        weights = torch.as_tensor(columns["weight"])
        if not bool(((weights >= 0) & weights.isfinite()).all()):
            raise ValueError(f"{name} has a weight that is negative or not finite; use finite weights from 0")
    if term in document.term_labels:
        raise ValueError(
            f"{name} has term_labels for {term!r}, the term of its labels; use `labels`, or another term"
        )


def _check_prefix(document: Document, name: str) -> None:
    given = dict(document.term_labels)
    if document.labels is not None:
        given["labels"] = document.labels
    for column, values in given.items():
        if bool((as_int64(values) != IGNORE_INDEX).any()):
            raise ValueError(
                f"{name} is the parent of another and has {column}; a prefix predicts nothing: leave its "
                "labels None, and start each answer with its own copy of the prompt's last token"
            )
    if document.document_extras:
        raise ValueError(
            f"{name} is the parent of another and has document_extras {sorted(document.document_extras)}; "
            "a prefix is not counted as a document: give them to the documents that continue it"
        )


def slice_document(document: Document, start: int, stop: int) -> Document:
    """Tokens `start` to `stop` of a document as a document of its own, with all that belongs to them."""
    weight = document.weight
    return replace(
        document,
        input_ids=document.input_ids[start:stop],
        labels=None if document.labels is None else document.labels[start:stop],
        weight=weight if isinstance(weight, int | float) else weight[start:stop],
        term_labels={name: values[start:stop] for name, values in document.term_labels.items()},
        token_extras={name: values[start:stop] for name, values in document.token_extras.items()},
    )


def build_batch(
    units: Sequence[Sequence[Document]],
    window: int,
    *,
    alignment: int = 8,
    pad_token_id: int = 0,
    term: str = "text",
    keys: Sequence[object] | None = None,
) -> PackedBatch:
    """One window that holds the documents of `units` in their order.

    Labels are shifted here, once. The weights of a term are left out where each is 1. `document_extras` that
    are tensors of one shape and dtype are stacked, others become a list, with None for a document without.

    Args:
        units: documents and whole groups, checked by `check_unit`. A unit is numbered as a group when it
            has several documents or its document names one.
        window: T, the number of slots.
        alignment: each document's stride is a multiple of this many slots.
        pad_token_id: token id of the slots that hold no token.
        term: the term of `Document.labels`; it always has targets, other terms where a document has them.
        keys: what errors call the units; their positions when left out.

    Raises:
        ValueError: the documents do not fit, or only some of them have a token extra.
    """
    names = range(len(units)) if keys is None else keys
    documents = [document for unit in units for document in unit]
    owners = [name for name, unit in zip(names, units, strict=True) for _ in unit]
    parents: list[int] = []
    groups: list[int] = []
    num_groups = 0
    for unit in units:
        first = len(parents)
        is_group = len(unit) > 1 or unit[0].group is not None
        parents += [-1 if document.parent is None else first + document.parent for document in unit]
        groups += [num_groups if is_group else -1] * len(unit)
        num_groups += is_group
    layout = Layout(
        [len(document) for document in documents],
        [document.source for document in documents],
        groups,
        parents,
        alignment=alignment,
        padded_length=window,
    )
    tokens = [as_int64(document.input_ids) for document in documents]
    labels = [
        _labels(document, ids, is_prefix)
        for document, ids, is_prefix in zip(documents, tokens, layout.is_prefix, strict=True)
    ]
    targets = {term: shift_targets(_spread(labels, layout, IGNORE_INDEX), layout)}
    for name in sorted({name for document in documents for name in document.term_labels}):
        columns = [
            as_int64(document.term_labels[name]) if name in document.term_labels else None
            for document in documents
        ]
        targets[name] = _spread(columns, layout, IGNORE_INDEX)
    return PackedBatch(
        _spread(tokens, layout, pad_token_id),
        targets,
        layout,
        _weights(documents, targets, term, layout),
        _token_extras(documents, owners, layout),
        _document_extras(documents, layout),
    )


def _labels(document: Document, ids: Tensor, is_prefix: bool) -> Tensor | None:
    if is_prefix:
        return None
    return ids if document.labels is None else as_int64(document.labels)


def _spread(columns: Sequence[Tensor | None], layout: Layout, fill: int) -> Tensor:
    """The values of the documents at their slots and `fill` elsewhere, int64[T]."""
    values = torch.full((layout.physical_tokens,), fill)
    for start, column in zip(layout.document_starts, columns, strict=True):
        if column is not None:
            values[start : start + len(column)] = column
    return values


def _weights(
    documents: Sequence[Document], targets: Mapping[str, Tensor], term: str, layout: Layout
) -> dict[str, Tensor]:
    """The data's weights of each term with one other than 1; 0 where there is no target."""
    if all(isinstance(document.weight, int | float) and document.weight == 1.0 for document in documents):
        return {}
    aligned = torch.zeros(layout.physical_tokens)
    for start, document in zip(layout.document_starts, documents, strict=True):
        aligned[start : start + len(document)] = torch.as_tensor(document.weight, dtype=torch.float32)
    weights = {}
    for name, labels in targets.items():
        # the weight of a label moves with the label
        values = shift_values(aligned, layout, 1, 0.0) if name == term else aligned
        is_target = labels != IGNORE_INDEX
        if bool((values[is_target] != 1.0).any()):
            weights[name] = torch.where(is_target, values, 0.0)
    return weights


def _token_extras(
    documents: Sequence[Document], owners: Sequence[object], layout: Layout
) -> dict[str, Tensor]:
    extras = {}
    for name in sorted({name for document in documents for name in document.token_extras}):
        for document, owner in zip(documents, owners, strict=True):
            if name not in document.token_extras:
                raise ValueError(
                    f"document {owner!r} has no token_extras[{name!r}], but another document of its window "
                    "has; give it to every document, or to none"
                )
        first = documents[0].token_extras[name]
        values = torch.zeros((layout.physical_tokens, *first.shape[1:]), dtype=first.dtype)
        for start, document, owner in zip(layout.document_starts, documents, owners, strict=True):
            column = document.token_extras[name]
            if column.shape[1:] != first.shape[1:] or column.dtype != first.dtype:
                raise ValueError(
                    f"document {owner!r} has token_extras[{name!r}] of {column.dtype} "
                    f"{list(column.shape[1:])} a token, document {owners[0]!r} of {first.dtype} "
                    f"{list(first.shape[1:])}; use one shape and dtype"
                )
            values[start : start + len(column)] = column
        extras[name] = values
    return extras


def _document_extras(documents: Sequence[Document], layout: Layout) -> dict[str, Any]:
    counted = [document for document, prefix in zip(documents, layout.is_prefix, strict=True) if not prefix]
    extras: dict[str, Any] = {}
    for name in sorted({name for document in counted for name in document.document_extras}):
        values = [document.document_extras.get(name) for document in counted]
        tensors = [value for value in values if isinstance(value, Tensor)]
        alike = len(tensors) == len(values) and len({(value.shape, value.dtype) for value in tensors}) == 1
        extras[name] = torch.stack(tensors) if alike else values
    return extras
