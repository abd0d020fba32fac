"""What audits look at: whole gradients, and how often ranks communicate."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


def full_gradient(parameter: nn.Parameter) -> Tensor:
    """The whole gradient of a parameter, on the CPU; zeros where it has none.

    Collectives: those that put a sharded gradient together, so every rank calls.
    """
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return whole.detach().to("cpu")


@final
class CollectiveCount(TorchDispatchMode):
    """Counts the collectives that this rank issues in its block, plain and functional.

    torch's CommDebugMode also follows the modules that run, and fails on models whose layers share one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count `func` if it communicates, and run it."""
        if "c10d" in func.namespace and not func.__name__.startswith(("wait_tensor", "barrier", "monitored")):
            self.total += 1
        return func(*args, **(kwargs or {}))
