"""`Layout`: what a window contains, against lists written out slot by slot."""

import copy
import pickle

import pytest
import torch
from hypothesis import given

from batch.strategies import layouts
from isoloss import Layout


def slots_of(layout: Layout) -> list[tuple[int, int]]:
    """(document, place in the document) of each slot, (-1, -1) where no token is; the plain way."""
    slots = []
    for index, length in enumerate(layout.document_lengths):
        slots += [(index, place) for place in range(length)]
        while len(slots) % layout.alignment:
            slots.append((-1, -1))
    return slots + [(-1, -1)] * (layout.physical_tokens - len(slots))


def context_of(layout: Layout, index: int) -> int:
    parent = layout.document_parents[index]
    return 0 if parent == -1 else layout.document_lengths[parent] + context_of(layout, parent)


@given(layouts())
def test_every_derived_value_equals_the_plain_one(layout: Layout) -> None:
    slots = slots_of(layout)
    assert len(slots) == layout.physical_tokens
    assert layout.document_ids().tolist() == [index for index, _ in slots]
    assert layout.is_token().tolist() == [index >= 0 for index, _ in slots]
    assert layout.position_ids().tolist() == [
        place + context_of(layout, index) if index >= 0 else 0 for index, place in slots
    ]
    assert layout.token_sources().tolist() == [
        layout.document_sources[index] if index >= 0 else -1 for index, _ in slots
    ]
    counted = [index for index in range(len(layout.document_lengths)) if index not in layout.document_parents]
    assert layout.num_documents == len(counted)
    assert layout.counted_document_ids().tolist() == [
        counted.index(index) if index in counted else -1 for index, _ in slots
    ]
    assert list(layout.counted_sources) == [layout.document_sources[index] for index in counted]
    assert layout.max_document_length == max([0, *layout.document_lengths])
    for index, start in enumerate(layout.document_starts):
        assert slots[start] == (index, 0)
    ends = [sum(layout.document_strides[: index + 1]) for index in range(len(layout.document_lengths))]
    assert layout.cu_seqlens.tolist() == [0, *ends]
    assert layout.cu_seqlens.dtype == torch.int32


@given(layouts())
def test_law_source_is_at_most_aligned_is_at_most_physical(layout: Layout) -> None:
    assert layout.source_tokens <= layout.aligned_tokens <= layout.physical_tokens
    assert layout.source_tokens == int(layout.is_token().sum())


@given(layouts())
def test_a_layout_survives_pickling_and_copying(layout: Layout) -> None:
    for other in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout)):
        assert other == layout
        assert hash(other) == hash(layout)
        assert other.document_ids().tolist() == layout.document_ids().tolist()


@pytest.mark.parametrize("padded_length", [None, 8])
def test_row_8_one_token_documents_are_documents(padded_length: int | None) -> None:
    layout = Layout([3, 1, 1], padded_length=padded_length)
    assert layout.num_documents == 3
    assert layout.source_tokens == 5
    assert layout.cu_seqlens.tolist() == [0, 3, 4, 5]


@pytest.mark.parametrize("lengths", [[3, 1, 2], [1, 1, 1]])
def test_a37_one_token_documents_do_not_merge(lengths: list[int]) -> None:
    layout = Layout(lengths)
    assert layout.position_ids().tolist() == [place for length in lengths for place in range(length)]
    assert layout.num_documents == 3
    if lengths == [3, 1, 2]:
        assert layout.cu_seqlens.tolist() == [0, 3, 4, 6]


def test_a38_padding_at_the_end_is_no_token() -> None:
    layout = Layout([3, 2], padded_length=8)
    assert (layout.source_tokens, layout.aligned_tokens, layout.physical_tokens) == (5, 5, 8)
    assert layout.num_documents == 2
    assert layout.document_ids().tolist() == [0, 0, 0, 1, 1, -1, -1, -1]


def test_a39_no_document_of_length_zero_at_the_end() -> None:
    layout = Layout([4, 4], padded_length=8)
    assert layout.cu_seqlens.tolist() == [0, 4, 8]
    assert layout.num_documents == 2


def test_a_window_of_padding() -> None:
    layout = Layout([], padded_length=4)
    assert (layout.source_tokens, layout.aligned_tokens, layout.physical_tokens) == (0, 0, 4)
    assert (layout.num_documents, layout.max_document_length) == (0, 0)
    assert layout.document_ids().tolist() == [-1] * 4
    assert layout.position_ids().tolist() == [0] * 4
    assert layout.cu_seqlens.tolist() == [0]


def test_a_document_continues_the_positions_of_its_parent_and_of_the_parents_parent() -> None:
    layout = Layout([3, 2, 4, 1], document_groups=[5, 5, 5, 5], document_parents=[-1, 0, 1, 0], alignment=2)
    assert layout.position_ids().tolist() == [0, 1, 2, 0, 3, 4, 5, 6, 7, 8, 3, 0]
    assert layout.is_prefix == (True, True, False, False)
    assert layout.num_documents == 2
    assert layout.source_tokens == 10, "the tokens of a prefix are counted once"


def test_tensors_and_lists_of_integers_are_taken() -> None:
    layout = Layout(torch.tensor([3, 1]), torch.tensor([0, 1], dtype=torch.int32))
    assert layout == Layout([3, 1], [0, 1])
    assert layout.document_lengths == (3, 1)


def test_a_layout_cannot_be_changed() -> None:
    layout = Layout([3])
    with pytest.raises(AttributeError, match="make a new one"):
        layout.alignment = 4
    layout.document_ids().zero_().sub_(5)
    layout.position_ids().zero_()
    assert layout.document_ids().tolist() == [0, 0, 0], "what is handed out is a copy"
    assert layout.position_ids().tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([3, 0],), {}, r"document_lengths\[1\] is 0; .* leave empty documents out"),
        (([3, 2], [0]), {}, r"document_sources has 1 entries for 2 documents"),
        (([3, 2], None, [0, -2]), {}, r"document_groups\[1\] is -2; use an index from 0, or -1"),
        (([3, 2], None, [0, 1], [-1, 0]), {}, r"document_parents\[1\] is 0; .* same group"),
        (([3, 2], None, None, [-1, 0]), {}, r"document_parents\[1\] is 0; .* has group -1"),
        (([3, 2], None, [0, 0], [1, -1]), {}, r"document_parents\[0\] is 1; a parent is an earlier document"),
        (([3, 2], None, [0, 0], [-1, 1]), {}, r"document_parents\[1\] is 1"),
        (([3, 2],), {"alignment": 0}, r"alignment must be at least 1 slot, got 0"),
        (([3, 2],), {"alignment": 4, "padded_length": 7}, r"need 8 slots at alignment 4, padded_length is 7"),
    ],
)
def test_errors_say_what_came_and_what_to_do(
    arguments: tuple[object, ...], options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(*arguments, **options)


@pytest.mark.parametrize("value", [1.0, True, "3", None])
def test_only_integers_are_lengths(value: object) -> None:
    with pytest.raises(TypeError, match=r"document_lengths\[1\] must be an integer, got"):
        Layout([3, value])
