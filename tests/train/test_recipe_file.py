"""The YAML reader and the overrides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isoloss.train.recipe_file import LocatedYaml, RecipeError, apply_overrides, read_yaml, write_yaml


def read(text: str) -> LocatedYaml:
    return read_yaml(text, lambda line: f"r.yaml:{line}")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("3.", 3.0),
        (".inf", float("inf")),
        ("0o10", 8),
        ("010", 10),
        ("0x1F", 31),
        ("+3", 3),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("True", True),
        ("false", False),
        ("~", None),
        ("", None),
        ("'1e-6'", "1e-6"),
        ('"true"', "true"),
        ("=", "="),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    read_value = read(f"key: {text}").value
    assert read_value == {"key": value}
    assert type(read_value["key"]) is type(value)


def test_every_key_and_element_has_its_line() -> None:
    document = read("a:\n  b: 1\n\n  c:\n    - x\n    - {d: 2}\n")
    assert document.locations == {
        (): "r.yaml:1",
        ("a",): "r.yaml:1",
        ("a", "b"): "r.yaml:2",
        ("a", "c"): "r.yaml:4",
        ("a", "c", 0): "r.yaml:5",
        ("a", "c", 1): "r.yaml:6",
        ("a", "c", 1, "d"): "r.yaml:6",
    }
    assert document.locate(("a", "absent", "key")) == "r.yaml:1"


def test_a_duplicate_key_names_both_lines() -> None:
    (problem,) = read("train:\n  seed: 1\n  bf16: true\n  seed: 2\n").problems
    assert str(problem) == "r.yaml:4: train.seed is given twice, first on line 2; keep one of them"


def test_duplicate_sections_name_both_lines() -> None:
    (problem,) = read("train: {a: 1}\nmodel: {}\ntrain: {b: 1}\n").problems
    assert str(problem) == "r.yaml:3: train is given twice, first on line 1; keep one of them"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\n\tb: 2\n", 2, "not valid YAML"),
        ("a: [1, 2\nb: 3\n", 2, "not valid YAML"),
        ("a: 1\n---\nb: 2\n", 2, "another document"),
        ("a: *nowhere\n", 1, "undefined alias"),
        ("a: 1\nb: \x01\n", 2, "not printable"),
    ],
)
def test_what_is_not_yaml_is_one_error_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        read(text)
    assert str(caught.value).startswith(f"r.yaml:{line}: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: !!python/object/apply:os.system [echo]\n", "YAML tag"),
        ("a: !mine {b: 1}\n", "YAML tag"),
        ("a: !!int abc\n", "remove the tag"),
        ("a: &x [*x]\n", "refers to itself"),
        ("a: {<<: {b: 1}}\n", "not part of YAML 1.2"),
        ("true: 1\n", "must be a name"),
        ("[a, b]: 1\n", "must be a name"),
    ],
)
def test_what_yaml_allows_and_a_recipe_does_not(text: str, words: str) -> None:
    (problem, *_) = read(text).problems
    assert words in str(problem)
    assert str(problem).startswith("r.yaml:1: ")


def test_an_anchor_may_be_used_twice() -> None:
    document = read("a: &x {b: 1}\nc: *x\n")
    assert document.value == {"a": {"b": 1}, "c": {"b": 1}}
    assert not document.problems


_plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.dictionaries(st.text(min_size=1).filter(lambda key: key != "<<"), _plain | st.lists(_plain)))
def test_what_is_written_reads_the_same(values: dict[str, object]) -> None:
    document = read(write_yaml(values))
    assert not document.problems
    assert document.value == values
    assert list(document.value) == list(values)


@pytest.mark.parametrize("text", ["1e-6", "on", "yes", "0o10", "null", "1_000", "~", "12:30:45", "true"])
def test_a_string_that_looks_like_something_else_is_quoted(text: str) -> None:
    assert write_yaml({"key": text}) == f"key: '{text}'\n"


def override(text: str, *overrides: str) -> LocatedYaml:
    return apply_overrides(read(text), overrides)


def test_overrides_are_yaml_values() -> None:
    changed = override("a: {b: 1}\n", "a.b=1e-6", "a.c=[1, x]", "a.d={e: on}", "a.f=", "a.g=x=y")
    assert changed.value == {"a": {"b": 1e-6, "c": [1, "x"], "d": {"e": "on"}, "f": None, "g": "x=y"}}
    assert not changed.problems


def test_an_override_reaches_list_elements() -> None:
    changed = override("a:\n- {w: 1}\n- {w: 2}\n", "a.1.w=5")
    assert changed.value == {"a": [{"w": 1}, {"w": 5}]}
    assert changed.locate(("a", 1, "w")) == "override a.1.w=5"
    assert changed.locate(("a", 0, "w")) == "r.yaml:2"


def test_an_override_replaces_a_whole_section_and_its_places() -> None:
    changed = override("a: {b: {c: 1}}\n", "a.b={d: 2}")
    assert changed.value == {"a": {"b": {"d": 2}}}
    assert ("a", "b", "c") not in changed.locations
    assert changed.locate(("a", "b", "d")) == "override a.b={d: 2}"


def test_the_last_override_of_a_key_wins() -> None:
    changed = override("a: 1\n", "a=2", "a=3")
    assert changed.value == {"a": 3}
    assert changed.locate(("a",)) == "override a=3"


def test_an_override_makes_the_sections_it_needs() -> None:
    changed = override("", "a.b.c=1")
    assert changed.value == {"a": {"b": {"c": 1}}}
    assert changed.locate(("a",)) == "override a.b.c=1"


def test_overrides_do_not_change_the_document() -> None:
    document = read("a: {b: [1, 2]}\n")
    apply_overrides(document, ["a.b.0=5"])
    assert document.value == {"a": {"b": [1, 2]}}


@pytest.mark.parametrize(
    ("given_override", "words"),
    [
        ("a.7.w=1", "a.7 does not exist: a has elements 0 to 1"),
        ("a.x.w=1", "a.x does not exist"),
        ("b.c=1", "b is 3 and has no key c"),
        ("steps", "expected key=value"),
        ("a..b=1", "expected key=value"),
        ("=1", "expected key=value"),
        ("b=[1", "not valid YAML"),
        ("b={c: 1, c: 2}", "given twice"),
    ],
)
def test_a_wrong_override_is_named(given_override: str, words: str) -> None:
    (problem,) = override("a: [{w: 1}, {w: 2}]\nb: 3\n", given_override).problems
    assert str(problem).startswith(f"override {given_override}: ")
    assert words in str(problem)
