"""Rows of preference pairs: a prompt and two answers, the better one and the worse."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from isoloss.batch.collation import slice_document
from isoloss.batch.document import IGNORE_INDEX, Document
from isoloss.data.errors import RowError
from isoloss.data.row_format import RowFormat
from isoloss.data.rows import Content, Conversation, check_row
from isoloss.data.tokenising import Tokeniser
from isoloss.objectives.preference import PREFERENCE_TERM, REFERENCE_EXTRA

REFERENCE_FIELDS = ("reference_chosen_logp", "reference_rejected_logp")
"""Fields with the sums of log-probabilities, in nats, that a reference gives to the two answers."""

_SHAPES = (
    "a row holds prompt, chosen and rejected, as strings or as lists of messages; or chosen and rejected as "
    "whole conversations with the same beginning; or messages, whose last is the chosen answer, with "
    "rejected_response"
)
_GROUP = "pair"

T = TypeVar("T")


def preference_format(
    tokenizer: PreTrainedTokenizerBase, *, shared_prompt: bool = False, stored_reference: bool = False
) -> RowFormat:
    """Pairs of answers to one prompt; see `_SHAPES` for the shapes of rows.

    Each side becomes a document of prompt and answer, of which the answer is the target; both are one group,
    which is dropped whole and counted where it does not fit a window, whatever `data.long_documents` says.
    The same answer twice is a pair like any other: it counts, and trains nothing.

    Args:
        tokenizer: of the model.
        shared_prompt: hold the prompt of a pair once, as a prefix that both answers continue.
        stored_reference: rows carry `reference_chosen_logp` and `reference_rejected_logp`.
    """
    tokeniser = Tokeniser(tokenizer, "completion")
    return RowFormat(
        terms=(PREFERENCE_TERM,),
        check=partial(_check_pair, vocabulary_size=len(tokenizer), stored_reference=stored_reference),
        documents=partial(
            _pair, tokeniser=tokeniser, shared_prompt=shared_prompt, stored_reference=stored_reference
        ),
        identity={
            "objective.shared_prompt": shared_prompt,
            "objective.reference": "data" if stored_reference else "model",
        },
    )


def read_sides(row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The two sides of a row, each as a row with `prompt` and `completion`.

    Raises:
        RowError: it holds none of the known shapes, or a side is empty.
    """
    given = {name: value for name, value in row.items() if value is not None}
    if "rejected_response" in given:
        if "rejected" in given:
            raise RowError("rejected and rejected_response both stand in the row; keep one")
        given["rejected"] = given.pop("rejected_response")
    if "messages" in given and "chosen" not in given:
        messages = given["messages"]
        if not isinstance(messages, list) or len(messages) < 2:
            raise RowError("messages must be a list of the prompt's messages and the chosen answer")
        given["prompt"], given["chosen"] = messages[:-1], messages[-1:]
        if isinstance(given.get("rejected"), str):
            given["rejected"] = [{"role": "assistant", "content": given["rejected"]}]
    for name in ("chosen", "rejected"):
        if name not in given:
            raise RowError(f"{name} is missing; {_SHAPES}")
        if not given[name]:
            raise RowError(f"{name} is empty, so the pair says nothing; leave the row out")
        if not isinstance(given[name], str | list):
            raise RowError(f"{name} must be a string or a list of messages, got {type(given[name]).__name__}")
    chosen, rejected, prompt = given["chosen"], given["rejected"], given.get("prompt")
    if prompt is None:
        if isinstance(chosen, str) or isinstance(rejected, str):
            raise RowError(f"prompt is missing; {_SHAPES}")
        prompt, chosen, rejected = _split_conversations(chosen, rejected)
    if isinstance(prompt, list):  # an answer in plain words to a prompt of messages is one message
        chosen, rejected = (
            [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
            for answer in (chosen, rejected)
        )
    shared = {"tools": given["tools"]} if "tools" in given else {}
    return (
        {"prompt": prompt, "completion": chosen, **shared},
        {"prompt": prompt, "completion": rejected, **shared},
    )


def _split_conversations(chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """What both conversations begin with, and what each goes on with."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if chosen == rejected:
        shared -= 1  # the same answer twice
    if shared == 0:
        raise RowError("chosen and rejected have no first message in common; give the prompt they answer")
    if shared in (len(chosen), len(rejected)):
        raise RowError(
            "one of chosen and rejected is the beginning of the other, so a side has no answer; leave the "
            "row out"
        )
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _each_side(row: Mapping[str, Any], read: Callable[[dict[str, Any]], T]) -> tuple[T, T]:
    """What `read` makes of the chosen and of the rejected side; its errors say which one."""
    weight = {"weight": row["weight"]} if row.get("weight") is not None else {}

    def read_side(name: str, side: dict[str, Any]) -> T:
        try:
            return read(side | weight)
        except RowError as error:
            raise RowError(f"{name}: {error}") from error

    chosen, rejected = read_sides(row)
    return read_side("chosen", chosen), read_side("rejected", rejected)


def _check_pair(row: Mapping[str, Any], *, vocabulary_size: int, stored_reference: bool) -> bool:
    contents = _each_side(row, partial(_check_side, vocabulary_size=vocabulary_size))
    if stored_reference:
        _references(row)
    return isinstance(contents[0], Conversation)


def _check_side(side: dict[str, Any], *, vocabulary_size: int) -> Content:
    content = check_row(side, loss_on="completion", vocabulary_size=vocabulary_size)
    if isinstance(content, Conversation) and any(
        weight not in (0.0, 1.0) for weight in content.weights("completion")
    ):
        raise RowError(
            "a message has a weight, but a pair has one loss for all of it; give the weight to the row"
        )
    return content


def _references(row: Mapping[str, Any]) -> list[torch.Tensor]:
    values = []
    for name in REFERENCE_FIELDS:
        value = row.get(name)
        if value is None:
            raise RowError(
                f"{name} is missing, which objective.reference: data needs; add it "
                "(recipes/precompute_reference.py does), or set objective.reference: frozen"
            )
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and math.isfinite(value) and value <= 0):
            raise RowError(f"{name} must be a sum of log-probabilities, at most 0, got {value!r}")
        values.append(torch.tensor(value, dtype=torch.float64))
    return values


def _pair(
    row: Mapping[str, Any], source: int, *, tokeniser: Tokeniser, shared_prompt: bool, stored_reference: bool
) -> list[Document]:
    sides = list(_each_side(row, lambda side: tokeniser.document(side, source)))
    if stored_reference:
        sides = [
            replace(side, document_extras={REFERENCE_EXTRA: reference})
            for side, reference in zip(sides, _references(row), strict=True)
        ]
    sides = [replace(side, group=_GROUP) for side in sides]
    shared = _shared_tokens(*sides) if shared_prompt else 0
    if not shared:
        return sides
    prefix = replace(slice_document(sides[0], 0, shared), labels=None, document_extras={})
    return [prefix, *(replace(slice_document(side, shared, len(side)), parent=0) for side in sides)]


def _shared_tokens(chosen: Document, rejected: Document) -> int:
    """Tokens of the prefix: what both sides begin with and neither trains, but for its last token.

    That one starts each answer, so that the first token of an answer has a slot that predicts it.
    """
    length = min(len(chosen), len(rejected))
    shared = torch.ones(length + 1, dtype=torch.bool)
    shared[length] = False
    for side in (chosen, rejected):
        if side.labels is None:
            return 0
        shared[:length] &= torch.as_tensor(side.labels)[:length] == IGNORE_INDEX
    ids = [torch.as_tensor(side.input_ids)[:length] for side in (chosen, rejected)]
    shared[:length] &= ids[0] == ids[1]
    return max(int(shared.int().argmin()) - 1, 0)
