"""Two models whose loss can be checked by hand, and steps on them.

Gain: one parameter w = 1; a slot of cost c has the loss w * c, so the gradient of w is the loss itself.
Lookup: logits = E[token] with E all zeros, so every target costs ln V, and the gradient of row E[i] says
which targets were used and by what they were divided.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from exactness.driving import replicate
from isoloss import Layout, Ledger, PackedBatch, Step, Term, Topology, shift_targets, sum_gradients

Costs = Sequence[float | None]
"""Cost of each slot of a document; None: a slot without target."""
Window = Sequence[Costs]
"""A window as the costs of its documents."""

VIA = ("add", "loss_from_logits", "loss")


def cost_window(
    documents: Window,
    *,
    sources: Sequence[int] | None = None,
    weights: Sequence[Sequence[float]] | None = None,
    terms: Sequence[str] = ("text",),
    alignment: int = 1,
    padding: int = 0,
    dtype: torch.dtype = torch.float64,
) -> PackedBatch:
    """A window whose slots have the given costs. Targets are class 0, aligned with the slots."""
    lengths = [len(costs) for costs in documents]
    slots = sum(-(-length // alignment) * alignment for length in lengths) + padding
    layout = Layout(lengths, sources, alignment=alignment, padded_length=max(slots, 1))
    targets = torch.full((layout.physical_tokens,), -100)
    costs = torch.zeros(layout.physical_tokens, dtype=dtype)
    slot_weights = torch.ones(layout.physical_tokens)
    for number, (start, values) in enumerate(zip(layout.document_starts, documents, strict=True)):
        for offset, value in enumerate(values):
            if value is not None:
                targets[start + offset] = 0
                costs[start + offset] = value
            if weights is not None:
                slot_weights[start + offset] = weights[number][offset]
    return PackedBatch(
        torch.zeros(layout.physical_tokens, dtype=torch.int64),
        {term: targets.clone() for term in terms},
        layout,
        None if weights is None else {term: slot_weights for term in terms},
        token_extras={"costs": costs},
    )


class Gain(nn.Module):
    """A scalar gain on the costs. `via` says which method of the step computes the share."""

    def __init__(self, via: str = "add", term: str | None = None) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, dtype=torch.float64))  # FSDP2 shards no scalars
        self.via = via
        self.term = term

    def forward(self, step: Step, batch: PackedBatch) -> Tensor:
        costs = batch.token_extras["costs"] if "costs" in batch.token_extras else torch.zeros(len(batch))
        costs = costs.to(torch.float64)
        if self.via == "add":
            return step.add(self.term, self.gain * costs, batch)
        # Two-class logits (0, ln(e^(w c) - 1)) cost exactly w c for class 0. A slot without target gets some
        # cost, as ln 0 has no finite gradient.
        other = torch.log(torch.expm1(self.gain * torch.where(costs == 0, 1.0, costs)))
        if self.via == "loss":
            head = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
            return step.loss(other.unsqueeze(-1), head, batch, term=self.term)
        logits = torch.stack([torch.zeros_like(other), other], dim=-1)
        return step.loss_from_logits(logits, batch, term=self.term)


class Lookup(nn.Module):
    """Logits of a token are its row of a table of zeros."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(vocabulary, vocabulary, dtype=torch.float64))

    def forward(self, step: Step, batch: PackedBatch) -> Tensor:
        return step.loss_from_logits(self.table[batch.input_ids], batch)


def lookup_window(
    documents: Sequence[Sequence[int]], labels: Sequence[Sequence[int]] | None = None
) -> PackedBatch:
    """A window of token ids; labels are unshifted, by default the ids."""
    layout = Layout([len(document) for document in documents])
    flat = torch.tensor([token for document in documents for token in document])
    wanted = flat if labels is None else torch.tensor([label for row in labels for label in row])
    return PackedBatch(flat, {"text": shift_targets(wanted, layout)}, layout)


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "the gradient is None"
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def build_topology(wrapper: str) -> Topology:
    """Of a world that is all replicas ("plain", "ddp"), all shards ("fsdp"), or "hsdp-RxS"."""
    if not dist.is_initialized():
        return Topology.single()
    if wrapper.startswith("hsdp-"):
        return Topology(dp_replicate_size=int(wrapper.removeprefix("hsdp-").split("x")[0]))
    return Topology(dp_replicate_size=1 if wrapper == "fsdp" else dist.get_world_size())


def wrap_module(module: nn.Module, wrapper: str, topology: Topology) -> nn.Module:
    if wrapper == "ddp":
        return replicate(module, topology)
    if wrapper.startswith(("fsdp", "hsdp")):
        return fully_shard(module, mesh=topology.fsdp_mesh)
    return module


def run_windows(
    micro_batches: Sequence[PackedBatch],
    *,
    module: nn.Module | None = None,
    wrapper: str = "plain",
    terms: Sequence[Term] = (Term("text"),),
    channels: Sequence[str] = (),
    backward: Callable[[Tensor], None] = torch.Tensor.backward,
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """One step of the documented loop on this rank's windows: (metrics, whole gradients by name)."""
    inner = Gain() if module is None else module
    topology = build_topology(wrapper)
    outer = wrap_module(inner, wrapper, topology)
    gradients = sum_gradients(outer, topology)
    ledger = Ledger(terms, channels=channels, topology=topology)
    with ledger.step(micro_batches, gradients=gradients) as step:
        for batch in step:
            backward(outer(step, batch))
    return step.metrics(), {name: whole(values.grad) for name, values in inner.named_parameters()}


def gain_step(
    windows: Sequence[Window],
    *,
    wrapper: str = "plain",
    reduction: str = "token",
    via: str = "add",
) -> tuple[float, float]:
    """(displayed loss, synchronised gradient of the gain) of a step on windows of costs."""
    metrics, gradients = run_windows(
        [cost_window(window) for window in windows],
        module=Gain(via),
        wrapper=wrapper,
        terms=[Term("text", reduction)],
    )
    return metrics["train/loss"], gradients["gain"].item()


def check_gain(
    windows: Sequence[Window], expected: float, *, wrapper: str = "plain", reduction: str = "token"
) -> None:
    """Loss and gradient of this rank's windows are `expected` through every method of the step."""
    for via in VIA:
        loss, gradient = gain_step(windows, wrapper=wrapper, reduction=reduction, via=via)
        assert math.isclose(loss, expected, rel_tol=1e-12), f"{via}: loss {loss}, expected {expected}"
        assert math.isclose(gradient, expected, rel_tol=1e-12), f"{via}: gradient {gradient}"


def different(value: float, expected: float, *, by: float = 0.01) -> bool:
    """Whether a mutant is caught: far beyond the tolerance of the tests."""
    return not math.isclose(value, expected, rel_tol=by)
