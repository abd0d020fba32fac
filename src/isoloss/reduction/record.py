"""The record of one or more closed steps, and the metrics made from it."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, final

from torch import Tensor

from isoloss.reduction.schema import VectorSchema, closing_schema, opening_schema
from isoloss.reduction.terms import Routing, Term, escape_name

TOKEN_COUNTERS = ("loss", "source", "aligned", "physical")
CHANNEL_COUNTERS = ("tokens", "source_tokens", "documents")
# float64 sums of the same numbers in another order agree to about 1e-13; a lost target among 10^8 shows.
BALANCE_TOLERANCE = 1e-9


@final
class Declaration:
    """What was declared at start-up, and the shape of both vectors that follows from it.

    With channels declared, documents of no declared channel are counted in one more, named "other".
    """

    def __init__(
        self,
        terms: tuple[Term, ...],
        channels: tuple[str, ...],
        routing: Routing | None = None,
        measures: tuple[str, ...] = (),
    ) -> None:
        self.terms = terms
        self.channels = channels
        self.routing = routing
        self.measures = measures
        other = "other"
        while other in channels:
            other += "_"
        self.channel_names = (*channels, other) if channels else ()
        self.escaped_channels = tuple(map(escape_name, self.channel_names))
        # Names of metrics are made once: at 50 channels, making them anew would be half the cost of a record.
        self.counter_keys = [self._channel_keys(f"channel_{counter}") for counter in CHANNEL_COUNTERS]
        # the first declared term has the plain name, a further one adds its own
        suffixes = ["", *(f"/{escape_name(term.name)}" for term in terms[1:])]
        self.loss_keys = [self._channel_keys("channel_loss", suffix) for suffix in suffixes]
        self.share_keys = [self._channel_keys("channel_loss_share", suffix) for suffix in suffixes]
        self.opening: VectorSchema = opening_schema(len(terms), len(self.channel_names))
        self.closing: VectorSchema = closing_schema(
            len(terms), len(self.channel_names), routing, len(measures)
        )

    def _channel_keys(self, kind: str, suffix: str = "") -> list[str]:
        return [f"{kind}/{name}{suffix}" for name in self.escaped_channels]


@final
@dataclass(frozen=True)
class StepRecord:
    """Both vectors of a closed step after their reduction; records of several steps add up.

    Numerators and denominators are summed, ratios are made last, so a window of steps is never a mean of
    means.
    """

    declaration: Declaration
    opening: Tensor
    """float64, CPU, by `opening_schema`."""
    closing: Tensor
    """float64, CPU, by `closing_schema`."""
    num_steps: int = 1

    def __add__(self, other: "StepRecord") -> "StepRecord":
        return StepRecord(
            self.declaration,
            self.opening + other.opening,
            self.closing + other.closing,
            self.num_steps + other.num_steps,
        )

    @cached_property
    def _opened(self) -> list[float]:
        return self.opening.tolist()

    @cached_property
    def _closed(self) -> list[float]:
        return self.closing.tolist()

    def opened(self, name: str) -> list[float]:
        """A one-dimensional block of the opening vector."""
        return self.declaration.opening.read(self._opened, name)

    def closed(self, name: str) -> list[float]:
        """A one-dimensional block of the closing vector."""
        return self.declaration.closing.read(self._closed, name)

    def channel_table(self, vector: Literal["opening", "closing"], name: str) -> list[list[float]]:
        """A block [rows][channels] of one of the two vectors."""
        if vector == "opening":
            return self.declaration.opening.read_table(self._opened, name)
        return self.declaration.closing.read_table(self._closed, name)

    @property
    def term_losses(self) -> dict[str, float]:
        """Weighted mean loss of each term, in nats; 0 for a term with denominator 0."""
        return {
            term.name: loss / weight if weight else 0.0
            for term, loss, weight in zip(
                self.declaration.terms, self.closed("losses"), self.opened("weights"), strict=True
            )
        }

    @property
    def loss(self) -> float:
        """What is minimised: the sum over terms of coefficient times weighted mean loss."""
        if self.num_steps == 1:
            return sum(self.closed("shares"))
        means = self.term_losses
        return sum(term.coefficient * means[term.name] for term in self.declaration.terms)

    def nonfinite(self) -> list[str]:
        """Terms whose loss is not finite, each with the channels it stands in; empty when all is well."""
        found = []
        names = self.declaration.channel_names
        for term, loss, share, row in zip(
            self.declaration.terms,
            self.closed("losses"),
            self.closed("shares"),
            self.channel_table("closing", "channel_losses"),
            strict=True,
        ):
            if not (math.isfinite(loss) and math.isfinite(share)):
                where = [name for name, value in zip(names, row, strict=True) if not math.isfinite(value)]
                found.append(f"term {term.name!r}" + (f" in channel {', '.join(where)}" if where else ""))
        return found

    def unbalanced_terms(self) -> list[str]:
        """Terms whose recorded losses are not those of all their targets, in words."""
        found = []
        for term, weight, consumed, imbalance in zip(
            self.declaration.terms,
            self.opened("weights"),
            self.closed("consumed"),
            self.closed("imbalance"),
            strict=True,
        ):
            tolerance = BALANCE_TOLERANCE * max(weight, 1.0)
            if abs(consumed - weight) > tolerance or imbalance > tolerance:
                found.append(
                    f"term {term.name!r}: the step holds targets of weight {weight:.12g}, losses were "
                    f"recorded for {consumed:.12g} (rank by rank they differ by {imbalance:.12g}); the term "
                    "was left out, recorded twice, or lost targets. Compute its loss (step.loss, step.add, "
                    "step.add_documents) once in every micro-batch, on every rank"
                )
        return found

    def orphaned_terms(self) -> list[str]:
        """Terms that have no target in the step and yet were given a loss other than 0, in words."""
        return [
            f"term {term.name!r}: it has no target in this step (its denominator is 0), but losses of "
            f"absolute sum {orphans:.6g} were added to it; give its targets to the batch "
            f"(targets={{{term.name!r}: ...}}) or set the loss to 0"
            for term, weight, orphans in zip(
                self.declaration.terms, self.opened("weights"), self.closed("orphans"), strict=True
            )
            if weight == 0 and orphans > 0
        ]

    def unbalanced_channels(self) -> list[str]:
        """Terms whose channels do not add up to them, in words."""
        found: list[str] = []
        if not self.declaration.channels:
            return found
        for term, loss, row in zip(
            self.declaration.terms,
            self.closed("losses"),
            self.channel_table("closing", "channel_losses"),
            strict=True,
        ):
            if math.isfinite(loss) and not math.isclose(sum(row), loss, rel_tol=1e-9, abs_tol=1e-9):
                found.append(f"term {term.name!r} sums to {loss:.12g}, its channels to {sum(row):.12g}")
        return found

    def counts_ordered(self) -> bool:
        """Whether loss <= source <= aligned <= physical tokens."""
        counts = self.opened("tokens")
        return counts == sorted(counts)

    def metrics(self, prefix: str = "train/") -> dict[str, float]:
        """Numbers by name (DESIGN section 9), global over ranks.

        Args:
            prefix: "train/" names what is minimised train/loss and leaves the other names bare; another
                prefix, such as "eval/", stands before every name.
        """
        values = {
            **self._term_metrics(),
            **self._channel_metrics(),
            **self._count_metrics(),
            **self._routing_metrics(),
            **self._measure_metrics(),
        }
        if prefix != "train/":
            values = {prefix + name: value for name, value in values.items()}
        return {f"{prefix}loss": self.loss} | values

    def _term_metrics(self) -> dict[str, float]:
        values = {f"loss/{escape_name(name)}": loss for name, loss in self.term_losses.items()}
        for term, z_loss, weight in zip(
            self.declaration.terms, self.closed("z_losses"), self.opened("weights"), strict=True
        ):
            if z_loss and weight:
                values[f"z_loss/{escape_name(term.name)}"] = z_loss / weight
        if len(self.declaration.terms) > 1:
            for term, targets in zip(self.declaration.terms, self.opened("targets"), strict=True):
                values[f"targets/{escape_name(term.name)}"] = targets
        return values

    def _channel_metrics(self) -> dict[str, float]:
        values: dict[str, float] = {}
        names = self.declaration.escaped_channels
        if not names:
            return values
        complete = not self.opened("missing_channel")[0]
        values["health/metadata_complete"] = float(complete)
        if not complete:
            return values
        counts = self.channel_table("opening", "channel_counts")
        # "other", the last, shows only when something fell into it
        shown = len(names) if counts[1][-1] else len(names) - 1
        for keys, row in zip(self.declaration.counter_keys, counts, strict=True):
            values.update(zip(keys[:shown], row[:shown], strict=True))
        for loss_keys, share_keys, weights, losses, total in zip(
            self.declaration.loss_keys,
            self.declaration.share_keys,
            self.channel_table("opening", "channel_weights"),
            self.channel_table("closing", "channel_losses"),
            self.opened("weights"),
            strict=True,
        ):
            for index in range(shown):
                if weights[index]:
                    values[loss_keys[index]] = losses[index] / weights[index]
                if total:
                    values[share_keys[index]] = losses[index] / total
        return values

    def _count_metrics(self) -> dict[str, float]:
        loss, source, aligned, physical = self.opened("tokens")
        values = {
            f"tokens/{name}": count
            for name, count in zip(TOKEN_COUNTERS, (loss, source, aligned, physical), strict=True)
        }
        values["documents"] = self.opened("documents")[0]
        if physical:
            values["packing/fill"] = source / physical
            values["packing/loss_fill"] = loss / physical
        if source:
            values["packing/loss_density"] = loss / source
        values["health/counts_ordered"] = float(self.counts_ordered())
        values["health/books_balance"] = float(not (self.unbalanced_terms() or self.unbalanced_channels()))
        return values

    @property
    def expert_counts(self) -> list[list[int]]:
        """Tokens that each expert was chosen for, [layers][experts]; empty without routing."""
        table = self.declaration.closing.read_table(self._closed, "expert_counts")
        return [[int(count) for count in row] for row in table]

    def _routing_metrics(self) -> dict[str, float]:
        """Of each layer, and over layers, how far the busiest expert lies above the mean, as a fraction."""
        values: dict[str, float] = {}
        counts = self.expert_counts
        for expert, column in enumerate(zip(*counts, strict=True)):
            values[f"moe/expert_tokens/{expert}"] = float(sum(column))
        violations = [max(row) * len(row) / sum(row) - 1.0 for row in counts if sum(row)]
        if len(violations) == len(counts) > 0:
            values["moe/max_violation"] = max(violations)
            values |= {f"moe/max_violation/{layer}": value for layer, value in enumerate(violations)}
        return values

    def _measure_metrics(self) -> dict[str, float]:
        """The mean of each measure, in all and by channel; one that nothing was measured for is left out."""
        values: dict[str, float] = {}
        sums = self.channel_table("closing", "measure_sums")
        counts = self.channel_table("closing", "measure_counts")
        complete = not self.opened("missing_channel")[0]
        for name, row, numbers in zip(self.declaration.measures, sums, counts, strict=True):
            if sum(numbers):
                values[name] = sum(row) / sum(numbers)
            if not complete:
                continue
            for channel, total, number in zip(self.declaration.escaped_channels, row, numbers, strict=False):
                if number:
                    values[f"channel_{name}/{channel}"] = total / number
        return values

    @property
    def digest(self) -> int:
        """Sum of the checksums of the documents: steps on the same documents have the same digest."""
        return int(self.opened("digest")[0])
