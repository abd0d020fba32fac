"""The answer that every layout must give: one document at a time, in one process, plain torch.

It uses nothing of the loss path: a plain transformers model with its own attention, the cross entropy of
torch, and sums written out. Each document's loss is divided by the denominator before its backward: float32
islands in a model (norms, routers) are not linear in the gradient.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy

from isoloss.audit.case import AuditCase, AuditResult, AuditRow

IGNORED = -100


def reference_result(case: AuditCase) -> AuditResult:
    """Loss, gradients, counts and channel losses of the step of `case`, token mean over all its targets."""
    model = case.build_model().to(case.dtype)
    model.train()
    targets = [_targets(row) for row in case.rows]
    total = sum(int((part != IGNORED).sum()) for part in targets)
    loss = 0.0
    sums: dict[int, float] = {}
    counts: dict[int, int] = {}
    for row, target in zip(case.rows, targets, strict=True):
        count = int((target != IGNORED).sum())
        if not count:
            continue
        ids = torch.tensor([row["input_ids"]])
        logits = model(input_ids=ids, use_cache=False).logits[0]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        summed = cross_entropy(wide, target, ignore_index=IGNORED, reduction="sum")
        (summed / total).backward()
        loss += float(summed.detach()) / total
        sums[row["source"]] = sums.get(row["source"], 0.0) + float(summed.detach())
        counts[row["source"]] = counts.get(row["source"], 0) + count
    return AuditResult(
        loss=loss,
        gradients={
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in model.named_parameters()
        },
        counts=expected_counts(case.rows),
        channels={source: sums[source] / counts[source] for source in sorted(sums)},
    )


def expected_counts(rows: Sequence[AuditRow]) -> dict[str, int]:
    """What the counters must show: targets within documents, tokens of documents, documents."""
    return {
        "loss_tokens": sum(int((_targets(row) != IGNORED).sum()) for row in rows),
        "source_tokens": sum(len(row["input_ids"]) for row in rows),
        "documents": len(rows),
    }


def _targets(row: AuditRow) -> torch.Tensor:
    """What each token predicts: the label of the next token of the same document."""
    return torch.tensor([*row["labels"][1:], IGNORED])
