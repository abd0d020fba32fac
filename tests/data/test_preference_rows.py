"""Rows of preference pairs: shapes, documents, shared prompts, faults."""

from typing import Any

import pytest
import torch

from data.corpora import byte_tokenizer, write_rows
from isoloss import Document, PackingRecord, pack
from isoloss.data.errors import DataError, RowError
from isoloss.data.preference_rows import preference_format, read_sides
from isoloss.data.sources import SourceSpec
from isoloss.data.training_data import DataSettings, TrainingData

STRINGS = {"prompt": "2+2?", "chosen": "4", "rejected": "five"}
QUESTION = {"role": "user", "content": "2+2?"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CHAT = {"prompt": [QUESTION], "chosen": [answer("4")], "rejected": [answer("five")]}


def texts(documents: list[Document]) -> list[tuple[str, str]]:
    """What each document holds, and which of it is predicted."""
    tokenizer = byte_tokenizer()
    shown = []
    for document in documents:
        ids = torch.as_tensor(document.input_ids)
        labels = torch.full_like(ids, -100) if document.labels is None else torch.as_tensor(document.labels)
        shown.append((tokenizer.decode(ids), tokenizer.decode(labels[labels != -100])))
    return shown


def test_strings_become_two_documents_of_one_group() -> None:
    documents = list(preference_format(byte_tokenizer()).documents(STRINGS, 3))
    end = byte_tokenizer().eos_token
    assert texts(documents) == [(f"2+2?4{end}", f"4{end}"), (f"2+2?five{end}", f"five{end}")]
    assert {document.group for document in documents} == {"pair"}
    assert {document.source for document in documents} == {3}
    assert {document.parent for document in documents} == {None}


@pytest.mark.parametrize(
    "row",
    [
        CHAT,
        {"prompt": [QUESTION], "chosen": "4", "rejected": "five"},
        {"prompt": [QUESTION], "chosen": "4", "rejected_response": "five"},
        {"chosen": [QUESTION, answer("4")], "rejected": [QUESTION, answer("five")]},
        {"messages": [QUESTION, answer("4")], "rejected_response": "five"},
    ],
)
def test_every_shape_of_a_conversation_gives_the_same_documents(row: dict[str, Any]) -> None:
    made = preference_format(byte_tokenizer())
    assert made.check(row)
    assert texts(list(made.documents(row, 0))) == texts(list(made.documents(CHAT, 0)))
    assert texts(list(made.documents(CHAT, 0)))[0][1] == "4<|im_end|>"


def test_a_shared_prompt_is_held_once() -> None:
    """Row 20: the prefix without its last token, which starts each answer."""
    prefix, chosen, rejected = preference_format(byte_tokenizer(), shared_prompt=True).documents(STRINGS, 0)
    end = byte_tokenizer().eos_token
    assert texts([prefix, chosen, rejected]) == [
        ("2+2", ""),
        (f"?4{end}", f"4{end}"),
        (f"?five{end}", f"five{end}"),
    ]
    assert (prefix.parent, chosen.parent, rejected.parent) == (None, 0, 0)
    (window,) = pack([prefix, chosen, rejected], 64, term="preference")
    apart = list(preference_format(byte_tokenizer()).documents(STRINGS, 0))
    (other,) = pack(apart, 64, term="preference")
    assert window.counts["preference"].num_targets.tolist() == [0, 2, 5]
    assert other.counts["preference"].num_targets.tolist() == [2, 5]
    assert other.layout.source_tokens - window.layout.source_tokens == 3


def test_answers_that_begin_alike_share_the_prompt_alone() -> None:
    row = {"prompt": "ab", "chosen": "xyz", "rejected": "xyw"}
    prefix, chosen, _ = preference_format(byte_tokenizer(), shared_prompt=True).documents(row, 0)
    assert (len(prefix), len(chosen)) == (1, 1 + 3 + 1)


def test_a_prompt_of_one_token_is_not_shared() -> None:
    row = {"prompt": "a", "chosen": "x", "rejected": "y"}
    assert len(preference_format(byte_tokenizer(), shared_prompt=True).documents(row, 0)) == 2


def test_references_travel_with_their_documents() -> None:
    row = STRINGS | {"reference_chosen_logp": -1.5, "reference_rejected_logp": -2}
    for shared in (False, True):
        made = preference_format(byte_tokenizer(), stored_reference=True, shared_prompt=shared)
        made.check(row)
        documents = list(made.documents(row, 0))
        (window,) = pack(documents, 64, term="preference")
        assert window.document_extras["reference_log_prob"].tolist() == [-1.5, -2.0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "rejected is missing; a row holds prompt, chosen and rejected"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "chosen is empty, so the pair says nothing"),
        ({"prompt": "a", "chosen": "b", "rejected": []}, "rejected is empty"),
        ({"chosen": "b", "rejected": "c"}, "prompt is missing"),
        ({"prompt": "a", "chosen": 3, "rejected": "c"}, "chosen must be a string or a list of messages"),
        (STRINGS | {"rejected_response": "x"}, "both stand in the row"),
        ({"messages": [answer("4")], "rejected_response": "x"}, "messages must be a list of the prompt"),
        ({"chosen": [QUESTION, answer("4")], "rejected": [answer("4")]}, "no first message in common"),
        ({"chosen": [QUESTION], "rejected": [QUESTION, answer("4")]}, "the beginning of the other"),
        (
            {"prompt": "a", "chosen": [answer("b")], "rejected": "c"},
            "chosen: prompt and completion must",
        ),
        ({"prompt": [QUESTION], "chosen": [answer("b")], "rejected": [QUESTION]}, "rejected: no message has"),
        ({"prompt": [QUESTION], "chosen": [{"role": "assistant"}], "rejected": "c"}, "has no content"),
        (STRINGS | {"weight": -1}, "weight must be a number from 0"),
        (CHAT | {"rejected": [answer("five") | {"weight": 2}]}, "rejected: a message has a weight"),
    ],
)
def test_a_row_at_fault_says_what_to_do(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        preference_format(byte_tokenizer()).check(row)


@pytest.mark.parametrize("value", [None, "x", 0.5, float("nan"), True])
def test_references_at_fault(value: object) -> None:
    row = STRINGS | {"reference_chosen_logp": -1.0, "reference_rejected_logp": value}
    with pytest.raises(RowError, match="reference_rejected_logp"):
        preference_format(byte_tokenizer(), stored_reference=True).check(row)


def test_the_same_answer_twice_is_a_pair() -> None:
    chosen, rejected = read_sides({"chosen": [QUESTION, answer("4")], "rejected": [QUESTION, answer("4")]})
    assert chosen == rejected == {"prompt": [QUESTION], "completion": [answer("4")]}


def open_pairs(path: Any, **settings: Any) -> TrainingData:
    chosen = {"window": 64, "alignment": 8, "windows_per_step": 1, "seed": 3, "num_passes": 1} | settings
    return TrainingData(
        DataSettings(sources=(SourceSpec(name="qa", path=str(path)),), **chosen),
        byte_tokenizer(),
        preference_format(byte_tokenizer()),
        data_rank=0,
        data_size=1,
    )


def test_an_empty_side_names_its_file_and_line(tmp_path: Any) -> None:
    path = write_rows(tmp_path / "pairs.jsonl", [STRINGS, STRINGS | {"rejected": ""}])
    with pytest.raises(DataError, match=r"pairs.jsonl:2: rejected is empty"):
        open_pairs(path)


def test_a_pair_that_fits_no_window_is_dropped_whole_and_counted(tmp_path: Any) -> None:
    long = STRINGS | {"chosen": "x" * 60}
    path = write_rows(tmp_path / "pairs.jsonl", [STRINGS, long, STRINGS])
    data = open_pairs(path)
    windows, _ = data.next_step()
    assert windows[0].layout.num_documents == 4
    (event,) = data.take_events()
    assert (event["action"], event["place"]) == ("dropped", f"{path}:2")
    record = PackingRecord()
    documents = list(preference_format(byte_tokenizer()).documents(long, 0))
    assert list(pack(documents, 64, term="preference", record=record)) == []
