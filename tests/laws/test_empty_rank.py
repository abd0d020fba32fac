"""Law: a rank without a valid token changes nothing and hangs nothing."""

import math

import pytest
import torch
import torch.distributed as dist

from exactness.driving import (
    CHANNELS,
    build_window,
    draw_documents,
    full_gradients,
    has_targets,
    run_step,
    wrap,
)
from isoloss import PackedBatch
from laws.gain import different, gain_step
from oracle.models import build_model
from oracle.single_process import answer, worst_difference
from ranks import run_on_ranks

TOLERANCE = 1e-10


@pytest.mark.parametrize("idle", ["documents without targets", "an empty window", "no window"])
def test_an_idle_rank_changes_nothing(idle: str) -> None:
    """Each rank is the idle one in turn; `no window` is filled up by the step."""
    busy = [document for document in draw_documents(seed=4) if has_targets(document)]
    barren = [document for document in draw_documents(seed=4) if not has_targets(document)]
    documents = busy + (barren if idle.startswith("documents") else [])
    expected = answer(build_model(), documents, reduction="sample", num_channels=len(CHANNELS))

    def body() -> None:
        rank = dist.get_rank()
        for wrapper in ("plain", "ddp", "fsdp"):
            wrapped = wrap(build_model(), wrapper, 3)
            for idler in range(3):
                others = [place for place in range(3) if place != idler]
                if rank != idler:
                    windows = [build_window(busy[others.index(rank) :: 2], padded_length=80)]
                elif idle.startswith("documents"):
                    windows = [build_window(barren, padded_length=80)]
                else:
                    windows = [PackedBatch.empty(80)] if idle == "an empty window" else []
                metrics = run_step(wrapped, windows, reduction="sample")
                difference, where = worst_difference(full_gradients(wrapped.inner), expected.gradients)
                assert difference < TOLERANCE, (wrapper, idler, where)
                assert metrics["train/loss"] == pytest.approx(expected.loss, rel=TOLERANCE)
                assert metrics["documents"] == expected.documents

    run_on_ranks(3, body, timeout_s=60)


def test_mutant_idle_rank_in_the_mean_is_caught() -> None:
    """Rank means averaged over all ranks, the idle one's mean of nothing clamped to 0 / 1."""
    costs = ([2.0, 4.0], [6.0], [])

    def body() -> float:
        mine = costs[dist.get_rank()]
        own = torch.tensor(sum(mine) / max(len(mine), 1))
        dist.all_reduce(own)
        return own.item() / 3

    right = 4.0
    assert all(different(value, right) for value in run_on_ranks(3, body))

    def law() -> float:
        loss, gradient = gain_step([[costs[dist.get_rank()]]] if costs[dist.get_rank()] else [[]])
        assert math.isclose(loss, gradient)
        return loss

    assert run_on_ranks(3, law) == [right] * 3
