"""Recomputed activations on ranks, against the oracle: recorded once, summed once. Row 19."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from exactness.driving import CHANNELS, build_window, draw_documents, full_gradients, wrap
from isoloss import Ledger, Term
from oracle.models import build_model
from oracle.single_process import answer, worst_difference
from ranks import run_on_ranks


@pytest.mark.parametrize("recomputed", ["blocks", "all"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_on_ranks(recomputed: str, reentrant: bool) -> None:
    documents = draw_documents(seed=12)
    expected = answer(build_model(), documents, reduction="square", num_channels=len(CHANNELS))

    def body() -> None:
        for wrapper in ("plain", "ddp", "fsdp", "fsdp-keep"):
            if recomputed == "all" and reentrant and wrapper == "ddp":
                continue  # torch's DDP does not support a reentrant recomputation of itself
            wrapped = wrap(build_model(), wrapper, 2)
            if recomputed == "blocks":
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)  # renamed in transformers 5.24
                    wrapped.inner.gradient_checkpointing_enable({"use_reentrant": reentrant})
            windows = [build_window(documents[start::4], padded_length=64) for start in range(4)]
            ledger = Ledger([Term("text", "square")], CHANNELS, wrapped.topology)
            needs_gradient = torch.zeros((), requires_grad=True)
            with ledger.step(windows[dist.get_rank() :: 2], gradients=wrapped.gradients) as step:
                for batch in step:
                    run = functools.partial(wrapped.outer, step, batch)
                    if recomputed == "all":
                        share = checkpoint(lambda _, run=run: run(), needs_gradient, use_reentrant=reentrant)
                    else:
                        share = run()
                    share.backward()
            assert step.metrics()["train/loss"] == pytest.approx(expected.loss, rel=1e-10)
            difference, where = worst_difference(full_gradients(wrapped.inner), expected.gradients)
            assert difference < 1e-10, (wrapper, where, difference)

    run_on_ranks(2, body)
