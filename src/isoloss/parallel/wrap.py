"""Wraps a model for the data axes of a run: nothing, DDP, FSDP2 or HSDP."""

import dataclasses
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from isoloss.parallel.experts import find_experts, shard_experts
from isoloss.parallel.tensor import apply_tensor_plan
from isoloss.topology import Topology


def wrap_model(
    loss_model: nn.Module, blocks: list[nn.Module], topology: Topology, *, bf16: bool = False
) -> nn.Module:
    """The model as the step calls it; its gradients still have to be told to sum (`sum_gradients`).

    First the model's own plan spreads matrices over the tensor ranks, then FSDP2 shards what each of them has
    over the data ranks.

    Args:
        loss_model: the model with its loss, wrapped as a whole so that the head runs inside.
        blocks: its repeated parts, each of which FSDP2 gathers by itself.
        topology: of the run. dp_shard x cp x sp above 1 shards (FSDP2, with dp_replicate above 1 HSDP);
            else dp_replicate above 1 replicates (DDP, under tp HSDP, as DDP knows no shards). ep above 1
            always takes FSDP2, and each layer's experts are then spread over ep, and sharded over the ranks
            that hold the same ones.
        bf16: whether FSDP2 computes in bfloat16 and reduces in float32. For the others see
            `compute_context`.
    """
    loss_model.to(topology.device)
    mesh = topology.fsdp_mesh
    if topology.tp_size > 1:
        apply_tensor_plan(loss_model.model, topology)
    if mesh is None or topology.world_size == topology.tp_size:
        return loss_model
    if not _shards(topology):
        if not any(parameter.requires_grad for parameter in loss_model.parameters()):
            return loss_model  # a frozen reference or teacher: DDP has nothing to reduce, and refuses it
        devices = [topology.device] if topology.device.type == "cuda" else None
        with warnings.catch_warnings():
            # torch 2.13 renames broadcast_buffers; 2.11 knows the old name only
            warnings.simplefilter("ignore", FutureWarning)
            # Buffers (rotary frequencies) are the same everywhere; broadcasting them costs a collective each.
            return DistributedDataParallel(
                loss_model, device_ids=devices, process_group=topology.loss_group, broadcast_buffers=False
            )
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if topology.expert_data_mesh is not None:
        shard_experts(loss_model, topology)
        # A unit of their own, also on one rank: in their layer's they would be sharded over all data ranks,
        # and what those hold are different experts. Routing weights stay in their dtype, as within a layer.
        expert_options: dict[str, Any] = {
            "mesh": topology.expert_data_mesh,
            "mp_policy": dataclasses.replace(policy, cast_forward_inputs=False),
        }
        for experts in find_experts(loss_model):
            fully_shard(experts, **expert_options)
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(loss_model, **options)  # changes the module's class in place
    return loss_model


def wrap_frozen(
    loss_model: nn.Module, blocks: list[nn.Module], topology: Topology, *, bf16: bool = False
) -> nn.Module:
    """As `wrap_model`, for a model that is asked and not trained: a reference, or a teacher.

    It is frozen and put into evaluation mode. What its blocks do not hold (embedding, last norm, head) stays
    gathered once it has been asked, so that its head can be used beside the trained one's.
    """
    loss_model.requires_grad_(False).eval()
    wrapped = wrap_model(loss_model, blocks, topology, bf16=bf16)
    if isinstance(wrapped, FSDPModule):
        wrapped.set_reshard_after_forward(False, recurse=False)
    return wrapped


def compute_context(topology: Topology, *, bf16: bool) -> AbstractContextManager[Any]:
    """What forward runs in: autocast for bfloat16 without FSDP2, which casts by itself."""
    if not bf16 or _shards(topology):
        return nullcontext()
    return torch.autocast(topology.device.type, dtype=torch.bfloat16)


def _shards(topology: Topology) -> bool:
    if topology.tp_size > 1:
        return topology.world_size > topology.tp_size
    return topology.dp_shard_size * topology.cp_size * topology.sp_size * topology.ep_size > 1
