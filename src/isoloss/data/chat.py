"""Conversations as text, and which of its characters are targets.

[Note: spans]
Which characters a turn owns is known in two ways. A chat template with {% generation %} markers says so
while it renders. Without markers the conversation is rendered up to before the turn (with the template's
opening of an answer) and up to its end; both must be beginnings of the whole rendering, and what lies between
is the turn. Characters become tokens by the offsets of one tokenisation of the whole: tokenising parts and
joining them would give other tokens at the seams.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from isoloss.data.errors import RowError
from isoloss.data.rows import Conversation, LossOn, Message

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True, slots=True)
class Span:
    """Characters of a text whose tokens are targets."""

    start: int
    stop: int
    weight: float


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation as text with its targets."""

    text: str
    default_weight: float
    """What a token outside of all spans weighs: 1 where everything is trained, else 0."""

    spans: list[Span]


@final
class ChatRenderer:
    """Renders conversations with the chat template of a tokenizer.

    Args:
        tokenizer: with a chat template.

    Raises:
        RowError: it has none, or several without a default.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._templates: dict[bool, str] = {}
        try:
            for with_tools in (False, True):
                self._templates[with_tools] = tokenizer.get_chat_template(tools=[{}] if with_tools else None)
        except ValueError as error:
            raise RowError(
                "the row is a conversation, but the tokenizer has no chat template, or several and no "
                "default; give one with data.chat_template"
            ) from error
        self._special_tokens = tuple(
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        )

    def render(self, content: Conversation, loss_on: LossOn) -> Rendering:
        """The text of a conversation, and which of its characters are targets.

        Raises:
            RowError: the template refuses the conversation, marks nothing in it, or renders turns differently
                once more turns follow.
        """
        weights = content.weights(loss_on)
        turns = _Turns(
            self._templates[content.tools is not None],
            dict(self._tokenizer.special_tokens_map),
            [
                {name: value for name, value in message.items() if name not in ("loss", "weight")}
                for message in content.messages
            ],
            content.tools,
        )
        default = 1.0 if loss_on == "all" else 0.0
        special = [number for number, weight in enumerate(weights) if weight != default]
        answers = {
            number for number, message in enumerate(content.messages) if message["role"] == "assistant"
        }
        if not default and turns.has_markers and answers.issuperset(special):
            text, blocks = turns.render()
            owners = _owners(turns, weights, sorted(answers), len(blocks))
            if not blocks:
                raise RowError(
                    "the chat template has {% generation %} markers, but marks nothing in this conversation; "
                    "check where the template puts them"
                )
            if owners is not None:
                spans = [Span(*block, weight) for block, weight in zip(blocks, owners, strict=True) if weight]
                return Rendering(text, default, [self._with_end_of_turn(text, span) for span in spans])
        text, _ = turns.render()
        return Rendering(
            text,
            default,
            [Span(*self._find(turns, text, number), weights[number]) for number in special],
        )

    def _with_end_of_turn(self, text: str, span: Span) -> Span:
        """Markers that close before the end-of-turn token would teach the model never to stop."""
        if text[: span.stop].rstrip().endswith(self._special_tokens):
            return span
        for token in self._special_tokens:
            if text.startswith(token, span.stop):
                return Span(span.start, span.stop + len(token), span.weight)
        return span

    def _find(self, turns: "_Turns", whole: str, number: int) -> tuple[int, int]:
        """First and last character of a turn; see [Note: spans]."""
        role = turns.messages[number]["role"]
        upto, _ = turns.render(number + 1)
        if not whole.startswith(upto):
            raise RowError(
                f"messages[{number}]: the chat template renders the turns up to this one differently once "
                f"more turns follow, so its tokens cannot be found; {_WAYS_OUT}"
            )
        start = 0
        if number:
            before, _ = turns.render(number, opens_answer=role == "assistant")
            if not whole.startswith(before):
                plain, _ = turns.render(number)
                what = (
                    f"opens an answer with {before[len(plain) :]!r}, but renders this one without it"
                    if whole.startswith(plain)
                    else "renders the turns before this one differently once more turns follow"
                )
                raise RowError(
                    f"messages[{number}]: the chat template {what}, so its tokens cannot be found; "
                    f"{_WAYS_OUT}"
                )
            start = len(before)
        elif role == "assistant":
            # a template may put a system prompt of its own before the first answer
            opened, _ = turns.render(1, opens_answer=True)
            opening = opened[len(upto) :]
            found = upto.find(opening) if opened.startswith(upto) and opening else -1
            if found < 0:
                raise RowError(
                    "messages[0]: the conversation starts with an answer, and the chat template does not "
                    f"show where it opens one; add the question, or {_WAYS_OUT}"
                )
            start = found + len(opening)
        # white space behind an end-of-turn token separates turns; without such a token it ends the turn
        stripped = upto.rstrip()
        return start, len(stripped) if stripped.endswith(self._special_tokens) else len(upto)


_WAYS_OUT = (
    "give a template with {% generation %} markers in data.chat_template, or train on the last turn only "
    "with data.loss_on: completion"
)


@dataclass(frozen=True, slots=True)
class _Turns:
    """What a template renders, whole or in part."""

    template: str
    special_tokens: dict[str, Any]
    messages: list[Message]
    tools: list[Any] | None

    @property
    def has_markers(self) -> bool:
        return _MARKER.search(self.template) is not None

    def render(
        self, count: int | None = None, *, opens_answer: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The first `count` turns as text, and the characters of each block that the template marks."""
        try:
            texts, blocks = render_jinja_template(
                conversations=[self.messages[:count]],
                tools=self.tools,
                chat_template=self.template,
                return_assistant_tokens_mask=self.has_markers,
                add_generation_prompt=opens_answer,
                **self.special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RowError(f"the chat template refuses the messages: {error}") from error
        for number, message in enumerate(self.messages[:count]):
            if isinstance(message.get("content"), list) and str(message["content"]) in texts[0]:
                raise RowError(
                    f"messages[{number}].content is a list of parts, which the chat template writes out as "
                    f"{str(message['content'])[:40]!r}; give a string, or a template that knows parts in "
                    "data.chat_template"
                )
        return texts[0], [(start, stop) for start, stop in blocks[0]] if blocks else []


def _owners(
    turns: _Turns, weights: Sequence[float], answers: Sequence[int], num_blocks: int
) -> list[float] | None:
    """What each marked block weighs; None where blocks cannot be told apart by turn."""
    if len({weights[number] for number in answers}) == 1:
        return [weights[answers[0]]] * num_blocks
    owners: list[float] = []
    for number in answers:
        count = len(turns.render(number + 1)[1])
        if count < len(owners):
            return None
        owners += [weights[number]] * (count - len(owners))
    return owners if len(owners) == num_blocks else None
