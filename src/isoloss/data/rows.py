"""What a row may hold, recognised by its fields."""

import difflib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from isoloss.batch.document import IGNORE_INDEX
from isoloss.data.errors import RowError

Message = dict[str, Any]
LossOn = Literal["assistant", "completion", "all"]

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}
SHAPE_FIELDS = ("messages", "conversations", "text", "prompt", "completion", "input_ids")
_OPTIONAL_FIELDS = ("labels", "attention_mask", "tools", "channel", "source", "weight")
FIELDS = (*SHAPE_FIELDS, *_OPTIONAL_FIELDS)
"""Fields that are read; rows may have others."""

_SHAPES = (
    "messages, conversations, text, prompt with completion, or input_ids (with labels); channel, source and "
    "weight may stand beside them"
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of a chat."""

    messages: list[Message]
    first_target: int | None = None
    """Where the completion starts of a row with prompt and completion; None: a row with messages."""

    tools: list[Any] | None = None
    """Tools that the chat template describes to the model, as JSON schemas."""

    def weights(self, loss_on: LossOn) -> list[float]:
        """What the targets of each message weigh; 0 where it has none.

        Assistant turns are targets, of a completion those in it, of messages with "completion" the last one,
        and every message with "all". A message's own `loss` overrules that, and its `weight` multiplies it; a
        weight of 0 means the same as `loss: false`.
        """
        first = self.first_target or 0
        answers = [
            number
            for number, message in enumerate(self.messages)
            if number >= first and message["role"] == "assistant"
        ]
        if loss_on == "completion" and self.first_target is None:
            answers = answers[-1:]
        return [
            _message_weight(message, loss_on == "all" or number in answers)
            for number, message in enumerate(self.messages)
        ]


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text: all of it is a target."""

    text: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and what follows it."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, tokenised before."""

    input_ids: list[int]
    labels: list[int] | None


Content = Conversation | Text | Completion | Tokens


def read_row(row: Mapping[str, Any]) -> Content:
    """The content of a row.

    Of several shapes the first counts of messages, conversations, input_ids, prompt with completion, text.

    Raises:
        RowError: it holds none of the known shapes, or a field at fault.
    """
    given = {name: value for name, value in row.items() if value is not None}
    if "messages" in given:
        return Conversation(_messages(given["messages"], "messages"), tools=_tools(given))
    if "conversations" in given:
        return Conversation(_sharegpt(given["conversations"]), tools=_tools(given))
    if "input_ids" in given:
        return _tokens(given)
    if "prompt" in given or "completion" in given:
        return _completion(given)
    if "text" in given:
        if not isinstance(given["text"], str):
            raise RowError(f"text must be a string, got {_shown(given['text'])}")
        if not given["text"]:
            raise RowError("text is empty; leave the row out")
        return Text(given["text"])
    raise RowError(f"{_found(given)}; a row holds {_SHAPES}")


def check_row(row: Mapping[str, Any], *, loss_on: LossOn, vocabulary_size: int | None = None) -> Content:
    """The content of a row that has something to predict, as far as can be told without a tokenizer.

    Args:
        row: fields and values.
        loss_on: which tokens are targets.
        vocabulary_size: token ids must be below it; None: they are not checked.

    Raises:
        RowError: the row is at fault, or has no target.
    """
    row_weight(row)
    content = read_row(row)
    if isinstance(content, Conversation):
        _check_targets(content, loss_on)
    elif isinstance(content, Tokens):
        _check_ids(content, vocabulary_size)
    return content


def _check_targets(content: Conversation, loss_on: LossOn) -> None:
    if any(content.weights(loss_on)):
        return
    if not any(message["role"] == "assistant" for message in content.messages[content.first_target or 0 :]):
        raise RowError(
            "no message has the role assistant, so the row has no target; add the answer, leave the row "
            "out, or set data.loss_on: all"
        )
    raise RowError(
        "every message that would be trained has loss: false or weight: 0, so the row has no target; leave "
        "it out"
    )


def _check_ids(content: Tokens, vocabulary_size: int | None) -> None:
    labels = content.labels
    if labels is not None and all(label == IGNORE_INDEX for label in labels[1:]):
        raise RowError(
            "labels has no target behind the first token, which nothing predicts; leave the row out, or give "
            "unshifted labels other than -100"
        )
    if vocabulary_size is None:
        return
    for name, ids in (("input_ids", content.input_ids), ("labels", labels or [0])):
        if max(ids) >= vocabulary_size:
            raise RowError(
                f"{name} holds {max(ids)}, the vocabulary has {vocabulary_size} entries; the row was made "
                "with another tokenizer"
            )


def near_misses(row: Mapping[str, Any]) -> list[str]:
    """What to say of optional fields that are not read because of their spelling."""
    hints = []
    optional = ("channel", "weight", "labels") if "input_ids" in row else ("channel", "weight")
    for name in row:
        near = difflib.get_close_matches(name, optional, n=1, cutoff=0.8)
        if near and name not in FIELDS:
            hints.append(f"the field {name!r} is not read; did you mean {near[0]!r}?")
    return hints


def row_channel(row: Mapping[str, Any], default: str) -> str:
    """The row's `channel`, else its `source`, else the name of its source.

    Raises:
        RowError: the field is no name.
    """
    for field in ("channel", "source"):
        value = row.get(field)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
                raise RowError(f"{field} must be a name, got {_shown(value)}")
            return str(value)
    return default


def row_weight(row: Mapping[str, Any]) -> float:
    """The row's `weight`, 1 if it has none."""
    return _weight(row.get("weight"), "weight")


def _message_weight(message: Message, is_target: bool) -> float:
    wanted = message.get("loss")
    if wanted is not None and not isinstance(wanted, bool):
        raise RowError(f"loss of a message must be true or false, got {_shown(wanted)}")
    weight = _weight(message.get("weight"), "weight of a message")
    return weight if (is_target if wanted is None else wanted) else 0.0


def _weight(value: object, what: str) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise RowError(f"{what} must be a number from 0, got {_shown(value)}")
    return float(value)


def _listed(value: object) -> object:
    """A list of objects that came as an object of lists, as older versions of `datasets` store it."""
    if isinstance(value, dict) and value and all(isinstance(part, list) for part in value.values()):
        lengths = {len(part) for part in value.values()}
        if len(lengths) == 1:
            return [dict(zip(value, parts, strict=True)) for parts in zip(*value.values(), strict=True)]
    return value


def _tools(given: Mapping[str, Any]) -> list[Any] | None:
    tools = given.get("tools")
    if isinstance(tools, str):  # a column of tables, whose schemas differ from row to row
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as fault:
            raise RowError(f"tools is a string, but no JSON: {fault.msg}; give a list of schemas") from None
    if tools is not None and not isinstance(tools, list):
        raise RowError(f"tools must be a list of JSON schemas, got {_shown(tools)}")
    return tools or None


def _messages(value: object, field: str) -> list[Message]:
    value = _listed(value)
    if not isinstance(value, list):
        raise RowError(f"{field} must be a list of {{role, content}}, got {_shown(value)}")
    if not value:
        raise RowError(f"{field} is an empty list; leave the row out")
    turns = []
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            raise RowError(f"{field}[{number}] must be an object {{role, content}}, got {_shown(message)}")
        # datasets fills fields that other rows have with None; a template must not see those
        turn = {name: part for name, part in message.items() if part is not None}
        for name in ("role", "content"):
            if name not in turn and not (name == "content" and "tool_calls" in turn):
                raise RowError(
                    f"{field}[{number}] has no {name}, only {', '.join(turn) or 'nothing'}; a message is "
                    "{role, content}"
                )
        if not isinstance(turn["role"], str):
            raise RowError(f"{field}[{number}].role must be a string, got {_shown(turn['role'])}")
        _check_text(turn.get("content", ""), f"{field}[{number}].content")
        turns.append(turn)
    return turns


def _check_text(value: object, field: str) -> None:
    is_parts = isinstance(value, list) and all(isinstance(part, dict) for part in value)
    if not isinstance(value, str) and not is_parts:
        raise RowError(f"{field} must be a string, or a list of parts as objects, got {_shown(value)}")


def _sharegpt(value: object) -> list[Message]:
    value = _listed(value)
    if isinstance(value, list) and value and isinstance(value[0], dict) and value[0].get("role") is not None:
        return _messages(value, "conversations")
    if not isinstance(value, list) or not value:
        raise RowError(
            f"conversations must be a list of {{from, value}} that is not empty, got {_shown(value)}"
        )
    turns = []
    for number, part in enumerate(value):
        if not isinstance(part, dict) or part.get("from") is None or part.get("value") is None:
            raise RowError(f"conversations[{number}] must be an object {{from, value}}, got {_shown(part)}")
        role = part["from"]
        if not isinstance(role, str) or role not in _SHAREGPT_ROLES:
            raise RowError(
                f"conversations[{number}].from is {_shown(role)}; use one of {', '.join(_SHAREGPT_ROLES)}"
            )
        _check_text(part["value"], f"conversations[{number}].value")
        extra = {name: part[name] for name in ("loss", "weight") if part.get(name) is not None}
        turns.append({"role": _SHAREGPT_ROLES[role], "content": part["value"], **extra})
    return turns


def _completion(given: Mapping[str, Any]) -> Content:
    for name in ("prompt", "completion"):
        if name not in given:
            raise RowError(
                f"{name} is missing beside {'completion' if name == 'prompt' else 'prompt'}; add it"
            )
    prompt, completion = given["prompt"], given["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise RowError("completion is empty, so the row has no target; leave the row out")
        return Completion(prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _messages(prompt, "prompt")
        messages = [*before, *_messages(completion, "completion")]
        return Conversation(messages, first_target=len(before), tools=_tools(given))
    raise RowError(
        f"prompt and completion must both be strings or both lists of messages, got {_shown(prompt)} and "
        f"{_shown(completion)}"
    )


def _tokens(given: Mapping[str, Any]) -> Tokens:
    ids = _integers(given["input_ids"], "input_ids")
    if not ids:
        raise RowError("input_ids is empty; leave the row out")
    if any(token < 0 for token in ids):
        raise RowError(f"input_ids holds {min(ids)}; token ids start at 0")
    mask = given.get("attention_mask", [])
    if not isinstance(mask, list):
        raise RowError(f"attention_mask must be a list, got {_shown(mask)}; leave it out")
    if 0 in mask:
        raise RowError(
            "attention_mask holds 0, so input_ids is padded; give the tokens of the document alone, windows "
            "are packed here"
        )
    if "labels" not in given:
        return Tokens(ids, None)
    labels = _integers(given["labels"], "labels")
    if len(labels) != len(ids):
        raise RowError(
            f"labels has {len(labels)} entries for {len(ids)} input_ids; give one per token, unshifted, -100 "
            "where a token is no target"
        )
    wrong = [label for label in labels if label < 0 and label != IGNORE_INDEX]
    if wrong:
        raise RowError(f"labels holds {wrong[0]}; a label is a token id, or -100 where a token is no target")
    return Tokens(ids, labels)


def _integers(value: object, field: str) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise RowError(f"{field} must be a list of integers, got {_shown(value)}")
    for number, entry in enumerate(value):
        if isinstance(entry, bool) or not isinstance(entry, int):
            raise RowError(f"{field}[{number}] must be an integer, got {_shown(entry)}")
    return list(value)


def _found(given: Mapping[str, Any]) -> str:
    if not given:
        return "the row has no field"
    guesses = []
    for name in given:
        near = difflib.get_close_matches(name.lower(), (*SHAPE_FIELDS, "labels"), n=1, cutoff=0.7)
        if near and near[0] != name:
            guesses.append(f"{name} (did you mean {near[0]}?)")
        else:
            guesses.append(name)
    return f"the row has the fields {', '.join(guesses)}"


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
