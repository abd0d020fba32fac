"""isoloss: the loss path of distributed language-model training, exact in every layout.

A training loop of one's own needs these lines and no others:

    model = isoloss.LossModel(model)                 # then DDP(model) or fully_shard(...)
    gradients = isoloss.sum_gradients(model, topology)
    ledger = isoloss.Ledger([isoloss.Term("text")], channels=["code", "docs"], topology=topology)
    with ledger.step(micro_batches, gradients=gradients) as step:
        for batch in step:
            model(step, batch).backward()
    metrics = step.metrics()
"""

from typing import TYPE_CHECKING, Any

from isoloss.batch.document import IGNORE_INDEX, Document
from isoloss.batch.layout import Layout
from isoloss.batch.packed_batch import PackedBatch
from isoloss.batch.packing import pack
from isoloss.batch.packing_record import PackingRecord
from isoloss.batch.targets import shift_targets
from isoloss.losses.linear_cross_entropy import (
    LinearCrossEntropyOutput,
    TeacherLogits,
    TeacherTopK,
    linear_cross_entropy,
    linear_kl_divergence,
    linear_log_probs,
)
from isoloss.losses.policy import PolicyOutput, clipped_policy_losses
from isoloss.losses.preference import preference_losses
from isoloss.losses.router import balancing_loss, router_z_loss
from isoloss.objectives.classification import Classification, label_documents
from isoloss.objectives.distillation import Distillation
from isoloss.objectives.loss_model import LossModel
from isoloss.objectives.multi_token import MultiToken, add_depths, look_ahead
from isoloss.objectives.policy_gradient import PolicyGradient
from isoloss.objectives.preference import Preference
from isoloss.parallel.routers import RouterLosses, update_expert_bias
from isoloss.reduction.gradients import GradientSum, clip_grad_norm_, sum_gradients
from isoloss.reduction.ledger import Ledger
from isoloss.reduction.step import Step
from isoloss.reduction.terms import Term
from isoloss.topology import Topology

if TYPE_CHECKING:
    from isoloss.audit.case import AuditCase, AuditResult
    from isoloss.train.recipe import Recipe
    from isoloss.train.trainer import Trainer

__all__ = [
    "IGNORE_INDEX",
    "AuditCase",
    "AuditResult",
    "Classification",
    "Distillation",
    "Document",
    "GradientSum",
    "Layout",
    "Ledger",
    "LinearCrossEntropyOutput",
    "LossModel",
    "MultiToken",
    "PackedBatch",
    "PackingRecord",
    "PolicyGradient",
    "PolicyOutput",
    "Preference",
    "Recipe",
    "RouterLosses",
    "Step",
    "TeacherLogits",
    "TeacherTopK",
    "Term",
    "Topology",
    "Trainer",
    "add_depths",
    "balancing_loss",
    "label_documents",
    "clip_grad_norm_",
    "clipped_policy_losses",
    "linear_cross_entropy",
    "linear_kl_divergence",
    "linear_log_probs",
    "look_ahead",
    "pack",
    "preference_losses",
    "router_z_loss",
    "shift_targets",
    "sum_gradients",
    "update_expert_bias",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # The trainer needs the extra "train"; the library for loops of one's own needs torch alone.
    if name in ("AuditCase", "AuditResult"):
        from isoloss.audit.case import AuditCase, AuditResult

        return AuditCase if name == "AuditCase" else AuditResult
    if name == "Recipe":
        from isoloss.train.recipe import Recipe

        return Recipe
    if name == "Trainer":
        from isoloss.train.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'isoloss' has no attribute {name!r}")
