"""Cases A30 to A33: nothing to score. Rows 2 and 5."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from isoloss import Layout, Ledger, PackedBatch, Step, Term, sum_gradients
from laws.gain import Gain, build_topology, check_gain, cost_window, run_windows, whole, wrap_module
from ranks import run_on_ranks


class Head(nn.Module):
    """A head on given hidden states, through the fused loss with the given options or from full logits."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 3).double()
        self.head = nn.Linear(3, 5).double()
        self.options = options

    def forward(self, step: Step, batch: PackedBatch) -> Tensor:
        hidden = self.body(batch.token_extras["hidden"])
        if self.options.get("backend") == "logits":
            return step.loss_from_logits(self.head(hidden), batch)
        return step.loss(hidden, self.head.weight, batch, bias=self.head.bias, **self.options)


def hidden_window(targets: list[int], seed: int = 0) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    return PackedBatch(
        torch.zeros(len(targets), dtype=torch.int64),
        {"text": torch.tensor(targets)},
        Layout([len(targets)]),
        token_extras={"hidden": torch.randn(len(targets), 3, generator=generator, dtype=torch.float64)},
    )


BACKENDS = [{"backend": "logits"}, {"backend": "reference"}, {"backend": "chunked"}, {"chunk_size": 1}]


@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp"])
def test_a30_one_rank_without_targets(wrapper: str) -> None:
    def body() -> None:
        costs: list[float | None] = [[None] * 6, [1.0, 5.0]][dist.get_rank()]
        check_gain([[costs]], 3.0, wrapper=wrapper)
        for options in BACKENDS:
            _, gradients = run_windows(
                [hidden_window([[-100] * 4, [1, 2, 3]][dist.get_rank()])],
                module=Head(**options),
                wrapper=wrapper,
            )
            assert all(values.isfinite().all() and values.any() for values in gradients.values())

    run_on_ranks(2, body)


@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp"])
def test_a30_a_step_without_targets_is_exactly_zero(wrapper: str) -> None:
    """Row 5: zeros, not None and not NaN; the counters do not move."""

    def body() -> None:
        for options in BACKENDS:
            metrics, gradients = run_windows(
                [hidden_window([-100] * 4), hidden_window([-100])], module=Head(**options), wrapper=wrapper
            )
            assert metrics["train/loss"] == metrics["tokens/loss"] == metrics["tokens/loss_total"] == 0
            assert metrics["tokens/source"] == 10
            assert all(not values.any() for values in gradients.values())  # NaN would be True
            assert not any(math.isnan(value) for value in metrics.values())
        for via in ("add", "loss", "loss_from_logits"):
            metrics, gradients = run_windows([cost_window([[None] * 3])], module=Gain(via), wrapper=wrapper)
            assert metrics["train/loss"] == gradients["gain"].item() == 0.0

    run_on_ranks(2, body)


def test_a31_an_empty_micro_batch_is_not_in_the_divisor() -> None:
    for middle in ([[None, None]], []):
        check_gain([[[2.0]], middle, [[4.0]]], 3.0, reduction="sample")
        check_gain([[[2.0]], middle, [[4.0]]], 3.0, reduction="square")


@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp"])
def test_a32_an_empty_micro_batch_on_one_rank_does_not_hang(wrapper: str) -> None:
    def body() -> int:
        first: list[float | None] = [[1.0], [None, None]][dist.get_rank()]
        second = [[2.0], [6.0]][dist.get_rank()]
        check_gain([[first], [second]], 3.0, wrapper=wrapper)
        passes = []
        run_windows(
            [cost_window([first]), cost_window([second])],
            wrapper=wrapper,
            backward=lambda share: (passes.append(1), share.backward())[1],
        )
        return len(passes)

    assert run_on_ranks(2, body, timeout_s=30) == [2, 2]


def test_a33_not_a_number_at_a_masked_slot() -> None:
    losses = torch.tensor([1.0, math.nan, 3.0], dtype=torch.float64, requires_grad=True)

    def step_on(targets: list[int]) -> tuple[Tensor, float]:
        losses.grad = None
        batch = PackedBatch(torch.zeros(3, dtype=torch.int64), {"text": torch.tensor(targets)}, Layout([3]))
        with Ledger([Term("text")]).step([batch]) as step:
            for one in step:
                step.add(None, losses, one).backward()
        assert losses.grad is not None
        return losses.grad, step.metrics()["train/loss"]

    gradient, loss = step_on([0, -100, 0])
    assert (gradient.tolist(), loss) == ([0.5, 0.0, 0.5], 2.0)
    _, loss = step_on([0, 0, 0])
    assert math.isnan(loss), "at a target it must show"


@pytest.mark.parametrize("options", [{"backend": "reference"}, {"backend": "chunked"}, {"chunk_size": 1}])
def test_a33_hidden_states_of_a_masked_slot_reach_nothing(options: dict[str, Any]) -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 5).double()

        def forward(self, step: Step, batch: PackedBatch) -> Tensor:
            return step.loss(
                batch.token_extras["hidden"], self.head.weight, batch, bias=self.head.bias, **options
            )

    batch = hidden_window([1, -100, 2])
    batch.token_extras["hidden"][1] = math.nan
    metrics, gradients = run_windows([batch], module=Given())
    assert math.isfinite(metrics["train/loss"])
    assert all(values.isfinite().all() for values in gradients.values())


def test_a33_logits_of_a_masked_slot_reach_nothing() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64)
    logits[1] = math.nan
    logits.requires_grad_()
    batch = hidden_window([1, -100, 2])
    with Ledger([Term("text")]).step([batch]) as step:
        for one in step:
            step.loss_from_logits(logits, one).backward()
    assert logits.grad is not None and logits.grad.isfinite().all() and not logits.grad[1].any()
    assert math.isfinite(step.metrics()["train/loss"])


def test_a32_without_the_last_backward_the_step_says_so() -> None:
    """A rank that skips its micro-batch would leave the others waiting: an error that says what to do."""

    def body() -> None:
        topology = build_topology("ddp")
        model = Gain()
        outer = wrap_module(model, "ddp", topology)
        ledger = Ledger([Term("text")], topology=topology)
        with pytest.raises(RuntimeError, match="no backward pass ran for the last micro-batch"):
            with ledger.step([cost_window([[1.0]])], gradients=sum_gradients(outer, topology)) as step:
                for batch in step:
                    outer(step, batch)
        # the next step is a fresh one
        model = Gain()
        outer = wrap_module(model, "ddp", topology)
        with ledger.step([cost_window([[3.0]])], gradients=sum_gradients(outer, topology)) as step:
            for batch in step:
                outer(step, batch).backward()
        assert step.metrics()["train/loss"] == whole(model.gain.grad).item() == 3.0

    run_on_ranks(1, body)
