"""Projection and cross entropy in one pass, with the loss of each token; level 0: torch only."""

from isoloss.losses.linear_cross_entropy.chunked import chunk_rows
from isoloss.losses.linear_cross_entropy.interface import Backend, linear_cross_entropy
from isoloss.losses.linear_cross_entropy.kl_divergence import (
    TeacherLogits,
    TeacherTopK,
    linear_kl_divergence,
)
from isoloss.losses.linear_cross_entropy.log_probs import linear_log_probs
from isoloss.losses.linear_cross_entropy.problem import LinearCrossEntropyOutput, VocabularyShard

__all__ = [
    "Backend",
    "LinearCrossEntropyOutput",
    "TeacherLogits",
    "TeacherTopK",
    "VocabularyShard",
    "chunk_rows",
    "linear_cross_entropy",
    "linear_kl_divergence",
    "linear_log_probs",
]
