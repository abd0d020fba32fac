"""`model.config` is checked against transformers, which itself accepts any key."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from isoloss.train.model import build_model, load_tokenizer
from isoloss.train.recipe import RecipeError, parse_recipe
from isoloss.train.recipe_model import check_model_config
from train.runs import make_corpus, recipe

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


@pytest.mark.parametrize(
    ("model_type", "experts"),
    [
        ("qwen3_moe", {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}),
        ("glm4_moe", {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}),
    ],
)
def test_what_the_code_reads_and_the_class_does_not_declare(
    tmp_path: Path, model_type: str, experts: dict[str, int]
) -> None:
    """The attention of these takes head_dim from the config where it is given."""
    make_corpus(tmp_path)
    config = {"model_type": model_type, "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16} | experts
    made = recipe(tmp_path, tmp_path / "run", f"model.config={config}")
    attention = build_model(made, load_tokenizer(made)).model.layers[0].self_attn
    assert attention.q_proj.weight.shape == (4 * 16, 32)
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (2 * 16, 32)
    assert attention.o_proj.weight.shape == (32, 4 * 16)
    (misspelt,) = check_model_config({**config, "head_dims": 16})
    assert str(misspelt).endswith("did you mean head_dim?")
