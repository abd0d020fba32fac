"""Gradients are summed over the ranks that hold different tokens, once a step; never averaged.

Every rank divides its losses by the denominators of the whole step, so the gradient of the step is the
plain sum of the ranks' gradients, and no world size stands anywhere.
"""

from collections.abc import Iterable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

from isoloss.topology import Topology, is_first_rank


@final
class PartialOverTensorRanks(nn.Module):
    """Child of a module whose own parameters are replicated, but used on this tensor rank's part alone.

    Such as the norm of the heads that a rank holds: its gradient there is a part, and the step sums the parts
    over the tensor ranks. A child without parameters changes neither forward nor state dict, and stays in
    place when DDP or FSDP2 wrap the module.
    """


def sum_gradients(module: nn.Module, topology: Topology | None = None) -> "GradientSum":
    """Make the wrappers in `module` sum gradients, and return what a step needs to do so once.

    Call it on the outermost module, after DDP(...) or fully_shard(...), once. Gradients of parameters that
    no wrapper reduces are summed by the step when its block ends. The step reduces what stands in `.grad`,
    so call `optimizer.zero_grad()` between steps.

    Args:
        module: a plain module, or one with DDP or FSDP2 (also HSDP) inside or around it.
        topology: of the run. None: all ranks hold different tokens.

    Raises:
        RuntimeError: DDP has a communication hook already (from torch).
        ValueError: the module is spread over tensor ranks, and `topology` has none.
    """
    return GradientSum(module, topology)


@final
class GradientSum:
    """How the gradients of one module are summed. Made by `sum_gradients`, driven by a step."""

    def __init__(self, module: nn.Module, topology: Topology | None) -> None:
        modules = list(module.modules())
        self.module = module
        self._is_open = False
        self._sharded = [part for part in modules if isinstance(part, FSDPModule)]
        self._replicated = [part for part in modules if isinstance(part, DistributedDataParallel)]
        if topology is not None:
            self._group = topology.loss_group
        else:
            self._group = dist.group.WORLD if dist.is_initialized() else None
        for part in self._sharded:
            # Neither setter recurses, and with the factor alone gloo refuses its PREMUL_SUM.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            if fills_unused():
                part.set_reduce_scatter_unused_params(True, recurse=False)
        self._reductions = [BucketReduction(ddp) for ddp in self._replicated]
        for reduction in self._reductions:
            reduction.ddp.register_comm_hook(reduction, sum_bucket)
        handled = {
            id(parameter)
            for ddp in self._replicated
            for name, parameter in ddp.module.named_parameters()
            if name not in ddp.parameters_to_ignore
        }
        tp_mesh = None if topology is None else topology.tp_mesh
        self._unwrapped = [
            parameter
            for parameter in module.parameters()
            if id(parameter) not in handled
            # what FSDP2 reduces lies on a mesh with an axis of its own
            and (not isinstance(parameter, DTensor) or parameter.device_mesh == tp_mesh)
        ]
        self._tensor_group = None if topology is None else topology.tp_group
        self._partial = [
            parameter
            for part in modules
            if any(isinstance(child, PartialOverTensorRanks) for child in part.children())
            for parameter in part.parameters(recurse=False)
        ]
        if self._partial and self._tensor_group is None:
            raise ValueError(
                "the module is spread over tensor ranks, but sum_gradients got "
                f"{'no topology' if topology is None else repr(topology)}; pass the topology that its tensor "
                "plan was applied with"
            )
        self._experts: list[nn.Parameter] = []
        """Experts spread over ep that FSDP2 does not own."""
        self._expert_group: dist.ProcessGroup | None = None
        if topology is not None and topology.expert_data_mesh is not None:
            owned = {id(parameter) for part in self._sharded for parameter in part.parameters()}
            self._expert_group = topology.expert_data_mesh.get_group()
            self._experts = [
                parameter
                for parameter in module.parameters()
                if isinstance(parameter, DTensor)
                and parameter.device_mesh == topology.ep_mesh
                and id(parameter) not in owned
            ]
        self._synchronises = False
        self._has_finished = False
        self._backwards: set[int] = set()

    def begin(self) -> None:
        """Start a step: no backward has been synchronised yet.

        Raises:
            RuntimeError: a part of the module was sharded after `sum_gradients`; it would average.
        """
        known = {id(part) for part in self._sharded}
        if any(isinstance(part, FSDPModule) and id(part) not in known for part in self.module.modules()):
            raise RuntimeError(
                "fully_shard was called after sum_gradients, so gradients would be averaged, not summed; "
                "call isoloss.sum_gradients on the module that fully_shard has wrapped"
            )
        self._backwards.clear()
        self._has_finished = False
        self._is_open = True
        reshard(self.module)  # else a forward since the last step left weights that are old by now
        for reduction in self._reductions:
            reduction.is_complete = False
        self.synchronise(False)

    def synchronise(self, enabled: bool) -> None:
        """Whether the wrappers reduce in the backward of the next forward."""
        self._synchronises = enabled
        for part in self._sharded:
            part.set_requires_gradient_sync(enabled, recurse=False)
            if enabled and self._is_open:
                widen_unused(part)
        for ddp in self._replicated:
            ddp.require_backward_grad_sync = enabled

    def saw_backward(self, graph_task: int) -> None:
        """Note that a backward pass reached a share of the step.

        Raises:
            RuntimeError: the step has ended, so nothing would sum this gradient over the ranks; or it is the
                second one that the wrappers reduce. A mean would survive that, a sum counts what was reduced
                before once per rank.
        """
        if not self._is_open and self._group is not None:
            raise RuntimeError(
                "a backward pass ran after the block of its step had ended, when gradients were summed "
                "already; call backward inside `with ledger.step(...) as step:`"
            )
        if not self._synchronises:
            return
        self._backwards.add(graph_task)
        if len(self._backwards) > 1 and (self._sharded or self._replicated):
            raise RuntimeError(
                "a second backward pass ran while gradients are being reduced, which would sum them twice; "
                "run one backward per micro-batch, inside the loop over the step, and add the shares of "
                "several terms before it"
            )

    def finish(self) -> None:
        """Sum what no wrapper has reduced: one SUM all-reduce per dtype. `end` follows.

        Collectives: one SUM per dtype of the parameters that no wrapper owns, over the ranks with different
        tokens, one of such experts over the ranks that hold the same ones, and over the tensor ranks one per
        dtype of the replicated parameters of which each uses a part. Gradients below 32 bits are summed in
        float32.

        Raises:
            RuntimeError: wrappers wait for a backward pass that did not run, or DDP for parameters that the
                pass did not reach; before torch 2.13 FSDP2 too.
        """
        wrapped = self._sharded or self._replicated
        if wrapped and not self._backwards:
            raise RuntimeError(
                "no backward pass ran for the last micro-batch of the step, so its gradients were not "
                "reduced; run forward and backward for every micro-batch, also for one without targets"
            )
        if not all(reduction.is_complete for reduction in self._reductions):
            raise RuntimeError(
                "DDP has not reduced every gradient: some parameters had no part in the loss of the last "
                "micro-batch on this rank; freeze them, or wrap with DistributedDataParallel(..., "
                "find_unused_parameters=True)"
            )
        if self._sharded and not fills_unused():
            self._check_all_used()
        # asked now, not at the start: what was frozen then may be trained now
        trained = [parameter for parameter in self._unwrapped if parameter.requires_grad]
        if self._group is not None:
            reduce_gradients(trained, self._group)
        if self._expert_group is not None:
            experts = [parameter for parameter in self._experts if parameter.requires_grad]
            reduce_gradients(experts, self._expert_group)
        if self._tensor_group is not None:
            partial = [parameter for parameter in self._partial if parameter.requires_grad]
            reduce_gradients(partial, self._tensor_group)
        # an optimizer treats zeros and None differently (weight decay)
        fill_gradients(parameter for parameter in self.module.parameters() if parameter.requires_grad)
        self._has_finished = True

    def _check_all_used(self) -> None:
        """Raise where FSDP2 left a parameter out of its reduction, which pairs gradients by their order."""
        others = {id(parameter) for parameter in (*self._unwrapped, *self._experts)}
        unused = [
            name
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and parameter.grad is None and id(parameter) not in others
        ]
        if unused:
            raise RuntimeError(
                f"FSDP2 of torch {torch.__version__} mixes the gradients of different parameters when ranks "
                f"do not use the same ones, and this rank used none of {', '.join(unused)}; use torch 2.13 "
                "or newer, freeze them, or use every parameter in each step (a term times 0)"
            )

    def end(self) -> None:
        """Leave the wrappers as they are outside a step: synchronised, without gradients of a failed step.

        Gradients in `.grad` are the caller's, `optimizer.zero_grad()` drops them.

        Collectives: none.
        """
        if not self._has_finished:
            for part in self._sharded:
                discard_unreduced(part)
        self.synchronise(True)
        self._synchronises = False
        self._is_open = False
        self._backwards.clear()


def reshard(module: nn.Module) -> None:
    """Make the parameters of `module` the sharded ones, which the optimizer moves and which hold gradients.

    FSDP2 does so in backward. A forward without one, as in evaluation, leaves its root unsharded: gradients
    of a step stand elsewhere then, and the next forward does not gather what the optimizer has moved.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def fills_unused() -> bool:
    """Whether FSDP2 can reduce zeros for parameters that a rank did not use: torch 2.13 and newer.

    Otherwise it leaves them out, and adds this rank's gradient of one to another rank's of the next.
    """
    return "set_reduce_scatter_unused_params" in dir(FSDPModule)


def _param_groups(part: FSDPModule) -> list[Any]:
    """The parameters that FSDP2 reduces together. The one place that looks inside FSDP2."""
    fields = vars(part._get_fsdp_state())
    # one group per module until torch 2.11, several later
    groups = fields["_fsdp_param_groups"] if "_fsdp_param_groups" in fields else [fields["_fsdp_param_group"]]
    return [group for group in groups if group is not None]


def widen_unused(part: FSDPModule) -> None:
    """Zeros in the dtype of the reduction for what no micro-batch has used before the last one.

    FSDP2 keeps the gradients of earlier micro-batches in that dtype, takes those of the last one in the dtype
    of the computation, and refuses to reduce both together.
    """
    for group in _param_groups(part):
        members = [member for member in group.fsdp_params if member.sharded_param.requires_grad]
        if any(member.unsharded_accumulated_grad is not None for member in members):
            for member in members:
                if member.unsharded_accumulated_grad is None:
                    shape = member._unsharded_param
                    member.unsharded_accumulated_grad = torch.zeros_like(shape, dtype=member.reduce_dtype)


def discard_unreduced(part: FSDPModule) -> None:
    """Drop the gradients of backward passes that FSDP2 has not reduced yet.

    It keeps them on its own unsharded parameters, where `zero_grad()` does not reach them: after an exception
    they would be added to the next step, without a warning. torch 2.13 has `reset_iter_state` for this case,
    which says that it drops them and does not.
    """
    if part._get_fsdp_state()._is_root and "reset_iter_state" in dir(FSDPModule):
        part.reset_iter_state()
    for group in _param_groups(part):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if "_unsharded_param" in vars(parameter):  # made by the first forward
                parameter._unsharded_param.grad = None


@final
class BucketReduction:
    """What DDP has reduced of one module's gradients in a step."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = ddp
        self.is_complete = False
        """Whether the last bucket was reduced; buckets are reduced in order."""


def sum_bucket(reduction: BucketReduction, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook: SUM instead of the mean; buckets below 32 bits are summed in float32.

    After a forward whose backward never ran, DDP reduces in the next backward even if that is not to be
    synchronised. A mean would survive that; here the bucket stays this rank's own.
    """
    buffer = bucket.buffer()
    if not reduction.ddp.require_backward_grad_sync:
        unchanged = torch.futures.Future[Tensor]()
        unchanged.set_result(buffer)
        return unchanged
    reduction.is_complete |= bucket.is_last()
    group = reduction.ddp.process_group
    wide = buffer.float() if buffer.dtype in (torch.bfloat16, torch.float16) else buffer
    work = dist.all_reduce(wide, group=group, async_op=True)
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))


def fill_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Zeros where a parameter has no gradient: what no rank used has a gradient of zero in every layout."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def reduce_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """SUM the gradients of replicated parameters over `group`, coalesced into one vector per dtype.

    A rank whose gradient is None takes part with zeros: ranks agree on what is reduced whatever their data.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for dtype, members in by_dtype.items():
        fill_gradients(members)
        gradients = [
            parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            for parameter in members
            if parameter.grad is not None
        ]
        wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        flat = torch.cat([gradient.reshape(-1).to(wide) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))


@torch.no_grad()
def clip_grad_norm_(module: nn.Module, max_norm: float) -> Tensor:
    """The 2-norm of the whole gradient before clipping; scales every gradient so that it is at most max_norm.

    Each element of the gradient counts once, whatever its sharding: of the ranks that hold the same element
    one adds its square. All ranks scale by the same factor.

    Args:
        module: any module; its gradients may be plain tensors, alike on all ranks, or DTensors.
        max_norm: largest norm allowed. `float("inf")` only measures.

    Returns:
        The norm before clipping, a float64 scalar, the same on every rank; NaN or inf if the gradient is,
        which then is left as it is.

    Collectives: one SUM all-reduce of one float64 over all ranks.
    Host syncs: none.

    Raises:
        ValueError: a gradient is a partial sum, or max_norm is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, got {max_norm}; use float('inf') to measure only")
    reshard(module)
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    joined = dist.is_available() and dist.is_initialized()
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    device = local[0].device if local else torch.device("cpu")
    squares = torch.zeros((), dtype=torch.float64, device=device)
    counted = [
        part for part, gradient in zip(local, gradients, strict=True) if not joined or _counts_here(gradient)
    ]
    if counted:
        norms = torch._foreach_norm(counted, 2, dtype=torch.float64)
        squares += torch.stack([norm.to(device) for norm in norms]).square().sum()
    if joined:
        dist.all_reduce(squares)
    norm = squares.sqrt()
    clips = norm.isfinite() & (norm > max_norm)
    factor = torch.where(clips, max_norm / norm, 1.0)
    for part in local:
        part.mul_(factor.to(part.device))
    return norm


def _counts_here(gradient: Tensor) -> bool:
    """Whether this rank adds its part of `gradient` to the norm: one rank per distinct element does."""
    if not isinstance(gradient, DTensor):
        return is_first_rank()
    if any(isinstance(placement, Partial) for placement in gradient.placements):
        raise ValueError(
            f"a gradient has placements {gradient.placements}, a partial sum has no norm; reduce it first "
            "(the step does when its block ends)"
        )
    mesh = gradient.device_mesh
    # A mesh that does not hold rank 0 is a copy of the one that does, along an axis of the run it lacks.
    if not bool((mesh.mesh == 0).any()):
        return False
    place: Any = mesh.get_coordinate()
    return all(
        where == 0
        for where, placement in zip(place, gradient.placements, strict=True)
        if isinstance(placement, Replicate)
    )
