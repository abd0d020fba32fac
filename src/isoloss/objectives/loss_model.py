"""A model together with its loss: what DDP or fully_shard wraps."""

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor, nn

from isoloss.batch.packed_batch import PackedBatch
from isoloss.parallel.attention import is_transformers_model, use_packed_attention
from isoloss.parallel.routers import RouterHooks, RouterLosses
from isoloss.reduction.step import Step
from isoloss.reduction.terms import Routing

Objective = Callable[[Any, Step, PackedBatch], Tensor]
"""An objective: (model, step, batch) -> this rank's share."""

_LOGIT_SCALES = (
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
    "logits_mup_width_multiplier",
    "logits_soft_cap",
    "output_logit_soft_cap",
)
"""Keys under which transformers configs hold a change of the logits, apart from `final_logit_softcapping`."""


@final
class LossModel(nn.Module):
    """Runs a model and its loss in one forward, so that the head is used inside the wrapped forward.

    Outside it a sharded head is a DTensor, a tied head loses its gradient without a warning, and DDP does
    not reduce at all. It has no parameter of its own. On a transformers model it sets attention by document
    (`isoloss.parallel.attention`), so that packed documents do not see each other.

    Args:
        model: a transformers causal language model, or any module with `get_decoder()` (called with
            `PackedBatch.model_inputs()`; returns hidden states [1, T, H], or an output that has them as
            `last_hidden_state`) and `get_output_embeddings()` (the head: a module with `weight` [V, H] and
            `bias` [V] or None, or the embedding itself). With an objective of your own the model can be
            anything.
        router_losses: losses of the routers of a mixture of experts, entered in every forward by hooks on
            them; None: none.
        routers: see `isoloss.parallel.routers.RouterHooks`.
    """

    def __init__(
        self,
        model: nn.Module,
        router_losses: RouterLosses | None = None,
        *,
        routers: Sequence[nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.router_hooks = None if router_losses is None else RouterHooks(model, router_losses, routers)
        if is_transformers_model(model):
            use_packed_attention(model)

    def forward(self, step: Step, batch: PackedBatch, objective: Objective | None = None) -> Tensor:
        """This rank's share of the step's loss, a differentiable scalar.

        Args:
            step: the open step.
            batch: a micro-batch that it yielded.
            objective: what to compute; None: next-token cross entropy of the only declared term.
        """
        chosen = causal_lm if objective is None else objective
        if self.router_hooks is None:
            return chosen(self.model, step, batch)
        return self.router_hooks.run(lambda: chosen(self.model, step, batch), step, batch)

    @property
    def routing(self) -> Routing | None:
        """Layers and experts of its routers, for `Ledger(..., routing=...)`; None without router losses."""
        return None if self.router_hooks is None else self.router_hooks.routing


def causal_lm(
    model: Any, step: Step, batch: PackedBatch, *, term: str | None = None, **kernel_options: Any
) -> Tensor:
    """Share of the next-token cross entropy of one term.

    What a transformers model does to its logits (scale, softcap) is read from its config.

    Args:
        model: see `LossModel`.
        step: the open step.
        batch: the micro-batch.
        term: name of the term; None: the only declared one.
        **kernel_options: of `linear_cross_entropy` (label_smoothing, z_loss, ...).

    Raises:
        NotImplementedError: the model scales its logits in a way that is not known here.
    """
    hidden, head = run_decoder(model, batch)
    options = head_options(model, head) | kernel_options
    return step.loss(hidden, head.weight, batch, term=term, **options)


def head_log_probs(model: Any, step: Step, batch: PackedBatch, *, term: str | None = None) -> Tensor:
    """Log-probability of every target of a term under the model; see `Step.log_probs` and `causal_lm`."""
    hidden, head = run_decoder(model, batch)
    return step.log_probs(hidden, head.weight, batch, term=term, **head_options(model, head))


def run_decoder(model: Any, batch: PackedBatch) -> tuple[Tensor, Any]:
    """Hidden states of the batch's slots [1, T_local, H], and the head that stands on them."""
    options = {"use_cache": False} if is_transformers_model(model) else {}
    output = model.get_decoder()(**batch.model_inputs(), **options)
    hidden = output if isinstance(output, Tensor) else output.last_hidden_state
    return hidden, model.get_output_embeddings()


def head_options(model: Any, head: Any) -> dict[str, Any]:
    """What a model does between its hidden states and its loss besides the weight of its head.

    Raises:
        NotImplementedError: see `logit_options`.
    """
    options: dict[str, Any] = {"bias": None if isinstance(head, nn.Embedding) else head.bias}
    if is_transformers_model(model):
        options |= logit_options(model.config.get_text_config())
    return options


def logit_options(config: Any) -> dict[str, float]:
    """What a transformers model does between its head and its loss, as options of `linear_cross_entropy`.

    Args:
        config: of the text model. The same key means different things in different families: Granite divides
            by `logits_scaling`, HyperCLOVA X multiplies.

    Raises:
        NotImplementedError: a key that changes logits, in a family whose use of it is not known here; the
            loss would be that of another model.
    """
    values, family = vars(config), config.model_type
    options: dict[str, float] = {}
    if values.get("final_logit_softcapping") is not None:
        options["softcap"] = values["final_logit_softcapping"]
    for key in _LOGIT_SCALES:
        scale = values.get(key)
        if scale is None or scale == 1.0:
            continue
        if key == "logit_scale" and family.startswith("cohere"):
            options["logit_scale"] = scale
        elif key == "logits_scaling" and family.startswith("granite"):
            options["logit_scale"] = 1.0 / scale
        elif key == "logits_scaling" and family.startswith("hyperclovax"):
            options["logit_scale"] = scale
        else:
            raise NotImplementedError(
                f"config.{key} = {scale} of a {family!r} model changes its logits in a way that is not known "
                "here; pass an objective that calls step.loss(..., logit_scale=..., softcap=...) as the "
                "model's own forward does"
            )
    return options
