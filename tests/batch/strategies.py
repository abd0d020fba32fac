"""Random layouts and documents."""

from hypothesis import strategies as st

from isoloss import Document, Layout


@st.composite
def layouts(draw: st.DrawFn, alignments: tuple[int, ...] = (1, 2, 4, 8)) -> Layout:
    """Up to 6 documents of 1 to 20 tokens, some of them prefixes in a chain, and some padding."""
    alignment = draw(st.sampled_from(alignments))
    lengths = draw(st.lists(st.integers(1, 20), max_size=6))
    groups: list[int] = []
    parents: list[int] = []
    for index in range(len(lengths)):
        continues = index > 0 and draw(st.booleans())
        groups.append(groups[-1] if continues else index)
        family = [other for other in range(index) if groups[other] == groups[index]]
        parents.append(draw(st.sampled_from([-1, *family])))
    sources = draw(st.lists(st.integers(-1, 3), min_size=len(lengths), max_size=len(lengths)))
    aligned = sum(-(-length // alignment) * alignment for length in lengths)
    return Layout(
        lengths,
        sources,
        groups,
        parents,
        alignment=alignment,
        padded_length=aligned + draw(st.integers(0, 4)) * alignment,
    )


@st.composite
def documents(draw: st.DrawFn, max_tokens: int = 40, min_tokens: int = 0) -> Document:
    """A document with labels, weights and further terms of every kind."""
    length = draw(st.integers(min_tokens, max_tokens))
    # a few free choices and cheap values: lists of drawn tokens make hypothesis slow
    first = draw(st.integers(1, 1000))
    ids = range(first, first + length)
    masked = draw(st.integers(1, 4))
    labels = [-100 if index % masked else token for index, token in enumerate(ids)]
    weights = [0.5 * (index % 4) for index in range(length)]
    return Document(
        list(ids),
        labels=draw(st.sampled_from([None, labels])),
        source=draw(st.integers(-1, 3)),
        weight=draw(st.sampled_from([1.0, 0.25, weights])),
        term_labels=draw(st.sampled_from([{}, {"class": [7] + [-100] * (length - 1)}])) if length else {},
    )
