"""A model together with its loss: what DDP or fully_shard wraps."""

from collections.abc import Callable
from typing import Any, final

from torch import Tensor, nn

from isoloss.batch.packed_batch import PackedBatch
from isoloss.parallel.attention import use_packed_attention
from isoloss.reduction.step import Step

Objective = Callable[[Any, Step, PackedBatch], Tensor]
"""An objective: (model, step, batch) -> this rank's share."""


@final
class LossModel(nn.Module):
    """Runs a model and its loss in one forward, so that the head is used inside the wrapped forward.

    Outside it a sharded head is a DTensor, a tied head loses its gradient without a warning, and DDP does
    not reduce at all. It has no parameter of its own. On a transformers model it sets attention by document
    (`isoloss.parallel.attention`), so that packed documents do not see each other.

    Args:
        model: a transformers causal language model, or any module with `get_decoder()` (called with
            `PackedBatch.model_inputs()`; returns hidden states [1, T, H], or an output that has them as
            `last_hidden_state`) and `get_output_embeddings()` (the head, with a `weight` [V, H]). With an
            objective of your own the model can be anything.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._from_transformers = use_packed_attention(model)

    def forward(self, step: Step, batch: PackedBatch, objective: Objective | None = None) -> Tensor:
        """This rank's share of the step's loss, a differentiable scalar.

        Args:
            step: the open step.
            batch: a micro-batch that it yielded.
            objective: what to compute; None: next-token cross entropy of the only declared term.
        """
        if objective is not None:
            return objective(self.model, step, batch)
        return causal_lm(self.model, step, batch, use_cache=False if self._from_transformers else None)


def causal_lm(
    model: Any, step: Step, batch: PackedBatch, *, term: str | None = None, use_cache: bool | None = None
) -> Tensor:
    """Share of the next-token cross entropy of one term.

    Args:
        model: see `LossModel`.
        step: the open step.
        batch: the micro-batch.
        term: name of the term; None: the only declared one.
        use_cache: passed to the decoder if given; False spares transformers a key-value cache.
    """
    options = {} if use_cache is None else {"use_cache": use_cache}
    output = model.get_decoder()(**batch.model_inputs(), **options)
    hidden = output if isinstance(output, Tensor) else output.last_hidden_state
    head = model.get_output_embeddings()
    return step.loss(hidden, head.weight, batch, term=term, bias=head.bias)
