"""Cases A34 and A35: ranks that hold different numbers of batches, or different sources. Rows 2, 21."""

import math

import pytest
import torch
import torch.distributed as dist

from isoloss import Ledger, PackedBatch, Term
from laws.gain import Gain, build_topology, cost_window, run_windows, wrap_module
from ranks import run_on_ranks


@pytest.mark.parametrize(
    "data", [([[1.0], [1.0], [4.0]], [[2.0], [2.0]]), ([[1.0], [1.0], [4.0], [2.0], [2.0]], [])]
)
@pytest.mark.parametrize("wrapper", ["plain", "ddp"])
def test_a34_eval_batches_of_unequal_number(wrapper: str, data: tuple[list[list[float]], ...]) -> None:
    """All five are evaluated; a rank without any takes part."""

    def body() -> None:
        topology = build_topology(wrapper)
        outer = wrap_module(Gain(), wrapper, topology)
        ledger = Ledger([Term("text")], topology=topology)
        windows = [cost_window([costs]) for costs in data[dist.get_rank()]]
        with torch.no_grad(), ledger.step(windows, training=False) as step:
            for batch in step:
                outer(step, batch)
        metrics = step.metrics()
        assert (metrics["eval/loss"], metrics["eval/tokens/loss"]) == (2.0, 5)

    run_on_ranks(2, body, timeout_s=30)


def test_a34_under_fsdp_the_shorter_rank_is_filled_up() -> None:
    """FSDP2 gathers in every forward, so all ranks run equally many."""

    def body() -> None:
        topology = build_topology("fsdp")
        outer = wrap_module(Gain(), "fsdp", topology)
        ledger = Ledger([Term("text")], topology=topology)
        data = [[[1.0], [1.0], [4.0]], [[2.0], [2.0]]][dist.get_rank()]
        windows = [cost_window([costs]) for costs in data]
        windows += [PackedBatch.empty(4)] * (3 - len(windows))
        with torch.no_grad(), ledger.step(windows, training=False) as step:
            for batch in step:
                outer(step, batch)
        metrics = step.metrics()
        assert (metrics["eval/loss"], metrics["eval/tokens/loss"]) == (2.0, 5)

    run_on_ranks(2, body, timeout_s=30)


def test_a35_ranks_with_different_channels() -> None:
    """Values never mix, and every rank shows the same keys."""

    def body() -> dict[str, float]:
        windows = [
            [cost_window([[1.0, 3.0]], sources=[0])],
            [cost_window([[2.0, 3.0, 4.0]], sources=[1])],
            [],
        ][dist.get_rank()]
        metrics, _ = run_windows(windows, channels=["a", "b"])
        return metrics

    for metrics in run_on_ranks(3, body, timeout_s=30):
        assert (metrics["channel_loss/a"], metrics["channel_tokens/a"]) == (2.0, 2)
        assert (metrics["channel_loss/b"], metrics["channel_tokens/b"]) == (3.0, 3)
        assert math.isclose(metrics["train/loss"], 13 / 5, rel_tol=1e-12)


def test_a35_ranks_with_different_terms() -> None:
    """Row 2: a term that only one rank feeds, and one that none feeds."""
    terms = [Term("text"), Term("image"), Term("audio")]

    class EveryTerm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, step, batch):  # type: ignore[no-untyped-def]
            return sum(
                step.add(term.name, self.gain * batch.token_extras["costs"], batch)
                if term.name in batch.targets
                else step.add(term.name, self.gain * torch.zeros(len(batch)), batch)
                for term in terms
            )

    def body() -> list[str]:
        held = [["text", "image"], ["text"]][dist.get_rank()]
        window = cost_window([[[1.0, 3.0], [8.0]][dist.get_rank()]], terms=held)
        metrics, gradients = run_windows([window], module=EveryTerm(), terms=terms)
        assert (metrics["loss/text"], metrics["loss/image"], metrics["loss/audio"]) == (4.0, 2.0, 0.0)
        assert metrics["train/loss"] == gradients["gain"].item() == 6.0
        return sorted(metrics)

    first, second = run_on_ranks(2, body, timeout_s=30)
    assert first == second
