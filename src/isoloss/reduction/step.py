"""One optimizer step's page of the ledger: local losses over global denominators.

[Note: shares]
With W the sum of a term's weights over every target of the step, on all ranks and in all micro-batches, a
rank backpropagates its *share*: coefficient * (sum of w_i l_i over the targets it holds) / W. Shares add up
to the loss, and gradients of shares to its gradient, over any split of the targets.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from isoloss.batch.document import IGNORE_INDEX
from isoloss.batch.packed_batch import PackedBatch
from isoloss.batch.weighting import TOKEN_REDUCTIONS, reduction_factors, weigh_documents
from isoloss.losses.linear_cross_entropy import (
    LinearCrossEntropyOutput,
    linear_cross_entropy,
    linear_log_probs,
)
from isoloss.losses.linear_cross_entropy.vocab_parallel import shard_of
from isoloss.losses.router import expert_frequencies
from isoloss.reduction.book import Book
from isoloss.reduction.gradients import GradientSum, reshard
from isoloss.reduction.opening import channel_indices, count_windows
from isoloss.reduction.record import Declaration, StepRecord
from isoloss.reduction.terms import TERM_REDUCTIONS, Routing, TermReduction
from isoloss.topology import Topology


def in_backward() -> bool:
    """Whether this code runs inside a backward pass, as the recomputation of a checkpointed forward does."""
    return _graph_task() != -1


def _graph_task() -> int:
    # The only word torch has for "which backward pass is this"; torch.utils.checkpoint relies on it too.
    return torch._C._current_graph_task_id()


@final
class Denominators:
    """W of every term, summed over ranks while the first forward runs."""

    def __init__(self, local: Tensor, declaration: Declaration, topology: Topology) -> None:
        self._schema = declaration.opening
        self._coefficients = [term.coefficient for term in declaration.terms]
        self._work: dist.Work | None = None
        self._host: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._scales: dict[torch.device, tuple[Tensor, ...]] = {}
        if topology.world_group is None:
            self._vector = local
            self._host = local
            return
        on_cuda = topology.device.type == "cuda"
        source = local.pin_memory() if on_cuda else local
        self._vector = source.to(topology.device, non_blocking=True)
        self._work = dist.all_reduce(self._vector, group=topology.world_group, async_op=True)

    def _wait(self) -> None:
        """Order everything after this behind the reduction: on CUDA the stream waits, on the CPU the host."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        if self._vector.device.type == "cuda":
            self._host = torch.empty(self._vector.shape, dtype=torch.float64, pin_memory=True)
            self._host.copy_(self._vector, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._host = self._vector

    def scale(self, index: int, device: torch.device) -> Tensor:
        """Coefficient / W of a term, 0 where W is 0; float64 scalar on `device`."""
        if device not in self._scales:
            self._wait()
            weights = self._schema.block(self._vector, "weights").to(device, non_blocking=True)
            inverse = torch.where(weights > 0, 1.0 / weights, 0.0)
            self._scales[device] = tuple(
                one * coefficient for one, coefficient in zip(inverse, self._coefficients, strict=True)
            )
        return self._scales[device][index]

    def on_host(self) -> Tensor:
        """The whole reduced vector on the host.

        Host syncs: one on CUDA, on a copy that was started before the first loss.
        """
        self._wait()
        if self._copied is not None:
            self._copied.synchronize()
        assert self._host is not None
        return self._host


@final
class Step:
    """Denominators and record of one optimizer step, or of one pass of evaluation. Made by `Ledger.step`.

    A context manager: entering starts the opening reduction, leaving it sums what no wrapper has summed and
    starts the closing one. Iterating yields this rank's micro-batches, sharded and on the device. An
    exception inside discards the page: nothing is communicated, no tensor is kept.
    """

    def __init__(
        self,
        *,
        declaration: Declaration,
        topology: Topology,
        windows: Sequence[PackedBatch],
        gradients: GradientSum | None,
        training: bool,
        has_more: bool,
        book: Book,
        evaluated: nn.Module | None = None,
    ) -> None:
        self.training = training
        self.max_document_length = max(window.layout.max_document_length for window in windows)
        """Tokens of the longest document in this rank's windows."""
        self._declaration = declaration
        self._topology = topology
        self._windows = windows
        self._gradients = gradients
        self._has_more = has_more
        self._book = book
        self._evaluated = evaluated
        self._index = {term.name: index for index, term in enumerate(declaration.terms)}
        self._was_entered = False
        self._denominators: Denominators | None = None
        self._closing: Tensor | None = None
        self._rows: dict[tuple[str, int], Tensor] = {}
        """Views of the closing vector: (block, term or measure) -> its numbers."""
        self._own_weights = declaration.opening.zeros()
        """Weight of each term in the windows that this rank owns, float64[terms], on the host."""
        self._opening: Tensor | None = None
        self._record: StepRecord | None = None
        self._totals: dict[str, float] | None = None
        self._pending: tuple[Tensor, dist.Work | None] | None = None

    # -- the block

    def __enter__(self) -> Self:
        if self._was_entered:
            raise RuntimeError("this step was entered before; open a new one with ledger.step(...)")
        self._was_entered = True
        schema = self._declaration.opening
        counted = self._windows if self._topology.owns_windows else []
        vector = count_windows(self._declaration, counted, self._book.known_channels)
        schema.block(vector, "has_more").fill_(self._has_more)
        self._own_weights = schema.block(vector, "weights").clone()  # the vector is reduced in place
        self._denominators = Denominators(vector, self._declaration, self._topology)
        if self.training and self._gradients is not None:
            self._gradients.begin()
        return self

    def __iter__(self) -> Iterator[PackedBatch]:
        self._opened()
        for place, window in enumerate(self._windows):
            batch = window.shard(self._topology)
            if self._topology.device.type != "cpu":
                batch = batch.to(self._topology.device)
            if self.training and self._gradients is not None:
                self._gradients.synchronise(place == len(self._windows) - 1)
            yield batch

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        denominators = self._opened()
        driven = self._gradients if self.training else None
        if self._evaluated is not None:
            reshard(self._evaluated)
            self._evaluated = None
        if kind is not None:
            self._discard()
            if driven is not None:
                driven.end()
            return
        try:
            if driven is not None:
                try:
                    driven.finish()
                finally:
                    driven.end()
            self._start_closing()
            self._opening = denominators.on_host()
            experts = self._pending
            self._book.close(
                self._opening, self._windows, training=self.training, read_record=lambda: self.record
            )
            self._totals = self._book.total_metrics
            if self.training and self._declaration.routing is not None and experts is not None:
                self._book.keep_expert_counts(*experts)
        except BaseException:
            self._discard()
            raise
        self._windows = ()
        self._denominators = None

    def _discard(self) -> None:
        self._denominators = None
        self._opening = None
        self._closing = None
        self._rows = {}
        self._pending = None
        self._record = None
        self._windows = ()

    def _opened(self) -> Denominators:
        if self._denominators is None:
            raise RuntimeError(
                "this step is not open: denominators live inside `with ledger.step(...) as step:` only, so "
                "that none can go stale"
            )
        return self._denominators

    # -- losses

    def loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        batch: PackedBatch,
        *,
        term: str | None = None,
        kernel: Callable[..., LinearCrossEntropyOutput] = linear_cross_entropy,
        **kernel_options: Any,
    ) -> Tensor:
        """This rank's share of a term's cross entropy, from hidden states and the head's weight.

        Call it inside the wrapped forward: outside it a sharded weight is a DTensor, and a tied weight would
        lose its gradient.

        Args:
            hidden: hidden states of the batch's slots, [..., H], in slot order.
            weight: weight of the language-model head, [V, H]. Sharded by rows over the tensor ranks, each
                rank computes with its own rows, and no logits of the whole vocabulary exist anywhere.
            batch: the micro-batch, as the step yields it.
            term: name of the term; None where only one is declared.
            kernel: another loss of hidden states and a head with the contract of `linear_cross_entropy`: it
                takes hidden, weight, targets and token_weights by name, and its loss is the weighted sum of
                its token losses.
            **kernel_options: passed to the kernel (bias, softcap, label_smoothing, z_loss, ...).

        Returns:
            A scalar, float32 (float64 for float64 input), differentiable. Exactly 0 with zero gradients
            where the term has no target. Backward it unscaled, or the displayed loss is not the one trained.

        Raises:
            ValueError: the rows of `hidden` are not the slots of `batch`, the term is not declared or has
                one loss per document, or the weight is sharded in another way than by rows.
            TypeError: the weight is a DTensor over other ranks than the tensor ranks.
        """
        index = self._term_index(term, TOKEN_REDUCTIONS)
        rows = hidden.reshape(-1, hidden.shape[-1])
        targets = self._targets(batch, index, rows.shape[0], "hidden", rows.device)
        weights = self._token_weights(batch, index, targets)
        weight, kernel_options = self.own_classes(weight, kernel_options)
        output = kernel(
            hidden=rows,
            weight=weight,
            targets=self._weighted_targets(batch, index, targets),
            token_weights=self._scaled(weights, index, _compute_dtype(rows)),
            **kernel_options,
        )
        z_losses = output.token_z_losses if kernel_options.get("z_loss") else None
        self._record_tokens(index, batch, weights, output.token_losses, z_losses, output.loss)
        return self._watched(output.loss)

    def log_probs(
        self,
        hidden: Tensor,
        weight: Tensor,
        batch: PackedBatch,
        *,
        term: str | None = None,
        **kernel_options: Any,
    ) -> Tensor:
        """Log-probability of every target of a term, for losses that are no sum of cross entropies.

        Args:
            hidden: hidden states of the batch's slots, [..., H], in slot order.
            weight: weight of the language-model head, [V, H]; see `loss`.
            batch: the micro-batch, as the step yields it.
            term: name of the term whose targets are meant, of any reduction; None where only one is declared.
            **kernel_options: passed to `linear_log_probs` (bias, softcap, logit_scale, ...).

        Returns:
            [T_local], float32 (float64 for float64 input), differentiable; 0 where there is no target.
            Nothing is recorded: hand the losses made of it to `add`, `add_documents` or `add_groups`.
        """
        index = self._term_index(term, TERM_REDUCTIONS)
        rows = hidden.reshape(-1, hidden.shape[-1])
        targets = self._targets(batch, index, rows.shape[0], "hidden", rows.device)
        weight, kernel_options = self.own_classes(weight, kernel_options)
        return linear_log_probs(rows, weight, targets, **kernel_options)

    def loss_from_logits(self, logits: Tensor, batch: PackedBatch, *, term: str | None = None) -> Tensor:
        """This rank's share of a term's cross entropy, from full logits [..., V]. See `loss`.

        `loss` does the same without the logits of the whole batch in memory.
        """
        index = self._term_index(term, TOKEN_REDUCTIONS)
        rows = logits.reshape(-1, logits.shape[-1])
        targets = self._targets(batch, index, rows.shape[0], "logits", rows.device)
        weighted = self._weighted_targets(batch, index, targets)
        # A NaN in a row without target would reach the gradient as NaN * 0.
        rows = rows.masked_fill((weighted == IGNORE_INDEX).unsqueeze(-1), 0.0)
        losses = nn.functional.cross_entropy(
            rows.to(_compute_dtype(rows)), weighted, ignore_index=IGNORE_INDEX, reduction="none"
        )
        return self._add_tokens(index, losses, batch, targets)

    def add(self, term: str | None, losses: Tensor, batch: PackedBatch) -> Tensor:
        """This rank's share of a term whose per-token losses the caller computed.

        Args:
            term: name of the term; None where only one is declared.
            losses: one loss per slot of `batch`, [T_local] or [1, T_local], in nats. Slots without a target
                of the term do not count, whatever stands there; in a step in which the term has no target
                at all they must hold 0. With reduction "source" every token is a target.
            batch: the micro-batch, as the step yields it.
        """
        index = self._term_index(term, (*TOKEN_REDUCTIONS, "source"))
        flat = losses.reshape(-1)
        targets = self._targets(batch, index, flat.shape[0], "losses", flat.device)
        return self._add_tokens(index, flat, batch, targets)

    def sum_by_document(self, values: Tensor, batch: PackedBatch) -> Tensor:
        """The sum of `values` [T_local] over each document's slots, complete over the window's shards.

        Returns:
            [num_documents], the same on every shard of the window; prefixes are no documents. In backward
            each shard hands the incoming gradient to its own slots, once. What comes after it runs alike on
            every shard, so apply parameters before: a module that is applied to the sums would count its
            gradient once per shard.

        Collectives: one differentiable SUM over the cp and sp ranks of the window, none without them.
        """
        self._opened()
        flat = values.reshape(-1)
        if flat.shape[0] != len(batch):
            raise ValueError(
                f"values has {flat.shape[0]} entries, the batch {len(batch)} slots; give one each"
            )
        documents = batch.counted_document_ids.to(flat.device)
        owned = documents >= 0
        sums = flat.new_zeros(batch.layout.num_documents + 1)
        places = torch.where(owned, documents, batch.layout.num_documents)
        sums = sums.index_add(0, places, torch.where(owned, flat, 0.0))[:-1]
        if self._topology.window_group is None:
            return sums
        return _SumOverShards.apply(sums, self._topology.window_group)

    def add_documents(self, term: str | None, losses: Tensor, batch: PackedBatch) -> Tensor:
        """This rank's share of a term with one loss per document.

        Args:
            term: name of a term with reduction "document"; None where only one is declared.
            losses: [num_documents], computed alike on every shard of the window (`sum_by_document`).
                Documents without a target of the term do not count.
            batch: the micro-batch.
        """
        index = self._term_index(term, ("document",))
        return self._add_units(index, losses.reshape(-1), batch)

    def add_groups(self, term: str | None, losses: Tensor, batch: PackedBatch) -> Tensor:
        """This rank's share of a term with one loss per group of documents, such as a preference pair.

        Args:
            term: name of a term with reduction "group"; None where only one is declared.
            losses: one loss per group, in the order in which groups first appear in the window, computed
                alike on every shard. A document without a group is a group of its own.
            batch: the micro-batch.
        """
        index = self._term_index(term, ("group",))
        return self._add_units(index, losses.reshape(-1), batch)

    # -- numbers that are shown and not trained

    @torch.no_grad()
    def measure(self, name: str, values: Tensor, batch: PackedBatch, *, term: str | None = None) -> None:
        """Show the mean of `values` under `name`, in all and by channel, as accuracies and rewards are.

        Args:
            name: declared as `Ledger(..., measures=[...])`.
            values: one number for each unit of the term: per slot [T_local], or per document or group as
                `add_documents` and `add_groups` take them. Units without a target do not count; the others
                count once each, whatever their weight.
            batch: the micro-batch, as the step yields it.
            term: whose targets are meant; None where only one is declared.
        """
        if name not in self._declaration.measures:
            declared = ", ".join(self._declaration.measures) or "none"
            raise ValueError(
                f"measure {name!r} is not declared; declared: {declared}. Add it to Ledger(..., measures=...)"
            )
        index = self._term_index(term, TERM_REDUCTIONS)
        if in_backward():  # a recomputed forward was measured the first time
            return
        flat = values.detach().reshape(-1).to(torch.float64)
        if self._declaration.terms[index].reduction in ("document", "group"):
            units = self._units(index, batch, flat.shape[0], "values")
            if not self._topology.owns_windows:  # every shard has the same values
                return
            counted, sources = units.has_target.to(flat.device), units.sources.to(flat.device)
        else:
            counted = self._targets(batch, index, flat.shape[0], "values", flat.device) != IGNORE_INDEX
            sources = batch.sources.to(flat.device)
        kept = torch.where(counted, flat, 0.0)
        row = self._declaration.measures.index(name)
        channels = torch.zeros_like(sources)
        if self._declaration.channels:
            channels = channel_indices(sources, self._declaration)
        device = flat.device
        self._closing_row("measure_sums", row, device).index_add_(0, channels, kept)
        self._closing_row("measure_counts", row, device).index_add_(0, channels, counted.to(torch.float64))

    # -- router losses, which are summed while the layers run

    @property
    def topology(self) -> Topology:
        """Of the run."""
        return self._topology

    @property
    def routing(self) -> Routing | None:
        """Routers of the model, as the ledger declares them."""
        return self._declaration.routing

    def channel_members(self, batch: PackedBatch) -> Tensor:
        """1 where a slot holds a token of a channel, float64[channels, T_local]; one row without channels."""
        is_token = batch.document_ids >= 0
        if not self._declaration.channels:
            return is_token.to(torch.float64).unsqueeze(0)
        rows = torch.arange(len(self._declaration.channel_names), device=is_token.device).unsqueeze(-1)
        members = rows == channel_indices(batch.sources, self._declaration)
        return (members & is_token).to(torch.float64)

    def source_scale(self, term: str, device: torch.device) -> Tensor:
        """The coefficient over W of a term with reduction "source", float64 scalar; 0 where W is 0.

        A sum of the term's losses times it is a share.
        """
        index = self._term_index(term, ("source",))
        return self._opened().scale(index, device)

    def previous_frequencies(self, device: torch.device) -> Tensor:
        """Share of the tokens that each expert got in the last training step, float64[layers, experts].

        From all ranks and micro-batches of it; uniform before the first.

        Raises:
            ValueError: the ledger declares no routing.
        """
        routing = self._declaration.routing
        if routing is None:
            raise ValueError(
                "the ledger declares no routing; make it with Ledger(..., routing=model.routing), so that "
                "the tokens of each expert are counted"
            )
        counts = self._book.expert_counts
        if counts is None:
            counts = torch.zeros(routing.num_layers, routing.num_experts, dtype=torch.float64)
        return expert_frequencies(counts.to(device, non_blocking=True))

    @torch.no_grad()
    def add_sums(self, term: str, sums: Tensor, num_tokens: Tensor) -> Tensor:
        """Enter losses of a term with reduction "source" that are summed already.

        Args:
            term: its name.
            sums: of the losses of this rank's slots by channel, as `channel_members` has them; float64.
            num_tokens: over how many tokens; float64 scalar.

        Returns:
            The share, a detached float64 scalar. Its gradient is the caller's.
        """
        share = sums.sum() * self.source_scale(term, sums.device)
        index, device = self._index[term], sums.device
        self._closing_row("shares", index, device).add_(share)
        self._closing_row("losses", index, device).add_(sums.sum())
        self._closing_row("consumed", index, device).add_(num_tokens)
        if self._declaration.channels:
            self._closing_row("channel_losses", index, device).add_(sums)
        return share

    def add_expert_counts(self, counts: Tensor) -> None:
        """Enter how often each expert was chosen for this rank's tokens, float64[layers, experts]."""
        schema = self._declaration.closing
        schema.block(self._closing_vector(counts.device), "expert_counts").add_(counts)

    # -- after the block

    @property
    def record(self) -> StepRecord:
        """Both reduced vectors. Waits for the closing reduction.

        Host syncs: one on CUDA, the first time.
        """
        if self._record is None:
            if self._pending is None or self._opening is None:
                raise RuntimeError(
                    "this step has no record: read it after its block has ended without an exception"
                )
            closing, work = self._pending
            if work is not None:
                work.wait()
            self._record = StepRecord(self._declaration, self._opening, closing.to("cpu"))
            self._pending = None
        return self._record

    @property
    def has_more(self) -> bool:
        """Whether any rank has data for the next step, as passed to `Ledger.step`.

        Host syncs: none; the opening vector was read when the block ended.
        """
        if self._opening is None:
            raise RuntimeError("this step has not ended without an exception; ask it after its block")
        return bool(self._declaration.opening.block(self._opening, "has_more")[0] > 0)

    def metrics(self) -> dict[str, float]:
        """Every number of the step by name, global over ranks.

        The longest document is a maximum, which no sum can tell: on one rank it is here, on several it comes
        from `reduce_maxima`, on the steps that are logged.
        """
        values = self._book.metrics(self.record, training=self.training, totals=self._totals)
        if self.training and self._topology.world_size == 1:
            values["packing/max_document_length"] = float(self.max_document_length)
        return values

    # -- inside

    def _term_index(self, name: str | None, reductions: Sequence[TermReduction]) -> int:
        self._opened()
        terms = self._declaration.terms
        if name is None:
            # router losses stand beside the one term that a plain loop has
            choice = [term for term in terms if term.reduction != "source"] or terms
            if len(choice) > 1:
                raise ValueError(
                    f"several terms are declared ({', '.join(self._index)}); say which with term=..."
                )
            name = choice[0].name
        if name not in self._index:
            raise ValueError(
                f"term {name!r} is not declared; declared: {', '.join(self._index)}. Add "
                f"Term({name!r}) to the ledger"
            )
        index = self._index[name]
        if terms[index].reduction not in reductions:
            raise ValueError(
                f"term {name!r} has reduction {terms[index].reduction!r}; this call needs one of "
                f"{', '.join(reductions)} (per-token terms: loss, loss_from_logits, add; per document: "
                "add_documents; per group: add_groups)"
            )
        return index

    def _targets(self, batch: PackedBatch, index: int, rows: int, what: str, device: torch.device) -> Tensor:
        if rows != len(batch):
            raise ValueError(
                f"{what} has {rows} rows, the batch {len(batch)} slots; pass one row per slot, unshifted "
                "(targets are shifted already)"
            )
        name = self._declaration.terms[index].name
        if self._declaration.terms[index].reduction == "source":
            return torch.where(batch.document_ids >= 0, 0, IGNORE_INDEX).to(device, non_blocking=True)
        if name in batch.targets:
            return batch.targets[name].to(device, torch.int64, non_blocking=True)
        return torch.full((rows,), IGNORE_INDEX, device=device)

    def _weighted_targets(self, batch: PackedBatch, index: int, targets: Tensor) -> Tensor:
        """The targets that weigh something. One of weight 0 counts for nothing, and 0 * NaN would be NaN."""
        data_weights = batch.weights.get(self._declaration.terms[index].name)
        if data_weights is None:
            return targets
        return torch.where(data_weights.to(targets.device, non_blocking=True) == 0, IGNORE_INDEX, targets)

    def _token_weights(self, batch: PackedBatch, index: int, targets: Tensor) -> Tensor:
        """Weights w of the slots, float64[T_local]; 0 where the slot has no target."""
        term, device = self._declaration.terms[index], targets.device
        weights = (targets != IGNORE_INDEX).to(torch.float64)
        counts = batch.counts.get(term.name)
        if counts is not None and term.reduction != "token" and term.reduction != "source":
            factors = reduction_factors(counts.num_targets, term.reduction)
            # id -1 (no document) reads the appended 0
            table = torch.cat([factors, factors.new_zeros(1)]).to(device, non_blocking=True)
            weights *= table[batch.document_ids.to(device, non_blocking=True)]
        if term.name in batch.weights:
            weights *= batch.weights[term.name].to(device, non_blocking=True)
        return weights

    def _scaled(self, weights: Tensor, index: int, dtype: torch.dtype) -> Tensor:
        """The weights times coefficient / W: with them a kernel's sum is the share."""
        return (weights * self._opened().scale(index, weights.device)).to(dtype)

    def _add_tokens(self, index: int, losses: Tensor, batch: PackedBatch, targets: Tensor) -> Tensor:
        losses = losses.to(_compute_dtype(losses))
        weights = self._token_weights(batch, index, targets)
        kept = torch.where(weights != 0, losses, 0.0)
        share = (kept * self._scaled(weights, index, losses.dtype)).sum()
        is_target = targets != IGNORE_INDEX
        orphans = torch.where(is_target, 0.0, losses.detach()).abs().nan_to_num(nan=0.0).sum()
        self._record_tokens(index, batch, weights, kept.detach(), None, share, orphans)
        return self._watched(share)

    def own_classes(self, weight: Tensor, kernel_options: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """This rank's rows of a head that is spread over the tensor ranks, and what tells a kernel so.

        `loss` and `log_probs` do this themselves; a teacher's head beside them needs it.

        Returns:
            The weight and the options; of a spread head both of this rank, with "vocab_group" beside them.
        """
        if not (isinstance(weight, DTensor) and weight.device_mesh == self._topology.tp_mesh):
            return weight, kernel_options
        return weight.to_local(), _on_this_rank(kernel_options) | {"vocab_group": shard_of(weight)}

    def _group_places(self, index: int, batch: PackedBatch) -> list[int]:
        """For each group the document that carries its weight: its first with targets, else its first."""
        layout = batch.layout
        counts = batch.counts.get(self._declaration.terms[index].name)
        places: dict[tuple[str, int], int] = {}
        filled: set[tuple[str, int]] = set()
        for document, (group, prefix) in enumerate(
            zip(layout.document_groups, layout.is_prefix, strict=True)
        ):
            if prefix:
                continue
            key = ("group", group) if group != -1 else ("document", document)
            has_targets = counts is not None and int(counts.num_targets[document]) > 0
            if key not in places or (has_targets and key not in filled):
                places[key] = document
            if has_targets:
                filled.add(key)
        return list(places.values())

    def _units(self, index: int, batch: PackedBatch, count: int, what: str) -> "_Units":
        """The documents or groups of a term with one loss each; `count` values were given for them."""
        term = self._declaration.terms[index]
        if term.reduction == "group":
            kind, documents = "groups", self._group_places(index, batch)
        else:
            kind = "documents"
            documents = [d for d, prefix in enumerate(batch.layout.is_prefix) if not prefix]
        if count != len(documents):
            raise ValueError(f"{what} has {count} entries, the window {len(documents)} {kind}; give one each")
        places = torch.tensor(documents, dtype=torch.int64)
        sources = torch.tensor(batch.layout.document_sources, dtype=torch.int64)[places]
        counts = batch.counts.get(term.name)
        if counts is None or term.reduction == "source":
            weights = torch.zeros(len(documents), dtype=torch.float64)
            return _Units(weights, weights > 0, sources)
        weights = weigh_documents(counts, term.reduction, batch.layout)[places]
        return _Units(weights, counts.num_targets[places] > 0, sources)

    def _add_units(self, index: int, losses: Tensor, batch: PackedBatch) -> Tensor:
        """Share of a term with one loss per document or group."""
        units = self._units(index, batch, losses.shape[0], "losses")
        losses = losses.to(_compute_dtype(losses))
        weights = units.weights.to(losses.device, non_blocking=True)
        has_target = units.has_target.to(losses.device, non_blocking=True)
        kept = torch.where(has_target & (weights != 0), losses, 0.0)
        share = (kept * self._scaled(weights, index, losses.dtype)).sum()
        if not in_backward() and self._topology.owns_windows:
            self._write(
                index,
                weights,
                kept.detach(),
                units.sources.to(losses.device, non_blocking=True),
                share,
                orphans=torch.where(has_target, 0.0, losses.detach()).abs().nan_to_num(nan=0.0).sum(),
            )
        return self._watched(share)

    def _record_tokens(
        self,
        index: int,
        batch: PackedBatch,
        weights: Tensor,
        losses: Tensor,
        z_losses: Tensor | None,
        share: Tensor,
        orphans: Tensor | None = None,
    ) -> None:
        if in_backward():  # a recomputed forward was recorded the first time
            return
        total = losses if z_losses is None else losses + z_losses
        self._write(index, weights, total, batch.sources, share, z_losses=z_losses, orphans=orphans)

    @torch.no_grad()
    def _write(
        self,
        index: int,
        weights: Tensor,
        losses: Tensor,
        sources: Tensor,
        share: Tensor,
        *,
        z_losses: Tensor | None = None,
        orphans: Tensor | None = None,
    ) -> None:
        """Add weighted losses to the closing vector. The numbers are those that the share was summed from."""
        device = losses.device
        weighted = losses.detach().to(torch.float64) * weights
        self._closing_row("shares", index, device).add_(share.detach())
        self._closing_row("losses", index, device).add_(weighted.sum())
        self._closing_row("consumed", index, device).add_(weights.sum())
        if z_losses is not None:
            self._closing_row("z_losses", index, device).add_((z_losses * weights).sum())
        if orphans is not None:
            self._closing_row("orphans", index, device).add_(orphans)
        if self._declaration.channels:
            channels = channel_indices(sources.to(device, non_blocking=True), self._declaration)
            self._closing_row("channel_losses", index, device).index_add_(0, channels, weighted)

    def _closing_vector(self, device: torch.device) -> Tensor:
        """The closing vector, which lies where the first loss does."""
        if self._closing is None:
            self._closing = self._declaration.closing.zeros(device)
        return self._closing

    def _closing_row(self, block: str, index: int, device: torch.device) -> Tensor:
        """The numbers of a term or measure in a block of the closing vector."""
        if (block, index) not in self._rows:
            rows = self._declaration.closing.block(self._closing_vector(device), block)
            self._rows[block, index] = rows[index]
        return self._rows[block, index]

    def _watched(self, share: Tensor) -> Tensor:
        """The share, with a hook that says which backward pass reached it."""
        if share.requires_grad:
            if self._gradients is not None:
                gradients = self._gradients
                share.register_hook(lambda _: gradients.saw_backward(_graph_task()))
            elif self._topology.world_size > 1:
                share.register_hook(self._book.warn_unsummed)
        return share

    def _expected_weights(self) -> Tensor:
        """Weight of each term that this rank has to record: of its own slots or units, float64[terms].

        Host syncs: none.
        """
        if self._topology.window_group is None:
            return self._own_weights
        shards = [window.shard(self._topology) for window in self._windows]
        device = shards[0].input_ids.device
        expected = []
        for index, term in enumerate(self._declaration.terms):
            weight = self._own_weights[index].to(device, non_blocking=True)
            if term.reduction in TOKEN_REDUCTIONS or term.reduction == "source":
                weight = torch.zeros_like(weight)
                for shard in shards:
                    targets = self._targets(shard, index, len(shard), "batch", device)
                    weight += self._token_weights(shard, index, targets).sum()
            expected.append(weight)
        return torch.stack(expected)

    def _start_closing(self) -> None:
        topology = self._topology
        closing = self._closing
        if closing is None:
            closing = self._declaration.closing.zeros(topology.device)
        # W alone does not tell a term that one rank left out and another recorded twice
        schema = self._declaration.closing
        expected = self._expected_weights().to(closing.device, non_blocking=True)
        schema.block(closing, "imbalance").copy_((schema.block(closing, "consumed") - expected).abs())
        if not topology.owns_losses:
            closing = torch.zeros_like(closing)
        work = None
        if topology.world_group is not None:
            closing = closing.to(topology.device)
            work = dist.all_reduce(closing, group=topology.world_group, async_op=True)
        self._closing = None
        self._rows = {}
        self._pending = (closing, work)


@dataclass(frozen=True, slots=True)
class _Units:
    """Documents or groups of a window, on the host: what each weighs, and its channel."""

    weights: Tensor
    """float64[units]; that of a group stands at one of its documents."""
    has_target: Tensor
    """bool[units]"""
    sources: Tensor
    """int64[units]"""


class _SumOverShards(torch.autograd.Function):
    """SUM over the shards of a window; each shard's part gets the incoming gradient once.

    A differentiable all-reduce would sum the incoming gradients, one per shard and all alike: the number of
    shards too large.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        summed = values.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _on_this_rank(options: dict[str, Any]) -> dict[str, Any]:
    """Kernel options with this rank's part of what is sharded like the head's weight, such as its bias."""
    return {
        name: value.to_local() if isinstance(value, DTensor) else value for name, value in options.items()
    }


def _compute_dtype(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32
