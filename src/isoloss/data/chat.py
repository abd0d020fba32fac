"""Rows become documents: tokens, and which of them are targets.

[Note: spans]
Which tokens an assistant turn owns is known in two ways. A chat template with {% generation %} markers says
so itself. Without markers the conversation is rendered as text up to before the turn (with the template's
opening of an answer) and up to its end; both must be beginnings of the whole rendering, and characters become
tokens by the offsets of one tokenisation of the whole. Tokenising parts and joining them would give other
tokens at the seams.
"""

from collections.abc import Mapping
from typing import Any, final

import jinja2
from transformers import PreTrainedTokenizerBase

from isoloss.batch.document import IGNORE_INDEX, Document
from isoloss.data.errors import DataError, RowError
from isoloss.data.rows import (
    Completion,
    Conversation,
    LossOn,
    Message,
    Text,
    Tokens,
    message_weight,
    read_row,
    row_weight,
)


@final
class Tokeniser:
    """Makes documents of rows.

    Args:
        tokenizer: of the model; with a chat template where rows hold conversations.
        loss_on: which tokens are targets. "assistant": assistant turns, completions, text. "completion": of a
            conversation the last assistant turn only. "all": every token.
        vocabulary_size: token ids of rows must be below it; None: unchecked.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn, vocabulary_size: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._loss_on = loss_on
        self._vocabulary_size = vocabulary_size
        template = tokenizer.chat_template
        self._template = template if isinstance(template, str) else None
        self._has_markers = self._template is not None and "{% generation" in self._template.replace(
            "{%-", "{%"
        )

    def document(self, row: Mapping[str, Any], source: int) -> Document:
        """The document of a row.

        Args:
            row: with one of the shapes of `read_row`.
            source: index of its channel.

        Raises:
            RowError: the row is at fault or has no target.
            DataError: the tokenizer cannot do what the row needs.
        """
        content = read_row(row)
        weights: list[float] | None = None
        if isinstance(content, Tokens):
            ids, labels = content.input_ids, content.labels or content.input_ids
            if self._vocabulary_size is not None and max(ids) >= self._vocabulary_size:
                raise RowError(
                    f"input_ids holds {max(ids)}, the model's vocabulary ends at "
                    f"{self._vocabulary_size - 1}; the row was made with another tokenizer"
                )
        elif isinstance(content, Text):
            ids = self._with_end(self._tokenizer(content.text).input_ids)
            labels = ids
        elif isinstance(content, Completion):
            ids, is_target = self._completion(content)
            labels = _masked(ids, is_target)
        else:
            ids, weights = self._conversation(content)
            labels = _masked(ids, [weight > 0 for weight in weights])
        # Nothing predicts the first token of a document; a single token without labels may stand alone.
        if all(label == IGNORE_INDEX for label in labels[1:]) and labels is not ids:
            raise RowError("no token of the row is a target; leave the row out, or see data.loss_on")
        factor = row_weight(row)
        weight: float | list[float] = factor
        if weights is not None and any(value not in (0.0, 1.0) for value in weights):
            weight = [factor * value for value in weights]
        return Document(ids, labels, source=source, weight=weight)

    def _with_end(self, ids: list[int]) -> list[int]:
        """The ids with one end-of-text token: models learn to stop from it."""
        end = self._tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def _completion(self, content: Completion) -> tuple[list[int], list[bool]]:
        whole = content.prompt + content.completion
        ids, offsets = self._encode(whole, add_special_tokens=True)
        start = len(content.prompt)
        is_target = [first >= start and last > first for first, last in offsets]
        ended = self._with_end(ids)
        is_target += [True] * (len(ended) - len(ids))
        if len(ended) == len(ids) and ids:
            is_target[-1] = True  # an end-of-text token that the tokenizer added has no characters
        if self._loss_on == "all":
            is_target = [True] * len(ended)
        return ended, is_target

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        if not self._tokenizer.is_fast:
            raise DataError(
                "data.tokenizer is a slow tokenizer, which does not say which characters a token covers; "
                "use a fast one (a folder with tokenizer.json)"
            )
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]

    def _conversation(self, content: Conversation) -> tuple[list[int], list[float]]:
        """Token ids of a conversation, and the weight of each as a target, 0 where it is none."""
        if self._template is None:
            raise DataError(
                "the rows hold conversations, but the tokenizer has no chat template (or several); give "
                "one with data.chat_template"
            )
        messages = content.messages
        plain = [{k: v for k, v in turn.items() if k not in ("loss", "weight")} for turn in messages]
        if self._loss_on == "all":
            ids, _ = self._encode(self._render(plain), add_special_tokens=False)
            return ids, [1.0] * len(ids)
        answers = [
            number
            for number, turn in enumerate(messages)
            if turn["role"] == "assistant" and number >= content.first_target
        ]
        if self._loss_on == "completion":
            answers = answers[-1:]
        wanted = {number: message_weight(messages[number]) for number in answers}
        if self._has_markers:
            marked = self._marked(plain, wanted)
            if marked is not None:
                return marked
        return self._by_prefix(plain, wanted)

    def _render(self, messages: list[Message], *, opens_answer: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=opens_answer
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise RowError(f"the chat template refuses the messages: {error}") from error
        return text

    def _marked(
        self, messages: list[Message], wanted: Mapping[int, float]
    ) -> tuple[list[int], list[float]] | None:
        """Spans by the template's markers; None where they cannot be told apart by message."""
        try:
            encoded = self._tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise RowError(f"the chat template refuses the messages: {error}") from error
        ids: list[int] = list(encoded["input_ids"])
        mask: list[int] = list(encoded["assistant_masks"])
        spans = _runs(mask)
        answers = [number for number, turn in enumerate(messages) if turn["role"] == "assistant"]
        if not spans:
            raise RowError(
                "the chat template has {% generation %} markers, but marks no token of this "
                "conversation; check where the template puts them"
            )
        if len(spans) != len(answers):
            # Two answers in a row may share one run; the prefixes tell them apart.
            return None
        ends = set(self._tokenizer.all_special_ids)
        weights = [0.0] * len(ids)
        for number, (start, stop) in zip(answers, spans, strict=True):
            # Markers that close before the end-of-turn token would teach the model never to stop.
            if stop < len(ids) and ids[stop] in ends and ids[stop - 1] not in ends:
                stop += 1
            weights[start:stop] = [wanted.get(number, 0.0)] * (stop - start)
        return ids, weights

    def _by_prefix(
        self, messages: list[Message], wanted: Mapping[int, float]
    ) -> tuple[list[int], list[float]]:
        """Spans by rendering up to each wanted turn; see [Note: spans]."""
        whole = self._render(messages)
        ids, offsets = self._encode(whole, add_special_tokens=False)
        weights = [0.0] * len(ids)
        for number, weight in wanted.items():
            before = self._render(messages[:number], opens_answer=True) if number else ""
            upto = self._render(messages[: number + 1])
            for text, what in ((before, "before"), (upto, "up to")):
                if not whole.startswith(text):
                    raise RowError(
                        f"messages[{number}]: the chat template renders the turns {what} this one "
                        "differently once more turns follow, so its tokens cannot be found; give a "
                        "template with {% generation %} markers in data.chat_template, or train on the last "
                        "turn only with data.loss_on: completion"
                    )
            stop = len(before) + len(upto[len(before) :].rstrip())
            for place, (first, last) in enumerate(offsets):
                if len(before) <= first < last <= stop:
                    weights[place] = weight
        return ids, weights


def _masked(ids: list[int], is_target: list[bool]) -> list[int]:
    return [token if wanted else IGNORE_INDEX for token, wanted in zip(ids, is_target, strict=True)]


def _runs(mask: list[int]) -> list[tuple[int, int]]:
    """(start, stop) of each run of ones."""
    runs = []
    start = None
    for place, value in enumerate([*mask, 0]):
        if value and start is None:
            start = place
        elif not value and start is not None:
            runs.append((start, place))
            start = None
    return runs
