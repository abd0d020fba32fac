"""Law: the order of documents in a window, and of windows in a step, changes nothing."""

import random

import pytest
import torch

from exactness.driving import CHANNELS, build_window, draw_documents, full_gradients, run_step, wrap
from isoloss import Layout, PackedBatch
from oracle.models import build_model
from oracle.single_process import PlainDocument, worst_difference

TOLERANCE = 1e-10


@pytest.mark.parametrize("reduction", ["token", "sample", "square"])
def test_documents_and_windows_in_any_order(reduction: str) -> None:
    documents = draw_documents(seed=2)
    wrapped = wrap(build_model(), "alone", 1)
    halves = [documents[:6], documents[6:]]
    first = run_step(wrapped, [build_window(half, padded_length=88) for half in halves], reduction=reduction)
    gradients = {name: values.clone() for name, values in full_gradients(wrapped.inner).items()}
    for seed in range(4):
        draw = random.Random(seed)
        shuffled = [draw.sample(half, len(half)) for half in draw.sample(halves, 2)]
        windows = [build_window(half, padded_length=88) for half in shuffled]
        metrics = run_step(wrapped, windows, reduction=reduction)
        assert metrics == pytest.approx(first, rel=TOLERANCE)
        assert worst_difference(full_gradients(wrapped.inner), gradients)[0] < TOLERANCE


def test_mutant_documents_that_see_each_other_are_caught() -> None:
    """A window whose boundaries are lost: one document that attends across them."""

    def merged(documents: list[PlainDocument]) -> PackedBatch:
        window = build_window(documents, channels=False)
        lone = Layout([window.layout.source_tokens], [0])
        return PackedBatch(window.input_ids, window.targets, lone)

    documents = draw_documents(seed=2, weighted=False)
    wrapped = wrap(build_model(), "alone", 1)
    forward = run_step(wrapped, [merged(documents)])["train/loss"]
    backward = run_step(wrapped, [merged(documents[::-1])])["train/loss"]
    assert abs(forward - backward) > 1e-4


def test_mutant_log_of_the_last_micro_batch_is_caught() -> None:
    windows = [build_window(half, padded_length=88) for half in (draw_documents()[:6], draw_documents()[6:])]
    wrapped = wrap(build_model(), "alone", 1)
    alone = [run_step(wrapped, [window])["train/loss"] for window in windows]
    right = run_step(wrapped, windows)["train/loss"]
    assert all(abs(value - right) > 1e-3 for value in alone)


def test_the_digest_names_the_documents_in_any_order() -> None:
    from isoloss import Ledger, LossModel, Term

    documents = draw_documents(seed=2)
    model = LossModel(build_model())
    digests = []
    for part in (documents, documents[::-1], documents[1:]):
        with torch.no_grad(), Ledger([Term("text")], CHANNELS).step([build_window(part)]) as step:
            for batch in step:
                model(step, batch)
        digests.append(step.record.digest)
    assert digests[0] == digests[1] != digests[2]
