"""Experts over ranks: who holds what, rows that travel and come back, faults seen elsewhere."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers.integrations.moe import use_experts_implementation

from exactness.driving import build_window, decoder_layers, draw_documents, full_gradients
from isoloss import (
    Layout,
    Ledger,
    LossModel,
    PackedBatch,
    Step,
    Term,
    Topology,
    clip_grad_norm_,
    sum_gradients,
)
from isoloss.parallel.experts import find_experts, shard_experts
from isoloss.parallel.wrap import wrap_model
from isoloss.topology import expert_ranks
from laws.collectives import CollectiveCounter
from oracle.mixture import EXPERTS, build_moe
from oracle.models import build_model
from ranks import on_ranks, run_on_ranks

F64 = torch.float64


@pytest.mark.parametrize(
    ("shape", "ep_size"),
    [((1, 4, 1, 1, 1), 2), ((2, 2, 2, 1, 2), 4), ((2, 6, 1, 2, 1), 3), ((1, 8, 2, 2, 2), 8)],
)
def test_expert_ranks_hold_every_rank_once(shape: tuple[int, ...], ep_size: int) -> None:
    ranks = torch.arange(math.prod(shape)).view(shape)
    mesh = expert_ranks(ranks, ep_size)
    assert sorted(mesh.flatten().tolist()) == list(range(math.prod(shape)))
    assert mesh.shape == (shape[-1], math.prod(shape[:-1]) // ep_size, ep_size)
    inner = math.prod(shape[2:])
    for group in mesh.flatten(0, 1):
        data_ranks, others = (group // inner).tolist(), (group % inner).tolist()
        assert len(set(others)) == 1, "ranks along ep have the same place on cp, sp and tp"
        assert data_ranks == list(range(data_ranks[0], data_ranks[0] + ep_size)), "and are neighbours"
    for tensor_rank, plane in enumerate(mesh):
        assert {int(rank) % shape[-1] for rank in plane.flatten()} == {tensor_rank}


# -- one layer of experts by hand


@use_experts_implementation(has_gate=False)
class GainExperts(nn.Module):
    """Expert e multiplies by its gain."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.up_proj = nn.Parameter(torch.ones(config.num_experts, 1, 1, dtype=F64))
        self.down_proj = nn.Parameter(torch.ones(config.num_experts, 1, 1, dtype=F64))
        self.act_fn = nn.Identity()


class GainModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = GainExperts(SimpleNamespace(num_experts=2, _experts_implementation="eager"))
        self.chosen = 0


def gain_loss(model: GainModel, step: Step, batch: PackedBatch) -> Tensor:
    costs = batch.token_extras["cost"].unsqueeze(-1)
    chosen = torch.full((len(batch), 1), model.chosen)
    return step.add("text", model.experts(costs, chosen, torch.ones_like(costs)), batch)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("chosen", [0, 1])
def test_a52_expert_gradients_know_no_ep_size(wrapped: bool, chosen: int) -> None:
    """Costs [1, 3] on rank 0, [2, 2] on rank 1, one expert for all: 8 / 4 = 2 (wrong: 4). row 25"""

    def body() -> None:
        topology = Topology(ep_size=2)
        loss_model = LossModel(GainModel())
        loss_model.model.chosen = chosen
        outer: nn.Module = loss_model
        if wrapped:
            outer = wrap_model(loss_model, [], topology)
        else:
            shard_experts(loss_model, topology)
        gradients = sum_gradients(outer, topology)
        costs = torch.tensor([[1.0, 3.0], [2.0, 2.0]][dist.get_rank()], dtype=F64)
        targets = {"text": torch.ones(2, dtype=torch.int64)}
        batch = PackedBatch(targets["text"], targets, Layout([2]), token_extras={"cost": costs})
        ledger = Ledger([Term("text")], topology=topology)
        with ledger.step([batch], gradients=gradients) as step:
            for micro_batch in step:
                outer(step, micro_batch, gain_loss).backward()
        for gradient in full_gradients(loss_model.model).values():
            assert gradient.flatten().tolist() == [2.0 if expert == chosen else 0.0 for expert in range(2)]

    run_on_ranks(2, body)


@on_ranks(2)
def test_a53_the_norm_is_one_over_experts_and_dense_parameters() -> None:
    """Expert gradients of norm 3 on rank 0 and 4 on rank 1, dense 12: norm 13, factor 0.5 on both."""
    topology = Topology(ep_size=2)
    model = GainModel()
    model.dense = nn.Parameter(torch.zeros(1, dtype=F64))
    shard_experts(model, topology)
    mine = [3.0, 4.0][dist.get_rank()]
    model.dense.grad = torch.full((1,), 12.0, dtype=F64)
    model.experts.up_proj.grad = DTensor.from_local(
        torch.full((1, 1, 1), mine, dtype=F64), topology.ep_mesh, [Shard(0)]
    )
    norm = clip_grad_norm_(model, 6.5)
    assert norm.item() == pytest.approx(13.0, rel=1e-15)
    assert model.dense.grad.item() == pytest.approx(6.0, rel=1e-15)
    assert model.experts.up_proj.grad.to_local().item() == pytest.approx(mine / 2, rel=1e-15)


# -- the exchange


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_dispatched_experts_are_the_whole_experts(dtype: str) -> None:
    """Forward and backward of one layer, with transformers' eager and grouped form on each rank."""

    def body() -> None:
        topology = Topology(ep_size=2)
        precision = getattr(torch, dtype)
        implementation = "eager" if precision == F64 else "grouped_mm"
        tolerance = {"rtol": 1e-12, "atol": 1e-12} if precision == F64 else {"rtol": 2e-4, "atol": 1e-5}
        draw = torch.Generator().manual_seed(dist.get_rank())
        whole = find_experts(build_moe(experts_implementation=implementation).to(precision))[0]
        model = build_moe(experts_implementation=implementation).to(precision)
        shard_experts(model, topology)
        spread = find_experts(model)[0]
        for rows, highest in ((7, EXPERTS), (5, EXPERTS // 2), (1, 1)):  # also experts of one rank only
            hidden = torch.randn(rows, 32, generator=draw, dtype=precision)
            chosen = torch.randint(0, highest, (rows, 2), generator=draw)
            weights = torch.rand(rows, 2, generator=draw, dtype=precision)
            outcomes = []
            for experts in (whole, spread):
                inputs = [hidden.clone().requires_grad_(), weights.clone().requires_grad_()]
                output = experts(inputs[0], chosen, inputs[1])
                output.square().sum().backward()
                outcomes.append((output.detach(), inputs[0].grad, inputs[1].grad))
            for value, expected in zip(*outcomes[::-1], strict=True):
                torch.testing.assert_close(value, expected, **tolerance)
        for name, parameter in whole.named_parameters():
            dist.all_reduce(parameter.grad)
            gradient = spread.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(gradient, parameter.grad, **tolerance)

    run_on_ranks(2, body)


@on_ranks(2)
def test_collectives_of_a_layer_do_not_depend_on_the_routing() -> None:
    topology = Topology(ep_size=2)
    model = build_moe()
    shard_experts(model, topology)
    experts = find_experts(model)[0]
    for highest in (EXPERTS, 1):
        hidden = torch.randn(4, 32, dtype=F64, requires_grad=True)
        chosen = torch.randint(0, highest, (4, 2))
        with CollectiveCounter() as forward:
            output = experts(hidden, chosen, torch.ones(4, 2, dtype=F64))
        with CollectiveCounter() as backward:
            output.sum().backward()
        assert (forward.total, backward.total) == (3, 2)
        # a rank that received no row has zeros, not None: FSDP2 reduces on all ranks or on none
        assert all(parameter.grad is not None for parameter in experts.parameters())


@on_ranks(2)
def test_bfloat16_under_fsdp_is_near_float32() -> None:
    """The experts' unit leaves routing weights in float32, as a layer without it does."""
    topology = Topology(ep_size=2)
    documents = draw_documents(weighted=False)
    window = build_window(documents[dist.get_rank() :: 2], padded_length=64, channels=False)
    losses = []
    for bf16 in (False, True):
        loss_model = LossModel(build_moe(experts_implementation="grouped_mm").float())
        outer = wrap_model(loss_model, decoder_layers(loss_model.model), topology, bf16=bf16)
        gradients = sum_gradients(outer, topology)
        with Ledger([Term("text")], topology=topology).step([window], gradients=gradients) as step:
            for batch in step:
                outer(step, batch).backward()
        losses.append(step.metrics()["train/loss"])
        assert all(gradient.isfinite().all() for gradient in full_gradients(loss_model.model).values())
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert losses[1] != losses[0]


# -- what does not fit


@on_ranks(3)
def test_experts_that_do_not_divide_are_an_error() -> None:
    with pytest.raises(ValueError, match=f"ep_size 3 must divide .* has \\[{EXPERTS}\\]"):
        shard_experts(build_moe(), Topology(ep_size=3))


@on_ranks(2)
def test_a_dense_model_has_no_experts_to_spread() -> None:
    message = "ep_size 2 spreads experts over ranks, but Qwen3ForCausalLM has none .*; set ep_size to 1"
    with pytest.raises(ValueError, match=message):  # the user's model, not what wraps it
        shard_experts(LossModel(build_model()), Topology(ep_size=2))
    model = build_moe()
    shard_experts(model, Topology())
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@on_ranks(2)
def test_experts_are_spread_once_and_before_anything_else() -> None:
    topology = Topology(ep_size=2)
    model = build_moe()
    shard_experts(model, topology)
    held = [parameter.to_local().shape for parameter in find_experts(model)[0].parameters()]
    shard_experts(model, topology)
    assert [parameter.to_local().shape for parameter in find_experts(model)[0].parameters()] == held
    sharded = build_moe()
    fully_shard(sharded, mesh=topology.fsdp_mesh)
    with pytest.raises(ValueError, match="experts go over ep first"):
        shard_experts(sharded, topology)
