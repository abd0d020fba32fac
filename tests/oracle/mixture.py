"""The independent answer for mixtures of experts: router losses written by hand, one document at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from oracle.models import VOCABULARY
from oracle.single_process import PlainDocument

EXPERTS = 8
PER_TOKEN = 2
MOE_KINDS = ("qwen3-moe", "mixtral", "qwen3-moe-idle")
"""-idle: one expert per token, and the upper half of the experts is never chosen."""


def build_moe(kind: str = "qwen3-moe", *, seed: int = 0, **changes: Any) -> nn.Module:
    """A two-layer model of one of `MOE_KINDS` with random weights in float64.

    Experts run in transformers' eager form, since its grouped one knows no float64.
    """
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "num_experts_per_tok": PER_TOKEN,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "experts_implementation": "eager",
    }
    torch.manual_seed(seed)
    model: nn.Module
    if kind.startswith("qwen3-moe"):
        own = {"num_experts": EXPERTS, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True}
        if kind.endswith("idle"):
            own |= {"num_experts_per_tok": 1, "norm_topk_prob": False}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(sizes | own | changes)))
    else:
        assert kind == "mixtral", kind
        own = {"num_local_experts": EXPERTS, "intermediate_size": 24, "head_dim": 8}
        model = MixtralForCausalLM(MixtralConfig(**(sizes | own | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            size = 0.5 if "gate.weight" in name else 0.1
            parameter.copy_(centre + size * torch.randn_like(parameter))
            if kind.endswith("idle") and "gate.weight" in name:
                # the mean of four logits is below the largest of them
                parameter[EXPERTS // 2 :] = parameter[: EXPERTS // 2].mean(0)
    return model.to(torch.float64).train()


@dataclass
class MixtureAnswer:
    """What a step must give."""

    text: float
    balance: float
    z: float
    gradients: dict[str, Tensor]
    counts: list[list[int]]
    """Tokens of each expert, [layers][experts]."""


def routed(model: nn.Module, document: PlainDocument) -> tuple[Tensor, list[Tensor]]:
    """Logits of a document's tokens, and of each layer's router."""
    output = model(input_ids=torch.tensor([document.tokens]), use_cache=False, output_router_logits=True)
    return output.logits[0], list(output.router_logits)


def counted(logits: Tensor, per_token: int) -> Tensor:
    """Tokens of each expert, by the router's own choice: the largest float32 probabilities."""
    chosen = logits.float().softmax(-1).topk(per_token, -1).indices
    return torch.tensor([float((chosen == expert).sum()) for expert in range(EXPERTS)], dtype=torch.float64)


def expert_counts(model: nn.Module, documents: Sequence[PlainDocument]) -> Tensor:
    """Tokens of each expert over `documents`, float64[layers, experts]."""
    counts = torch.zeros(2, EXPERTS, dtype=torch.float64)
    per_token = model.config.num_experts_per_tok
    with torch.no_grad():
        for one in documents:
            for layer, logits in enumerate(routed(model, one)[1]):
                counts[layer] += counted(logits, per_token)
    return counts


def moe_answer(
    model: nn.Module,
    groups: Sequence[Sequence[PlainDocument]],
    *,
    balance: float,
    z: float,
    frequencies: Sequence[Tensor] | None = None,
) -> MixtureAnswer:
    """Losses and gradients of one step.

    Args:
        model: plain.
        groups: documents; those of a group share expert frequencies.
        balance: coefficient of the balancing loss.
        z: coefficient of the router z-loss.
        frequencies: for each group, [layers, experts]; None: the group's own.
    """
    documents = [one for group in groups for one in group]
    targets = sum(len(one.targets()) for one in documents)
    tokens = sum(len(one.tokens) for one in documents)
    counts = expert_counts(model, documents)
    layers = counts.shape[0]
    model.zero_grad(set_to_none=True)
    sums = {"text": 0.0, "balance": 0.0, "z": 0.0}
    for index, group in enumerate(groups):
        if frequencies is None:
            own = expert_counts(model, group)
            f = own / own.sum(-1, keepdim=True)
        else:
            f = frequencies[index]
        for one in group:
            logits, routers = routed(model, one)
            total = torch.zeros((), dtype=torch.float64)
            for place, label, _ in one.targets():
                loss = nn.functional.cross_entropy(logits[place], torch.tensor(label)) / targets
                sums["text"] += loss.item()
                total = total + loss
            for layer, router in enumerate(routers):
                p = router.softmax(-1)
                loss = EXPERTS * (p * f[layer]).sum() / (layers * tokens)
                sums["balance"] += loss.item()
                z_loss = (router.exp().sum(-1).log() ** 2).sum() / (layers * tokens)
                sums["z"] += z_loss.item()
                total = total + balance * loss + z * z_loss
            total.backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    return MixtureAnswer(**sums, gradients=gradients, counts=counts.to(torch.int64).tolist())
