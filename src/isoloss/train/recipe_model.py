"""Checks `model.config` against the configuration class of transformers.

transformers sets whatever keyword it is given as an attribute, so a misspelt key would silently leave the
default in place.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.modeling_rope_utils import RopeParameters

from isoloss.train.recipe_file import KeyPath, Problem, dotted, scalar_from_text

_ROPE_KEYS = ("rope_parameters", "rope_scaling")
_OLD_ROPE_KEYS = ("rope_theta", "rope_scaling", "partial_rotary_factor")
_DTYPE_KEYS = ("dtype", "torch_dtype")
_READ_BY_CODE = re.compile(r'\bgetattr\(\s*(?:self\.)?config,\s*"([A-Za-z]\w*)"')


def check_model_config(config: Mapping[Any, Any], path: KeyPath = ("model", "config")) -> list[Problem]:
    """Every key of a transformers configuration that is unknown, or whose value its class refuses.

    Args:
        config: the mapping under `model.config`, with `model_type`.
        path: where it stands in the recipe.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        where = (*path, "model_type")
        if model_type is None:
            return [
                Problem(
                    (where,), f"{dotted(where)} is missing; give a transformers model type, such as qwen3"
                )
            ]
        return [Problem((where,), f"{dotted(where)} must be a name, got {model_type!r}; for example qwen3")]
    if model_type not in CONFIG_MAPPING:
        hint = did_you_mean(model_type, CONFIG_MAPPING.keys()) or "use one that this transformers has"
        where = (*path, "model_type")
        return [
            Problem((where,), f"{dotted(where)} {model_type!r} is not a model type of transformers; {hint}")
        ]
    given = {key: value for key, value in config.items() if key != "model_type"}
    problems = list(_check_keys(AutoConfig.for_model(model_type), given, path))
    faulty = {problem.keys[0][len(path)] for problem in problems}
    sound = {key: value for key, value in given.items() if key not in faulty}
    return [*problems, *_check_values(CONFIG_MAPPING[model_type], sound, path)]


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """`did you mean max_steps?`, or nothing when no known word is near."""
    near = get_close_matches(str(word), list(known), n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else ""


def _known_keys(default: Any) -> set[str]:
    fields = (
        {field.name for field in dataclasses.fields(default)} if dataclasses.is_dataclass(default) else set()
    )
    known = {*default.to_dict(), *fields, *default.attribute_map}
    if "rope_parameters" in known:
        known.update(_OLD_ROPE_KEYS)
    return known


def _keys_that_code_reads(default: Any) -> set[str]:
    """Keys that the model asks for although its config class does not declare them, such as head_dim."""
    folder = Path(inspect.getfile(type(default))).parent
    sources = [path.read_text(encoding="utf-8") for path in folder.glob("modeling_*.py")]
    return {key for source in sources for key in _READ_BY_CODE.findall(source)}


def _check_keys(default: Any, given: Mapping[Any, Any], path: KeyPath) -> Iterator[Problem]:
    """Keys that the class of `default` does not have, and numbers written as strings, parts included."""
    known = _known_keys(default)
    if not known.issuperset(given):
        known |= _keys_that_code_reads(default)
    class_name = type(default).__name__
    for key, value in given.items():
        where = (*path, key)
        if key in _DTYPE_KEYS:
            yield Problem(
                (where,), f"{dotted(where)} belongs in model.dtype (stored type) and train.bf16; move it"
            )
        elif key not in known:
            hint = did_you_mean(key, known) or "remove it"
            yield Problem((where,), f"{dotted(where)} is not a key of {class_name}; {hint}")
        elif key in default.sub_configs and isinstance(value, Mapping):
            part = {inner: given_value for inner, given_value in value.items() if inner != "model_type"}
            yield from _check_keys(vars(default)[key], part, where)
        else:
            if key in _ROPE_KEYS and isinstance(value, Mapping):
                yield from _check_rope_keys(value, where)
            defaults = default.to_dict()
            if not isinstance(defaults.get(key), str):
                yield from _check_numbers(value, where)


def _check_rope_keys(given: Mapping[Any, Any], path: KeyPath) -> Iterator[Problem]:
    if any(isinstance(value, Mapping) for value in given.values()):  # one set of parameters a layer type
        for key, value in given.items():
            if isinstance(value, Mapping):
                yield from _check_rope_keys(value, (*path, key))
        return
    known = {*RopeParameters.__annotations__, "type"}
    for key in given:
        if key not in known:
            hint = did_you_mean(key, known) or "remove it"
            yield Problem(((*path, key),), f"{dotted((*path, key))} is not a rope parameter; {hint}")


def _check_numbers(value: object, path: KeyPath) -> Iterator[Problem]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _check_numbers(inner, (*path, key))
    elif isinstance(value, str) and isinstance(scalar_from_text(value), int | float):
        message = f"{dotted(path)} must be a number, got the string {value!r}; write {value} without quotes"
        yield Problem((path,), message)


def _check_values(config_class: Any, given: Mapping[str, Any], path: KeyPath) -> Iterator[Problem]:
    """Values that the class refuses: each key alone first, since it stops at the first fault."""
    clean = True
    for key, value in given.items():
        if key in config_class.sub_configs:
            continue
        try:
            config_class(**{key: value})
        except StrictDataclassError as error:
            if not isinstance(error.__cause__, TypeError):
                continue  # a rule over several keys, which the whole may satisfy
            clean = False
            where = (*path, key)
            yield Problem((where,), f"{dotted(where)}: {error.__cause__}; {_type_hint(value)}")
    if not clean:
        return
    try:
        config_class(**given)
    except (StrictDataclassError, TypeError, ValueError, KeyError) as error:
        cause = error.__cause__ or error
        yield Problem(
            (path,), f"{dotted(path)} is refused by {config_class.__name__}: {cause}; change these values"
        )


def _type_hint(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"for a float write {value}.0"
    return "give a value of that type"
