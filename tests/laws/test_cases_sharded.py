"""Cases A14, A20 to A24, A28 and A29 on models without attention: targets first, shards later."""

import math

import pytest
import torch
from torch import nn

from isoloss import Ledger, PackedBatch, Term, Topology, sum_gradients
from laws.gain import Gain, Lookup, cost_window, lookup_window, whole
from ranks import run_on_ranks


def sharded_step(
    topology: Topology, windows: list[PackedBatch], module: nn.Module, channels: tuple[str, ...] = ()
) -> tuple[dict[str, float], dict[str, torch.Tensor], list[PackedBatch]]:
    ledger = Ledger([Term("text")], channels=channels, topology=topology)
    shards = []
    with ledger.step(windows, gradients=sum_gradients(module, topology)) as step:
        for batch in step:
            shards.append(batch)
            module(step, batch).backward()
    return step.metrics(), {name: whole(p.grad) for name, p in module.named_parameters()}, shards


def test_a14_tensor_ranks_share_one_batch() -> None:
    def body() -> None:
        topology = Topology(dp_shard_size=2, tp_size=4)
        costs = [[1.0, 3.0], [2.0] * 4][topology.data_rank]
        metrics, gradients, _ = sharded_step(topology, [cost_window([costs])], Gain())
        assert metrics["tokens/loss"] == 6
        assert metrics["train/loss"] == gradients["gain"].item() == 2.0

    run_on_ranks(8, body)


def test_a20_the_target_at_a_shard_boundary() -> None:
    def body() -> None:
        topology = Topology(sp_size=2)
        window = lookup_window([list(range(1, 9))])
        metrics, gradients, (shard,) = sharded_step(topology, [window], Lookup(16))
        assert shard.targets["text"].tolist() == [[2, 3, 4, 5], [6, 7, 8, -100]][topology.sp_rank]
        assert metrics["tokens/loss"] == 7
        assert math.isclose(gradients["table"][4, 5].item(), -(15 / 16) / 7, rel_tol=1e-12)

    run_on_ranks(2, body)


def test_a21_zigzag_shards() -> None:
    def body() -> None:
        topology = Topology(cp_size=2)
        metrics, gradients, (shard,) = sharded_step(topology, [lookup_window([list(range(8))])], Lookup(16))
        assert shard.targets["text"].tolist() == [[1, 2, 7, -100], [3, 4, 5, 6]][topology.cp_rank]
        assert metrics["tokens/loss"] == 7
        assert math.isclose(gradients["table"][1, 2].item(), -(15 / 16) / 7, rel_tol=1e-12)

    run_on_ranks(2, body)


@pytest.mark.parametrize(
    ("axis", "ranks", "costs", "expected"),
    [
        ("sp_size", 4, [3.0] * 100, 3.0),  # A22
        ("sp_size", 4, [2.0] * 15 + [None], 2.0),  # A23
        ("sp_size", 2, [6.0] + [None] * 7, 6.0),  # A24 (a)
        ("sp_size", 2, [6.0, None, None, None, 2.0, 2.0, 2.0, None], 3.0),  # A24 (b)
        ("cp_size", 2, [6.0, None, 2.0, 2.0, 2.0, None, None, None], 3.0),  # A24 (b), zigzag
        ("cp_size", 2, [2.0] * 3 + [None] * 8 + [2.0] * 5, 2.0),  # A29
    ],
)
def test_a22_a23_a24_a29_shards_have_no_denominator_of_their_own(
    axis: str, ranks: int, costs: list[float | None], expected: float
) -> None:
    def body() -> None:
        topology = Topology(**{axis: ranks})
        for training in (True, False):
            ledger = Ledger([Term("text")], topology=topology)
            model = Gain()
            gradients = sum_gradients(model, topology) if training else None
            with ledger.step([cost_window([costs])], gradients=gradients, training=training) as step:
                for batch in step:
                    share = model(step, batch)
                    if training:
                        share.backward()
            metrics = step.metrics()
            prefix = "" if training else "eval/"
            assert math.isclose(metrics["train/loss" if training else "eval/loss"], expected, rel_tol=1e-12)
            assert metrics[f"{prefix}tokens/loss"] == sum(cost is not None for cost in costs)
            if training:
                assert math.isclose(whole(model.gain.grad).item(), expected, rel_tol=1e-12)

    run_on_ranks(ranks, body)


def test_a28_a_shard_without_targets_shows_the_same_keys() -> None:
    def body() -> dict[str, float]:
        topology = Topology(cp_size=2)
        costs: list[float | None] = [None, None, 1.0, 3.0, None, None, None, None]
        metrics, _, (shard,) = sharded_step(
            topology, [cost_window([costs], sources=[0])], Gain(), channels=("chat",)
        )
        held = int((shard.targets["text"] != -100).sum())
        assert held == [0, 2][topology.cp_rank]
        return metrics

    first, second = run_on_ranks(2, body)
    assert first == second
    assert (first["channel_loss/chat"], first["channel_tokens/chat"], first["train/loss"]) == (2.0, 2, 2.0)
