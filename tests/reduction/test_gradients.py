"""Gradients are summed once a step, and clipped by the norm of the whole, on real gloo meshes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from isoloss import Layout, Ledger, PackedBatch, Term, Topology, clip_grad_norm_, sum_gradients
from isoloss.reduction import gradients as gradients_module
from ranks import on_ranks

F64 = torch.float64


class Gain(nn.Module):
    """Losses of a micro-batch are a weight times its costs; both inside the forward, as LossModel does."""

    def __init__(self, dtype=F64):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))
        self.fixed = nn.Parameter(torch.ones(1, dtype=dtype), requires_grad=False)

    def forward(self, step, batch, costs):
        return step.add(None, self.weight * self.fixed * costs, batch)


def window(size):
    return PackedBatch(torch.arange(size), {"text": torch.ones(size, dtype=torch.int64)}, Layout([size]))


def wrap(kind, model, topology):
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=topology.loss_group)
    return fully_shard(model, mesh=topology.fsdp_mesh) if kind == "fsdp2" else model


def whole(parameter):
    gradient = parameter.grad
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).tolist()


# -- sums


@on_ranks(2)
def test_row_23_row_25_plain_parameters_are_summed_in_one_collective_per_dtype():
    """row 23, row 25: frozen ones stay out, one without a gradient on this rank takes part with zeros."""
    rank = dist.get_rank()
    model = nn.Module()
    for name, dtype in (("a", F64), ("b", torch.float32), ("c", F64), ("frozen", F64), ("later", F64)):
        model.register_parameter(name, nn.Parameter(torch.zeros(2, dtype=dtype)))
    model.frozen.requires_grad_(False)
    model.later.requires_grad_(False)
    gradients = sum_gradients(model, Topology())
    for trains_later in (False, True):
        model.later.requires_grad_(trains_later)
        for name in "ab":
            parameter = model.get_parameter(name)
            parameter.grad = torch.full_like(parameter, 1.0 + rank)
        model.c.grad = torch.full_like(model.c, 5.0) if rank else None
        model.later.grad = torch.full_like(model.later, 3.0) if trains_later else None
        gradients.begin()
        with CommDebugMode() as communication:
            gradients.finish()
        gradients.end()
        assert communication.get_total_counts() == 2
        assert model.a.grad.tolist() == model.b.grad.tolist() == [3.0, 3.0]
        assert model.c.grad.tolist() == [5.0, 5.0]
        assert model.frozen.grad is None
        assert trains_later is False or model.later.grad.tolist() == [6.0, 6.0]


@on_ranks(3)
def test_gradients_below_32_bits_are_summed_in_float32():
    """bfloat16 has 8 bits: 256 + 1 + 1 added there is 256, in float32 it is 258."""
    mine = torch.tensor([256.0, 1.0, 1.0])[dist.get_rank()]
    for kind in ("plain", "ddp"):
        model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        topology = Topology(dp_replicate_size=3)
        wrapped = wrap(kind, model, topology)
        gradients = sum_gradients(wrapped, topology)
        gradients.begin()
        gradients.synchronise(True)
        loss = wrapped(mine.reshape(1, 1).bfloat16()).sum()
        loss.register_hook(lambda _, gradients=gradients: gradients.saw_backward(1))
        loss.backward()
        gradients.finish()
        gradients.end()
        assert model.weight.grad.dtype == torch.bfloat16
        assert model.weight.grad.item() == 258.0, kind


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp2"])
def test_a13_a16_a17_sum_and_not_mean(kind):
    _check_sum(kind)


@on_ranks(2)
def _check_sum(kind):
    """Costs [2, 2] and [4, 4, 4, 4] in two micro-batches each: 20/6."""
    rank = dist.get_rank()
    topology = Topology(dp_replicate_size=2 if kind == "ddp" else 1)
    model = Gain()
    wrapped = wrap(kind, model, topology)
    gradients = sum_gradients(wrapped, topology)
    ledger = Ledger([Term("text")], topology=topology)
    size, cost = ((1, 2.0), (2, 4.0))[rank]
    for _ in range(2):  # nothing is left over from step to step
        wrapped.zero_grad()
        with ledger.step([window(size)] * 2, gradients=gradients) as step:
            for batch in step:
                wrapped(step, batch, torch.full((size,), cost, dtype=F64)).backward()
        assert whole(model.weight) == pytest.approx([20 / 6], rel=1e-15)
        assert step.metrics()["train/loss"] == pytest.approx(20 / 6, rel=1e-15)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_second_synchronised_backward_raises(kind):
    _check_second_backward(kind)


@on_ranks(2)
def _check_second_backward(kind):
    topology = Topology(dp_replicate_size=2 if kind == "ddp" else 1)
    wrapped = wrap(kind, Gain(), topology)
    gradients = sum_gradients(wrapped, topology)
    ledger = Ledger([Term("text")], topology=topology)
    batch = window(2)
    costs = torch.ones(2, dtype=F64)
    with pytest.raises(RuntimeError, match="a second backward pass ran"):
        with ledger.step([batch], gradients=gradients) as step:
            for micro_batch in step:
                share = wrapped(step, micro_batch, costs)
                share.backward(retain_graph=True)
                share.backward()
    # the wrapper is left synchronised, and the next step is right
    wrapped.zero_grad()
    with ledger.step([batch], gradients=gradients) as step:
        for micro_batch in step:
            wrapped(step, micro_batch, costs).backward()
    assert whole(next(wrapped.parameters())) == [1.0]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_missing_last_backward_raises_and_leaves_the_wrapper_synchronised(kind):
    _check_missing_backward(kind)


@on_ranks(2)
def _check_missing_backward(kind):
    topology = Topology(dp_replicate_size=2 if kind == "ddp" else 1)
    wrapped = wrap(kind, Gain(), topology)
    gradients = sum_gradients(wrapped, topology)
    ledger = Ledger([Term("text")], topology=topology)
    costs = torch.ones(2, dtype=F64)
    with pytest.raises(RuntimeError, match="no backward pass ran for the last micro-batch"):
        with ledger.step([window(2)] * 2, gradients=gradients) as step:
            for place, batch in enumerate(step):
                share = wrapped(step, batch, costs)
                if place == 0:
                    share.backward()
    if kind == "ddp":
        assert wrapped.require_backward_grad_sync
    with pytest.raises(RuntimeError, match="no record"):
        step.metrics()


@on_ranks(2)
def test_an_exception_leaves_the_wrapper_synchronised():
    topology = Topology(dp_replicate_size=2)
    wrapped = wrap("ddp", Gain(), topology)
    gradients = sum_gradients(wrapped, topology)
    ledger = Ledger([Term("text")], topology=topology)
    with pytest.raises(KeyError), ledger.step([window(2)] * 2, gradients=gradients) as step:
        for batch in step:
            assert not wrapped.require_backward_grad_sync
            wrapped(step, batch, torch.ones(2, dtype=F64)).backward()
            raise KeyError("from the loop")
    assert wrapped.require_backward_grad_sync


def test_one_process_needs_no_gradient_sum_and_may_have_one():
    model = Gain()
    ledger = Ledger([Term("text")])
    batch = window(2)
    for gradients in (None, sum_gradients(model)):
        model.zero_grad()
        with ledger.step([batch], gradients=gradients) as step:
            for micro_batch in step:
                model(step, micro_batch, torch.tensor([1.0, 3.0], dtype=F64)).backward()
        assert model.weight.grad.tolist() == [2.0]


# -- the norm


def sharded(local, mesh, placements):
    """A parameter whose gradient has this local part."""
    part = torch.tensor(local, dtype=F64)
    parameter = nn.Parameter(DTensor.from_local(torch.zeros_like(part), mesh, placements, run_check=False))
    parameter.grad = DTensor.from_local(part, mesh, placements, run_check=False)
    return parameter


def plain(values):
    parameter = nn.Parameter(torch.zeros(len(values), dtype=F64))
    parameter.grad = torch.tensor(values, dtype=F64)
    return parameter


def local_gradients(model):
    return [
        gradient.to_local().tolist() if isinstance(gradient, DTensor) else gradient.tolist()
        for gradient in (parameter.grad for parameter in model)
    ]


def check_clip(model, norm, max_norm):
    """The norm, the scaled gradients, one collective; and that there was something to clip."""
    before = local_gradients(model)
    assert norm > max_norm, "not vacuous"
    with CommDebugMode() as communication:
        found = clip_grad_norm_(model, max_norm)
    assert communication.get_total_counts() == (1 if dist.is_initialized() else 0)
    assert found.dtype == F64 and found.item() == pytest.approx(norm, rel=1e-15)
    factor = max_norm / norm
    for old, new in zip(before, local_gradients(model), strict=True):
        assert new == pytest.approx([value * factor for value in old], rel=1e-15)
    assert clip_grad_norm_(model, float("inf")).item() == pytest.approx(max_norm, rel=1e-14)


@on_ranks(2)
def test_a53_experts_on_their_ranks_and_dense_weights_on_all():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    expert = [[3.0, 0.0], [0.0, 4.0]][dist.get_rank()]
    check_clip(nn.ParameterList([sharded(expert, mesh, [Shard(0)]), plain([12.0])]), 13.0, 6.5)


@on_ranks(4)
def test_a54_replicas_of_a_shard_count_once():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    part = [[3.0], [4.0]][mesh.get_local_rank("shard")]
    check_clip(nn.ParameterList([sharded(part, mesh, [Replicate(), Shard(0)])]), 5.0, 1.0)


@on_ranks(2)
def test_a55_replicated_parameters_count_once_under_tensor_parallelism():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    part = [[3.0], [4.0]][dist.get_rank()]
    for replicated in (sharded([12.0], mesh, [Replicate()]), plain([12.0])):
        check_clip(nn.ParameterList([sharded(part, mesh, [Shard(0)]), replicated]), 13.0, 6.5)


@on_ranks(4)
def test_a_mesh_without_the_data_axis_is_a_copy():
    """DDP over tensor parallelism: parameters know the tp axis alone, and both replicas hold the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    part = [[3.0], [4.0]][mesh.get_local_rank("tp")]
    check_clip(nn.ParameterList([sharded(part, mesh["tp"], [Shard(0)])]), 5.0, 1.0)


@on_ranks(2)
def test_an_empty_shard_takes_part():
    mesh = init_device_mesh("cpu", (2,))
    part = [[3.0, 4.0], []][dist.get_rank()]
    check_clip(nn.ParameterList([sharded(part, mesh, [Shard(0)])]), 5.0, 1.0)


@on_ranks(2)
def test_a_partial_gradient_has_no_norm():
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="a partial sum has no norm"):
        clip_grad_norm_(nn.ParameterList([sharded([1.0], mesh, [Partial()])]), 1.0)


def test_one_process_clips_as_torch_does():
    generator = torch.Generator().manual_seed(0)
    model, reference = (nn.ParameterList(nn.Parameter(torch.zeros(n)) for n in (3, 5)) for _ in range(2))
    for ours, theirs in zip(model, reference, strict=True):
        ours.grad = 10 * torch.randn(ours.shape, generator=generator)
        theirs.grad = ours.grad.clone()
    norm = clip_grad_norm_(model, 1.0)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    torch.testing.assert_close(norm.float(), expected)
    for ours, theirs in zip(model, reference, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_small_gradient_is_left_alone_and_zero_stays_zero():
    model = nn.ParameterList([plain([0.3, 0.4]), plain([0.0])])
    assert clip_grad_norm_(model, 1.0).item() == pytest.approx(0.5)
    assert local_gradients(model) == [[0.3, 0.4], [0.0]]
    model = nn.ParameterList([plain([0.0, 0.0]), nn.Parameter(torch.zeros(1))])
    assert clip_grad_norm_(model, 1.0).item() == 0.0
    assert model[0].grad.tolist() == [0.0, 0.0] and model[1].grad is None
    assert clip_grad_norm_(nn.ParameterList([nn.Parameter(torch.zeros(1))]), 1.0).item() == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_reported_and_left_alone(bad):
    model = nn.ParameterList([plain([3.0, bad]), plain([4.0])])
    assert not clip_grad_norm_(model, 1.0).isfinite()
    assert local_gradients(model)[1] == [4.0]
    assert local_gradients(model)[0][0] == 3.0


def test_the_norm_of_bfloat16_gradients_is_computed_in_float64():
    """A million elements of 1: squares summed in bfloat16 would stop at 256."""
    parameter = nn.Parameter(torch.zeros(1_000_000, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    assert clip_grad_norm_(nn.ParameterList([parameter]), 1.0).item() == 1000.0
    assert parameter.grad.dtype == torch.bfloat16
    assert parameter.grad[0].item() == pytest.approx(1e-3, rel=4e-3)


def test_a_parameter_without_gradient_has_zeros_on_one_rank_as_on_several() -> None:
    """AdamW decays what has a gradient of zeros and leaves what has None: layouts must agree on which."""
    model = nn.Linear(2, 1)
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    gradients = sum_gradients(model)
    batch = PackedBatch(torch.arange(2), {"text": torch.tensor([1, -100])}, Layout([2]))
    with Ledger([Term("text")]).step([batch], gradients=gradients) as step:
        for part in step:
            step.add("text", model(torch.ones(2, 2)).squeeze(-1), part).backward()
    assert model.unused.grad is not None
    assert model.unused.grad.tolist() == [0.0, 0.0, 0.0]


# -- uses that would otherwise train with a wrong gradient and say nothing


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp2"])
@on_ranks(2)
def test_a_backward_after_the_block_raises(kind):
    """Wrappers miss the backward when the block ends; of a plain module it is seen when it runs."""
    topology = Topology()
    model = wrap(kind, Gain(), topology)
    ledger = Ledger([Term("text")], topology=topology)
    with pytest.raises(RuntimeError, match="after the block|no backward pass ran"):
        with ledger.step([window(2)], gradients=sum_gradients(model, topology)) as step:
            for batch in step:
                share = model(step, batch, torch.ones(2, dtype=F64))
        share.backward()


@on_ranks(2)
def test_sharding_after_sum_gradients_raises():
    topology = Topology()
    model = Gain()
    gradients = sum_gradients(model, topology)
    fully_shard(model, mesh=topology.fsdp_mesh)
    ledger = Ledger([Term("text")], topology=topology)
    with (
        pytest.raises(RuntimeError, match="fully_shard was called after sum_gradients"),
        ledger.step([window(2)], gradients=gradients),
    ):
        pass


@on_ranks(2)
def test_a_forward_without_backward_does_not_reach_the_next_step_of_ddp():
    """DDP waits for the backward of the last forward, and would reduce in the next one: sums, twice."""
    topology = Topology()
    model = wrap("ddp", Gain(), topology)
    gradients = sum_gradients(model, topology)
    ledger = Ledger([Term("text")], topology=topology)
    costs = torch.tensor([2.0, 4.0 * dist.get_rank()], dtype=F64)
    with pytest.raises(KeyError), ledger.step([window(2)], gradients=gradients) as step:
        for batch in step:
            model(step, batch, costs)
            raise KeyError
    with ledger.step([window(2)] * 3, gradients=gradients) as step:
        for batch in step:
            model(step, batch, costs).backward()
    assert whole(model.module.weight) == pytest.approx([2.0], rel=1e-15)


class WithUnused(Gain):
    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(2, dtype=F64))


@on_ranks(2)
def test_ddp_that_waits_for_unused_parameters_raises():
    topology = Topology()
    model = wrap("ddp", WithUnused(), topology)
    ledger = Ledger([Term("text")], topology=topology)
    with (
        pytest.raises(RuntimeError, match="find_unused_parameters=True"),
        ledger.step([window(2)], gradients=sum_gradients(model, topology)) as step,
    ):
        for batch in step:
            model(step, batch, torch.ones(2, dtype=F64)).backward()


@on_ranks(2)
def test_an_unused_parameter_has_zeros_under_every_wrapper():
    topology = Topology()
    for kind in ("plain", "ddp", "fsdp2"):
        model = WithUnused()
        if kind == "ddp":
            model = DistributedDataParallel(model, find_unused_parameters=True)
        else:
            model = wrap(kind, model, topology)
        ledger = Ledger([Term("text")], topology=topology)
        with ledger.step([window(2)] * 2, gradients=sum_gradients(model, topology)) as step:
            for batch in step:
                model(step, batch, torch.ones(2, dtype=F64)).backward()
        [unused] = [value for name, value in model.named_parameters() if name.endswith("unused")]
        assert whole(unused) == [0.0, 0.0]


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_a_norm_that_is_not_above_zero_is_refused(max_norm: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        clip_grad_norm_(nn.Linear(1, 1), max_norm)


class OneOfTwo(nn.Module):
    """Uses the parameter that it is told to, as a model with one tower per kind of input does."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.v = nn.Parameter(torch.ones(2))
        self.neither = nn.Parameter(torch.ones(2))

    def forward(self, step, batch, name, cost):
        losses = self.get_parameter(name).float() * torch.tensor([cost, 0.0])
        return step.add(None, losses, batch)


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_ranks_that_use_different_parameters_of_one_unit(param_dtype):
    """FSDP2 pairs gradients by their order: without zeros for the others it adds those of w to those of v."""
    rank = dist.get_rank()
    topology = Topology()
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    model = fully_shard(OneOfTwo(), mesh=topology.fsdp_mesh, mp_policy=policy)
    gradients = sum_gradients(model, topology)
    ledger = Ledger([Term("text")], topology=topology)
    for used in ([["w"], ["v"]], [["w", "v"], ["v", "v"]], [["w", "w"], ["v", "w"]]):
        model.zero_grad()
        expected = {"w": 0.0, "v": 0.0, "neither": 0.0}
        for cost, names in zip((1.0, 3.0), used, strict=True):
            for name in names:
                expected[name] += cost / (4 * len(names))  # two targets a window, two ranks
        with ledger.step([window(2)] * len(used[rank]), gradients=gradients) as step:
            for batch, name in zip(step, used[rank], strict=True):
                model(step, batch, name, (1.0, 3.0)[rank]).backward()
        for name, parameter in model.named_parameters():
            assert whole(parameter) == [expected[name], 0.0], (used, name)


@on_ranks(2)
def test_an_fsdp2_that_leaves_unused_parameters_out_raises():
    """As before torch 2.13."""
    gradients_module.fills_unused = lambda: False  # this process ends with the test
    topology = Topology()
    model = fully_shard(OneOfTwo(), mesh=topology.fsdp_mesh)
    ledger = Ledger([Term("text")], topology=topology)
    used, other = ("w", "v") if dist.get_rank() else ("v", "w")
    with (
        pytest.raises(RuntimeError, match=f"this rank used none of {other}, neither; use torch 2.13"),
        ledger.step([window(2)], gradients=sum_gradients(model, topology)) as step,
    ):
        for batch in step:
            model(step, batch, used, 1.0).backward()


@pytest.mark.parametrize("evaluates", ["nothing", "inside a step", "outside"])
@on_ranks(2)
def test_an_evaluation_between_backward_and_optimizer_step_changes_nothing(evaluates):
    """FSDP2 leaves its root unsharded after a forward: gradients hidden, next forward on old weights."""
    topology = Topology()
    model = fully_shard(Gain(), mesh=topology.fsdp_mesh)
    gradients = sum_gradients(model, topology)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ledger = Ledger([Term("text")], topology=topology)
    costs = torch.full((2,), 4.0, dtype=F64)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with ledger.step([window(2)], gradients=gradients) as step:
            for batch in step:
                model(step, batch, costs).backward()
        losses.append(step.metrics()["train/loss"])
        with torch.no_grad(), ledger.step([window(2)], training=False) as page:
            for batch in page:
                if evaluates == "inside a step":
                    model(page, batch, costs)
                else:
                    page.add(None, costs, batch)
        if evaluates == "outside":
            with torch.no_grad():
                model(AnyStep(), None, costs)
        else:
            assert [parameter.grad is not None for parameter in model.parameters()] == [True, False]
        assert clip_grad_norm_(model, 1.0).item() == 4.0
        optimizer.step()
    assert losses == [4.0, 2.0, 0.0]


class AnyStep:
    def add(self, term, losses, batch):
        return losses.sum()
