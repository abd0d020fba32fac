"""Counts the collectives of a block."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

NOT_COLLECTIVE = ("wait_tensor", "_wrap_tensor_autograd")


class CollectiveCounter(TorchDispatchMode):
    """Every operator of torch.distributed that runs in the block, plain, functional or of objects.

    `CommDebugMode` counts the same by the same means, and also tracks modules by hooks, which fail on a
    module that is called many times in one block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.counts.total()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func._opname
        if func.namespace in ("c10d", "_c10d_functional") and name not in NOT_COLLECTIVE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))
