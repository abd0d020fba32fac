"""Channels on or off: loss and every gradient identical to the bit. Rows 13 and 19.

In float32 and bfloat16, with recomputation of the blocks or of the whole loss model, and with activations
offloaded; recomputing and offloading change no bit either, and record nothing twice.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from exactness.driving import CHANNELS, build_window, draw_documents
from isoloss import Ledger, LossModel, PackedBatch, Step, Term
from oracle.models import build_model

MEMORY = (
    "kept",
    "blocks recomputed, reentrant",
    "blocks recomputed",
    "all recomputed, reentrant",
    "all recomputed",
    "offloaded",
)


def forward_of(model: LossModel, memory: str) -> Callable[[Step, PackedBatch], Tensor]:
    if memory.startswith("blocks"):
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # transformers 5.24 renames it, 5.0 has this name only
            model.model.gradient_checkpointing_enable({"use_reentrant": memory.endswith("reentrant")})
    if not memory.startswith("all"):
        return model
    reentrant = memory.endswith("reentrant")
    # the reentrant kind gives a gradient only to a call that has an input with one
    needs_gradient = torch.zeros((), requires_grad=True)

    def recomputed(step: Step, batch: PackedBatch) -> Tensor:
        return checkpoint(lambda _: model(step, batch), needs_gradient, use_reentrant=reentrant)

    return recomputed


@contextlib.contextmanager
def offloading(memory: str) -> Iterator[None]:
    with torch.autograd.graph.save_on_cpu() if memory == "offloaded" else contextlib.nullcontext():
        yield


def train_step(
    dtype: torch.dtype, memory: str, channels: tuple[str, ...], kind: str = "qwen3-tied"
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, float]]:
    documents = draw_documents(seed=7)
    windows = [build_window(part, alignment=8, padded_length=96) for part in (documents[:5], documents[5:])]
    model = LossModel(build_model(kind, dtype=dtype))
    run = forward_of(model, memory)
    ledger = Ledger([Term("text", "square")], channels=channels)
    shares = []
    with ledger.step(windows) as step, offloading(memory):
        for batch in step:
            share = run(step, batch)
            shares.append(share.detach().clone())
            share.backward()
    gradients = {}
    for name, parameter in model.model.named_parameters():
        assert parameter.grad is not None
        gradients[name] = parameter.grad
    return shares, gradients, step.metrics()


@functools.cache
def quiet_step(dtype: torch.dtype, kind: str) -> tuple[list[Tensor], dict[str, Tensor], dict[str, float]]:
    return train_step(dtype, "kept", (), kind)


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen2-bias"])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_13_and_19_observing_changes_no_bit(dtype: torch.dtype, memory: str, kind: str) -> None:
    shares, gradients, metrics = quiet_step(dtype, kind)
    for channels in ((), CHANNELS):
        seen_shares, seen_gradients, seen = train_step(dtype, memory, channels, kind)
        assert all(torch.equal(one, other) for one, other in zip(shares, seen_shares, strict=True))
        differing = [
            name for name, values in gradients.items() if not torch.equal(values, seen_gradients[name])
        ]
        assert not differing
        # recorded once, and the same per-token losses
        assert all(seen[name] == value for name, value in metrics.items())
    assert seen["channel_loss/code"] > 0.0


@pytest.mark.parametrize("memory", MEMORY)
def test_row_19_channel_losses_are_those_of_the_kept_pass(memory: str) -> None:
    kept = train_step(torch.float32, "kept", CHANNELS)[2]
    assert train_step(torch.float32, memory, CHANNELS)[2] == kept


def test_row_12_the_head_is_projected_once() -> None:
    """Channels cost no second projection: the same number of matrix products with and without them."""
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for channels in ((), CHANNELS):
        with FlopCounterMode(display=False) as counter:
            train_step(torch.float32, "kept", channels)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_mutant_a_loss_weighed_by_channel_is_caught() -> None:
    """A mean of channel means, as an observation that reaches into the loss makes it."""
    _, _, metrics = train_step(torch.float32, "kept", CHANNELS)
    means = [value for name, value in metrics.items() if name.startswith("channel_loss/")]
    assert abs(sum(means) / len(means) - metrics["train/loss"]) > 1e-3
