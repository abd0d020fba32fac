"""Steps to audit: a right one in plain torch, and ones with the faults that trainers have."""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from isoloss import AuditCase, AuditResult
from isoloss.reduction.observing import full_gradient


def _loss_sum(model: torch.nn.Module, case: AuditCase, rows: list[int]) -> tuple[torch.Tensor, int]:
    total, count = torch.zeros((), dtype=case.dtype), 0
    for row in rows:
        ids, labels = case.rows[row]["input_ids"], case.rows[row]["labels"]
        targets = torch.tensor([*labels[1:], -100])
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        total = total + cross_entropy(logits, targets, reduction="sum")
        count += int((targets != -100).sum())
    return total, count


def _ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def mean_of_means(case: AuditCase) -> AuditResult:
    """Each micro-batch is divided by its own count, then averaged: wrong as soon as counts differ."""
    rank, world_size = _ranks()
    assert case.assignment is not None
    model = case.build_model().to(case.dtype)
    parts = [part for part in case.assignment[rank] if part]
    shown = torch.zeros((), dtype=case.dtype)
    for part in parts:
        loss, count = _loss_sum(model, case, list(part))
        (loss / max(count, 1) / len(parts)).backward()
        shown += loss.detach() / max(count, 1) / len(parts)
    return _averaged(model, shown, world_size)


def _averaged(model: torch.nn.Module, shown: torch.Tensor, world_size: int) -> AuditResult:
    gradients = {name: full_gradient(parameter) for name, parameter in model.named_parameters()}
    if world_size > 1:
        for value in (shown, *gradients.values()):
            dist.all_reduce(value)
            value /= world_size
    return AuditResult(loss=float(shown), gradients=gradients, counts={})


def ddp_by_hand(case: AuditCase) -> AuditResult:
    """Right: global denominator, times the world size that DDP divides away, reduced once."""
    rank, world_size = _ranks()
    assert case.assignment is not None
    model = case.build_model().to(case.dtype)
    total = sum(sum(label != -100 for label in row["labels"][1:]) for row in case.rows)
    shown = torch.zeros((), dtype=case.dtype)
    for part in case.assignment[rank]:
        loss, _ = _loss_sum(model, case, list(part))
        if part:
            (loss / total).backward()
        shown += loss.detach() / total
    gradients = {name: full_gradient(parameter) for name, parameter in model.named_parameters()}
    if world_size > 1:
        for value in (shown, *gradients.values()):
            dist.all_reduce(value)
    counts = {"source_tokens": sum(len(row["input_ids"]) for row in case.rows)}
    return AuditResult(loss=float(shown), gradients=gradients, counts=counts)


def counts_before_the_shift(case: AuditCase) -> AuditResult:
    """Loss and gradient are right, the displayed count is not."""
    result = ddp_by_hand(case)
    shown = sum(label != -100 for row in case.rows for label in row["labels"])
    return AuditResult(loss=result.loss, gradients=result.gradients, counts={"loss_tokens": shown})
