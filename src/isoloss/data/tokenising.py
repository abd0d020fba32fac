"""Rows become documents: tokens, and which of them are targets."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from isoloss.batch.document import IGNORE_INDEX, Document
from isoloss.data.chat import ChatRenderer, Span
from isoloss.data.errors import DataError, RowError
from isoloss.data.rows import Completion, Conversation, LossOn, Text, Tokens, read_row, row_weight


@final
class Tokeniser:
    """Makes documents of rows.

    Args:
        tokenizer: of the model.
        loss_on: which tokens are targets. "assistant": assistant turns, completions, text. "completion": of a
            conversation the last assistant turn only. "all": every token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn) -> None:
        self._tokenizer = tokenizer
        self._exact: PreTrainedTokenizerBase | None = None
        self._loss_on = loss_on
        self._chat: ChatRenderer | None = None

    def document(self, row: Mapping[str, Any], source: int) -> Document:
        """The document of a row; int32 and float32 tensors.

        Args:
            row: with one of the shapes of `read_row`.
            source: index of its channel.

        Raises:
            RowError: the row is at fault or has no target.
            DataError: the tokenizer cannot do what the row needs.
        """
        content = read_row(row)
        weight: float | torch.Tensor = row_weight(row)
        labels: list[int] | None = None
        if isinstance(content, Tokens):
            ids, labels = content.input_ids, content.labels
        elif isinstance(content, Text):
            ids = self._with_end(self._tokenizer(content.text, verbose=False).input_ids)
        else:
            ids, weights = self._weigh(content)
            if not all(weights):
                labels = [
                    token if wanted else IGNORE_INDEX for token, wanted in zip(ids, weights, strict=True)
                ]
            if any(wanted not in (0.0, 1.0) for wanted in weights):
                weight = weight * torch.tensor(weights)
        if not ids:
            raise RowError("the row has no token; leave it out")
        # nothing predicts the first token of a document; a single token of text may stand alone
        if labels is not None and all(label == IGNORE_INDEX for label in labels[1:]):
            raise RowError("no token of the row is a target; leave the row out, or see data.loss_on")
        return Document(
            torch.tensor(ids, dtype=torch.int32),
            None if labels is None else torch.tensor(labels, dtype=torch.int32),
            source=source,
            weight=weight,
        )

    def encode(self, row: Mapping[str, Any]) -> list[int]:
        """The tokens of a row as a model will be asked with them: with no end but the tokenizer's own.

        Raises:
            RowError: the row is at fault or has no token.
        """
        content = read_row(row)
        if isinstance(content, Tokens):
            return content.input_ids
        if isinstance(content, Completion):
            ids = self._tokenizer(content.prompt + content.completion, verbose=False).input_ids
        elif isinstance(content, Text):
            ids = self._tokenizer(content.text, verbose=False).input_ids
        else:
            ids, _ = self._weigh(content)
        if not ids:
            raise RowError("the row has no token; leave it out")
        return list(ids)

    def encode_words(self, words: Sequence[str]) -> tuple[list[int], list[int]]:
        """The tokens of words joined by spaces, and the place of each word's first token.

        Raises:
            RowError: a word has no token of its own, so that no place could carry its label.
        """
        starts, length = [], 0
        for word in words:
            starts.append(length)
            length += len(word) + 1
        ids, offsets = self._encode(" ".join(words), add_special_tokens=True)
        places: list[int] = []
        place = 0
        for number, (start, word) in enumerate(zip(starts, words, strict=True)):
            while place < len(offsets) and offsets[place][1] <= start:
                place += 1
            beyond = place == len(offsets) or offsets[place][0] >= start + len(word)
            if beyond or (places and place == places[-1]):
                raise RowError(
                    f"tokens[{number}] is {word!r}, of which the tokenizer makes no token of its own; leave "
                    "the word out, or join it to the one before"
                )
            places.append(place)
        return ids, places

    def _weigh(self, content: Conversation | Completion) -> tuple[list[int], list[float]]:
        """Token ids, and what each weighs as a target, 0 where it is none."""
        if isinstance(content, Completion):
            return self._completion(content)
        if self._chat is None:
            self._chat = ChatRenderer(self._tokenizer)
        rendering = self._chat.render(content, self._loss_on)
        ids, offsets = self._encode(rendering.text, add_special_tokens=False)
        return ids, weigh_tokens(offsets, rendering.spans, rendering.default_weight)

    def _completion(self, content: Completion) -> tuple[list[int], list[float]]:
        text = content.prompt + content.completion
        ids, offsets = self._encode(text, add_special_tokens=True)
        span = Span(0 if self._loss_on == "all" else len(content.prompt), len(text), 1.0)
        weights = weigh_tokens(offsets, [span], 1.0 if self._loss_on == "all" else 0.0)
        ended = self._with_end(ids)
        # the end-of-text token is a target, also one that the tokenizer added, which has no characters
        return ended, [*weights[: len(ended) - 1], 1.0] if self._ends(ended) else weights

    def _ends(self, ids: list[int]) -> bool:
        return bool(ids) and ids[-1] == self._tokenizer.eos_token_id

    def _with_end(self, ids: list[int]) -> list[int]:
        """The ids with one end-of-text token: models learn to stop from it."""
        end = self._tokenizer.eos_token_id
        return ids if end is None or self._ends(ids) else [*ids, end]

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        if not self._tokenizer.is_fast:
            raise DataError(
                "data.tokenizer is a slow tokenizer, which does not say which characters a token covers; "
                "use a fast one (a folder with tokenizer.json)"
            )
        if self._exact is None:
            self._exact = _with_exact_offsets(self._tokenizer)
        encoded = self._exact(
            text, add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False
        )
        return encoded["input_ids"], encoded["offset_mapping"]


def _with_exact_offsets(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A fast tokenizer that gives the same tokens, and counts white space to the token that holds it.

    Some tokenizers leave white space at the edges of a token out of its offsets, so that a token of a line
    break and an indentation would seem to lie before the line.
    """
    specification = json.loads(tokenizer.backend_tokenizer.to_str())
    post_processor = specification["post_processor"] or {}
    parts = [
        part for part in (post_processor, *post_processor.get("processors", ())) if part.get("trim_offsets")
    ]
    if not parts:
        return tokenizer
    for part in parts:
        part["trim_offsets"] = False
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(specification)))


def weigh_tokens(
    offsets: Sequence[tuple[int, int]], spans: Sequence[Span], default: float = 0.0
) -> list[float]:
    """What each token weighs as a target, from the characters that it covers.

    A token that reaches over the start or the end of a span belongs to it: left out, the characters that it
    shares with the span would never be learned. Where two spans meet in a token, the later one counts.

    Args:
        offsets: first and last character (exclusive) of each token, in order; equal for a token that the
            tokenizer adds.
        spans: in order, without overlap.
        default: what a token outside of all spans weighs.
    """
    weights = [default] * len(offsets)
    first = 0
    for span in spans:
        while first < len(offsets) and offsets[first][1] <= span.start:
            first += 1
        place = first
        while place < len(offsets) and offsets[place][0] < span.stop:
            weights[place] = span.weight
            place += 1
    return weights
