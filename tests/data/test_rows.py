"""What a row may hold, and what is said of one that holds something else."""

import copy
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.corpora import MARKED, PLAIN, REWRITING, byte_tokenizer
from isoloss.data.errors import RowError
from isoloss.data.rows import (
    Completion,
    Conversation,
    LossOn,
    Text,
    Tokens,
    check_row,
    near_misses,
    read_row,
    row_channel,
    row_weight,
)
from isoloss.data.tokenising import Tokeniser

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def test_each_shape_is_recognised() -> None:
    assert read_row({"text": "t"}) == Text("t")
    assert read_row({"prompt": "p", "completion": "c"}) == Completion("p", "c")
    assert read_row({"prompt": "", "completion": "c"}) == Completion("", "c")
    assert read_row({"messages": [USER, ANSWER]}) == Conversation([USER, ANSWER])
    assert read_row({"prompt": [USER], "completion": [ANSWER]}) == Conversation(
        [USER, ANSWER], first_target=1
    )
    assert read_row({"input_ids": [1, 2]}) == Tokens([1, 2], None)
    assert read_row({"input_ids": [1, 2], "labels": [-100, 2]}) == Tokens([1, 2], [-100, 2])


def test_sharegpt_becomes_messages() -> None:
    row = {
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "human", "value": "q"},
            {"from": "gpt", "value": "a", "weight": 0.5},
            {"from": "observation", "value": "o"},
            {"from": "gpt", "value": "b", "loss": False},
        ]
    }
    assert read_row(row) == Conversation(
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a", "weight": 0.5},
            {"role": "tool", "content": "o"},
            {"role": "assistant", "content": "b", "loss": False},
        ]
    )
    assert read_row({"conversations": [USER, ANSWER]}) == Conversation([USER, ANSWER])


def test_fields_that_a_table_fills_with_null_are_absent() -> None:
    message = {"role": "assistant", "content": "a", "loss": None, "weight": None, "tool_calls": None}
    row = {"messages": [USER, message], "text": None, "input_ids": None, "weight": None, "channel": None}
    assert read_row(row) == Conversation([USER, ANSWER])
    assert row_weight(row) == 1.0
    assert row_channel(row, "name") == "name"


def test_messages_stored_as_an_object_of_lists_are_turned_round() -> None:
    row = {"messages": {"role": ["user", "assistant"], "content": ["q", "a"]}}
    assert read_row(row) == Conversation([USER, ANSWER])


def test_a_message_may_hold_tool_calls_alone() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": None}}}]}
    assert read_row({"messages": [USER, call], "tools": [{"name": "f"}]}) == Conversation(
        [USER, call], tools=[{"name": "f"}]
    )


def test_the_channel_is_named_by_the_row_or_its_source() -> None:
    assert row_channel({"channel": "c", "source": "s"}, "name") == "c"
    assert row_channel({"source": "s"}, "name") == "s"
    assert row_channel({"channel": 7}, "name") == "7"
    assert row_channel({}, "name") == "name"
    for value in ("", True, 1.5, ["a"], {"a": 1}):
        with pytest.raises(RowError, match=r"channel must be a name, got"):
            row_channel({"channel": value}, "name")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "the row has no field; a row holds messages, conversations, text"),
        ({"txt": "a", "id": 1}, r"fields txt \(did you mean text\?\), id; a row holds messages"),
        ({"mesages": []}, r"mesages \(did you mean messages\?\)"),
        ({"labels": [1]}, r"the row has the fields labels; a row holds"),
        ({"text": 5}, r"text must be a string, got 5 \(int\)"),
        ({"text": ""}, "text is empty; leave the row out"),
        ({"prompt": "a"}, "completion is missing beside prompt; add it"),
        ({"completion": "a"}, "prompt is missing beside completion; add it"),
        ({"prompt": "a", "completion": ""}, "completion is empty, so the row has no target"),
        ({"prompt": "a", "completion": [ANSWER]}, "must both be strings or both lists of messages"),
        ({"messages": "hi"}, r"messages must be a list of \{role, content\}, got 'hi' \(str\)"),
        ({"messages": []}, "messages is an empty list; leave the row out"),
        ({"messages": [USER, "x"]}, r"messages\[1\] must be an object"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\] has no role, only content"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has no content, only role"),
        ({"messages": [{"role": 1, "content": "a"}]}, r"messages\[0\]\.role must be a string"),
        ({"messages": [USER]}, "no message has the role assistant, so the row has no target"),
        (
            {"messages": [USER, {**ANSWER, "loss": False}]},
            "loss: false or weight: 0, so the row has no target",
        ),
        ({"messages": [USER, {**ANSWER, "loss": "no"}]}, "loss of a message must be true or false, got 'no'"),
        (
            {"messages": [USER, {**ANSWER, "weight": -1}]},
            "weight of a message must be a number from 0, got -1",
        ),
        ({"messages": [USER, ANSWER], "tools": "[{"}, "tools is a string, but no JSON"),
        ({"messages": [USER, ANSWER], "tools": 3}, "tools must be a list of JSON schemas, got 3"),
        ({"conversations": []}, r"conversations must be a list of \{from, value\} that is not empty"),
        ({"conversations": [{"from": "gpt"}]}, r"conversations\[0\] must be an object \{from, value\}"),
        (
            {"conversations": [{"from": "bot", "value": ""}]},
            r"conversations\[0\]\.from is 'bot' \(str\); use one of",
        ),
        ({"input_ids": "ab"}, "input_ids must be a list of integers"),
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [1, 2.5]}, r"input_ids\[1\] must be an integer, got 2.5"),
        ({"input_ids": [1, -1]}, "input_ids holds -1; token ids start at 0"),
        ({"input_ids": [1, 99]}, "input_ids holds 99, the vocabulary has 50 entries"),
        (
            {"input_ids": [1, 2], "labels": [2]},
            "labels has 1 entries for 2 input_ids; give one per token, unshifted",
        ),
        ({"input_ids": [1, 2], "labels": [1, -5]}, "labels holds -5; a label is a token id, or -100"),
        ({"input_ids": [1, 2], "labels": [1, 50]}, "labels holds 50, the vocabulary has 50 entries"),
        ({"input_ids": [1, 2], "labels": [1, -100]}, "labels has no target behind the first token"),
        ({"input_ids": [1, 0], "attention_mask": [1, 0]}, "attention_mask holds 0, so input_ids is padded"),
        ({"input_ids": [1, 2], "attention_mask": 1}, "attention_mask must be a list, got 1"),
        (
            {"messages": [USER, {**ANSWER, "content": 5}]},
            r"messages\[1\]\.content must be a string, or a list",
        ),
        ({"messages": [USER, {**ANSWER, "content": ["a"]}]}, r"list of parts as objects, got \['a'\]"),
        ({"conversations": [{"from": "gpt", "value": {}}]}, r"conversations\[0\]\.value must be a string"),
        ({"text": "a", "weight": "2"}, r"weight must be a number from 0, got '2' \(str\)"),
        ({"text": "a", "weight": float("nan")}, "weight must be a number from 0, got nan"),
        ({"text": "a", "weight": -0.5}, "weight must be a number from 0, got -0.5"),
    ],
)
def test_a_row_at_fault_is_told_what_is_wrong_and_what_to_do(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        check_row(row, loss_on="assistant", vocabulary_size=50)


def test_what_is_a_fault_depends_on_what_is_trained() -> None:
    check_row({"messages": [USER]}, loss_on="all")
    check_row({"messages": [{**USER, "loss": True}]}, loss_on="assistant")
    with pytest.raises(RowError, match="no target"):
        check_row({"messages": [ANSWER, USER, {**ANSWER, "weight": 0}]}, loss_on="completion")


def test_long_values_are_shortened_in_messages() -> None:
    with pytest.raises(RowError) as caught:
        read_row({"text": ["x" * 1000]})
    assert len(str(caught.value)) < 120


def test_fields_that_are_nearly_ours_are_pointed_out() -> None:
    assert near_misses({"text": "a", "wieght": 1}) == [
        "the field 'wieght' is not read; did you mean 'weight'?"
    ]
    assert near_misses({"text": "a", "label": 1, "id": 3, "source": "s", "url": "u"}) == []
    assert near_misses({"input_ids": [1], "label": [1]}) == [
        "the field 'label' is not read; did you mean 'labels'?"
    ]


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.floats()
    | st.sampled_from(["", "x", "user", "assistant", "gpt", "system"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "loss", "x"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
_GOOD: list[dict[str, Any]] = [
    {"messages": [USER, ANSWER, USER, ANSWER]},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"prompt": "p", "completion": "c"},
    {"prompt": [USER], "completion": [ANSWER]},
    {"text": "t"},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1]},
]
_ADDED = ("loss", "weight", "channel", "source", "tools", "tool_calls", "attention_mask", "content", "name")


@st.composite
def _damaged(draw: st.DrawFn) -> dict[str, Any]:
    """A good row with a few values taken out or replaced, at any depth."""
    row = copy.deepcopy(draw(st.sampled_from(_GOOD)))
    for _ in range(draw(st.integers(1, 3))):
        here: Any = row
        while True:
            keys = [*here, *_ADDED] if isinstance(here, dict) else list(range(len(here)))
            key = draw(st.sampled_from(keys))
            is_there = key in here if isinstance(here, dict) else True
            if is_there and isinstance(here[key], dict | list) and here[key] and draw(st.booleans()):
                here = here[key]
                continue
            if is_there and draw(st.integers(0, 4)) == 0:
                del here[key]
            else:
                here[key] = draw(_VALUES)
            break
    return row


_TOKENISERS = [
    Tokeniser(byte_tokenizer(template), loss_on)
    for template in (PLAIN, MARKED, REWRITING)
    for loss_on in get_args(LossOn)
]


@settings(max_examples=300)
@given(_damaged(), st.sampled_from(get_args(LossOn)), st.integers(0, 2))
def test_whatever_a_row_holds_it_is_a_document_or_a_fault_in_our_words(
    row: dict[str, Any], loss_on: LossOn, template: int
) -> None:
    """Never a raw traceback; and what the survey lets pass has a target once it is tokenised."""
    tokeniser = _TOKENISERS[3 * template + get_args(LossOn).index(loss_on)]
    try:
        check_row(row, loss_on=loss_on, vocabulary_size=300)
        row_channel(row, "s")
        document = tokeniser.document(row, 0)
    except RowError as error:
        assert len(str(error)) > 20
    else:
        assert len(document) == 1 or document.labels is None or (document.labels[1:] != -100).any()
