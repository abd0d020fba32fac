"""Several terms with their own reductions and coefficients, against the oracle. Rows 6 and 24."""

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from exactness.driving import CHANNELS, build_window, draw_documents, full_gradients, wrap
from isoloss import Ledger, PackedBatch, Step, Term
from isoloss.objectives.loss_model import causal_lm
from oracle.models import build_model, with_float64_norms
from oracle.single_process import answer, worst_difference
from ranks import run_on_ranks

TERMS = (Term("text", "token", 1.0), Term("again", "sample", 0.3), Term("third", "square", -0.1))


def three_terms(model: nn.Module, step: Step, batch: PackedBatch) -> Tensor:
    """The same cross entropy as three terms, through the fused loss and through logits."""
    first = causal_lm(model, step, batch, term="text")
    logits = model(**batch.model_inputs(), use_cache=False).logits
    return (
        first
        + step.loss_from_logits(logits, batch, term="again")
        + causal_lm(model, step, batch, term="third")
    )


def test_terms_add_up_with_their_coefficients() -> None:
    documents = draw_documents(seed=13)
    answers = [
        answer(with_float64_norms(build_model()), documents, reduction=term.reduction, num_channels=3)
        for term in TERMS
    ]
    loss = sum(term.coefficient * one.loss for term, one in zip(TERMS, answers, strict=True))
    gradients = {
        name: sum(term.coefficient * one.gradients[name] for term, one in zip(TERMS, answers, strict=True))
        for name in answers[0].gradients
    }

    def body() -> None:
        for wrapper in ("plain", "ddp", "fsdp", "hsdp-shard-1"):
            wrapped = wrap(with_float64_norms(build_model()), wrapper, 2)
            ledger = Ledger(TERMS, CHANNELS, wrapped.topology)
            windows = [
                PackedBatch(
                    window.input_ids,
                    {term.name: window.targets["text"] for term in TERMS},
                    window.layout,
                    {term.name: window.weights["text"] for term in TERMS} if window.weights else None,
                )
                for window in (build_window(documents[start::4], padded_length=64) for start in range(4))
            ]
            with ledger.step(windows[dist.get_rank() :: 2], gradients=wrapped.gradients) as step:
                for batch in step:
                    wrapped.outer(step, batch, three_terms).backward()
            metrics = step.metrics()
            assert metrics["train/loss"] == pytest.approx(loss, rel=1e-10)
            for term, one in zip(TERMS, answers, strict=True):
                assert metrics[f"loss/{term.name}"] == pytest.approx(one.loss, rel=1e-10)
            difference, where = worst_difference(full_gradients(wrapped.inner), gradients)
            assert difference < 1e-10, (wrapper, where, difference)
            # a slot that three terms score is one loss token
            assert metrics["tokens/loss"] == answers[0].loss_tokens
            assert metrics["targets/third"] == answers[0].loss_tokens

    run_on_ranks(2, body)
