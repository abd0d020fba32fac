"""What an audited step is given and gives back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

Strategy = Literal["single", "ddp", "fsdp2"]


class AuditRow(TypedDict):
    """One document."""

    input_ids: list[int]
    labels: list[int]
    """Unshifted, -100 where a token is no target."""
    source: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditCase:
    """One optimizer step, for every rank alike."""

    rows: Sequence[AuditRow]
    """All documents of the step."""

    assignment: Sequence[Sequence[Sequence[int]]] | None
    """`assignment[data rank][micro-batch]`: the rows of a micro-batch; None: the trainer packs by itself."""

    strategy: Strategy
    """How parameters are held: in one process, copied (DDP), or sharded (FSDP2)."""

    packed: bool
    """Whether the rows of a micro-batch share one packed window; else each is a row of a padded batch."""

    dtype: torch.dtype
    """Of parameters and computation."""

    output_dir: Path
    """A folder that the step may write to."""

    build_model: Callable[[], Any]
    """Makes a transformers causal language model with the same weights on every rank."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of further mesh axes (`sp_size`, `cp_size`, `tp_size`, `ep_size`, `dp_replicate_size`), for steps
    that know them; the audit of a user's step leaves them at 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """What a step gave."""

    loss: float
    """The loss as it is displayed, the same on every rank."""

    gradients: Mapping[str, Tensor]
    """Full gradient of every parameter by its name in `build_model()`: after all reductions, unclipped."""

    counts: Mapping[str, int]
    """Token counters; the audit knows `loss_tokens`, `source_tokens` and `documents`."""

    channels: Mapping[int, float] = field(default_factory=dict)
    """Mean loss of every source, where the step knows it."""

    num_collectives: int | None = None
    """Collectives of the step, where it counted them."""


AuditedStep = Callable[[AuditCase], AuditResult]
"""A step to audit, called in every rank of an initialised process group (none for one rank)."""
