"""Law: a term without targets is exactly 0 with zero gradients, 0 / 0 included. Rows 2, 4, 5, 24."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from isoloss import Ledger, PackedBatch, Step, Term, sum_gradients
from laws.gain import Gain, build_topology, cost_window, run_windows
from ranks import run_on_ranks

TERMS = (Term("text"), Term("image", coefficient=0.5))


class TwoGains(nn.Module):
    """Each term has a gain of its own; `stray` is what the second one costs where it has no target."""

    def __init__(self, stray: float = 0.0) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.stray = stray

    def forward(self, step: Step, batch: PackedBatch) -> Tensor:
        costs = batch.token_extras["costs"]
        other = costs if "image" in batch.targets else torch.full_like(costs, self.stray)
        return step.add("text", self.gains[0] * costs, batch) + step.add(
            "image", self.gains[1] * other, batch
        )


def two_terms(windows: list[PackedBatch], model: nn.Module) -> tuple[dict[str, float], list[float]]:
    topology = build_topology("plain")
    ledger = Ledger(TERMS, topology=topology)
    with ledger.step(windows, gradients=sum_gradients(model, topology)) as step:
        for batch in step:
            model(step, batch).backward()
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    return step.metrics(), parameter.grad.tolist()


def test_a_term_that_no_batch_feeds_is_exactly_zero() -> None:
    metrics, gradients = two_terms([cost_window([[1.0, 3.0]]), cost_window([[5.0]])], TwoGains())
    assert (metrics["loss/text"], metrics["loss/image"], metrics["train/loss"]) == (3.0, 0.0, 3.0)
    assert gradients == [3.0, 0.0]
    assert metrics["targets/image"] == 0


def test_a_term_that_one_micro_batch_of_one_rank_feeds() -> None:
    def body() -> None:
        windows = [cost_window([[1.0]]), cost_window([[3.0]])]
        if dist.get_rank() == 1:
            windows[1] = cost_window([[4.0, 8.0]], terms=("text", "image"))
        metrics, gradients = two_terms(windows, TwoGains())
        assert (metrics["loss/text"], metrics["loss/image"]) == (17 / 5, 6.0)
        assert math.isclose(metrics["train/loss"], 17 / 5 + 0.5 * 6.0, rel_tol=1e-15)
        assert gradients == pytest.approx([17 / 5, 3.0], rel=1e-15)

    run_on_ranks(2, body)


def test_row_5_a_loss_without_a_denominator_is_an_error_on_every_rank() -> None:
    """It names the term, also where only another rank added the loss."""

    def body() -> None:
        model = TwoGains(stray=0.25 if dist.get_rank() == 1 else 0.0)
        with pytest.raises(ValueError, match="term 'image': it has no target.*absolute sum 0.25"):
            two_terms([cost_window([[1.0]])], model)

    run_on_ranks(2, body)


def test_row_24_a_term_left_out_is_an_error_at_the_first_step() -> None:
    def body() -> None:
        topology = build_topology("plain")
        ledger = Ledger(TERMS, topology=topology)
        gain = nn.Parameter(torch.ones(1, dtype=torch.float64))
        with pytest.raises(ValueError, match="term 'image'.*left out, recorded twice, or lost targets"):
            with ledger.step([cost_window([[1.0]], terms=("text", "image"))]) as step:
                for batch in step:
                    step.add("text", gain * batch.token_extras["costs"], batch)
                    if dist.get_rank() == 0:
                        step.add("image", gain * batch.token_extras["costs"], batch)

    run_on_ranks(2, body)


def test_row_24_a_term_recorded_twice_is_an_error() -> None:
    batch = cost_window([[1.0, 2.0]])
    with pytest.raises(ValueError, match="term 'text'.*weight 2, losses were recorded for 4"):
        with Ledger([Term("text")]).step([batch]) as step:
            for one in step:
                step.add(None, one.token_extras["costs"], one)
                step.add(None, one.token_extras["costs"], one)


@pytest.mark.parametrize("term", [Term("pairs", "group"), Term("class", "document")])
def test_terms_of_documents_and_groups_are_zero_without_targets(term: Term) -> None:
    losses = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    batch = cost_window([[None, None], [None]], terms=(term.name,))
    with Ledger([term]).step([batch]) as step:
        for one in step:
            add = step.add_groups if term.reduction == "group" else step.add_documents
            share = add(None, losses, one)
            share.backward()
    assert share.item() == step.metrics()["train/loss"] == 0.0
    assert losses.grad is not None and losses.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("via", ["add", "loss", "loss_from_logits"])
def test_targets_whose_weights_are_all_zero(via: str) -> None:
    """W is 0 although there are targets: zeros as well, and no error, since no loss was given by mistake."""
    batch = cost_window([[1.0, 3.0]], weights=[[0.0, 0.0]])
    for reduction in ("token", "sample", "square"):
        metrics, gradients = run_windows([batch], module=Gain(via), terms=[Term("text", reduction)])
        assert metrics["train/loss"] == gradients["gain"].item() == 0.0
        assert metrics["tokens/loss"] == 2


@pytest.mark.parametrize("reduction", ["token", "sample", "square"])
def test_weights_without_any_target(reduction: str) -> None:
    """A rank whose only window has weights and no target counts in the same dtype as the others."""

    def body() -> None:
        window = [cost_window([[2.0]], sources=[0]), cost_window([[None]], sources=[0], weights=[[3.0]])]
        metrics, gradients = run_windows(
            [window[dist.get_rank()]], terms=[Term("text", reduction)], channels=["web"]
        )
        assert metrics["train/loss"] == metrics["channel_loss/web"] == gradients["gain"].item() == 2.0

    run_on_ranks(2, body)


def test_row_4_denominators_end_with_the_step() -> None:
    """Nothing stale can be read after the step, after an exception, or by an evaluation."""
    ledger = Ledger([Term("text")])
    batch = cost_window([[1.0, 3.0]])
    losses = torch.tensor([1.0, 3.0])
    with ledger.step([batch]) as step:
        for one in step:
            step.add(None, losses, one)
    with pytest.raises(RuntimeError, match="this step is not open"):
        step.add(None, losses, batch)
    failed = ledger.step([batch])
    with pytest.raises(KeyError), failed:
        raise KeyError("data")
    for use in (lambda: failed.add(None, losses, batch), failed.__enter__, lambda: next(iter(failed))):
        with pytest.raises(RuntimeError):
            use()
    for use in (failed.metrics, lambda: failed.has_more, lambda: failed.record):
        with pytest.raises(RuntimeError):
            use()
    unopened = ledger.step([batch])
    with pytest.raises(RuntimeError, match="this step is not open"):
        unopened.add(None, losses, batch)
    # the evaluation of another amount of data has its own denominator
    with torch.no_grad(), ledger.step([cost_window([[8.0]])], training=False) as step:
        for one in step:
            step.add(None, torch.tensor([8.0]), one)
    assert step.metrics()["eval/loss"] == 8.0


def test_mutant_plain_division_is_caught() -> None:
    """A sum over W without the guard is not a number as soon as W is 0."""
    gain = torch.ones(1, requires_grad=True)
    share = (gain * torch.zeros(3)).sum() / torch.zeros(())
    share.backward()
    assert gain.grad is not None and share.isnan() and gain.grad.isnan()
