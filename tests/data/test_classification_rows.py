"""Rows of classification: labels of documents and of tokens, classes from the recipe or the rows, faults."""

from typing import Any

import pytest
import torch
from tokenizers import normalizers

from data.corpora import byte_tokenizer
from isoloss import PackingRecord, pack
from isoloss.data.classification_rows import classification_format, collect_classes
from isoloss.data.errors import RowError

CLASSES = ("animal", "plant")


def window(
    rows: list[dict[str, Any]], size: int = 64, classes: tuple[str, ...] = CLASSES, **options: Any
) -> Any:
    made = classification_format(byte_tokenizer(), classes, **options)
    documents = []
    for number, row in enumerate(rows):
        made.check(row)
        documents += made.documents(row, number)
    (batch,) = pack(documents, 64, term="classification", alignment=1)
    return made.complete(batch)


def labelled(batch: Any) -> list[tuple[int, int]]:
    targets = batch.targets["classification"]
    return [(place, int(targets[place])) for place in (targets != -100).nonzero().squeeze(-1).tolist()]


def test_the_label_stands_at_the_last_token() -> None:
    rows = [{"text": "cat", "label": "animal"}, {"text": "x", "label": 1}, {"text": "oak", "label": "plant"}]
    batch = window(rows)
    assert batch.layout.document_lengths in ((3, 3, 1), (3, 1, 3), (1, 3, 3))  # no end is added
    starts = dict(zip(batch.layout.document_sources, batch.layout.document_starts, strict=True))
    assert sorted(labelled(batch)) == sorted([(starts[0] + 2, 0), (starts[1], 1), (starts[2] + 2, 1)])
    assert batch.counts["classification"].num_targets.tolist() == [1, 1, 1]


def test_weights_go_with_their_labels() -> None:
    batch = window([{"text": "cat", "label": 0, "weight": 2.5}, {"text": "oak", "label": 1}])
    places = [place for place, _ in labelled(batch)]
    assert sorted(batch.weights["classification"][places].tolist()) == [1.0, 2.5]


def test_a_truncated_document_keeps_its_label() -> None:
    made = classification_format(byte_tokenizer(), CLASSES)
    documents = made.documents({"text": "a long text", "label": "plant"}, 0)
    (batch,) = pack(documents, 8, term="classification", record=PackingRecord())
    assert labelled(made.complete(batch)) == [(7, 1)]


def test_numbers() -> None:
    rows = [{"text": "ab", "label": 1.5}, {"text": "c", "label": -2}]
    batch = window(rows, classes=(), problem_type="regression")
    places = [place for place, _ in labelled(batch)]
    assert sorted(batch.token_extras["regression_values"][places].tolist()) == [-2.0, 1.5]


def test_labels_of_token_ids() -> None:
    row = {"input_ids": [5, 6, 7], "labels": ["plant", None, 0]}
    assert labelled(window([row], level="token")) == [(0, 1), (2, 0)]


def test_labels_of_words_stand_at_their_first_tokens() -> None:
    row = {"tokens": ["big", "oak", "and"], "labels": ["animal", "plant", -100]}
    assert labelled(window([row], level="token")) == [(0, 0), (4, 1)]


def test_conversations_prompts_and_token_ids_have_labels_too() -> None:
    turns = [{"role": "user", "content": "hi"}]
    rows: list[dict[str, Any]] = [{"messages": turns}, {"prompt": turns}, {"prompt": "hi"}, {"text": "hi"}]
    batch = window([row | {"label": 1} for row in [*rows, {"input_ids": [1, 2]}]])
    assert batch.counts["classification"].num_targets.tolist() == [1] * 5
    made = classification_format(byte_tokenizer(), CLASSES)
    ids = [made.documents(row | {"label": 1}, 0)[0].input_ids.tolist() for row in rows]  # type: ignore[union-attr]
    assert ids[0] == ids[1]
    assert ids[2] == ids[3]


def test_a_word_without_a_token_of_its_own_is_named() -> None:
    """Its label would stand at another word's token, or at none."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("~", "")
    made = classification_format(tokenizer, CLASSES, level="token")
    for words in (["a", "~", "b"], ["a", "~"], ["~", "a"]):
        row = {"tokens": words, "labels": [0] * len(words)}
        made.check(row)
        with pytest.raises(RowError, match=rf"tokens\[{words.index('~')}\] is '~'.*leave the word out"):
            made.documents(row, 0)


def test_a_row_that_ends_with_padding_is_pooled_elsewhere_by_others() -> None:
    tokenizer = byte_tokenizer()
    made = classification_format(tokenizer, CLASSES)
    with pytest.raises(RowError, match="padding token of its own"):
        made.documents({"input_ids": [7, tokenizer.pad_token_id], "label": 0}, 0)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"text": "x", "label": "plnt"},
            {},
            "label is 'plnt'.* none of the classes .*did you mean 'plant'",
        ),
        ({"text": "x", "label": 2}, {}, r"label is 2, outside the 2 classes \(animal, plant\)"),
        ({"text": "x", "label": -1}, {}, "outside the 2 classes"),
        ({"text": "x", "label": True}, {}, "must be the name or index of a class"),
        ({"text": "x", "label": 0.5}, {}, "must be the name or index of a class"),
        ({"text": "x"}, {}, "label is missing"),
        ({"prompt": "", "label": 0}, {}, "text is empty"),
        ({"label": 0}, {}, "a row holds messages"),
        ({"text": "", "label": 0}, {}, "text is empty"),
        ({"text": "x", "label": float("nan")}, {"problem_type": "regression"}, "must be a finite number"),
        ({"text": "x", "label": "1.5"}, {"problem_type": "regression"}, "must be a finite number"),
        ({"input_ids": [1, 2], "labels": [0]}, {"level": "token"}, "labels has 1 entries for 2 input_ids"),
        ({"input_ids": [1, 2], "labels": [0, 5]}, {"level": "token"}, r"labels\[1\] is 5, outside"),
        ({"input_ids": [1, 2], "labels": [None, -100]}, {"level": "token"}, "has no label"),
        ({"text": "x", "labels": [0]}, {"level": "token"}, "must be lists of the same length"),
        ({"tokens": ["a", ""], "labels": [0, 1]}, {"level": "token"}, "tokens must be words"),
    ],
)
def test_a_row_at_fault_says_what_to_do(row: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        classification_format(byte_tokenizer(), CLASSES, **options).check(row)


def test_classes_of_the_rows() -> None:
    rows = [{"label": "b"}, {"label": "a"}, {"other": 1}, {"label": "b"}]
    assert collect_classes(rows, "sequence") == ("a", "b")
    assert collect_classes([{"label": 2}, {"label": 0}], "sequence") == ("0", "1", "2")
    assert collect_classes([{"labels": ["x", None, "y"]}], "token") == ("x", "y")
    with pytest.raises(ValueError, match="rows hold names"):
        collect_classes([{"label": "b"}, {"label": 1}], "sequence")
    with pytest.raises(ValueError, match="problem_type: regression"):
        collect_classes([{"label": 0.5}, {"label": 1}], "sequence")
    with pytest.raises(ValueError, match="the index 10000000000, which would be 10000000001 classes"):
        collect_classes([{"label": 10**10}], "sequence")
    with pytest.raises(ValueError, match="the rows name 1 classes"):
        collect_classes([{"label": "b"}], "sequence")


def test_targets_are_never_shifted() -> None:
    """A09: a label belongs to its own token."""
    batch = window([{"input_ids": [9, 8], "labels": [1, 0]}], level="token")
    assert torch.equal(batch.targets["classification"][:2], torch.tensor([1, 0]))
