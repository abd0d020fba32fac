"""The long-lived book of a run: declared terms and channels, one page per step, counts since the start."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from isoloss.batch.packed_batch import PackedBatch
from isoloss.reduction.book import Book
from isoloss.reduction.gradients import GradientSum
from isoloss.reduction.record import Declaration, StepRecord
from isoloss.reduction.step import Step
from isoloss.reduction.terms import Routing, Term, check_unique
from isoloss.topology import Topology


@final
class Ledger:
    """Denominators, losses and counts of every step, exact in every layout.

    Terms and channels are declared here, never read off a batch: all ranks always issue the same two
    collectives a step, whatever their data holds.

    Args:
        terms: the loss terms, in the same order on every rank.
        channels: names of the data sources; a document's source is an index into them. Empty: losses and
            counts are not split.
        topology: of the run; None for one rank.
        routing: layers and experts of a model with routers, as `LossModel.routing` tells them: their tokens
            are counted, and the counts of a step are the frequencies of the next one's balancing loss.
        measures: names of further numbers to show, such as "rewards/margins", each the mean of what
            `Step.measure` is given, in all and by channel ("channel_rewards/margins/<name>").
        strict: whether documents without a channel, of an undeclared channel, or targets of an undeclared
            term raise on all ranks before the optimizer moves. Otherwise undeclared channels are counted
            as "other", with a warning, and missing ones lower health/metadata_complete.

    Raises:
        TypeError: a term is no Term.
        ValueError: no term, or a name that is given twice.

    Example:
        >>> import torch
        >>> from isoloss import Layout, PackedBatch, Term
        >>> layout = Layout([2], [0])
        >>> batch = PackedBatch(torch.tensor([5, 6]), {"text": torch.tensor([6, -100])}, layout)
        >>> ledger = Ledger([Term("text")], channels=["docs"])
        >>> with ledger.step([batch]) as step:
        ...     share = step.add("text", torch.tensor([0.5, 0.0]), batch)
        >>> step.metrics()["channel_loss/docs"]
        0.5
    """

    def __init__(
        self,
        terms: Sequence[Term],
        channels: Sequence[str] = (),
        topology: Topology | None = None,
        *,
        routing: Routing | None = None,
        measures: Sequence[str] = (),
        strict: bool = False,
    ) -> None:
        if isinstance(terms, Term | str) or not all(isinstance(term, Term) for term in terms):
            raise TypeError(
                f"a ledger takes a list of Term objects, got {terms!r}; write [Term('text')], with a "
                "reduction and a coefficient where they differ"
            )
        if not terms:
            raise ValueError("a ledger needs at least one term, such as Term('text')")
        check_unique("term", [term.name for term in terms])
        self._topology = Topology.single() if topology is None else topology
        self._declaration = Declaration(
            tuple(terms), check_unique("channel", channels), routing, check_unique("measure", measures)
        )
        self._book = Book(self._declaration, self._topology, strict=strict)
        self._trained: Callable[[], nn.Module | None] = _no_module
        """The module of the last training step, while it lives."""

    @property
    def terms(self) -> tuple[Term, ...]:
        """The declared terms."""
        return self._declaration.terms

    @property
    def channels(self) -> tuple[str, ...]:
        """The declared channels."""
        return self._declaration.channels

    @property
    def totals(self) -> dict[str, int]:
        """Tokens (loss, source, aligned, physical) and documents trained since the start of the run."""
        return dict(self._book.totals)

    @property
    def channel_totals(self) -> dict[str, dict[str, int]]:
        """The same by channel: tokens (loss), source_tokens, documents."""
        return {name: dict(counts) for name, counts in self._book.channel_totals.items()}

    @property
    def expert_counts(self) -> Tensor | None:
        """Tokens of each expert in the last training step, float64[layers, experts]; None before the first.

        Over all ranks and micro-batches, on the device of the run.

        Host syncs: none.
        """
        return self._book.expert_counts

    def step(
        self,
        micro_batches: Iterable[PackedBatch],
        gradients: GradientSum | None = None,
        training: bool = True,
        *,
        has_more: bool = True,
    ) -> Step:
        """Open the page of one optimizer step, or with training=False of one pass of evaluation.

        Args:
            micro_batches: this rank's whole windows of the step, unsharded; under a wrapper that
                communicates in forward (FSDP2) the same number on every rank, filled up with
                `PackedBatch.empty`. A rank without any gets one empty window.
            gradients: from `sum_gradients`; None for one process.
            training: False counts nothing towards the totals and drives no gradients.
            has_more: whether this rank has data for another step; `Step.has_more` says if any rank does.

        Collectives: one SUM all-reduce of one float64 vector over all ranks when the block is entered, one
            when it is left; besides, those of the gradients. None without a process group.

        Raises:
            TypeError: a micro-batch is no PackedBatch.
            ValueError: a micro-batch is a shard of a window.
        """
        windows = list(micro_batches) or [PackedBatch.empty(self._smallest_window)]
        for place, window in enumerate(windows):
            if not isinstance(window, PackedBatch):
                raise TypeError(
                    f"micro_batches[{place}] is a {type(window).__name__}; a step takes PackedBatch objects, "
                    "as `pack` yields them"
                )
            if window.shards > 1:
                raise ValueError(
                    f"micro_batches[{place}] is one of {window.shards} shards; give the step whole windows, "
                    "it counts and then shards them"
                )
        if training and gradients is not None:
            self._trained = weakref.ref(gradients.module)
        return Step(
            declaration=self._declaration,
            topology=self._topology,
            windows=windows,
            gradients=gradients,
            training=training,
            has_more=has_more,
            book=self._book,
            evaluated=None if training else self._trained(),
        )

    @property
    def _smallest_window(self) -> int:
        return 2 * self._topology.cp_size * self._topology.sp_size

    def metrics(self, record: StepRecord, training: bool = True) -> dict[str, float]:
        """Metrics of a record, also of several steps added up: `sum` of numerators over denominators."""
        return self._book.metrics(record, training=training)

    def restore_record(self, opening: list[float], closing: list[float], num_steps: int) -> StepRecord:
        """A record from the numbers of its two vectors, as a checkpoint keeps them."""
        return StepRecord(
            self._declaration,
            torch.tensor(opening, dtype=torch.float64),
            torch.tensor(closing, dtype=torch.float64),
            num_steps,
        )

    def skip_step(self) -> None:
        """Note that the optimizer did not move in the last step (`steps/skipped`)."""
        self._book.skip()

    def state_dict(self) -> dict[str, Any]:
        """Counts since the start of the run; the same on every rank, fit for any number of ranks."""
        return self._book.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over saved counts.

        Raises:
            ValueError: saved with other definitions of the metrics or with channels not declared here.
        """
        self._book.load_state_dict(state)

    def explain(self) -> str:
        """Each denominator of the last step whose metrics were read, and what it was made of."""
        return self._book.explain()


def _no_module() -> None:
    """What a ledger knows before the first training step."""
