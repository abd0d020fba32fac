"""What a ledger keeps from step to step: counts since the start of the run, and what it found wrong."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.batch.packed_batch import PackedBatch
from isoloss.reduction.opening import undeclared_channels
from isoloss.reduction.record import CHANNEL_COUNTERS, TOKEN_COUNTERS, Declaration, StepRecord
from isoloss.reduction.schema import METRICS_VERSION
from isoloss.reduction.terms import escape_name
from isoloss.topology import Topology

logger = logging.getLogger(__name__)


@final
class Book:
    """Cumulative counts of the training steps, and the checks that every closed step goes through."""

    def __init__(self, declaration: Declaration, topology: Topology, *, strict: bool) -> None:
        self.declaration = declaration
        self.topology = topology
        self.strict = strict
        self.known_channels: frozenset[int] = frozenset()
        """Undeclared channel indices that every rank has been told of."""
        self.num_steps = 0
        self.num_skipped = 0
        self.total_metrics: dict[str, float]
        """Counts since the start of the run at the end of the last training step, by name."""
        # Python integers: they do not wrap, and cannot round.
        self.totals = dict.fromkeys((*TOKEN_COUNTERS, "documents"), 0)
        self.channel_totals = _no_counts(declaration)
        self._tell_totals()
        self.last_record: StepRecord | None = None
        self._expert_counts: Tensor | None = None
        self._expert_work: dist.Work | None = None
        self._checked: set[bool] = set()
        self._warned_unsummed = False

    def close(
        self,
        opening: Tensor,
        windows: Sequence[PackedBatch],
        *,
        training: bool,
        read_record: Callable[[], StepRecord],
    ) -> None:
        """Check a step that has ended, and enter its counts.

        What is checked is the same on every rank, so all raise or none does. On CUDA the closing vector is
        read here only in the first training step, the first evaluation, and when a term has no target;
        later its checks show in the health gauges, and the host is not held up.

        Raises:
            ValueError: a term was left out, recorded twice or lost targets; a term without targets was
                given a loss; in strict mode, a channel or a term that was not declared.
        """
        schema = self.declaration.opening
        values = opening.tolist()
        faults: list[str] = []
        if schema.read(values, "unknown_channel")[0] > 0:
            faults += self._exchange_unknown_channels(windows)
        missing = int(schema.read(values, "missing_channel")[0])
        if missing and self.strict:
            faults.append(
                f"{missing} documents have no channel (source -1) although channels are declared; give every "
                "document the index of its channel"
            )
        unknown = int(schema.read(values, "unknown_term")[0])
        if unknown:
            declared = ", ".join(repr(term.name) for term in self.declaration.terms)
            faults.append(
                f"{unknown} targets belong to a term that is not declared (declared: {declared}); they are "
                "not trained. Declare the term or leave its targets out"
            )
        if faults and self.strict:
            raise ValueError("; ".join(faults))
        for fault in faults:
            logger.warning("isoloss: %s", fault)
        empty_term = 0 in schema.read(values, "weights")
        if self.topology.device.type == "cpu" or training not in self._checked or empty_term:
            record = read_record()
            broken = record.unbalanced_terms() + record.orphaned_terms()
            if broken:
                raise ValueError("; ".join(broken))
            self._checked.add(training)
        if training:
            self._count(values)

    def keep_expert_counts(self, closing: Tensor, work: dist.Work | None) -> None:
        """Keep the expert counts of a training step, whose closing reduction may still run."""
        self._expert_counts = self.declaration.closing.block(closing, "expert_counts")
        self._expert_work = work

    @property
    def expert_counts(self) -> Tensor | None:
        """Tokens of each expert in the last training step, float64[layers, experts]; None before the first.

        Host syncs: none on CUDA, where the stream waits for the reduction.
        """
        if self._expert_work is not None:
            self._expert_work.wait()
            self._expert_work = None
        return self._expert_counts

    def _exchange_unknown_channels(self, windows: Sequence[PackedBatch]) -> list[str]:
        """Tell every rank which undeclared channels were seen. All ranks enter, as the flag is global."""
        local = undeclared_channels(self.declaration, windows)
        found: list[Any] = [local]
        if self.topology.world_group is not None:
            found = [None] * self.topology.world_size
            dist.all_gather_object(found, local, group=self.topology.world_group)
        new = set[int]().union(*found) - self.known_channels
        if not self.strict:  # where they are an error, they are one every time
            self.known_channels |= new
        return [
            f"documents of channel {sorted(new)} were seen, but only {len(self.declaration.channels)} "
            f"channels are declared; they are counted as {self.declaration.channel_names[-1]!r}. Declare "
            "every channel when the ledger is made"
        ]

    def skip(self) -> None:
        """Note that the optimizer did not move in the last step."""
        self.num_skipped += 1
        self.total_metrics["steps/skipped"] = float(self.num_skipped)

    def _count(self, opening: Sequence[float]) -> None:
        schema = self.declaration.opening
        self.num_steps += 1
        for name, count in zip(TOKEN_COUNTERS, schema.read(opening, "tokens"), strict=True):
            self.totals[name] += int(count)
        self.totals["documents"] += int(schema.read(opening, "documents")[0])
        for counter, row in zip(CHANNEL_COUNTERS, schema.read_table(opening, "channel_counts"), strict=True):
            for name, count in zip(self.declaration.channel_names, row, strict=True):
                if count:
                    self.channel_totals[name][counter] += int(count)
        self._tell_totals()

    def _tell_totals(self) -> None:
        # a new one: the steps before keep theirs
        self.total_metrics = {f"tokens/{name}_total": float(self.totals[name]) for name in TOKEN_COUNTERS}
        self.total_metrics["documents_total"] = float(self.totals["documents"])
        self.total_metrics["steps/skipped"] = float(self.num_skipped)

    def metrics(
        self, record: StepRecord, *, training: bool, totals: dict[str, float] | None = None
    ) -> dict[str, float]:
        """Numbers of a record by name; those of training with the counts since the start of the run.

        Args:
            record: of one step or several.
            training: whether they were training steps.
            totals: `total_metrics` when the step ended; None: as they are now.
        """
        for fault in record.unbalanced_terms() + record.unbalanced_channels():
            logger.error("isoloss: the books do not balance: %s", fault)
        self.last_record = record
        if not training:
            return record.metrics("eval/")
        return record.metrics() | (self.total_metrics if totals is None else totals)

    def warn_unsummed(self, _: Tensor) -> None:
        """Hook of a share that is backpropagated although nothing sums gradients over the ranks."""
        if not self._warned_unsummed:
            self._warned_unsummed = True
            logger.warning(
                "isoloss: a backward pass ran on %d ranks without gradients=...; this rank's gradient holds "
                "its own share only. Pass gradients=isoloss.sum_gradients(model, topology) to ledger.step",
                self.topology.world_size,
            )

    @property
    def _other(self) -> str | None:
        """Name under which documents of undeclared channels are counted; None without channels."""
        return self.declaration.channel_names[-1] if self.declaration.channels else None

    def state_dict(self) -> dict[str, Any]:
        """Counts since the start of the run, in plain Python; the same on every rank."""
        return {
            "metrics_version": METRICS_VERSION,
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "totals": dict(self.totals),
            "channel_totals": {name: dict(counts) for name, counts in self.channel_totals.items()},
            "other_channel": self._other,
            "expert_counts": None if self.expert_counts is None else self.expert_counts.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the counts of another book, on any number of ranks.

        Raises:
            ValueError: it is no state of a book, its metrics have other definitions, it counted channels not
                declared here, or experts of another model.
        """
        missing = sorted(self.state_dict().keys() - state.keys())
        if missing:
            raise ValueError(
                f"expected what Ledger.state_dict returned, got {sorted(state)} without {missing}; pass the "
                "state of a ledger, as it was saved"
            )
        if state["metrics_version"] != METRICS_VERSION:
            raise ValueError(
                f"the ledger was saved with version {state['metrics_version']} of the metrics, this is "
                f"version {METRICS_VERSION}; totals would mix two definitions, start a new run"
            )
        channel_totals = _no_counts(self.declaration)
        lost: list[str] = []
        for name, counts in state["channel_totals"].items():
            # "other" of one ledger may be the name of a source in another
            place = name if name in self.declaration.channels else None
            place = self._other if name == state["other_channel"] else place
            if place is not None:
                channel_totals[place] = dict(counts)
            elif any(counts.values()):
                lost.append(name)
        if lost:
            raise ValueError(
                f"the ledger was saved with counts of channels {lost}, which are not declared now "
                f"({list(self.declaration.channels)}); declare them, or their totals are lost"
            )
        experts = state["expert_counts"]
        if experts is not None:
            counts = torch.tensor(experts, dtype=torch.float64, device=self.topology.device)
            declared = self.declaration.closing.shapes["expert_counts"]
            if counts.shape != declared:
                raise ValueError(
                    f"the ledger was saved with counts of {list(counts.shape)} (layers, experts), this one "
                    f"declares {list(declared)}; resume with the model of the run"
                )
            self._expert_counts = counts
        self.num_steps = state["num_steps"]
        self.num_skipped = state["num_skipped"]
        self.totals = dict(state["totals"])
        self.channel_totals = channel_totals
        self._tell_totals()

    def explain(self) -> str:
        """Each denominator of the last step whose record was read, and what it was made of."""
        record = self.last_record
        if record is None:
            return "No step has been read yet: close one and call its metrics()."
        lines = [f"{record.num_steps} step{'s' if record.num_steps > 1 else ''}"]
        loss, source, aligned, physical = record.opened("tokens")
        lines.append(
            f"  tokens: {loss:.0f} loss <= {source:.0f} source <= {aligned:.0f} aligned <= {physical:.0f} "
            f"physical, in {record.opened('documents')[0]:.0f} documents"
        )
        rules = {
            "token": "each target weighs 1",
            "sample": "each target weighs 1 / targets of its document",
            "square": "each target weighs 1 / sqrt(targets of its document)",
            "document": "each document with a target weighs 1",
            "group": "each group with a target weighs 1",
            "source": "each token of a document weighs 1",
        }
        names = self.declaration.channel_names
        for index, term in enumerate(self.declaration.terms):
            weight = record.opened("weights")[index]
            targets = record.opened("targets")[index]
            lines.append(
                f"  term {term.name!r}: W = {weight:.12g} from {targets:.0f} targets, reduction "
                f"{term.reduction!r}: {rules[term.reduction]}, times the data's weight"
            )
            mean = record.term_losses[term.name]
            lines.append(
                f"    loss = {record.closed('losses')[index]:.12g} / W = {mean:.12g}, coefficient "
                f"{term.coefficient:g}, adds {term.coefficient * mean:.12g} to the loss"
                if weight
                else "    no target in the step: the term is exactly 0, and so are its gradients"
            )
            if names:
                weights = record.channel_table("opening", "channel_weights")[index]
                losses = record.channel_table("closing", "channel_losses")[index]
                lines += [
                    f"    channel {escape_name(name)}: weight {part:.12g} ({part / weight:.1%} of W), "
                    f"loss {total / part:.12g}"
                    for name, part, total in zip(names, weights, losses, strict=True)
                    if part
                ]
        lines.append(f"  train/loss = {record.loss:.12g}")
        return "\n".join(lines)


def _no_counts(declaration: Declaration) -> dict[str, dict[str, int]]:
    """Counts of every channel, all 0."""
    return {name: dict.fromkeys(CHANNEL_COUNTERS, 0) for name in declaration.channel_names}
