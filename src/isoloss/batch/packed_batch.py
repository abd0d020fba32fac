"""One packed window with its targets: what a micro-batch is."""

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, Self, final

import torch
from torch import Tensor

from isoloss.batch.document import IGNORE_INDEX
from isoloss.batch.layout import Layout
from isoloss.batch.weighting import TargetCounts, count_targets
from isoloss.sharding import shard_slots
from isoloss.topology import Topology

_PER_SLOT = ("input_ids", "position_ids", "document_ids", "counted_document_ids", "sources")


@final
class PackedBatch:
    """A window of T token slots, or one rank's shard of it.

    Neither a dataclass nor a pytree: FSDP2 casts floating tensors in those when they pass through a wrapped
    forward, and leaves a plain object alone. What each term finds in the whole window is counted when it is
    made, on the host, so that denominators are known before any forward and before any sharding.

    Args:
        input_ids: token ids, int[T].
        targets: for each term the label predicted at each slot, int64[T], already shifted within its
            document, -100 where nothing is predicted.
        layout: the documents of the window.
        weights: the data's weights by term, float32[T] (float64 is kept), aligned with `targets`; a term
            left out has weights of one.
        token_extras: further values per slot, [T, ...] each; sharded like the tokens.
        document_extras: further values, one entry for each of the `layout.num_documents` documents; never
            sharded.

    Raises:
        TypeError: something is no tensor, no mapping, or no Layout.
        ValueError: a shape that is not [T], a target outside a document or in a prefix, a weight that is
            negative or not finite, or weights of a term without targets.
    """

    def __init__(
        self,
        input_ids: Tensor,
        targets: Mapping[str, Tensor],
        layout: Layout,
        weights: Mapping[str, Tensor] | None = None,
        token_extras: Mapping[str, Tensor] | None = None,
        document_extras: Mapping[str, Any] | None = None,
    ) -> None:
        _check_type("layout", layout, Layout, "make it with Layout(document_lengths)")
        _check_type("targets", targets, Mapping, "give {'text': targets}, by term")
        self.layout = layout
        self.input_ids = input_ids
        self.targets = dict(targets)
        self.weights = dict(weights or {})
        self.token_extras = dict(token_extras or {})
        self.document_extras = dict(document_extras or {})
        self.shards = 1
        """Over how many ranks the window is split; 1 for the whole window."""
        self.topology: Topology | None = None
        """Of the ranks over which the window is split; None for the whole window."""
        document_ids = layout.document_ids()
        self._check(document_ids)
        self.position_ids = layout.position_ids().to(input_ids.device)
        self.document_ids = document_ids.to(input_ids.device)
        self.counted_document_ids = layout.counted_document_ids().to(input_ids.device)
        self.sources = layout.token_sources().to(input_ids.device)
        host_targets = {term: values.to("cpu") for term, values in self.targets.items()}
        self.counts: dict[str, TargetCounts] = {
            term: count_targets(
                values, self.weights[term].to("cpu") if term in self.weights else None, layout
            )
            for term, values in host_targets.items()
        }
        """What each term finds in the documents of the whole window, on the host."""
        self.loss_tokens = self.count_loss_tokens(host_targets)
        """Slots of each document that are a target of any term, int64[documents], on the host."""

    def _check(self, documents: Tensor) -> None:
        slots = self.layout.physical_tokens
        per_slot = {
            "input_ids": self.input_ids,
            **{f"targets[{term!r}]": values for term, values in self.targets.items()},
            **{f"weights[{term!r}]": values for term, values in self.weights.items()},
        }
        extras = {f"token_extras[{name!r}]": values for name, values in self.token_extras.items()}
        for name, values in {**per_slot, **extras}.items():
            _check_type(name, values, Tensor, "make it with torch.tensor(...)")
        for name, values in per_slot.items():
            if values.shape != (slots,):
                raise ValueError(
                    f"{name} has shape {list(values.shape)}, the layout has {slots} slots; give one value "
                    "per slot of the window"
                )
        for name, values in self.token_extras.items():
            if values.shape[:1] != (slots,):
                raise ValueError(
                    f"token_extras[{name!r}] has shape {list(values.shape)}, the layout has {slots} slots; "
                    "its first dimension runs over the slots of the window"
                )
        for name, values in self.document_extras.items():
            is_one = not isinstance(values, Sized) or (isinstance(values, Tensor) and values.ndim == 0)
            if is_one or len(values) != self.layout.num_documents:
                raise ValueError(
                    f"document_extras[{name!r}] {'is one value' if is_one else f'has {len(values)} entries'} "
                    f"for {self.layout.num_documents} documents; give one per document (a prefix is none)"
                )
        belongs = documents >= 0
        has_prefix = any(self.layout.is_prefix)
        for term, values in self.targets.items():
            if values.dtype not in (torch.int64, torch.int32):
                raise ValueError(f"targets[{term!r}] must be int64, got {values.dtype}")
            is_target = (values != IGNORE_INDEX).to("cpu")
            if bool((is_target & ~belongs).any()):
                raise ValueError(
                    f"targets[{term!r}] has a target in an alignment or padding slot; those slots belong to "
                    f"no document and must hold {IGNORE_INDEX}"
                )
            if has_prefix and bool((is_target & (self.layout.counted_document_ids() < 0)).any()):
                raise ValueError(
                    f"targets[{term!r}] has a target in a document that is the parent of another; a prefix "
                    "holds the prompt without its last token and predicts nothing"
                )
        for term, values in self.weights.items():
            if term not in self.targets:
                raise ValueError(
                    f"weights[{term!r}] has no targets; terms with targets: {sorted(self.targets)}"
                )
            if not values.is_floating_point():
                raise ValueError(f"weights[{term!r}] must be float32, got {values.dtype}")
            if not bool(((values >= 0) & values.isfinite()).all()):
                raise ValueError(f"weights[{term!r}] has a negative or non-finite weight; use weights >= 0")

    @classmethod
    def empty(cls, window: int, terms: Sequence[str] = (), pad_token_id: int = 0) -> "PackedBatch":
        """A window of padding: no document, no target. A rank without data takes part with it."""
        return cls(
            torch.full((window,), pad_token_id),
            {term: torch.full((window,), IGNORE_INDEX) for term in terms},
            Layout([], padded_length=window),
        )

    def with_terms(
        self,
        targets: Mapping[str, Tensor],
        weights: Mapping[str, Tensor] | None = None,
        token_extras: Mapping[str, Tensor] | None = None,
    ) -> "PackedBatch":
        """The whole window with targets of further terms, their weights, and further values per slot.

        What a name stood for before is replaced.

        Args:
            targets: as when a batch is made; each term is counted anew.
            weights: of these terms; those of a term left out are as before.
            token_extras: further values per slot.

        Raises:
            ValueError: as when a batch is made.
        """
        return PackedBatch(
            self.input_ids,
            self.targets | dict(targets),
            self.layout,
            self.weights | dict(weights or {}),
            self.token_extras | dict(token_extras or {}),
            self.document_extras,
        )

    def num_targets(self, term: str) -> int:
        """Targets of a term in the whole window, also where this is a shard of it."""
        counts = self.counts.get(term)
        return 0 if counts is None else int(counts.num_targets.sum())

    def is_target(self, term: str) -> Tensor:
        """Whether each slot is a target of a term, bool[T]."""
        if term not in self.targets:
            return torch.zeros_like(self.input_ids, dtype=torch.bool)
        return self.targets[term] != IGNORE_INDEX

    def count_loss_tokens(self, terms: Iterable[str]) -> Tensor:
        """Slots of each document that are a target of any of `terms`, int64[documents]; of a whole window."""
        scored = torch.zeros(len(self), dtype=torch.bool)
        for term in terms:
            scored |= (self.targets[term] != IGNORE_INDEX).to("cpu")
        documents = self.document_ids.to("cpu")[scored]
        return torch.bincount(documents, minlength=len(self.layout.document_lengths))

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def __repr__(self) -> str:
        return f"PackedBatch({len(self)} slots of {self.layout!r}, terms {sorted(self.targets)})"

    def shard(self, topology: Topology) -> "PackedBatch":
        """This rank's slots of the window, by the map of `isoloss.sharding`; itself where nothing is cut.

        Raises:
            ValueError: it is a shard already, or the window does not split.
        """
        if topology.cp_size == topology.sp_size == 1:
            return self
        if self.shards > 1:
            raise ValueError(f"this batch is one of {self.shards} shards already; shard whole windows")
        slots = shard_slots(
            self.layout,
            cp_size=topology.cp_size,
            cp_rank=topology.cp_rank,
            sp_size=topology.sp_size,
            sp_rank=topology.sp_rank,
        ).to(self.input_ids.device)
        local = self._map(lambda values: values[slots])
        local.shards = topology.cp_size * topology.sp_size
        local.topology = topology
        return local

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The batch on another device, without blocking the host; counts stay on the host."""
        where = torch.device(device)
        moved = self._map(lambda values: values.to(where, non_blocking=True))
        moved.document_extras = {
            name: values.to(where, non_blocking=True) if isinstance(values, Tensor) else values
            for name, values in self.document_extras.items()
        }
        return moved

    def _map(self, change: Any) -> "PackedBatch":
        """A copy with `change` applied to every tensor that has one value per slot."""
        copy: Self = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        for name in _PER_SLOT:
            copy.__dict__[name] = change(self.__dict__[name])
        for name in ("targets", "weights", "token_extras"):
            copy.__dict__[name] = {key: change(values) for key, values in self.__dict__[name].items()}
        return copy

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments for a decoder's forward: one row of slots, its positions, and the layout.

        The layout, and the topology of a shard, reach the attention function as keyword arguments
        (`isoloss.parallel.attention`).
        """
        inputs = {
            "input_ids": self.input_ids.unsqueeze(0),
            "position_ids": self.position_ids.unsqueeze(0),
            "layout": self.layout,
        }
        return inputs if self.topology is None else inputs | {"topology": self.topology}


def _check_type(name: str, value: object, expected: type, advice: str) -> None:
    if not isinstance(value, expected):
        raise TypeError(
            f"{name} must be a {expected.__name__}, got {value!r:.60} ({type(value).__name__}); {advice}"
        )
