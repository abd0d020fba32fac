"""`model.config` is checked against transformers, which itself accepts any key."""

import pytest
from transformers import AutoConfig

from isoloss.train.recipe import RecipeError, parse_recipe
from isoloss.train.recipe_model import check_model_config

SMALL = {"model_type": "qwen3", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "head_dim": 8}


def messages(**changes: object) -> list[str]:
    return [str(problem) for problem in check_model_config({**SMALL, **changes})]


def message(**changes: object) -> str:
    (text,) = messages(**changes)
    return text


def test_a_good_config() -> None:
    assert messages() == []
    assert messages(rms_norm_eps=1e-6, rope_theta=1e4, tie_word_embeddings=True, sliding_window=None) == []
    assert messages(rope_parameters={"rope_type": "default", "rope_theta": 1e6}) == []


def test_transformers_accepts_an_unknown_key() -> None:
    """The reason for this check: if this fails, transformers has begun to check by itself."""
    assert AutoConfig.for_model("qwen3", hiden_size=3).to_dict()["hiden_size"] == 3


def test_an_unknown_key_names_the_nearest() -> None:
    assert (
        message(hiden_size=3)
        == "model.config.hiden_size is not a key of Qwen3Config; did you mean hidden_size?"
    )
    assert message(zzz=3) == "model.config.zzz is not a key of Qwen3Config; remove it"


def test_a_number_in_quotes() -> None:
    assert message(rms_norm_eps="1e-6") == (
        "model.config.rms_norm_eps must be a number, got the string '1e-6'; write 1e-6 without quotes"
    )
    nested = message(rope_parameters={"rope_type": "default", "rope_theta": "1e6"})
    assert "model.config.rope_parameters.rope_theta must be a number" in nested


def test_1e_6_without_quotes_is_a_number() -> None:
    """YAML 1.1 reads `1e-6` as a string."""
    text = "model: {config: {model_type: qwen3, rms_norm_eps: 1e-6}}\n"
    text += "data: {tokenizer: t, sources: [{name: a, path: b}]}\ntrain: {output_dir: x, max_steps: 1}\n"
    config = parse_recipe(text).model.config
    assert config is not None
    assert config["rms_norm_eps"] == 1e-6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": 1}, "for a float write 1.0"),
        ({"vocab_size": "many"}, "model.config.vocab_size: "),
        ({"tie_word_embeddings": "yes"}, "model.config.tie_word_embeddings: "),
        ({"num_hidden_layers": 2.5}, "model.config.num_hidden_layers: "),
        ({"layer_types": ["full_attention"]}, "model.config is refused by Qwen3Config"),
        ({"dtype": "bfloat16"}, "belongs in model.dtype"),
        ({"rope_parameters": {"rope_tipe": "default"}}, "did you mean rope_type?"),
        ({"model_type": "qwen33"}, "'qwen33' is not a model type of transformers; did you mean qwen3?"),
        ({"model_type": None}, "model.config.model_type is missing"),
        ({"model_type": 3}, "must be a name, got 3"),
    ],
)
def test_what_the_class_refuses(changes: dict[str, object], words: str) -> None:
    assert words in message(**changes)


def test_all_faults_at_once_with_lines() -> None:
    text = """\
model:
  config:
    model_type: qwen3
    hiden_size: 3
    rms_norm_eps: '1e-6'
    vocab_size: many
data: {tokenizer: t, sources: [{name: a, path: b}]}
train: {output_dir: x, max_steps: 1}
"""
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text)
    assert [problem.location for problem in caught.value.problems] == [f"recipe.yaml:{n}" for n in (4, 5, 6)]


def test_a_part_of_a_composed_config_is_checked_too() -> None:
    config = {"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text", "hiden_size": 3}}
    (problem,) = check_model_config(config)
    assert str(problem) == (
        "model.config.text_config.hiden_size is not a key of Qwen2_5_VLTextConfig; did you mean hidden_size?"
    )


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text", "mixtral", "qwen3_moe"])
def test_a_config_that_transformers_writes_is_accepted(model_type: str) -> None:
    written = AutoConfig.for_model(model_type).to_dict()
    written.pop("dtype")
    assert check_model_config(written) == []
