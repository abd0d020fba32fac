"""Declared loss terms, and names that no two sources can share."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from isoloss.batch.weighting import REDUCTIONS, Reduction

TermReduction = Reduction | Literal["source"]
"""How a term weighs its losses: a reduction of targets, or "source": each token of a document weighs 1."""
TERM_REDUCTIONS: tuple[TermReduction, ...] = (*REDUCTIONS, "source")


@dataclass(frozen=True, slots=True)
class Term:
    """A named loss with its own denominator.

    What is trained is the sum over terms of `coefficient * (sum of w_i l_i) / W`, with W the sum of the
    weights w_i over every target of the step, on all ranks and in all micro-batches.

    Raises:
        ValueError: an unknown reduction, an empty name, or a coefficient that is not finite.
    """

    name: str
    reduction: TermReduction = "token"
    """What one target of a document with n targets weighs: "token" 1, "sample" 1 / n, "square" 1 / sqrt(n);
    "document" and "group": one loss per document or per group of documents; "source": one loss per token of
    a document, with or without target, such as the router losses of a mixture of experts."""
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a term needs a name, such as 'text'")
        if self.reduction not in TERM_REDUCTIONS:
            raise ValueError(
                f"term {self.name!r}: reduction {self.reduction!r} is not known; use one of "
                f"{', '.join(TERM_REDUCTIONS)}"
            )
        if not math.isfinite(self.coefficient):
            raise ValueError(f"term {self.name!r}: coefficient {self.coefficient} is not finite")


@dataclass(frozen=True, slots=True)
class Routing:
    """How many experts choose among whom: what a ledger needs to count their tokens.

    Raises:
        ValueError: a size below 1.
    """

    num_layers: int
    """Layers with a router."""
    num_experts: int
    """Experts of each of them."""

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.num_experts < 1:
            raise ValueError(f"{self} has no expert; leave routing out for a model without routers")


def check_unique(kind: str, names: Sequence[str]) -> tuple[str, ...]:
    """The names as a tuple; a name given twice would merge two curves and raises ValueError."""
    if isinstance(names, str):
        raise ValueError(f"expected a list of {kind} names, got the text {names!r}; write [{names!r}]")
    for name in names:
        if not isinstance(name, str) or not name:
            raise ValueError(f"a {kind} needs a non-empty string as its name, got {name!r}")
        if list(names).count(name) > 1:
            raise ValueError(f"{kind} {name!r} is declared twice; every {kind} needs its own name")
    return tuple(names)


_ESCAPED = re.compile(r"%(?=[0-9A-Fa-f]{2})|[/\x00-\x1f\x7f-\x9f]")
_RUN = re.compile(r"(?:%[0-9A-Fa-f]{2})+")


def escape_name(name: str) -> str:
    """`name` with "/" and control characters as %XX of their UTF-8 bytes, so that it is one path component.

    A "%" that two hexadecimal digits follow is escaped too: two names never become one.

    >>> escape_name("web/en"), escape_name("50% web"), escape_name("a%2Fb")
    ('web%2Fen', '50% web', 'a%252Fb')
    """
    return _ESCAPED.sub(lambda hit: "".join(f"%{byte:02X}" for byte in hit[0].encode()), name)


def unescape_name(name: str) -> str:
    """The inverse of `escape_name`.

    >>> unescape_name("web%2Fen"), unescape_name("50% web"), unescape_name("a%252Fb")
    ('web/en', '50% web', 'a%2Fb')
    """
    return _RUN.sub(lambda hit: bytes.fromhex(hit[0].replace("%", "")).decode(), name)
