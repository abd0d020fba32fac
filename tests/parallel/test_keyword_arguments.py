"""Models whose modules drop keyword arguments on the way to their attention are found by their source."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from isoloss import LossModel
from isoloss.parallel.keyword_arguments import find_dropping_module

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def build(family: str, **changes: Any) -> nn.Module:
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, **SIZES | changes)
    )
    return model


@pytest.mark.parametrize(
    ("family", "layer"), [("nemotron", "NemotronDecoderLayer"), ("stablelm", "StableLmDecoderLayer")]
)
def test_a_layer_that_drops_the_layout_is_named_before_the_first_forward(family: str, layer: str) -> None:
    with pytest.raises(
        ValueError, match=f"does not keep packed documents apart: its {layer} calls attention without"
    ):
        LossModel(build(family))


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gemma2", "mistral", "opt", "gpt2", "phi"])
def test_models_that_hand_the_layout_on(family: str) -> None:
    changes = {"word_embed_proj_dim": 16} if family == "opt" else {}
    model = build(family, **changes)
    assert find_dropping_module(model, model.config) is None


class Attention(nn.Module):
    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attend: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
        output: torch.Tensor = attend(self, hidden, hidden, hidden, None, **kwargs)[0]
        return output


class ForgetfulAttention(nn.Module):
    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        output: torch.Tensor = attend(self, hidden, hidden, hidden, None)[0]
        return output


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.inner = attention

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = self.inner(hidden, **kwargs)
        return output


class ForgetfulBlock(Block):
    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = self.inner(hidden)
        return output


def test_the_module_that_drops_them_is_named() -> None:
    assert find_dropping_module(nn.Sequential(Block(Attention()))) is None
    assert find_dropping_module(nn.Sequential(ForgetfulBlock(Attention()))) == "ForgetfulBlock"
    assert find_dropping_module(nn.Sequential(Block(ForgetfulAttention()))) == "ForgetfulAttention"
    assert find_dropping_module(nn.Sequential(ForgetfulBlock(nn.Identity()))) is None


def test_a_class_without_a_source_is_taken_to_hand_them_on() -> None:
    typed = "class Typed(Block):\n    def forward(self, hidden, **kwargs):\n        return self.inner(hidden)"
    names: dict[str, Any] = {"Block": Block}
    exec(typed, names)
    assert find_dropping_module(names["Typed"](Attention())) is None


def test_a_tower_with_a_config_of_its_own_needs_no_layout() -> None:
    text, audio = object(), object()
    block = ForgetfulBlock(Attention())
    block.inner.config = text
    assert find_dropping_module(nn.Sequential(block), text) == "ForgetfulBlock"
    block.inner.config = audio
    assert find_dropping_module(nn.Sequential(block), text) is None
