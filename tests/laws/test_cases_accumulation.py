"""Cases A01 to A05 and A07: gradient accumulation. Rows 1, 23."""

import math

import pytest
import torch
from torch import Tensor

from isoloss import Layout, Ledger, PackedBatch, Step, Term
from laws.gain import Gain, check_gain, cost_window, different, gain_step, run_windows
from ranks import run_on_ranks


def test_a01_mean_of_micro_batch_means() -> None:
    check_gain([[[4.0]], [[1.0, 1.0, 1.0]]], 1.75)


def test_a01_mutants_are_caught() -> None:
    """A loop that divides each micro-batch by its own count, then by the number of micro-batches or not."""
    for divisor, wrong in ((2, 2.5), (1, 5.0)):
        gradient = torch.zeros(())
        for costs in ([4.0], [1.0, 1.0, 1.0]):
            loss, _ = gain_step([[costs]])  # a step of its own: the mean over one micro-batch
            gradient += loss / divisor
        assert gradient == wrong and different(wrong, 1.75)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_a02_divided_by_the_window_count_once(accumulation: int) -> None:
    per_window = 4 // accumulation
    check_gain([[[2.0] * 5] * per_window] * accumulation, 2.0)


def test_a03_short_last_window() -> None:
    micro_batches = [cost_window([[3.0, 5.0]]) for _ in range(4)] + [cost_window([[2.0, 2.0]])]
    model = Gain()
    ledger = Ledger([Term("text")])
    updates = []
    for start in range(0, 5, 4):
        model.zero_grad()
        with ledger.step(micro_batches[start : start + 4]) as step:
            for batch in step:
                model(step, batch).backward()
        assert model.gain.grad is not None
        updates.append((step.metrics()["train/loss"], model.gain.grad.item()))
    assert updates == [(4.0, 4.0), (2.0, 2.0)]


def test_a04_weighted_by_tokens_not_by_samples() -> None:
    check_gain([[[1.0] * 8], [[5.0], [5.0], [5.0]]], 23 / 11)
    # by samples each document counts alike, in whatever micro-batch it stands
    check_gain([[[1.0] * 8], [[5.0], [5.0], [5.0]]], (1 + 15) / 4, reduction="sample")


class Smoothed(torch.nn.Module):
    """Logits from the batch, times a gain of 1, through the fused loss with label smoothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, step: Step, batch: PackedBatch) -> Tensor:
        logits = self.gain * batch.token_extras["logits"]
        return step.loss(logits, torch.eye(2, dtype=torch.float64), batch, label_smoothing=0.1)


def test_a05_label_smoothing_uses_the_window_count() -> None:
    windows = [
        PackedBatch(
            torch.zeros(len(logits), dtype=torch.int64),
            {"text": torch.zeros(len(logits), dtype=torch.int64)},
            Layout([len(logits)]),
            token_extras={"logits": torch.tensor(logits, dtype=torch.float64)},
        )
        for logits in ([[0.0, math.log(3)]], [[0.0, 0.0]] * 3)
    ]
    metrics, gradients = run_windows(windows, module=Smoothed())
    first = 0.9 * math.log(4) + 0.05 * (math.log(4) + math.log(4 / 3))
    expected = (first + 3 * math.log(2)) / 4
    assert math.isclose(expected, 0.852701, abs_tol=1e-6)
    assert math.isclose(metrics["train/loss"], expected, rel_tol=1e-12)
    # d/dz of the first target is softmax - (0.95, 0.05) = (-0.7, 0.7); of (0, 0) nothing, as it is times 0
    assert math.isclose(gradients["gain"].item(), 0.7 * math.log(3) / 4, rel_tol=1e-12)


@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a07_no_engine_divides_behind_the_back(wrapper: str, ranks: int) -> None:
    """One window of 8, eight windows of one, with and without a wrapper that averages by default."""

    def body() -> None:
        place = torch.distributed.get_rank()
        mine = [float(cost) for cost in range(1, 9)][place::ranks]
        check_gain([[mine]], 4.5, wrapper=wrapper)
        check_gain([[[cost]] for cost in mine], 4.5, wrapper=wrapper)

    run_on_ranks(ranks, body)
