"""The mesh and the named groups of a run, as one frozen value.

The only module that asks for a rank or a world size. Axes, outermost first:

    dp_replicate  replicas with their own data; parameters are copied (DDP, HSDP)
    dp_shard      ranks with their own data; parameters are sharded (FSDP2)
    cp            context: ranks share windows, each holds pieces of every document
    sp            sequence (Ulysses): ranks share windows, each holds a contiguous part
    tp            tensor: ranks share tokens, each holds a part of every matrix

Experts have a mesh of their own over the same ranks. ep lies inside the data ranks: neighbours on it are
neighbours there, and hold different experts. All other ranks that see the same experts (the rest of the data
ranks, cp and sp) form the axis expert_data.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
EXPERT_AXES = ("expert_tp", "expert_data", "ep")


@final
class Topology:
    """How the ranks of a run are split over the axes.

    Without a process group it describes one rank, has no mesh and no group, and nothing communicates.

    Args:
        dp_replicate_size, dp_shard_size, cp_size, sp_size, tp_size: sizes of the axes. dp_shard_size -1
            takes the ranks that the others leave.
        ep_size: experts are spread over this many data ranks; a factor of the data ranks.
        device: where tensors of the loss path live; default: the current CUDA device under a process group
            with NCCL, else the CPU.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks.

    Collectives: creates the process groups of the mesh, so every rank must construct it alike.
    """

    mesh: DeviceMesh | None
    """Mesh with the axes of `AXES`; None for one rank without a process group."""

    def __init__(
        self,
        dp_replicate_size: int = 1,
        dp_shard_size: int = -1,
        sp_size: int = 1,
        cp_size: int = 1,
        tp_size: int = 1,
        ep_size: int = 1,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        joined = dist.is_available() and dist.is_initialized()
        world_size = dist.get_world_size() if joined else 1
        sizes = resolve_sizes(
            world_size,
            dp_replicate_size=dp_replicate_size,
            dp_shard_size=dp_shard_size,
            cp_size=cp_size,
            sp_size=sp_size,
            tp_size=tp_size,
            ep_size=ep_size,
        )
        where = _default_device(joined) if device is None else torch.device(device)
        mesh = None
        coordinate: tuple[int, ...] = (0,) * len(AXES)
        if joined:
            mesh = init_device_mesh(where.type, sizes, mesh_dim_names=AXES)
            coordinate = tuple(mesh.get_coordinate() or ())
        fields: dict[str, Any] = {
            **{f"{axis}_size": size for axis, size in zip(AXES, sizes, strict=True)},
            **{f"{axis}_rank": place for axis, place in zip(AXES, coordinate, strict=True)},
            "ep_size": ep_size,
            "rank": dist.get_rank() if joined else 0,
            "world_size": world_size,
            "device": where,
            "mesh": mesh,
            "world_group": dist.group.WORLD if joined else None,
            "loss_group": None,
            "window_group": None,
            "cp_group": None,
            "sp_group": None,
            "tp_group": None,
            "tp_mesh": None,
            "fsdp_mesh": None,
            "ep_rank": 0,
            "ep_mesh": None,
            "expert_data_mesh": None,
        }
        if mesh is not None:
            fields |= _derived_groups(mesh, sizes)
            if ep_size > 1:
                experts = expert_ranks(mesh.mesh, ep_size)
                expert_mesh = DeviceMesh(where.type, experts, mesh_dim_names=EXPERT_AXES)
                fields["expert_data_mesh"] = expert_mesh["expert_data"]
                fields["ep_mesh"] = expert_mesh["ep"]
                fields["ep_rank"] = expert_mesh["ep"].get_local_rank()
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    dp_replicate_size: int
    dp_shard_size: int
    cp_size: int
    sp_size: int
    tp_size: int
    ep_size: int
    dp_replicate_rank: int
    dp_shard_rank: int
    cp_rank: int
    sp_rank: int
    tp_rank: int
    rank: int
    world_size: int
    device: torch.device
    world_group: dist.ProcessGroup | None
    """All ranks of the run: what the ledger's two vectors are summed over."""
    loss_group: dist.ProcessGroup | None
    """The ranks with distinct tokens: what gradients of replicated parameters are summed over."""
    window_group: dist.ProcessGroup | None
    """The cp x sp ranks that share this rank's windows; None where each rank has its own."""
    cp_group: dist.ProcessGroup | None
    """The context ranks; None where cp_size is 1."""
    sp_group: dist.ProcessGroup | None
    """The sequence ranks; None where sp_size is 1."""
    tp_group: dist.ProcessGroup | None
    """The tensor ranks, which hold the same tokens; None where tp_size is 1."""
    tp_mesh: DeviceMesh | None
    """Mesh of the tensor ranks; parameters that are sharded over them lie on it."""
    fsdp_mesh: DeviceMesh | None
    """What `fully_shard` takes: dp_shard x cp x sp in one axis, with dp_replicate before it if above 1."""
    ep_rank: int
    """Which run of experts this rank holds."""
    ep_mesh: DeviceMesh | None
    """The ranks that hold different experts of the same layers; None where ep_size is 1."""
    expert_data_mesh: DeviceMesh | None
    """The ranks that hold the same experts; None where ep_size is 1."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Topology is frozen; make a new one instead of setting {name}")

    @classmethod
    def single(cls, device: torch.device | str | None = None) -> "Topology":
        """One rank. Under a process group of several ranks this is an error, as the sizes do not fit."""
        return cls(dp_shard_size=1, device=device)

    @property
    def data_size(self) -> int:
        """Ranks that read different windows: dp_replicate_size * dp_shard_size."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def data_rank(self) -> int:
        """This rank's place among those that read different windows."""
        return self.dp_replicate_rank * self.dp_shard_size + self.dp_shard_rank

    @property
    def owns_windows(self) -> bool:
        """Whether this rank counts its windows: one rank per window does (sp = cp = tp = 0)."""
        return self.cp_rank == self.sp_rank == self.tp_rank == 0

    @property
    def owns_losses(self) -> bool:
        """Whether the losses of this rank's slots are summed: tp ranks hold the same ones (tp = 0)."""
        return self.tp_rank == 0

    def __repr__(self) -> str:
        axes = ", ".join(
            f"{axis}_size={size}"
            for axis, size in (
                ("dp_replicate", self.dp_replicate_size),
                ("dp_shard", self.dp_shard_size),
                ("cp", self.cp_size),
                ("sp", self.sp_size),
                ("tp", self.tp_size),
                ("ep", self.ep_size),
            )
            if size > 1
        )
        return f"Topology({axes or 'one rank'}; rank {self.rank} of {self.world_size}, {self.device})"


def resolve_sizes(
    world_size: int,
    *,
    dp_replicate_size: int,
    dp_shard_size: int,
    cp_size: int,
    sp_size: int,
    tp_size: int,
    ep_size: int,
) -> tuple[int, ...]:
    """Sizes of the axes in the order of `AXES`, with dp_shard_size -1 filled in.

    Raises:
        ValueError: a size below 1, or sizes that do not multiply to `world_size`; shows the arithmetic.
    """
    others = {
        "dp_replicate_size": dp_replicate_size,
        "cp_size": cp_size,
        "sp_size": sp_size,
        "tp_size": tp_size,
        "ep_size": ep_size,
    }
    for name, size in others.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; an axis has at least 1 rank")
    if dp_shard_size != -1 and dp_shard_size < 1:
        raise ValueError(f"dp_shard_size is {dp_shard_size}; use a size from 1, or -1 for the ranks left")
    product = dp_replicate_size * cp_size * sp_size * tp_size
    arithmetic = (
        f"dp_replicate_size {dp_replicate_size} x cp_size {cp_size} x sp_size {sp_size} x tp_size {tp_size}"
    )
    if dp_shard_size == -1:
        if world_size % product:
            raise ValueError(
                f"{arithmetic} = {product} does not divide the {world_size} ranks of the run, so nothing "
                "fits in dp_shard_size=-1; change a size or the number of processes"
            )
        dp_shard_size = world_size // product
    elif product * dp_shard_size != world_size:
        raise ValueError(
            f"{arithmetic} x dp_shard_size {dp_shard_size} = {product * dp_shard_size}, but the run has "
            f"{world_size} ranks; change a size, set dp_shard_size=-1, or start {product * dp_shard_size} "
            "processes"
        )
    data_size = dp_replicate_size * dp_shard_size
    if data_size % ep_size:
        raise ValueError(
            f"ep_size {ep_size} is no factor of the {data_size} data ranks (dp_replicate_size "
            f"{dp_replicate_size} x dp_shard_size {dp_shard_size}); experts are spread over data ranks"
        )
    return dp_replicate_size, dp_shard_size, cp_size, sp_size, tp_size


def expert_ranks(ranks: Tensor, ep_size: int) -> Tensor:
    """The ranks of a mesh with the axes of `AXES`, in the order of `EXPERT_AXES`.

    Args:
        ranks: int[dp_replicate, dp_shard, cp, sp, tp].
        ep_size: a factor of the data ranks.

    Returns:
        int[tp, expert_data, ep]: every rank once. Along ep lie neighbours in the data ranks, with the same
        place on cp, sp and tp; along expert_data everything else.
    """
    data = ranks.flatten(0, 1).unflatten(0, (-1, ep_size))  # [data / ep, ep, cp, sp, tp]
    return data.permute(4, 0, 2, 3, 1).flatten(1, 3)


def is_first_rank() -> bool:
    """Whether this process is rank 0 of the run: who acts where one of many copies is to act."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def training_device() -> torch.device:
    """Where this process trains: its CUDA device where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _default_device(joined: bool) -> torch.device:
    if joined and torch.cuda.is_available() and "nccl" in str(dist.get_backend()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _derived_groups(mesh: DeviceMesh, sizes: tuple[int, ...]) -> dict[str, Any]:
    replicate_size, _, cp_size, sp_size, tp_size = sizes
    shard = mesh["dp_shard", "cp", "sp"]._flatten("fsdp")
    groups: dict[str, Any] = {
        # the public slice of a flattened axis is deprecated since torch 2.11
        "fsdp_mesh": DeviceMesh._concatenate([mesh["dp_replicate"], shard]) if replicate_size > 1 else shard,
        "loss_group": dist.group.WORLD,
    }
    if tp_size > 1:
        groups["loss_group"] = mesh["dp_replicate", "dp_shard", "cp", "sp"]._flatten("loss").get_group()
        groups["tp_mesh"] = mesh["tp"]
        groups["tp_group"] = mesh["tp"].get_group()
    if cp_size * sp_size > 1:
        groups["window_group"] = mesh["cp", "sp"]._flatten("window").get_group()
    if cp_size > 1:
        groups["cp_group"] = mesh["cp"].get_group()
    if sp_size > 1:
        groups["sp_group"] = mesh["sp"].get_group()
    return groups


@contextmanager
def process_group(
    *, rank: int, world_size: int, local_rank: int, init_method: str = "env://"
) -> Iterator[None]:
    """Join the run's process group for the length of the block: NCCL where CUDA is, gloo elsewhere.

    Args:
        rank: this process's number in the run.
        world_size: the number of processes of the run.
        local_rank: its number on this machine; it takes the CUDA device of that number.
        init_method: where the ranks meet, as in `torch.distributed.init_process_group`.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        # gloo beside NCCL: asynchronous checkpoints coordinate on the CPU
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
