"""Experts spread over ranks: each rank holds some of every layer's, and tokens travel to their experts.

[Note: dispatch]
A slot and one of the experts chosen for it are an assignment. A rank sorts its assignments by expert, sends
each rank the rows of the experts that it holds, applies its own experts to what it received, and sends the
rows back, where they are weighed and added up. No assignment is dropped and none is added, so the host has to
know one thing only, how many rows go where. The gradient of an expert is the sum over the rows of all ranks
that reached it: complete over ep, and over expert_data after the SUM.
"""

import functools
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from isoloss.parallel.attention import is_transformers_model
from isoloss.topology import Topology

EXPERTS_NAME = "isoloss"


def find_experts(model: nn.Module) -> list[nn.Module]:
    """The modules that hold the experts of a layer and run them through transformers' experts interface."""
    return [module for module in model.modules() if "_is_expert_parallel" in vars(module)]


def shard_experts(model: nn.Module, topology: Topology) -> None:
    """Keep this rank's run of every layer's experts, and send tokens to theirs from now on.

    Call it on the whole model, alike on every rank, before FSDP2 (`wrap_model` does). Each expert parameter
    becomes a DTensor sharded by its first dimension over ep; FSDP2 shards it further over expert_data.

    Args:
        model: a transformers model whose experts use its experts interface.
        topology: of the run; nothing happens where ep_size is 1.

    Raises:
        ValueError: the model has no such experts, ep_size does not divide their number, or they are spread
            over other ranks already.
    """
    if topology.ep_mesh is None:
        return
    found = find_experts(model)
    sizes = {int(experts.num_experts) for experts in found}  # type: ignore[arg-type]
    # a user knows the model, not what wraps it
    name = next((type(part).__name__ for part in model.modules() if is_transformers_model(part)), "the model")
    if not found:
        raise ValueError(
            f"ep_size {topology.ep_size} spreads experts over ranks, but {name} has none behind "
            "transformers' experts interface; set ep_size to 1, or use a mixture of experts that has"
        )
    if any(size % topology.ep_size for size in sizes):
        raise ValueError(
            f"ep_size {topology.ep_size} must divide the experts of each layer, {name} has {sorted(sizes)}; "
            "choose a factor, or ep_size=1"
        )
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for experts in found:
        config: Any = experts.config
        name = config._experts_implementation
        if not name.startswith(EXPERTS_NAME):
            registered = f"{EXPERTS_NAME}_{name}"
            ALL_EXPERTS_FUNCTIONS.register(registered, functools.partial(dispatched_experts, local=name))
            config._experts_implementation = registered
        for key, parameter in list(experts.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                if parameter.device_mesh != topology.ep_mesh:
                    raise ValueError(
                        f"{key} is spread over {parameter.device_mesh} already; experts go over ep first, "
                        "before a tensor plan or fully_shard"
                    )
                continue  # a second call changes nothing
            experts.register_parameter(key, _shard(parameter, topology.ep_mesh, topology.ep_rank))


def _shard(parameter: nn.Parameter, mesh: DeviceMesh, rank: int) -> nn.Parameter:
    mine = parameter.detach().chunk(mesh.size())[rank].clone()  # the rest is freed with the whole
    sharded = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def dispatched_experts(
    experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, local: str
) -> Tensor:
    """Output of the chosen experts of every slot, weighed and summed, as a transformers experts function.

    See [Note: dispatch]. Padding slots are routed and travel like tokens; their gradient is zero.

    Args:
        experts: the module; its parameters are DTensors over ep, as `shard_experts` leaves them.
        hidden: [N, H].
        top_k_index: the experts chosen for each slot, int64[N, K].
        top_k_weights: their weights, [N, K]. They are applied where the slot is.
        local: transformers' name of what a rank applies its own experts with.

    Returns:
        [N, H].

    Collectives: three all-to-alls over ep (counts, rows, rows back), two in backward, whatever the routing.
    Host syncs: one, for the numbers of rows.
    """
    mesh = next(experts.parameters(recurse=False)).device_mesh
    group, size = mesh.get_group(), mesh.size()
    per_rank = experts.num_experts // size
    top_k = top_k_index.shape[-1]
    chosen = top_k_index.reshape(-1)
    order = chosen.argsort(stable=True)
    sent = torch.zeros(experts.num_experts, dtype=torch.int64, device=chosen.device)
    sent.scatter_add_(0, chosen, torch.ones_like(chosen))
    received = torch.empty_like(sent)  # [rank that sends, expert of mine]
    dist.all_to_all_single(received, sent, group=group)
    counts = torch.stack([sent, received]).view(2, size, per_rank).to("cpu")
    send_rows, receive_rows = counts.sum(-1).tolist()

    rows = _Exchange.apply(hidden[order // top_k], send_rows, receive_rows, group)
    ids = torch.arange(per_rank, device=chosen.device).repeat(size)
    ids = ids.repeat_interleave(received, output_size=rows.shape[0])
    outputs = _apply_local(_LocalExperts(experts, per_rank), rows, ids, counts[1].sum(0).tolist(), local)
    outputs = _Exchange.apply(outputs, receive_rows, send_rows, group)

    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    weighted = outputs[places].view(*top_k_index.shape, -1) * top_k_weights.unsqueeze(-1)
    return weighted.sum(1).to(hidden.dtype)


def _apply_local(
    experts: "_LocalExperts", rows: Tensor, ids: Tensor, num_rows: Sequence[int], local: str
) -> Tensor:
    """Each row through its expert; `ids` says which of this rank's, `num_rows` how many each has."""
    # The grouped kernels know no float64, and of no row at all they make no graph to the parameters, whose
    # gradients FSDP2 then would not reduce on this rank alone.
    if local != "eager" and rows.shape[0] and rows.dtype != torch.float64:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ones = rows.new_ones(rows.shape[0], 1)
        return ALL_EXPERTS_FUNCTIONS[local](experts, rows, ids.unsqueeze(-1), ones)
    order = ids.argsort(stable=True)
    outputs = _apply_each(experts, rows[order].split(list(num_rows)))
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return outputs[places]


def _apply_each(experts: Any, parts: Sequence[Tensor]) -> Tensor:
    """One expert after the other, also those without a row, so that each is part of the graph."""
    first = experts.gate_up_proj if experts.has_gate else experts.up_proj
    second = experts.down_proj
    if not experts.is_transposed:
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    biases: tuple[Tensor | None, Tensor | None] = (None, None)
    if experts.has_bias:
        biases = (
            experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias,
            experts.down_proj_bias,
        )
    outputs = []
    for expert, part in enumerate(parts):
        inner = part.to(first.dtype) @ first[expert]
        if biases[0] is not None:
            inner = inner + biases[0][expert]
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        outer = inner @ second[expert]
        if biases[1] is not None:
            outer = outer + biases[1][expert]
        outputs.append(experts.post_expert_norm(outer) if experts.has_post_expert_norm else outer)
    return torch.cat(outputs)


@final
class _LocalExperts:
    """An experts module as it looks to transformers' functions on a rank that holds a part of the experts."""

    def __init__(self, experts: nn.Module, num_experts: int) -> None:
        self._experts = experts
        self.num_experts = num_experts

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to_local() if isinstance(value, DTensor) else value


class _Exchange(torch.autograd.Function):
    """Runs of rows to their ranks; in backward the gradients of the rows go back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send_rows: list[int], receive_rows: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.splits, ctx.group = (send_rows, receive_rows), group
        received = rows.new_empty(sum(receive_rows), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive_rows, send_rows, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        send_rows, receive_rows = ctx.splits
        return _Exchange.apply(gradient, receive_rows, send_rows, ctx.group), None, None, None
