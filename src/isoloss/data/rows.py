"""What a row may hold, recognised by its fields."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
KNOWN_FIELDS = ("messages", "conversations", "text", "prompt", "completion", "input_ids", "labels")
_SHAPES = (
    "messages, conversations, text, prompt with completion, or input_ids (with labels); channel, source and "
    "weight may stand beside them"
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of a chat; from `first_target` on, assistant turns are targets."""

    messages: list[Message]
    first_target: int = 0


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

    Raises:
        RowError: it holds none of the known shapes, or a field at fault.
    """
    given = {name: value for name, value in row.items() if value is not None}
    if "messages" in given:
        return Conversation(_messages(given["messages"], "messages"))
    if "conversations" in given:
        return Conversation(_sharegpt(given["conversations"]))
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


def check_row(row: Mapping[str, Any], *, loss_on: str) -> None:
    """Whether a row has a known shape and something to predict, as far as can be told without a tokenizer.

    Raises:
        RowError: it has not.
    """
    row_weight(row)
    content = read_row(row)
    if not isinstance(content, Conversation) or loss_on == "all":
        return
    turns = content.messages[content.first_target :]
    answers = [turn for turn in turns if turn["role"] == "assistant"]
    if not answers:
        raise RowError(
            "no message has the role assistant, so the row has no target; add the answer, leave the row "
            "out, or set data.loss_on: all"
        )
    if not any(message_weight(turn) for turn in answers):
        raise RowError(
            "every assistant message has loss: false or weight: 0, so the row has no target; leave it out"
        )


def row_weight(row: Mapping[str, Any]) -> float:
    """The row's `weight`, 1 if it has none."""
    return _weight(row.get("weight"), "weight")


def message_weight(message: Message) -> float:
    """What a message's targets weigh: its `weight`, or 0 for `loss: false`."""
    wanted = message.get("loss")
    if wanted is not None and not isinstance(wanted, bool):
        raise RowError(f"loss of a message must be true or false, got {_shown(wanted)}")
    return 0.0 if wanted is False else _weight(message.get("weight"), "weight of a message")


def _weight(value: object, what: str) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise RowError(f"{what} must be a number from 0, got {_shown(value)}")
    return float(value)


def _messages(value: object, field: str) -> list[Message]:
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
        turns.append(turn)
    return turns


def _sharegpt(value: object) -> list[Message]:
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
        if part["from"] not in _SHAREGPT_ROLES:
            raise RowError(
                f"conversations[{number}].from is {part['from']!r}; use one of {', '.join(_SHAREGPT_ROLES)}"
            )
        extra = {name: part[name] for name in ("loss", "weight") if part.get(name) is not None}
        turns.append({"role": _SHAREGPT_ROLES[part["from"]], "content": part["value"], **extra})
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
        return Conversation([*before, *_messages(completion, "completion")], first_target=len(before))
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
    if "labels" not in given:
        return Tokens(ids, None)
    labels = _integers(given["labels"], "labels")
    if len(labels) != len(ids):
        raise RowError(
            f"labels has {len(labels)} entries for {len(ids)} input_ids; give one per token, unshifted, -100 "
            "where a token is no target"
        )
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
        near = difflib.get_close_matches(name.lower(), KNOWN_FIELDS, n=1, cutoff=0.7)
        if near:
            guesses.append(f"{name} (did you mean {near[0]}?)")
        else:
            guesses.append(name)
    return f"the row has the fields {', '.join(guesses)}"


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
