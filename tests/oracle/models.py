"""Small transformers models in float64, alike on every rank and in every process."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.masking_utils import eager_mask

VOCABULARY = 64
MODEL_KINDS = ("qwen3-tied", "qwen3-untied", "llama", "qwen2-bias")


def build_model(
    kind: str = "qwen3-tied", *, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any
) -> nn.Module:
    """A two-layer model of one of `MODEL_KINDS` with random weights, ready to train.

    Norm scales and biases are drawn too: at their start values of ones and zeros a lost gradient of a
    neighbour can hide. `options` are of the model's config.
    """
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **options,
    }
    torch.manual_seed(seed)
    model: nn.Module
    if kind.startswith("qwen3"):
        config = Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=kind == "qwen3-tied")
        model = Qwen3ForCausalLM(config)
    elif kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    else:
        assert kind == "qwen2-bias", f"expected one of {MODEL_KINDS}, got {kind!r}"
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=False))
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 1.0 if parameter.ndim == 1 and parameter.mean() == 1.0 else 0.0
            parameter.copy_(centre + 0.1 * torch.randn_like(parameter))
    return model.to(dtype).train()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, which FSDP2 gathers one by one."""
    return list(model.get_decoder().layers)


def build_special_model(kind: str) -> nn.Module:
    """Models that do more than scaled attention and a plain head, one layer of each kind they have."""
    options = {
        "mistral": {"sliding_window": 4},
        "gemma2": {
            "sliding_window": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 5,
            "head_dim": 8,
        },
        "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7},
        "cohere": {"logit_scale": 0.25},
    }[kind]
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    torch.manual_seed(0)
    implementation = "sdpa"
    if kind == "gemma2":  # sdpa knows no cap
        implementation = "float64_eager"
        AttentionInterface.register(implementation, float64_eager_attention)
        AttentionMaskInterface.register(implementation, eager_mask)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(torch.float64).train()


def float64_eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention with the whole mask; transformers' own eager form takes its softmax in float32."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores + attention_mask, dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


class Float64Norm(nn.Module):
    """The norm of another module, computed in the dtype of its input.

    transformers' norms compute in float32 inside a float64 model. Their gradient is then not linear: a
    prefix whose gradient is the sum over two answers differs by 1e-7 from two prefixes with one answer each.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        name = type(norm).__name__
        self.weight = norm.weight
        self.offset = 1.0 if name.startswith("Gemma") else 0.0
        self.centres = name.endswith("LayerNorm")
        self.eps = next(value for key, value in vars(norm).items() if key in ("eps", "variance_epsilon"))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.centres:
            hidden = hidden - hidden.mean(-1, keepdim=True)
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.eps)
        return (self.offset + self.weight) * hidden * scale


def with_float64_norms(model: nn.Module) -> nn.Module:
    """The model with every norm replaced by `Float64Norm`, its parameters and their names unchanged."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith(("RMSNorm", "LayerNorm")):
                setattr(parent, name, Float64Norm(child))
    return model
