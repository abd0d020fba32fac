"""YAML with the line of every key, as recipes are written: YAML 1.2 scalars, no duplicate keys, no tags."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import yaml

KeyPath = tuple[str | int, ...]
"""Keys and list positions from the root: `("data", "sources", 1, "weight")`."""

_NULL, _BOOL, _INT, _FLOAT, _STR = (
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str")
)

_PLAIN_TAGS = (_NULL, _BOOL, _INT, _FLOAT, _STR, "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")

# The core schema of YAML 1.2. PyYAML's own rules are those of 1.1, where `1e-6` and `0o10` are strings,
# `on` and `no` are booleans, 010 is 8 and 1:30 is 90.
_CORE_SCHEMA = (
    (_NULL, re.compile(r"^(?:null|Null|NULL|~|)$")),
    (_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")),
    (_INT, re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")),
    (
        _FLOAT,
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a recipe: the keys it is about, the first of which says where, and what to do."""

    keys: tuple[KeyPath, ...]
    message: str
    location: str = ""
    """`recipe.yaml:14` or `override train.max_steps=4`; empty for a recipe built in Python."""

    def __str__(self) -> str:
        return f"{self.location}: {self.message}" if self.location else self.message


class RecipeError(ValueError):
    """A recipe cannot be used; holds every fault found, one a line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class LocatedYaml:
    """What a YAML text holds and where each key of it stands."""

    value: object
    locations: Mapping[KeyPath, str]
    problems: tuple[Problem, ...] = ()

    def locate(self, path: KeyPath) -> str:
        """Where `path` was written; for an absent key, where the section stands that should hold it."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.locations:
                return self.locations[path[:length]]
        return ""


def dotted(path: KeyPath) -> str:
    """`data.sources.1.weight`."""
    return ".".join(map(str, path))


class _Composer(yaml.SafeLoader):
    """Makes nodes, whose tags follow YAML 1.2; nothing is ever constructed from a tag."""

    yaml_implicit_resolvers: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {None: list(_CORE_SCHEMA)}


class _Dumper(yaml.SafeDumper):
    """Quotes a string that any YAML, 1.1 or 1.2, would read as something else."""

    yaml_implicit_resolvers: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {
        **yaml.SafeDumper.yaml_implicit_resolvers,
        None: [*yaml.SafeDumper.yaml_implicit_resolvers.get(None, []), *_CORE_SCHEMA],
    }

    def ignore_aliases(self, data: object) -> bool:
        return True


def write_yaml(value: object) -> str:
    """`value` as block YAML in the given order, readable by YAML 1.1 and 1.2 alike."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def scalar_from_text(text: str) -> object:
    """The null, boolean, number or string that a plain YAML 1.2 scalar stands for."""
    tag = next((tag for tag, pattern in _CORE_SCHEMA if pattern.match(text)), _STR)
    return _scalar(tag, text)


def _scalar(tag: str, text: str) -> object:
    if tag == _NULL:
        return None
    if tag == _BOOL:
        return text.lower() == "true"
    if tag == _INT:
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text, base)
    if tag == _FLOAT:
        return float(re.sub(r"\.(inf|nan)$", r"\1", text.lower()))
    return text


def read_yaml(text: str, place: Callable[[int], str]) -> LocatedYaml:
    """Read one YAML document.

    Args:
        text: the document.
        place: line number (from 1) -> how a message names that line.

    Returns:
        Mappings, lists and scalars with the place of every key and list element. Faults that leave the rest
        readable (duplicate keys, unknown tags) are in `problems`.

    Raises:
        RecipeError: the text is not YAML.
    """
    try:
        loader = _Composer(text)
        root = loader.get_single_node()
        loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        cause = error.problem or error.context or "malformed"
        message = f"not valid YAML: {cause}; check indentation, colons and quotes around this line"
        raise RecipeError([Problem(((),), message, place(line))]) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"not valid YAML: character {error.character!r} is not printable; remove it"
        raise RecipeError([Problem(((),), message, place(line))]) from error
    reading = _Reading(place)
    value = None if root is None else reading.value(root, ())
    return LocatedYaml(value, reading.locations, tuple(reading.problems))


class _Reading:
    """Turns nodes into values while noting places and faults."""

    def __init__(self, place: Callable[[int], str]) -> None:
        self.place = place
        self.locations: dict[KeyPath, str] = {(): place(1)}
        self.problems: list[Problem] = []
        self._open: list[yaml.Node] = []

    def value(self, node: yaml.Node, path: KeyPath) -> object:
        if any(node is outer for outer in self._open):
            self._report(path, node, f"{dotted(path)} refers to itself; write the values out")
            return None
        if node.tag not in _PLAIN_TAGS:
            self._report(
                path, node, f"{dotted(path)} has the YAML tag {node.tag}; write a plain value without a tag"
            )
            return None
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return self._sequence(node, path)
            return self._scalar(node, path)
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str | int, object]:
        values: dict[str | int, object] = {}
        lines: dict[str | int, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = (
                _scalar(key_node.tag, key_node.value)
                if isinstance(key_node, yaml.ScalarNode)
                else key_node.value
            )
            if isinstance(key, bool) or not isinstance(key, str | int):
                message = f"a key in {dotted(path) or 'the recipe'} must be a name, got {key!r}; write a name"
                self._report(path, key_node, message)
                continue
            if key == "<<":
                message = (
                    "`<<` is not part of YAML 1.2; write the keys out, or use an anchor for a whole section"
                )
                self._report(path, key_node, message)
                continue
            inner = (*path, key)
            if key in lines:
                message = f"{dotted(inner)} is given twice, first on line {lines[key]}; keep one of them"
                self._report(inner, key_node, message)
                continue
            lines[key] = line
            self.locations[inner] = self.place(line)
            values[key] = self.value(value_node, inner)
        return values

    def _sequence(self, node: yaml.SequenceNode, path: KeyPath) -> list[object]:
        values = []
        for position, element in enumerate(node.value):
            self.locations[*path, position] = self.place(element.start_mark.line + 1)
            values.append(self.value(element, (*path, position)))
        return values

    def _scalar(self, node: yaml.Node, path: KeyPath) -> object:
        try:
            return _scalar(node.tag, node.value)
        except ValueError:  # an explicit tag on something else, `!!int abc`
            self._report(
                path, node, f"{dotted(path)} is tagged {node.tag}, got {node.value!r}; remove the tag"
            )
            return None

    def _report(self, path: KeyPath, node: yaml.Node, message: str) -> None:
        self.problems.append(Problem((path,), message, self.place(node.start_mark.line + 1)))


def apply_overrides(document: LocatedYaml, overrides: Sequence[str]) -> LocatedYaml:
    """`document` with `key.path=value` overrides, each value read as YAML; a later one wins.

    Sections that are absent are made; list elements must exist. Faults are added to `problems`.
    """
    value: object = document.value
    locations = dict(document.locations)
    problems = list(document.problems)
    for override in overrides:
        place = f"override {override}"
        key, equals, text = override.partition("=")
        steps = key.split(".")
        if not equals or not all(steps):
            message = (
                f"expected key=value with a dotted key, got {override!r}; write for example train.max_steps=4"
            )
            problems.append(Problem(((),), message, place))
            continue
        try:
            given = read_yaml(text, lambda line, place=place: place)  # type: ignore[misc]
            value, path = _replaced(value, steps, given.value, ())
        except RecipeError as error:
            problems.extend(Problem(problem.keys, problem.message, place) for problem in error.problems)
            continue
        problems.extend(given.problems)
        locations = {known: where for known, where in locations.items() if known[: len(path)] != path}
        locations |= {path + inner: place for inner in given.locations}
        locations = {path[:length]: place for length in range(1, len(path))} | locations
    return LocatedYaml(value, locations, tuple(problems))


def _replaced(value: object, steps: Sequence[str], new: object, above: KeyPath) -> tuple[object, KeyPath]:
    """`value` with `new` at the end of `steps`, and the path that the steps turned out to be."""
    if not steps:
        return new, above
    if isinstance(value, list):
        if not steps[0].isdecimal() or int(steps[0]) >= len(value):
            have = f"elements 0 to {len(value) - 1}" if value else "no element"
            message = (
                f"{dotted((*above, steps[0]))} does not exist: {dotted(above)} has {have}; use one of them"
            )
            raise RecipeError([Problem((above,), message)])
        index = int(steps[0])
        inner, path = _replaced(value[index], steps[1:], new, (*above, index))
        return [*value[:index], inner, *value[index + 1 :]], path
    if value is not None and not isinstance(value, dict):
        message = f"{dotted(above)} is {value!r} and has no key {steps[0]}; override {dotted(above)} itself"
        raise RecipeError([Problem((above,), message)])
    mapping = value or {}
    inner, path = _replaced(mapping.get(steps[0]), steps[1:], new, (*above, steps[0]))
    return {**mapping, steps[0]: inner}, path
