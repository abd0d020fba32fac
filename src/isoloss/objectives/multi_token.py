"""Multi-token prediction: beside the next token, those behind it, each depth a term of its own.

[Note: depths]
Depth d predicts the token d + 1 ahead, within its document. Its hidden state at a slot is one block over the
projection of two things side by side: the hidden state of depth d - 1 at the slot, and the embedding of the
token d ahead of it; embedding and head are those of the model (DeepSeek-V3, arXiv:2412.19437, section 2.2,
where the hidden state of the model is taken before its last norm, here behind it). Attention is causal, so no
slot sees the token that it is to predict. Where the token d ahead lies outside the document there is no
target, and zeros stand in place of its embedding.
"""

import copy
from typing import Any, final

import torch
from torch import Tensor, nn

from isoloss.batch.document import IGNORE_INDEX
from isoloss.batch.packed_batch import PackedBatch
from isoloss.objectives.loss_model import head_options, run_decoder
from isoloss.objectives.objective import TEXT_TERM
from isoloss.reduction.step import Step
from isoloss.reduction.terms import Term, TermReduction

AHEAD_EXTRA = "tokens_ahead"
"""Name of the `token_extras` with the tokens 1, 2, ... ahead of each slot, int64[T, depths], -1 outside."""


DEPTHS = "multi_token_depths"
"""Name of the model's part that `add_depths` adds."""


def depth_term(depth: int) -> str:
    """Name of the term of a depth, from 1."""
    return f"mtp_{depth}"


@final
class MultiTokenDepth(nn.Module):
    """One further depth on a decoder; see [Note: depths].

    Args:
        model: a transformers causal language model, whose norms are copied and whose last layer's class,
            with the options of the last layer, the block has. Of a mixture of experts the block is one too.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        decoder, config = model.get_decoder(), model.config.get_text_config()
        width = config.hidden_size
        self.hidden_norm = copy.deepcopy(decoder.norm)
        self.embedding_norm = copy.deepcopy(decoder.norm)
        self.projection = nn.Linear(2 * width, width, bias=False)
        self.block = type(decoder.layers[-1])(config, config.num_hidden_layers - 1)
        self.norm = copy.deepcopy(decoder.norm)
        for part in (self.projection, self.block):
            part.apply(model._init_weights)  # as transformers starts its own layers
        self.to(dtype=model.dtype, device=model.device)

    def forward(self, hidden: Tensor, embeddings: Tensor, **inputs: Any) -> Tensor:
        """Hidden states of this depth [1, T, H], before its norm.

        Args:
            hidden: of the depth before, [1, T, H].
            embeddings: of the tokens ahead, [1, T, H]; zeros where there is none.
            **inputs: what a layer of the decoder takes beside its hidden states.
        """
        joined = torch.cat([self.hidden_norm(hidden), self.embedding_norm(embeddings)], -1)
        output = self.block(self.projection(joined), attention_mask=None, **inputs)
        return output if isinstance(output, Tensor) else output[0]


def add_depths(model: Any, num_depths: int) -> None:
    """Give a transformers causal language model its further depths, as its part `DEPTHS`.

    They are part of its parameters from then on; a checkpoint of the model holds them, and the plain model
    loads from it without them.

    Raises:
        ValueError: it has them already, or its layers cannot be used one by one.
    """
    if DEPTHS in dict(model.named_children()):
        raise ValueError("the model has further depths already; add them once")
    parts = dict(model.get_decoder().named_children())
    missing = [name for name in ("norm", "layers", "rotary_emb") if name not in parts]
    if missing:
        raise ValueError(
            f"multi-token prediction needs a decoder with {', '.join(missing)}, which "
            f"{type(model.get_decoder()).__name__} has not; use a model of the Llama family, such as Qwen3"
        )
    model.add_module(DEPTHS, nn.ModuleList(MultiTokenDepth(model) for _ in range(num_depths)))


def look_ahead(batch: PackedBatch, num_depths: int, *, term: str = TEXT_TERM) -> PackedBatch:
    """A whole window with the targets, weights and tokens of further depths.

    The target of depth d at a slot is that of `term` d slots later, in the same document; so is its weight.

    Args:
        batch: a whole window with targets of `term`.
        num_depths: D.
        term: of the next-token targets.

    Returns:
        The window with targets "mtp_1" to "mtp_D" and `token_extras` "tokens_ahead".
    """
    documents = batch.document_ids
    targets: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    ahead = torch.full((len(batch), num_depths), -1, dtype=torch.int64)
    for depth in range(1, num_depths + 1):
        stays = torch.zeros(len(batch), dtype=torch.bool)
        stays[:-depth] = (documents[:-depth] == documents[depth:]) & (documents[:-depth] >= 0)
        moved = torch.full_like(batch.targets[term], IGNORE_INDEX)
        moved[:-depth] = batch.targets[term][depth:]
        targets[depth_term(depth)] = torch.where(stays, moved, IGNORE_INDEX)
        ahead[:-depth, depth - 1] = batch.input_ids[depth:]
        ahead[~stays, depth - 1] = -1
        if term in batch.weights:
            moved_weights = torch.zeros_like(batch.weights[term])
            moved_weights[:-depth] = batch.weights[term][depth:]
            weights[depth_term(depth)] = torch.where(stays, moved_weights, 0.0)
    return batch.with_terms(targets, weights, {AHEAD_EXTRA: ahead})


@final
class MultiToken:
    """Cross entropy of the next token, and of those behind it, each depth with its own denominator.

    Args:
        num_depths: D; the model has as many (`add_depths`), and windows their targets (`look_ahead`).
        reduction: of every term.
        coefficient: of each further depth.
        label_smoothing: see `linear_cross_entropy`; of every term.
        z_loss: likewise.
    """

    def __init__(
        self,
        num_depths: int = 1,
        reduction: TermReduction = "token",
        *,
        coefficient: float = 0.3,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        depths = [Term(depth_term(depth), reduction, coefficient) for depth in range(1, num_depths + 1)]
        self._terms = (Term(TEXT_TERM, reduction), *depths)
        self._options: dict[str, Any] = {"label_smoothing": label_smoothing, "z_loss": z_loss}

    @property
    def terms(self) -> tuple[Term, ...]:
        """The next token, then each depth."""
        return self._terms

    @property
    def measures(self) -> tuple[str, ...]:
        """None."""
        return ()

    def __call__(self, model: Any, step: Step, batch: PackedBatch) -> Tensor:
        """Share of the cross entropy of every depth."""
        hidden, head = run_decoder(model, batch)
        options = head_options(model, head) | self._options
        share = step.loss(hidden, head.weight, batch, term=TEXT_TERM, **options)
        inputs = batch.model_inputs()
        del inputs["input_ids"]
        inputs["position_embeddings"] = model.get_decoder().rotary_emb(hidden, inputs["position_ids"])
        embed = model.get_input_embeddings()
        for depth, (term, module) in enumerate(zip(self._terms[1:], model.multi_token_depths, strict=True)):
            ahead = torch.full((len(batch),), -1, device=hidden.device)  # a window without documents
            if AHEAD_EXTRA in batch.token_extras:
                ahead = batch.token_extras[AHEAD_EXTRA][:, depth].to(hidden.device)
            embeddings = embed(ahead.clamp(min=0)) * (ahead >= 0).unsqueeze(-1)
            hidden = module(hidden, embeddings.unsqueeze(0).to(hidden.dtype), **inputs)
            share = share + step.loss(module.norm(hidden), head.weight, batch, term=term.name, **options)
        return share
