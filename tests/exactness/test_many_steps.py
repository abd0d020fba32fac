"""Several steps in a row against the oracle, evaluations and a failed step between them. Rows 4, 14."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from exactness.driving import CHANNELS, WRAPPERS, build_window, draw_documents, wrap
from isoloss import Ledger, PackedBatch, Term
from oracle.models import build_model
from oracle.single_process import PlainDocument, answer
from ranks import run_on_ranks

STEPS = 4
RATE = 0.1


def documents_of(number: int) -> list[PlainDocument]:
    return draw_documents(seed=20 + number)[: 13 - 2 * number]


def windows_of(number: int, ranks: int) -> list[list[PackedBatch]]:
    """[rank][micro-batch]; the number of micro-batches changes from step to step."""
    documents = documents_of(number)
    hands = ranks * (1 + number % 3)
    windows = [build_window(documents[start::hands], padded_length=88) for start in range(hands)]
    return [windows[rank::ranks] for rank in range(ranks)]


def oracle_run() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses of training and of the evaluation before each step, and the last weights."""
    model = build_model()
    losses, evaluations = [], []
    for number in range(STEPS):
        evaluations.append(answer(model, documents_of(number + 1), num_channels=3).loss)
        expected = answer(model, documents_of(number), reduction="sample", num_channels=3)
        losses.append(expected.loss)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= RATE * expected.gradients[name]
    return losses, evaluations, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_steps_in_a_row(ranks: int) -> None:
    losses, evaluations, weights = oracle_run()
    untrained = answer(build_model(), documents_of(STEPS - 1), reduction="sample", num_channels=3).loss
    assert abs(untrained - losses[-1]) > 0.01, "the run must move, or stale weights could not show"

    def body() -> None:
        rank = dist.get_rank()
        for wrapper, (_, worlds) in WRAPPERS.items():
            if ranks not in worlds:
                continue
            wrapped = wrap(build_model(), wrapper, ranks)
            optimizer = torch.optim.SGD(wrapped.outer.parameters(), lr=RATE)
            trained = Ledger([Term("text", "sample")], CHANNELS, wrapped.topology)
            evaluated = Ledger([Term("text")], CHANNELS, wrapped.topology)
            for number in range(STEPS):
                with (
                    torch.no_grad(),
                    evaluated.step(windows_of(number + 1, ranks)[rank], training=False) as step,
                ):
                    for batch in step:
                        wrapped.outer(step, batch)
                assert step.metrics()["eval/loss"] == pytest.approx(evaluations[number], rel=1e-9)
                if number == 2:
                    with pytest.raises(ValueError, match="bad row"):
                        with trained.step(windows_of(0, ranks)[rank] * 2, wrapped.gradients) as step:
                            for place, batch in enumerate(step):
                                if place == 1:
                                    raise ValueError("bad row")
                                wrapped.outer(step, batch).backward()
                    optimizer.zero_grad()
                with trained.step(windows_of(number, ranks)[rank], wrapped.gradients) as step:
                    for batch in step:
                        wrapped.outer(step, batch).backward()
                assert step.metrics()["train/loss"] == pytest.approx(losses[number], rel=1e-9), wrapper
                optimizer.step()
                optimizer.zero_grad()
            for name, parameter in wrapped.inner.named_parameters():
                full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                # float32 norms inside the float64 model: rounding differs once the weights do
                torch.testing.assert_close(full.detach(), weights[name], rtol=0, atol=1e-8)
            counted = sum(len(one.targets()) for number in range(STEPS) for one in documents_of(number))
            assert trained.totals["loss"] == counted and evaluated.totals["loss"] == 0

    run_on_ranks(ranks, body)
