"""From documents to a window: extras, weights, groups, parents, and errors that name the document."""

import math

import pytest
import torch

from isoloss import IGNORE_INDEX, Document, PackedBatch
from isoloss.batch.collation import build_batch, check_unit
from isoloss.batch.document import as_int64

IGN = IGNORE_INDEX


def one(*documents: Document, **options: object) -> PackedBatch:
    """Each document as a unit of its own in a window of 16 at alignment 4."""
    return build_batch([[document] for document in documents], 16, alignment=4, **options)  # type: ignore[arg-type]


def test_lists_tensors_and_ranges_of_any_integer_type_are_tokens() -> None:
    batch = one(
        Document([1, 2, 3]),
        Document(torch.tensor([4, 5], dtype=torch.int32), torch.tensor([IGN, 5], dtype=torch.int16)),
        Document(range(6, 8)),
        pad_token_id=9,
    )
    assert batch.input_ids.tolist() == [1, 2, 3, 9, 4, 5, 9, 9, 6, 7, 9, 9, 9, 9, 9, 9]
    assert batch.input_ids.dtype == batch.targets["text"].dtype == torch.int64
    assert batch.targets["text"].tolist() == [2, 3, IGN, IGN, 5, IGN, IGN, IGN, 7] + [IGN] * 7


def test_numbers_that_are_no_integers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"expected integers, got torch.float32; give token ids"):
        as_int64([1.0, 2.5])
    with pytest.raises(TypeError, match=r"expected integers, got torch.float64"):
        as_int64(torch.tensor([1.0], dtype=torch.float64))
    assert as_int64([]).dtype == torch.int64


def test_the_term_of_the_labels_can_be_named_and_always_has_targets() -> None:
    batch = one(Document([1, 2], [IGN, IGN]), term="answer")
    assert list(batch.targets) == ["answer"]
    assert batch.targets["answer"].tolist() == [IGN] * 16


def test_a_term_of_some_documents_has_targets_in_those() -> None:
    batch = one(Document([1, 2], term_labels={"class": [IGN, 5]}), Document([3]))
    assert batch.targets["class"].tolist() == [IGN, 5] + [IGN] * 14
    assert list(one(Document([3])).targets) == ["text"]


def test_weights_are_left_out_where_all_targets_weigh_one() -> None:
    assert one(Document([1, 2])).weights == {}
    assert one(Document([1, 2], weight=[0.0, 1.0])).weights == {}, "the first token is no target"
    batch = one(Document([1, 2], weight=0.5), Document([3, 4]), Document([5, 6], weight=[3.0, 2.0]))
    assert batch.weights["text"].tolist() == [0.5, 0, 0, 0, 1.0, 0, 0, 0, 2.0] + [0] * 7
    assert batch.weights["text"].dtype == torch.float32
    assert one(Document([1], weight=0.5)).weights == {}, "no target, no weight"


def test_weights_of_aligned_labels_are_not_shifted() -> None:
    batch = one(Document([1, 2, 3], weight=[0.5, 2.0, 4.0], term_labels={"class": [7, IGN, 8]}))
    assert batch.weights["text"].tolist() == [2.0, 4.0] + [0] * 14
    assert batch.weights["class"].tolist() == [0.5, 0, 4.0] + [0] * 13
    batch = one(Document([1, 2, 3], weight=[0.5, 1.0, 1.0], term_labels={"class": [7, IGN, IGN]}))
    assert list(batch.weights) == ["class"]


def test_token_extras_are_padded_with_zeros() -> None:
    batch = one(
        Document([1, 2], token_extras={"place": torch.tensor([[1, 2], [3, 4]])}),
        Document([3], token_extras={"place": torch.tensor([[5, 6]])}),
    )
    assert batch.token_extras["place"].tolist() == [[1, 2], [3, 4], [0, 0], [0, 0], [5, 6]] + [[0, 0]] * 11
    assert batch.token_extras["place"].dtype == torch.int64


def test_token_extras_of_some_documents_only_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"document 'b' has no token_extras\['place'\], .* to none"):
        one(Document([1], token_extras={"place": torch.ones(1)}), Document([2]), keys=["a", "b"])
    for other in (torch.ones(1, 3), torch.ones(1, 2, dtype=torch.float64)):
        with pytest.raises(
            ValueError, match=r"document 'b' has .* a token, document 'a' of torch.float32 \[2\]"
        ):
            one(
                Document([1], token_extras={"place": torch.ones(1, 2)}),
                Document([2], token_extras={"place": other}),
                keys=["a", "b"],
            )


def test_document_extras_are_stacked_or_listed_over_the_counted_documents() -> None:
    prefix = Document([1], group=0)
    answer = Document([2], group=0, parent=0, document_extras={"value": torch.tensor(2.0), "label": 1})
    other = Document([3], document_extras={"value": torch.tensor(3.0), "pixels": torch.ones(2)})
    batch = build_batch([[prefix, answer], [other]], 32)
    assert torch.equal(batch.document_extras["value"], torch.tensor([2.0, 3.0]))
    assert batch.document_extras["label"] == [1, None]
    assert batch.document_extras["pixels"][0] is None
    shapes = one(
        Document([1], document_extras={"pixels": torch.ones(2)}),
        Document([1], document_extras={"pixels": torch.ones(3)}),
    ).document_extras["pixels"]
    assert isinstance(shapes, list) and [len(pixels) for pixels in shapes] == [2, 3]


def test_parents_become_positions_in_the_window_and_groups_are_numbered() -> None:
    pair = [
        Document([1, 2], group="x"),
        Document([2, 3], parent=0, group="x"),
        Document([2], group="x", parent=0),
    ]
    batch = build_batch([[Document([9])], pair, [Document([9])], pair], 32, alignment=2)
    assert batch.layout.document_parents == (-1, -1, 1, 1, -1, -1, 5, 5)
    assert batch.layout.document_groups == (-1, 0, 0, 0, -1, 1, 1, 1)
    assert batch.layout.num_documents == 6
    assert batch.targets["text"].tolist()[:8] == [IGN] * 4 + [3, IGN, IGN, IGN], "a prefix predicts nothing"
    assert batch.position_ids.tolist()[2:8] == [0, 1, 2, 3, 2, 0]


def test_a_prefix_may_say_that_it_has_no_label() -> None:
    check_unit([Document([1, 2], [IGN, IGN], group=0), Document([3], group=0, parent=0)], "row", "text")


PAIR = {"group": 0}


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], r"unit 'row' has no document; add at least one"),
        ([Document([1], group=0), Document([1], group=1)], r"unit 'row' has documents of the groups"),
        ([Document([1], group=0), Document([1])], r"groups \['0', 'None'\]; add the documents of one group"),
        ([Document([1], parent=0)], r"document 'row' has parent 0; a parent is the position of an earlier"),
        (
            [Document([1], **PAIR), Document([1], parent=-1, **PAIR)],
            r"document 1 of unit 'row' has parent -1",
        ),
        ([Document([1], parent=1, **PAIR), Document([1], **PAIR)], r"document 0 of unit 'row' has parent 1"),
        (
            [Document([1, 2], [IGN, 2], **PAIR), Document([1], parent=0, **PAIR)],
            r"document 0 of unit 'row' is the parent of another and has labels; a prefix predicts nothing",
        ),
        (
            [Document([1], term_labels={"class": [3]}, **PAIR), Document([1], parent=0, **PAIR)],
            r"has class; a prefix predicts nothing",
        ),
        (
            [Document([1], document_extras={"label": 1}, **PAIR), Document([1], parent=0, **PAIR)],
            r"has document_extras \['label'\]; a prefix is not counted",
        ),
        ([Document([1, 2, 3], [1, 2])], r"document 'row' has 3 tokens and 2 labels; give one for each token"),
        ([Document([1, 2], weight=[1.0])], r"document 'row' has 2 tokens and 1 weight"),
        ([Document([1], term_labels={"class": [1, 2]})], r"1 tokens and 2 term_labels\['class'\]"),
        ([Document([1], token_extras={"x": torch.ones(2)})], r"1 tokens and 2 token_extras\['x'\]"),
        ([Document(torch.ones(1, 4, dtype=torch.int64))], r"document 'row' has input_ids of shape \[1, 4\]"),
        ([Document([1], term_labels={"text": [1]})], r"has term_labels for 'text', the term of its labels"),
        ([Document([1], weight=-0.5)], r"document 'row' has weight -0.5; a weight is a finite number from 0"),
        ([Document([1], weight=math.nan)], r"document 'row' has weight nan"),
        (
            [Document([1, 2], weight=[1.0, -2.0])],
            r"document 'row' has a weight that is negative or not finite",
        ),
    ],
)
def test_errors_name_the_document(documents: list[Document], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_unit(documents, "row", "text")
