"""Whether the keyword arguments of a model's forward reach its attention, by the source of its modules.

The layout of the window is one of them. A module on the way that accepts them and calls the next one without
them drops the layout in silence.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import nn

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""What modules of transformers look their attention function up in."""


def find_dropping_module(model: nn.Module, config: Any = None) -> str | None:
    """Name of the first class that calls attention without the keyword arguments that it was called with.

    A class whose source cannot be read, or does not show the call, is taken to hand them on.

    Args:
        model: whose modules to look at.
        config: of the text model; attention with another one belongs to a tower, which knows no layout.
    """
    kinds = dict.fromkeys(
        (type(parent), name, type(child))
        for parent in model.modules()
        for name, child in parent.named_children()
        if vars(child).get("config", config) is config
    )
    sources = {kind: _forward_source(kind) for pair in kinds for kind in (pair[0], pair[2])}
    for parent, name, child in kinds:
        if INTERFACE not in sources[child]:
            continue
        found = ast.parse(sources[child])
        if _drops(found, list(_interface_names(found))):
            return child.__name__
        if _drops(ast.parse(sources[parent]), [f"self.{name}"]):
            return parent.__name__
    return None


def _forward_source(kind: type[nn.Module]) -> str:
    try:
        return textwrap.dedent(inspect.getsource(kind.forward))
    except (OSError, TypeError):  # written at a prompt, or not in Python
        return ""


def _interface_names(source: ast.Module) -> Iterator[str]:
    """What a forward calls the attention function that it looked up."""
    for node in ast.walk(source):
        if isinstance(node, ast.Assign | ast.AnnAssign) and INTERFACE in ast.unparse(node):
            yield ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)


def _drops(source: ast.Module, functions: list[str]) -> bool:
    """Whether calls of the functions are in the source, and none of them hands `**` anything on."""
    calls = [
        node
        for node in ast.walk(source)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in functions
    ]
    return bool(calls) and not any(keyword.arg is None for call in calls for keyword in call.keywords)
