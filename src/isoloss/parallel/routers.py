"""Router losses of a mixture of experts, entered by hooks while its layers run.

[Note: router losses]
Frequencies may be known at the end of the forward only, and what a layer made is not kept until then. So a
hook on each router adds up, by channel, its probabilities and z-losses, and lets an autograd function stand
between the router and its experts. It passes the expert weights through; in backward it makes the gradient of
the router losses from the layer's own logits, which autograd keeps as long as it keeps the layer. The losses'
values are added to the share at the end of the forward, and the gradient that arrives there in backward,
before any layer's, scales what the layers add: also a rescaled share has its right gradient.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from isoloss.batch.packed_batch import PackedBatch
from isoloss.losses.router import (
    RouterScores,
    count_experts,
    expert_frequencies,
    expert_pull,
    router_gradient,
    router_probabilities,
    router_z_loss,
)
from isoloss.parallel.attention import is_transformers_model
from isoloss.reduction.ledger import Ledger
from isoloss.reduction.step import Step, in_backward
from isoloss.reduction.terms import Routing

BIAS = "e_score_correction_bias"
SOFTMAX_FAMILIES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "qwen3_vl_moe_text", "olmoe"),
    *("flex_olmo", "gpt_oss", "granitemoe", "hunyuan_v1_moe", "minimax", "deepseek_v2", "ernie4_5_moe"),
)
SIGMOID_FAMILIES = (
    *("deepseek_v3", "glm4_moe", "glm4_moe_lite", "dots1", "minimax_m2", "solar_open", "lfm2_moe"),
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLosses:
    """Which losses train the routers, each a term of the ledger with reduction "source".

    A term's loss is the mean over layers: W counts tokens, and the balancing loss is 1 when experts are
    balanced, whatever the number of layers and of experts per token.
    """

    balance: str | None = "moe_balance"
    """Name of the balancing loss's term; None: not trained."""
    z: str | None = None
    """Name of the z-loss's term; None: not trained."""
    counts: Literal["previous_step", "window", "micro_batch"] = "previous_step"
    """Where the expert frequencies of the balancing loss come from, which are never differentiated:
    "previous_step": all tokens of the last training step, on all ranks and in all micro-batches, uniform (no
    gradient) in the first; nothing is communicated for it, and no split of the step changes it. "window": the
    token's own window; one collective per micro-batch under cp or sp, and no split changes it. "micro_batch":
    the windows that all ranks run at the same time; one collective per micro-batch, and the loss is the same
    only for the same windows in each micro-batch."""
    scores: RouterScores | None = None
    """How the routers make scores of logits; None: as the model's family is known to."""


@final
class RouterHooks:
    """Hooks on the routers of one model, which enter its router losses into the open step. Removable.

    Args:
        model: a transformers model whose routers return (logits [N, E], weights [N, K], experts int64[N, K]).
        losses: what to enter; token counts of experts are entered in any case.
        routers: those modules, in layer order, each with `num_experts`; None: those that transformers names.

    Raises:
        ValueError: no router is found, their numbers of experts differ, or it is not known how the family
            makes scores.
    """

    def __init__(
        self, model: nn.Module, losses: RouterLosses, routers: Sequence[nn.Module] | None = None
    ) -> None:
        found = list(find_routers(model) if routers is None else routers)
        sizes = {int(router.num_experts) for router in found}  # type: ignore[arg-type]
        if len(sizes) != 1:
            raise ValueError(
                f"{type(model).__name__} has {len(found)} routers with {sorted(sizes)} experts; expected one "
                "or more, all with the same number. Pass routers=... or leave router losses out"
            )
        self.losses = losses
        self.routing = Routing(num_layers=len(found), num_experts=sizes.pop())
        self._scores: RouterScores = "softmax"
        if losses.balance is not None:
            self._scores = router_scores(model) if losses.scores is None else losses.scores
        self._forward: _Tape | None = None
        self._backward: Callable[[], _Tape | None] = lambda: None
        # A recomputed forward finds what its first run has made; goes with the batch.
        self._tapes: weakref.WeakKeyDictionary[PackedBatch, _Tape] = weakref.WeakKeyDictionary()
        self._handles = [
            router.register_forward_hook(functools.partial(self._saw, layer))
            for layer, router in enumerate(found)
        ]

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def run(self, forward: Callable[[], Tensor], step: Step, batch: PackedBatch) -> Tensor:
        """The share that `forward` returns plus that of the router losses; differentiable.

        Args:
            forward: runs the model on the batch, once.
            step: the open step.
            batch: a micro-batch that it yielded.

        Collectives: with counts "window" one SUM all-reduce over cp x sp if above 1, with "micro_batch" one
            over all data, cp and sp ranks; with "previous_step" none.

        Raises:
            ValueError: the ledger declares other routers, or a router's rows are not the slots of the batch.
        """
        if step.routing != self.routing:
            raise ValueError(
                f"the ledger declares routing={step.routing}, the model has {self.routing}; make it with "
                "Ledger(..., routing=model.routing)"
            )
        recomputed = in_backward()
        if not recomputed:
            self._tapes[batch] = _Tape(self.losses, self._scores, self.routing, step, batch)
        tape = self._forward = self._tapes[batch]
        try:
            share = forward()
        finally:
            self._forward = None
        if not recomputed:
            tape.finish(step)
        return _JoinShares.apply(share, tape, self)

    def enter_backward(self, tape: "_Tape") -> None:
        """Note whose backward pass has begun: a layer that is recomputed in it asks."""
        self._backward = weakref.ref(tape)

    def _saw(self, layer: int, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        """Forward hook of a router. Outside the forward of a step it changes nothing."""
        tape = self._forward
        if tape is None and in_backward():  # a layer that is recomputed by itself
            tape = self._backward()
        if tape is None:
            return None
        logits, weights, experts = outputs
        logits = logits.reshape(-1, logits.shape[-1])
        if not in_backward():
            tape.record(layer, logits.detach(), experts.reshape(logits.shape[0], -1))
        if torch.is_grad_enabled():
            weights = _AddRouterGradient.apply(logits, weights, tape, layer)
        return logits.view_as(outputs[0]), weights, experts


@final
class _Tape:
    """What the routers showed in one micro-batch, and what their backward needs."""

    def __init__(
        self, losses: RouterLosses, scores: RouterScores, routing: Routing, step: Step, batch: PackedBatch
    ) -> None:
        self.losses = losses
        self.scores = scores
        self.routing = routing
        self.is_token = batch.document_ids >= 0
        device = self.is_token.device
        self.scales = {
            term: step.source_scale(term, device) / routing.num_layers
            for term in (losses.balance, losses.z)
            if term is not None
        }
        """What a loss of one token and layer is multiplied by."""
        self.pull: Tensor | None = None
        """`expert_pull` of each layer, once the frequencies are known; float64[layers, experts]."""
        if losses.balance is not None and losses.counts == "previous_step":
            self.pull = expert_pull(step.previous_frequencies(device))
        self.value: Tensor | None = None
        """Share of the router losses, once the forward is through; a detached scalar."""
        self.incoming: Tensor | None = None
        """Gradient of that share, once its backward has begun."""
        members = step.channel_members(batch)
        layers, experts = routing.num_layers, routing.num_experts
        self._members: Tensor | None = members
        self._runs = 0
        self._counts = torch.zeros(layers, experts, dtype=torch.float64, device=device)
        self._gates = torch.zeros(layers, len(members), experts, dtype=torch.float64, device=device)
        self._z_sums = torch.zeros(len(members), dtype=torch.float64, device=device)

    @torch.no_grad()
    def record(self, layer: int, logits: Tensor, experts: Tensor) -> None:
        """Add up what one router shows: probabilities and z-losses by channel, and whom it chose."""
        assert self._members is not None, "the forward is through"
        if logits.shape[0] != len(self.is_token):
            raise ValueError(
                f"router {layer} saw {logits.shape[0]} rows, the batch has {len(self.is_token)} slots; "
                "router losses need one row per slot"
            )
        self._runs += 1
        self._counts[layer] += count_experts(experts, self.routing.num_experts, self.is_token)
        # what stands in a slot without a token may be anything, and 0 times it NaN
        logits = logits.masked_fill(~self.is_token.unsqueeze(-1), 0.0)
        if self.losses.balance is not None:
            self._gates[layer] += self._members @ router_probabilities(logits, self.scores).to(torch.float64)
        if self.losses.z is not None:
            self._z_sums += self._members @ router_z_loss(logits).to(torch.float64)

    @torch.no_grad()
    def finish(self, step: Step) -> None:
        """Find the frequencies, and enter losses and counts into the step.

        Collectives: see `RouterHooks.run`.
        """
        layers = self.routing.num_layers
        assert self._members is not None, "the forward is through"
        tokens = self._members.sum(-1)
        num_tokens = tokens.sum() * (self._runs / layers)
        value = tokens.new_zeros(())
        if self.losses.balance is not None:
            if self.pull is None:
                self.pull = expert_pull(expert_frequencies(self._summed_counts(step)))
            # per channel the sum over layers and tokens of 1 + sum_e pull_e p_e
            sums = tokens * self._runs + (self._gates * self.pull.unsqueeze(1)).sum((0, 2))
            value += step.add_sums(self.losses.balance, sums / layers, num_tokens)
        if self.losses.z is not None:
            value += step.add_sums(self.losses.z, self._z_sums / layers, num_tokens)
        step.add_expert_counts(self._counts)
        self.value = value
        self._members = None
        self._gates = self._z_sums = self._counts = tokens.new_zeros(0)

    def _summed_counts(self, step: Step) -> Tensor:
        topology = step.topology
        group = topology.window_group if self.losses.counts == "window" else topology.loss_group
        counts = self._counts.clone()
        if group is not None:
            dist.all_reduce(counts, group=group)
        return counts

    def gradient(self, layer: int, logits: Tensor) -> Tensor:
        """Gradient of the whole loss by way of the router losses of one layer, [N, E]."""
        if self.incoming is None:  # a backward that the share is no part of
            return torch.zeros_like(logits)
        push, z_scale = None, None
        if self.losses.balance is not None:
            assert self.pull is not None, "the forward is through"
            push = self.pull[layer] * (self.scales[self.losses.balance] * self.incoming)
        if self.losses.z is not None:
            z_scale = self.scales[self.losses.z] * self.incoming
        gradient = router_gradient(logits, self.scores, push=push, z_scale=z_scale)
        return gradient.masked_fill(~self.is_token.unsqueeze(-1), 0.0).to(logits.dtype)


class _AddRouterGradient(torch.autograd.Function):
    """Expert weights as they are; in backward the logits get the gradient of the router losses."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, weights: Tensor, tape: _Tape, layer: int) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.tape, ctx.layer = tape, layer
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        [logits] = ctx.saved_tensors
        return ctx.tape.gradient(ctx.layer, logits), gradient, None, None


class _JoinShares(torch.autograd.Function):
    """The share plus the value of the router losses; backward tells the layers its gradient."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, tape: _Tape, hooks: RouterHooks) -> Tensor:
        ctx.tape, ctx.hooks = tape, hooks
        assert tape.value is not None, "the forward is through"
        return share + tape.value.to(share.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.tape.incoming = gradient
        ctx.hooks.enter_backward(ctx.tape)
        return gradient, None, None


def find_routers(model: nn.Module) -> list[nn.Module]:
    """The routers of a transformers model in layer order: the modules whose logits it can return.

    Raises:
        ValueError: it is no transformers model, or its routers do not return (logits, weights, experts).
    """
    if not is_transformers_model(model):
        raise ValueError(
            f"{type(model).__name__} is no transformers model; pass its routers, modules that return "
            "(logits [N, E], weights [N, K], experts [N, K]) and have num_experts, as routers=..."
        )
    import transformers

    recorders = [
        part._can_record_outputs["router_logits"]
        for part in model.modules()
        if isinstance(part, transformers.PreTrainedModel)
        and "router_logits" in (part._can_record_outputs or {})
    ]
    if any(recorder.index != 0 for recorder in recorders):
        raise ValueError(
            f"the routers of {type(model).__name__} do not return their logits first; router losses need "
            "routers that return (logits, weights, experts)"
        )
    kinds = tuple(recorder.target_class for recorder in recorders)
    return [part for part in model.modules() if isinstance(part, kinds)]


@torch.no_grad()
def update_expert_bias(model: nn.Module, ledger: Ledger, rate: float) -> None:
    """Balance without a loss: move the bias by which experts are chosen, once after each optimizer step.

    An expert that got fewer tokens in the last training step than the mean of its layer has its bias raised
    by `rate`, one that got more has it lowered. The bias decides who is chosen and weighs nothing, so it has
    no gradient (DeepSeek-V3). Counts are those of all ranks and micro-batches, so every rank makes the same
    change.

    Args:
        model: a transformers model whose routers have `e_score_correction_bias`, sharded or not.
        ledger: of the run; it declares routing, and router hooks fill it (`RouterLosses(balance=None)` where
            no loss is to be added).
        rate: the change of a step, such as 0.001.

    Raises:
        ValueError: a router has no such bias, or the ledger counts other routers.
    """
    biases = expert_biases(model)
    counts = ledger.expert_counts
    if counts is None:  # no training step yet
        return
    if len(counts) != len(biases):
        raise ValueError(
            f"the ledger counts experts of {len(counts)} layers, the model has {len(biases)} routers; pass "
            "the model that the ledger's routing comes from"
        )
    for bias, row in zip(biases, counts, strict=True):
        change = (rate * (row.mean() - row).sign()).to(bias.device, bias.dtype)
        if isinstance(bias, DTensor):  # a parameter under FSDP2; every rank has the whole change
            everywhere = [Replicate()] * bias.device_mesh.ndim
            change = DTensor.from_local(change, bias.device_mesh, everywhere, run_check=False)
        bias.add_(change)


def expert_biases(model: nn.Module) -> list[Tensor]:
    """The bias by which each router of a transformers model chooses experts, in layer order.

    Raises:
        ValueError: a router has no such bias.
    """
    routers = find_routers(model)
    tensors = [dict([*router.named_buffers(), *router.named_parameters()]) for router in routers]
    if not routers or not all(BIAS in owned for owned in tensors):
        raise ValueError(
            f"not every one of the {len(routers)} routers of {type(model).__name__} has {BIAS}, by which "
            "experts are chosen; balance it with a balancing loss"
        )
    return [owned[BIAS] for owned in tensors]


def router_scores(model: nn.Module) -> RouterScores:
    """How the routers of a model's family make scores of logits.

    Raises:
        ValueError: the family is not known here; its balancing loss would be that of another model.
    """
    family = model.config.get_text_config().model_type if is_transformers_model(model) else "this"  # type: ignore[operator, union-attr]
    if family in SOFTMAX_FAMILIES:
        return "softmax"
    if family in SIGMOID_FAMILIES:
        return "sigmoid"
    raise ValueError(
        f"how the routers of a {family!r} model make scores is not known here; say "
        'RouterLosses(scores="softmax") or "sigmoid", as its router does'
    )
