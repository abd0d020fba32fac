"""Tensor parallelism against the oracle: whole heads, columns and vocabulary rows on each of the ranks.

Loss, every gradient element, channels and counters, alone and together with FSDP2, HSDP, sequence and context
parallelism. Rows 8, 16, 18.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from exactness import test_moe as moe
from exactness.driving import (
    CHANNELS,
    Wrapped,
    compare,
    full_gradients,
    run_step,
)
from exactness.test_sequence_context import ALIGNMENT, WINDOW, draw_long_documents, own_windows
from isoloss import LossModel, Topology, sum_gradients
from isoloss.parallel.wrap import wrap_model
from oracle.models import build_model, decoder_layers
from oracle.single_process import Answer, aligned_tokens, answer
from ranks import run_on_ranks

TOPOLOGIES: dict[str, tuple[int, dict[str, int]]] = {
    "tp2": (2, {"tp_size": 2}),
    "tp4": (4, {"tp_size": 4}),
    "dp2tp2": (4, {"tp_size": 2}),
    "dp2tp2-replicated": (4, {"dp_replicate_size": 2, "tp_size": 2}),
    "tp2sp2": (4, {"tp_size": 2, "sp_size": 2}),
    "tp2cp2": (4, {"tp_size": 2, "cp_size": 2}),
    "dp2cp2tp2": (8, {"tp_size": 2, "cp_size": 2}),
    "hsdp2x2tp2": (8, {"tp_size": 2, "dp_replicate_size": 2}),
}
"""name -> (ranks, sizes besides dp_shard)"""

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-tied": ("qwen3-tied", {}),
    "qwen3-untied": ("qwen3-untied", {}),
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2-bias", {}),
    # what no number of ranks divides
    "uneven": ("qwen3-untied", {"vocab_size": 67, "intermediate_size": 51}),
    "uneven-tied": ("qwen3-tied", {"vocab_size": 67, "intermediate_size": 51}),
}


def build(kind: str) -> Any:
    """With a key head for each of four tensor ranks."""
    name, options = KINDS[kind]
    return build_model(name, num_key_value_heads=4, **options)


@functools.cache
def oracle(kind: str, reduction: str) -> Answer:
    return answer(build(kind), draw_long_documents(), reduction=reduction, num_channels=len(CHANNELS))


@dataclass(frozen=True)
class Configuration:
    topology: str
    kind: str
    accumulation: int
    reduction: str


ALL = tuple(itertools.product((1, 3), ("token", "sample", "square")))


def configurations(ranks: int) -> Iterator[Configuration]:
    """Qwen3 with a tied head goes through everything, the others through a part."""
    names = [name for name, (size, _) in TOPOLOGIES.items() if size == ranks]
    for name, kind in itertools.product(names, KINDS):
        if kind == "qwen3-tied":
            steps = ALL if name in ("tp2", "tp4", "dp2tp2", "tp2sp2") else ((1, "token"), (3, "square"))
        elif kind == "qwen3-untied":
            steps = ((1, "sample"), (3, "token")) if ranks < 8 else ((3, "token"),)
        else:
            steps = ((3, "square"),) if name in ("tp2", "tp4", "dp2tp2") or kind == "uneven-tied" else ()
        for accumulation, reduction in steps:
            yield Configuration(name, kind, accumulation, reduction)


def run_configurations(chosen: list[Configuration], answers: dict[tuple[str, str], Answer]) -> list[str]:
    failures = []
    documents = draw_long_documents()
    for (name, kind), group in itertools.groupby(chosen, key=lambda one: (one.topology, one.kind)):
        topology = Topology(**TOPOLOGIES[name][1])
        inner = build(kind)
        outer = wrap_model(LossModel(inner), decoder_layers(inner), topology)
        wrapped = Wrapped(inner, outer, topology, sum_gradients(outer, topology))
        for one in group:
            windows = own_windows(
                documents, topology, one.accumulation, alignment=ALIGNMENT, padded_length=WINDOW
            )
            metrics = run_step(wrapped, windows, reduction=one.reduction)
            differences = compare(
                metrics,
                full_gradients(inner),
                answers[one.kind, one.reduction],
                aligned=aligned_tokens(documents, ALIGNMENT),
                physical=WINDOW * topology.data_size * one.accumulation,
            )
            failures += [f"{one}: {difference}" for difference in differences]
    return failures


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_row_8_tensor_ranks_give_the_answer_of_the_oracle(ranks: int) -> None:
    """Rows 8, 16 and 18."""
    chosen = list(configurations(ranks))
    answers = {(one.kind, one.reduction): oracle(one.kind, one.reduction) for one in chosen}
    for rank, failures in enumerate(run_on_ranks(ranks, run_configurations, chosen, answers, timeout_s=240)):
        assert not failures, f"rank {rank}: {len(failures)} differences\n" + "\n".join(failures[:20])


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(2, {"tp_size": 2}), (4, {"tp_size": 2}), (4, {"tp_size": 2, "ep_size": 2})]
)
def test_mixtures_of_experts_on_tensor_ranks(ranks: int, sizes: dict[str, int]) -> None:
    """Rows 25 and 26: router losses, expert counts, every gradient; experts cut, or whole ones over ep.

    Mixtral without ep stays out: its routing weights are float32 in a float64 model, and the ranks' parts of
    their gradient are rounded before the sum (1e-7 of the embedding's gradient).
    """
    chosen = [
        moe.Case(kind, tuple(sizes.items()), True, accumulation, counts, empty_rank=False)
        for kind, accumulation, counts in (
            ("qwen3-moe", 3, "previous_step"),
            ("qwen3-moe-idle", 1, "micro_batch"),
            *((("mixtral", 3, "window"),) if "ep_size" in sizes else ()),
        )
    ]
    answers = {case: moe.answers_of(case, ranks) for case in chosen}
    for rank, failures in enumerate(run_on_ranks(ranks, moe.run_cases, chosen, answers, ranks)):
        assert not failures, f"rank {rank}:\n" + "\n".join(failures[:20])
