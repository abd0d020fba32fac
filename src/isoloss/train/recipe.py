"""Reads recipes: a YAML file and overrides in, a checked `Recipe` out, or every fault at once.

Each fault names its line, the key, what was expected and what came, and what to write instead:

    recipe.yaml:14: train.max_step is not a key of train; did you mean max_steps?
"""

import copy
import dataclasses
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from isoloss.train.recipe_file import (
    KeyPath,
    LocatedYaml,
    Problem,
    RecipeError,
    apply_overrides,
    dotted,
    read_yaml,
    scalar_from_text,
    write_yaml,
)
from isoloss.train.recipe_keys import FOREIGN_KEYS
from isoloss.train.recipe_schema import (
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    ParallelConfig,
    PartialRecipe,
    Recipe,
    SourceConfig,
    TrainConfig,
    check_consistent,
    check_supported,
    check_world_size,
    data_ranks,
    windows_per_step,
)

__all__ = [
    "DataConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "ParallelConfig",
    "Problem",
    "Recipe",
    "RecipeError",
    "SourceConfig",
    "TrainConfig",
    "check_supported",
    "check_world_size",
    "data_ranks",
    "describe_keys",
    "dump_recipe",
    "load_recipe",
    "parse_recipe",
    "windows_per_step",
]

_Section = TypeVar("_Section")

_SECTIONS: Mapping[str, type] = MappingProxyType(
    {
        "model": ModelConfig,
        "data": DataConfig,
        "objective": ObjectiveConfig,
        "train": TrainConfig,
        "parallel": ParallelConfig,
    }
)
_UNKNOWN_KEY = ("unexpected_keyword_argument", "invalid_key")
_OLD_BOOLEANS = MappingProxyType(
    {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
)
_MISSING = "?"  # stands in for a required text while the remaining keys are checked


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a YAML file with `key.path=value` overrides.

    Args:
        path: the file. Paths inside it are relative to the working directory.
        overrides: for example `train.max_steps=4` or `data.sources.1.weight=2`; values are YAML.

    Raises:
        RecipeError: with every fault of the file and the overrides.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        message = f"cannot read the recipe: {error.strerror}; give the path of a YAML file"
        raise RecipeError([Problem(((),), message, str(path))]) from error
    except UnicodeDecodeError as error:
        message = f"byte {error.start} is not UTF-8; save the file as UTF-8"
        raise RecipeError([Problem(((),), message, str(path))]) from error
    return parse_recipe(text, overrides, name=str(path))


def parse_recipe(text: str, overrides: Sequence[str] = (), *, name: str = "recipe.yaml") -> Recipe:
    """As `load_recipe`, from the text of a file that messages call `name`."""
    document = apply_overrides(read_yaml(text, lambda line: f"{name}:{line}"), overrides)
    reading = _Reading(document)
    problems = [*document.problems, *reading.problems]
    contradictions = _faults_of(check_consistent, reading.sections)
    contradictions += _faults_of(check_supported, reading.sections)
    # A key that is itself at fault stands at its default here: nothing follows from that.
    problems += [problem for problem in contradictions if not reading.doubts(problem)]
    model = reading.sections.model
    if model and model.config is not None:
        from isoloss.train.recipe_model import check_model_config  # transformers takes a second to import

        problems += check_model_config(model.config)
    if problems:
        raise RecipeError(_in_order(problems, document))
    made = {name: section for name, section in vars(reading.sections).items() if section is not None}
    return Recipe(**made)


def _faults_of(check: Callable[[PartialRecipe], None], sections: PartialRecipe) -> list[Problem]:
    try:
        check(sections)
    except RecipeError as error:
        return list(error.problems)
    return []


def _in_order(problems: Sequence[Problem], document: LocatedYaml) -> list[Problem]:
    """The problems with their places, by line, those of overrides last."""
    located = [
        problem
        if problem.location
        else dataclasses.replace(problem, location=document.locate(problem.keys[0]))
        for problem in problems
    ]

    places = {place: number for number, place in enumerate(dict.fromkeys(document.locations.values()))}

    def order(problem: Problem) -> tuple[float, int]:
        name, _, number = problem.location.rpartition(":")
        line = int(number) if name and number.isdecimal() else math.inf
        return line, places.get(problem.location, 0)

    return sorted(dict.fromkeys(located), key=order)


class _Reading:
    """The sections of a recipe, each None where it cannot be made, and the faults of single keys."""

    def __init__(self, document: LocatedYaml) -> None:
        root = document.value
        self.problems: list[Problem] = []
        self._broken = {path for problem in document.problems for path in problem.keys if path}
        if root is not None and not isinstance(root, dict):
            message = f"a recipe is a mapping of sections, got {_shown(root)}; start with `model:`"
            raise RecipeError([Problem(((),), message, document.locate(()))])
        sections: dict[str | int, object] = root if isinstance(root, dict) else {}
        for key in sections:
            if key not in _SECTIONS:
                self._report_unknown((key,), Recipe)
        self.sections = PartialRecipe(
            model=self._section("model", ModelConfig, sections),
            data=self._section("data", DataConfig, sections),
            objective=self._section("objective", ObjectiveConfig, sections),
            train=self._section("train", TrainConfig, sections),
            parallel=self._section("parallel", ParallelConfig, sections),
        )

    def doubts(self, problem: Problem) -> bool:
        """Whether a key of the problem was itself at fault, so that the problem may be its echo."""
        return any(path[: len(broken)] == broken for path in problem.keys for broken in self._broken)

    def _section(
        self, name: str, section: type[_Section], sections: Mapping[str | int, object]
    ) -> _Section | None:
        given = sections.get(name)
        if given is not None and not isinstance(given, dict):
            self._report(
                (name,), f"{name} is a mapping of keys, got {_shown(given)}; write its keys below it"
            )
            self._broken.add((name,))
            return None
        values = copy.deepcopy(given or {})
        adapter = TypeAdapter(section)
        try:
            return adapter.validate_python(values)
        except ValidationError as error:
            faults = error.errors(include_url=False)
        for fault in faults:
            self._report_fault((name, *fault["loc"]), fault, section)
            _mend(values, fault["loc"], fault["type"])
        try:
            return adapter.validate_python(values)
        except ValidationError:  # a required key is beyond mending; it has been reported
            return None

    def _report(self, path: KeyPath, message: str) -> None:
        self.problems.append(Problem((path,), message))

    def _report_fault(self, path: KeyPath, fault: ErrorDetails, section: type) -> None:
        self._broken.add(path)
        owner = SourceConfig if path[:2] == ("data", "sources") and len(path) > 3 else section
        if fault["type"] in _UNKNOWN_KEY:
            self._report_unknown(path, owner)
        elif fault["type"] == "missing":
            self._report(path, f"{dotted(path)} is missing; add it: {_meaning(owner, str(path[-1]))}")
        elif fault["type"] != "too_short" or not fault["input"]:  # else its elements have been reported
            hint = (
                _hint(fault) or f"change it: {_meaning(owner, str(path[3 if owner is SourceConfig else 1]))}"
            )
            named = path[:-1] if fault["type"] == "literal_error" and isinstance(path[-1], int) else path
            message = f"{dotted(named)} must be {_expected(fault)}, got {_shown(fault['input'])}; {hint}"
            self._report(path, message)

    def _report_unknown(self, path: KeyPath, owner: type) -> None:
        """Say what to write instead of a key that its section does not have."""
        *above, key = path
        self._broken.add(path)
        what = (
            f"{dotted(path)} is not a key of {dotted(tuple(above))}" if above else f"{key} is not a section"
        )
        homes = [name for name, section in _SECTIONS.items() if key in _keys(section)]
        own = _keys(owner)
        near = get_close_matches(str(key), own, n=1, cutoff=0.75)
        if key in FOREIGN_KEYS:
            advice = f"here it is {FOREIGN_KEYS[str(key)]}"
        elif homes:
            advice = f"write {' or '.join(f'{home}.{key}' for home in homes)}"
        elif near:
            advice = f"did you mean {near[0]}?"
            self._broken.add((*above, near[0]))
        else:
            everywhere = {name: home for home, section in _SECTIONS.items() for name in _keys(section)}
            elsewhere = get_close_matches(str(key), everywhere, n=1, cutoff=0.75)
            advice = f"did you mean {everywhere[elsewhere[0]]}.{elsewhere[0]}?" if elsewhere else ""
            advice = advice or f"use one of {', '.join(own)}"
        self._report(path, f"{what}; {advice}")


def _mend(values: Any, location: tuple[Any, ...], kind: str) -> None:
    """Make `values` pass where it failed: drop the key, or name what is missing."""
    *above, key = location
    if isinstance(key, int):  # an element of a list: the list goes
        values.pop(location[0], None)
        return
    for step in above:
        if step not in (values if isinstance(values, dict) else range(len(values))):
            return  # gone with an earlier fault
        values = values[step]
    if kind == "missing":
        values[key] = _MISSING
    else:
        values.pop(key, None)


def _keys(section: type) -> list[str]:
    return [field.name for field in dataclasses.fields(section)]


def _meaning(section: type, key: str) -> str:
    """The docstring of a key, on one line."""
    return str(vars(section)["__pydantic_fields__"][key].description).replace("\n", " ")


def _expected(fault: ErrorDetails) -> str:
    """What pydantic expected, in words."""
    context = fault.get("ctx", {})
    return {
        "int_type": "an integer",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_type": "true or false",
        "string_type": "text",
        "string_too_short": "text that is not empty",
        "tuple_type": "a list",
        "dict_type": "a mapping",
        "dataclass_type": "a mapping of keys",
        "too_short": "a list that is not empty",
        "literal_error": f"one of {context.get('expected', '')}".replace(" or ", ", "),
        "greater_than": f"above {context.get('gt', 0):g}",
        "greater_than_equal": f"at least {context.get('ge', 0):g}",
        "less_than": f"below {context.get('lt', 0):g}",
        "less_than_equal": f"at most {context.get('le', 0):g}",
    }.get(fault["type"], fault["msg"])


def _hint(fault: ErrorDetails) -> str:
    """What to write instead, where the value tells; else nothing."""
    kind, given = fault["type"], fault["input"]
    numeric = kind in ("int_type", "float_type")
    if numeric and isinstance(given, str):
        plain = given.replace("_", "")
        if isinstance(scalar_from_text(plain), int | float):
            return f"write {plain} without quotes or underscores"
    if kind == "int_type" and isinstance(given, float):
        return (
            f"write {given:.0f}" if given.is_integer() else f"write {math.floor(given)} or {math.ceil(given)}"
        )
    if kind == "bool_type" and isinstance(given, str) and given.lower() in _OLD_BOOLEANS:
        return f"YAML 1.2 has no {given}; write {_OLD_BOOLEANS[given.lower()]}"
    if kind == "literal_error":
        options = re.findall(r"'([^']*)'", fault["ctx"]["expected"])
        near = get_close_matches(str(given), options, n=1, cutoff=0.6)
        return f"did you mean {near[0]}?" if near else ""
    return ""


def _shown(value: object) -> str:
    """`value` as YAML would show it, shortened, with its type where that is in doubt."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    if len(text) > 80:
        text = f"{text[:77]}..."
    if isinstance(value, str):
        return f"the text {text}"
    return text


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML with every default written out; it loads again to an equal recipe."""
    return write_yaml(_plain(dataclasses.asdict(recipe)))


def _plain(value: object) -> object:
    """Tuples as lists, so that YAML needs no tags."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def describe_keys() -> str:
    """Every key with its default and meaning, a section after the other, as `--help` shows it."""
    lines: list[str] = []
    for name, section in _SECTIONS.items():
        lines += [name, *_described(section, "  ")]
        if section is DataConfig:
            lines += ["  data.sources, each", *_described(SourceConfig, "    ")]
    return "\n".join(lines)


def _described(section: type, indent: str) -> Iterator[str]:
    for field in dataclasses.fields(section):
        required = field.default is dataclasses.MISSING
        default = "required" if required else write_yaml(_plain(field.default)).splitlines()[0].strip()
        meaning = f"{field.name} ({default})  {_meaning(section, field.name)}"
        yield textwrap.fill(meaning, 100, initial_indent=indent, subsequent_indent=f"{indent}    ")
