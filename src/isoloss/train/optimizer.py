"""AdamW and the learning rate as a function of how far the run is."""

import math
from typing import Literal

import torch
from torch import nn

Schedule = Literal["linear", "cosine", "constant"]


def build_optimizer(
    model: nn.Module, *, learning_rate: float, betas: tuple[float, float], epsilon: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; vectors (norms, biases) are not decayed."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=epsilon)


def learning_rate_factor(step: int, progress: float, *, schedule: Schedule, warmup_steps: int) -> float:
    """What the peak learning rate is multiplied by in the step of index `step`.

    A function of the place in the run alone: a resumed run needs no state for it.

    Args:
        step: optimizer steps done before this one.
        progress: part of the run that is done before this one, in [0, 1].
        schedule: "linear" and "cosine" fall to 0 at the end of the run, "constant" stays.
        warmup_steps: over so many steps the rate rises linearly from 0, reaching the peak in the step after.

    >>> learning_rate_factor(0, 0.0, schedule="cosine", warmup_steps=4)
    0.2
    >>> learning_rate_factor(50, 0.5, schedule="linear", warmup_steps=0)
    0.5
    """
    rise = min(1.0, (step + 1) / (warmup_steps + 1))
    if schedule == "linear":
        fall = 1.0 - progress
    elif schedule == "cosine":
        fall = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        fall = 1.0
    return rise * fall
