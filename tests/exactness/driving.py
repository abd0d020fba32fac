"""Drives the package on plain documents, and compares what comes out with the oracle's answer."""

import math
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from isoloss import (
    GradientSum,
    Layout,
    Ledger,
    LossModel,
    PackedBatch,
    Term,
    Topology,
    shift_targets,
    sum_gradients,
)
from oracle.models import VOCABULARY, decoder_layers
from oracle.single_process import Answer, PlainDocument, worst_difference

TOLERANCE = 1e-10
CHANNELS = ("code", "docs", "chat")


def draw_documents(seed: int = 0, *, weighted: bool = True) -> list[PlainDocument]:
    """Documents of very unequal lengths: one-token ones, ones without targets, weights, three channels.

    Channel 2 has documents and no target.
    """
    draw = random.Random(seed)
    documents = []
    for index, length in enumerate((19, 1, 2, 12, 3, 1, 7, 5, 16, 2)):
        tokens = [draw.randrange(3, VOCABULARY) for _ in range(length)]
        labels = [-100 if draw.random() < 0.25 else token for token in tokens]
        weights = []
        if weighted and index % 3 == 0:
            weights = [draw.choice([0.0, 0.5, 1.0, 2.5]) for _ in tokens]  # one per token
        elif weighted and index % 3 == 1:
            weights = [draw.choice([0.25, 3.0])] * length  # one per document
        documents.append(PlainDocument(tokens, labels, weights, channel=index % 2))
    for length in (4, 1, 6):
        tokens = [draw.randrange(3, VOCABULARY) for _ in range(length)]
        documents.append(PlainDocument(tokens, [-100] * length, channel=2))
    return documents


def has_targets(document: PlainDocument) -> bool:
    return bool(document.targets())


def build_window(
    documents: Sequence[PlainDocument],
    *,
    alignment: int = 1,
    padded_length: int | None = None,
    pad_token_id: int = 0,
    term: str = "text",
    channels: bool = True,
) -> PackedBatch:
    """A window of `documents`, packed by hand."""
    layout = Layout(
        [len(document.tokens) for document in documents],
        [document.channel for document in documents] if channels else None,
        alignment=alignment,
        padded_length=padded_length,
    )
    input_ids = torch.full((layout.physical_tokens,), pad_token_id)
    labels = torch.full((layout.physical_tokens,), -100)
    weights = torch.ones(layout.physical_tokens)
    for start, document in zip(layout.document_starts, documents, strict=True):
        for offset, token in enumerate(document.tokens):
            input_ids[start + offset] = token
            labels[start + offset] = document.labels[offset]
            if document.weights and offset:
                weights[start + offset - 1] = document.weights[offset]  # of what the slot predicts
    weighted = any(document.weights for document in documents)
    return PackedBatch(
        input_ids, {term: shift_targets(labels, layout)}, layout, {term: weights} if weighted else None
    )


@dataclass
class Wrapped:
    """A model under one of `WRAPPERS`, with what a step needs."""

    inner: nn.Module
    outer: nn.Module
    topology: Topology
    gradients: GradientSum | None


WRAPPERS = {
    # name: (dp_replicate_size for a world of n ranks, worlds it is run on)
    "alone": (lambda n: 1, (1,)),
    "plain": (lambda n: n, (1, 2, 3, 4)),
    "ddp": (lambda n: n, (1, 2, 3, 4)),
    "fsdp": (lambda n: 1, (1, 2, 3, 4)),
    "fsdp-keep": (lambda n: 1, (2, 4)),
    "hsdp-shard-1": (lambda n: n, (2, 3)),
    "hsdp-2x2": (lambda n: 2, (4,)),
    "hsdp-2x2-keep": (lambda n: 2, (4,)),
}
"""alone: without gradients=...; -keep: reshard_after_forward=False."""


def shard(loss_model: LossModel, topology: Topology, *, reshard: bool = True) -> nn.Module:
    assert topology.mesh is not None
    mesh = topology.fsdp_mesh
    if topology.dp_shard_size == 1 and topology.dp_replicate_size > 1:
        assert mesh is not None and mesh.ndim == 2, "shard groups of size 1 need both axes"
    for layer in decoder_layers(loss_model.model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(loss_model, mesh=mesh, reshard_after_forward=reshard)


def replicate(module: nn.Module, topology: Topology) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(module, process_group=topology.loss_group)


def wrap(inner: nn.Module, wrapper: str, world_size: int) -> Wrapped:
    replicates, worlds = WRAPPERS[wrapper]
    assert world_size in worlds
    loss_model = LossModel(inner)
    topology = Topology(dp_replicate_size=replicates(world_size))
    outer: nn.Module = loss_model
    if wrapper == "ddp":
        outer = replicate(loss_model, topology)
    elif wrapper.startswith(("fsdp", "hsdp")):
        outer = shard(loss_model, topology, reshard=not wrapper.endswith("-keep"))
    gradients = None if wrapper == "alone" else sum_gradients(outer, topology)
    return Wrapped(inner, outer, topology, gradients)


def full_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Every gradient, whole; None is a failure, since a step leaves zeros at least."""
    missing = [name for name, parameter in module.named_parameters() if parameter.grad is None]
    assert not missing, f"the gradients of {missing} are None"
    return {name: whole_gradient(parameter) for name, parameter in module.named_parameters()}


def whole_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def run_step(
    wrapped: Wrapped,
    micro_batches: Sequence[PackedBatch],
    *,
    reduction: str = "token",
    channels: Sequence[str] = CHANNELS,
) -> dict[str, float]:
    """The documented loop. Gradients stand in the model afterwards."""
    wrapped.inner.zero_grad(set_to_none=True)
    ledger = Ledger([Term("text", reduction)], channels=channels, topology=wrapped.topology)
    with ledger.step(micro_batches, gradients=wrapped.gradients) as step:
        for batch in step:
            wrapped.outer(step, batch).backward()
    return step.metrics()


def close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def compare(
    metrics: dict[str, float],
    gradients: dict[str, Tensor],
    expected: Answer,
    *,
    aligned: int,
    physical: int,
    channels: Sequence[str] = CHANNELS,
) -> list[str]:
    """What differs from the oracle, in words: loss, every gradient element, channels, integers."""
    found = []
    floats = {"train/loss": expected.loss, "loss/text": expected.loss}
    for channel, name in enumerate(channels):
        for kind, values in (
            ("channel_loss", expected.channel_losses),
            ("channel_loss_share", expected.channel_shares),
        ):
            if channel in values:
                floats[f"{kind}/{name}"] = values[channel]
            elif f"{kind}/{name}" in metrics:
                found.append(f"{kind}/{name} is shown although it has no denominator")
    for key, value in floats.items():
        if not close(metrics[key], value):
            found.append(f"{key} is {metrics[key]!r}, expected {value!r}")
    integers = {
        "tokens/loss": expected.loss_tokens,
        "tokens/source": expected.source_tokens,
        "tokens/aligned": aligned,
        "tokens/physical": physical,
        "documents": expected.documents,
        "tokens/loss_total": expected.loss_tokens,
        "tokens/source_total": expected.source_tokens,
        "tokens/physical_total": physical,
        "documents_total": expected.documents,
        "health/books_balance": 1,
        "health/counts_ordered": 1,
    }
    for channel, name in enumerate(channels):
        integers[f"channel_tokens/{name}"] = expected.channel_tokens[channel]
        integers[f"channel_source_tokens/{name}"] = expected.channel_source_tokens[channel]
        integers[f"channel_documents/{name}"] = expected.channel_documents[channel]
    for key, count in integers.items():
        if metrics[key] != count:
            found.append(f"{key} is {metrics[key]!r}, expected {count}")
    difference, where = worst_difference(gradients, expected.gradients)
    if difference > TOLERANCE:
        found.append(f"gradient of {where} differs by {difference:.3g} of its largest element")
    return found
