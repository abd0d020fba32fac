"""Our own step, as something to audit."""

from collections.abc import Mapping, Sequence

from isoloss.audit.case import AuditCase, AuditResult
from isoloss.batch.document import Document
from isoloss.batch.packed_batch import PackedBatch
from isoloss.batch.packing import pack
from isoloss.objectives.loss_model import LossModel
from isoloss.parallel.wrap import wrap_model
from isoloss.reduction.gradients import sum_gradients
from isoloss.reduction.ledger import Ledger
from isoloss.reduction.observing import CollectiveCount, full_gradient
from isoloss.reduction.terms import Term
from isoloss.topology import Topology
from isoloss.train.model import transformer_blocks

WINDOW = 320
"""Slots of a window: all rows of the audit fit into one."""


def own_step(case: AuditCase) -> AuditResult:
    """One step of the ledger on the documents of `case`, packed one window per micro-batch."""
    topology = _topology(case.sizes)
    if case.strategy == "ddp":
        topology = _topology({**case.sizes, "dp_replicate_size": topology.data_size})
    model = case.build_model().to(case.dtype)
    loss_model = LossModel(model)
    wrapped = wrap_model(loss_model, transformer_blocks(model), topology)
    names = dict(model.named_parameters())
    gradients = sum_gradients(wrapped, topology)
    sources = sorted({row["source"] for row in case.rows})
    ledger = Ledger([Term("text")], channels=[f"source {n}" for n in sources], topology=topology)
    assert case.assignment is not None
    windows = [window_of(case, micro_batch) for micro_batch in case.assignment[topology.data_rank]]
    with CollectiveCount() as communication:
        with ledger.step(windows, gradients=gradients) as step:
            for batch in step:
                wrapped(step, batch).backward()
        metrics = step.metrics()
    return AuditResult(
        loss=metrics["train/loss"],
        gradients={name: full_gradient(parameter) for name, parameter in names.items()},
        counts={
            "loss_tokens": int(metrics["tokens/loss"]),
            "source_tokens": int(metrics["tokens/source"]),
            "documents": int(metrics["documents"]),
        },
        channels={
            source: metrics[f"channel_loss/source {source}"]
            for source in sources
            if f"channel_loss/source {source}" in metrics
        },
        num_collectives=communication.total,
    )


def window_of(case: AuditCase, micro_batch: Sequence[int]) -> PackedBatch:
    """One packed window with the rows of a micro-batch; an empty one without rows."""
    documents = [
        Document(case.rows[index]["input_ids"], case.rows[index]["labels"], source=case.rows[index]["source"])
        for index in micro_batch
    ]
    if not documents:
        return PackedBatch.empty(WINDOW, ["text"])
    (window,) = pack(documents, WINDOW)
    return window


def _topology(sizes: Mapping[str, int]) -> Topology:
    return Topology(
        dp_replicate_size=sizes.get("dp_replicate_size", 1),
        sp_size=sizes.get("sp_size", 1),
        cp_size=sizes.get("cp_size", 1),
        tp_size=sizes.get("tp_size", 1),
        ep_size=sizes.get("ep_size", 1),
    )
