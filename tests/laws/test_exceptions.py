"""An exception inside a step discards the page, and leaves the next step right. Row 14."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from exactness.driving import CHANNELS, Wrapped, build_window, draw_documents, full_gradients, run_step, wrap
from isoloss import Ledger, LossModel, PackedBatch, Term
from laws.collectives import CollectiveCounter
from laws.gain import cost_window
from oracle.models import build_model, decoder_layers
from oracle.single_process import answer, worst_difference
from ranks import run_on_ranks


class Interrupted(BaseException):
    """Not even an Exception, as KeyboardInterrupt is none."""


@pytest.mark.parametrize("error", [ValueError("bad row"), KeyboardInterrupt(), Interrupted("stop")])
def test_row_14_the_original_exception_goes_on(error: BaseException) -> None:
    cause = OSError("disk")
    with pytest.raises(type(error)) as caught:
        with Ledger([Term("text")]).step([cost_window([[1.0]])]) as step:
            for _ in step:
                raise error from cause
    assert caught.value is error
    assert error.__cause__ is cause and error.__context__ is None
    assert "__notes__" not in vars(error)


def test_row_14_no_tensor_stays_alive() -> None:
    """Neither the closed step nor the ledger holds what the forward made."""
    model = LossModel(build_model())
    ledger = Ledger([Term("text")], channels=CHANNELS)
    kept = []

    def failing_step() -> object:
        windows = [build_window(half) for half in (draw_documents()[:5], draw_documents()[5:])]
        step = ledger.step(windows)
        alive: list[weakref.ref[torch.Tensor]] = [weakref.ref(window.input_ids) for window in windows]
        try:
            with step:
                for number, batch in enumerate(step):
                    share = model(step, batch)
                    alive.append(weakref.ref(share))
                    if number == 1:
                        raise ValueError("in the forward")
                    share.backward()
        except ValueError as error:
            assert str(error) == "in the forward"
        kept.extend(alive)
        return step

    step = failing_step()  # the step itself outlives the failure
    model.zero_grad(set_to_none=True)
    gc.collect()
    assert len(kept) == 4 and all(reference() is None for reference in kept)
    graphs = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.grad_fn is not None]
    assert not graphs, "a graph is alive"
    with pytest.raises(RuntimeError, match="no record"):
        step.metrics()  # type: ignore[attr-defined]


PLACES = ("between micro-batches", "in the forward", "before the last backward", "in a backward")


def fail_in(wrapped: Wrapped, ledger: Ledger, windows: list[PackedBatch], place: str) -> None:
    """A step of three micro-batches that fails at `place` in the second, or at the end of the third."""
    layer = decoder_layers(wrapped.inner)[1]
    number = 0

    def fail(*_: object) -> None:
        if number == 1:
            raise ValueError("in the data")

    def fail_in_backward(_module: object, _inputs: object, output: torch.Tensor) -> None:
        output.register_hook(fail)

    hook = None
    if place == "in the forward":
        hook = layer.register_forward_pre_hook(fail)
    elif place == "in a backward":
        hook = layer.register_forward_hook(fail_in_backward)
    with ledger.step(windows * 3, gradients=wrapped.gradients) as step:
        try:
            with CollectiveCounter() as counter:
                for number, batch in enumerate(step):
                    if place == "between micro-batches":
                        fail()
                    share = wrapped.outer(step, batch)
                    if number == 2:
                        raise ValueError("in the data")
                    share.backward()
        finally:
            # gathered weights and broadcast buffers are the wrappers'; nothing was reduced
            assert not [name for name in counter.counts if "reduce" in name], counter.counts
            if hook is not None:
                hook.remove()


@pytest.mark.parametrize("place", PLACES)
def test_row_14_the_next_step_is_right(place: str) -> None:
    """On ranks, under each wrapper: no collective by the failed step, nothing counted, gradients exact.

    FSDP2 keeps what it has not reduced where `zero_grad()` does not reach it.
    """
    documents = draw_documents(seed=8)
    expected = answer(build_model(), documents, num_channels=len(CHANNELS))

    def body() -> None:
        rank = dist.get_rank()
        for wrapper in ("plain", "ddp", "fsdp", "fsdp-keep", "hsdp-shard-1"):
            wrapped = wrap(build_model(), wrapper, 2)
            windows = [build_window(part, padded_length=80) for part in (documents[:4], documents[4:])][
                rank::2
            ]
            ledger = Ledger([Term("text")], CHANNELS, wrapped.topology)
            with pytest.raises(ValueError, match="in the data"):
                fail_in(wrapped, ledger, windows, place)
            assert ledger.totals["loss"] == 0
            metrics = run_step(wrapped, windows)
            difference, where = worst_difference(full_gradients(wrapped.inner), expected.gradients)
            assert difference < 1e-10, (wrapper, where)
            assert metrics["train/loss"] == pytest.approx(expected.loss, rel=1e-10)

    run_on_ranks(2, body)
