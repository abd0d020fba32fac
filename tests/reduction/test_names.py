import pytest
from hypothesis import given
from hypothesis import strategies as st

from isoloss import Ledger, Term
from isoloss.reduction.terms import escape_name, unescape_name

names = st.text(
    alphabet=st.one_of(st.sampled_from("%/2fFaA0\x00\x1f\x7f\x85é"), st.characters(codec="utf-8"))
)


@given(names)
def test_row_22_escaped_names_are_one_component_and_reversible(name):
    """row 22"""
    escaped = escape_name(name)
    assert "/" not in escaped
    assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in escaped)
    assert unescape_name(escaped) == name


@given(names, names)
def test_row_22_two_names_never_become_one(first, second):
    """row 22"""
    assert (escape_name(first) == escape_name(second)) == (first == second)


@pytest.mark.parametrize(("first", "second"), [("a/b", "a%2Fb"), ("a%2Fb", "a%252Fb"), ("\n", "%0A")])
def test_row_22_names_that_are_made_to_collide(first, second):
    """row 22"""
    assert escape_name(first) != escape_name(second)


def test_ordinary_names_are_kept_as_written():
    for name in ("code", "50% web", "C++ & Rust", "日本語", "wiki.en-2024"):
        assert escape_name(name) == name


def test_a_name_declared_twice_is_an_error():
    with pytest.raises(ValueError, match="term 'text' is declared twice"):
        Ledger([Term("text"), Term("text", "sample")])
    with pytest.raises(ValueError, match="channel 'code' is declared twice"):
        Ledger([Term("text")], channels=["code", "docs", "code"])
    with pytest.raises(ValueError, match="non-empty string"):
        Ledger([Term("text")], channels=[""])
    with pytest.raises(ValueError, match="at least one term"):
        Ledger([])


def test_a_term_says_what_is_wrong_with_it():
    with pytest.raises(ValueError, match="reduction 'mean' is not known; use one of token, sample"):
        Term("text", "mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="coefficient nan is not finite"):
        Term("text", coefficient=float("nan"))
    with pytest.raises(ValueError, match="needs a name"):
        Term("")


def test_channels_given_as_one_text_are_refused() -> None:
    with pytest.raises(ValueError, match=r"list of channel names, got the text 'code'; write \['code'\]"):
        Ledger([Term("text")], channels="code")
