"""Balancing by bias in recipes: how far it moves and where, in every layout, and that a resume keeps it."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from isoloss.parallel import routers
from isoloss.parallel.routers import find_routers
from isoloss.train.export import export_run
from isoloss.train.trackers import read_metrics
from isoloss.train.trainer import Trainer
from train.runs import differences, make_corpus, numbers, recipe, train

EXPERTS = 4
RATE = 0.01
SIGMOID = (
    "model.config={model_type: glm4_moe, vocab_size: 64, hidden_size: 32, intermediate_size: 48, "
    f"moe_intermediate_size: 16, n_routed_experts: {EXPERTS}, num_experts_per_tok: 2, n_group: 1, "
    "topk_group: 1, first_k_dense_replace: 1, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, head_dim: 8}"
)
SOFTMAX = (
    "model.config={model_type: qwen3_moe, vocab_size: 64, hidden_size: 32, intermediate_size: 48, "
    f"moe_intermediate_size: 16, num_experts: {EXPERTS}, num_experts_per_tok: 2, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2}"
)
BALANCED = (
    SIGMOID,
    f"objective.router_bias_update_rate={RATE}",
    "train.max_steps=6",
    "train.lr_scheduler_type=constant",
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, four micro-batches a step."""
    folder = tmp_path_factory.mktemp("reference")
    assert train(recipe(corpus, folder / "run", *BALANCED), 1, folder) == []
    return folder / "run"


def final_bias(run: Path) -> list[float]:
    [router] = find_routers(AutoModelForCausalLM.from_pretrained(export_run(run)))
    bias: list[float] = router.e_score_correction_bias.tolist()
    return bias


def bias_of_counts(lines: list[dict[str, Any]]) -> list[float]:
    """By the definition, from the tokens of each expert that a line shows (the model has one such layer)."""
    bias = torch.zeros(EXPERTS)
    for line in lines:
        counts = [line[f"moe/expert_tokens/{expert}"] for expert in range(EXPERTS)]
        mean = sum(counts) / EXPERTS
        bias += torch.tensor([RATE * ((count < mean) - (count > mean)) for count in counts])
    return bias.tolist()


def test_the_bias_moves_once_a_step_towards_the_idle(reference: Path) -> None:
    lines = read_metrics(reference)
    bias = final_bias(reference)
    assert bias == bias_of_counts(lines[1:])
    assert any(bias) and any(bias_of_counts(lines[1:2])), "or nothing was shown"
    assert "loss/moe_balance" not in lines[-1]


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (2, []),
        (4, []),  # two micro-batches a step on two ranks, one on four
        (2, ["parallel.dp_replicate_size=2"]),
        (2, ["parallel.ep_size=2"]),
        pytest.param(2, ["parallel.sp_size=2"], marks=pytest.mark.slow),
    ],
)
def test_the_layout_does_not_change_the_bias(
    corpus: Path, reference: Path, tmp_path: Path, world_size: int, overrides: list[str]
) -> None:
    made = recipe(corpus, tmp_path / "run", *BALANCED, *overrides)
    assert train(made, world_size, tmp_path) == []
    assert final_bias(tmp_path / "run") == final_bias(reference)
    assert differences(numbers(reference), numbers(tmp_path / "run"), 2e-4) == []


def test_a_resume_goes_on_with_the_bias(corpus: Path, reference: Path, tmp_path: Path) -> None:
    """It is a buffer, which is no parameter and yet part of the checkpoint."""
    assert train(recipe(corpus, tmp_path / "run", *BALANCED, "train.max_steps=3"), 1, tmp_path) == []
    resumed = recipe(corpus, tmp_path / "run", *BALANCED, "train.resume_from_checkpoint=auto")
    assert train(resumed, 1, tmp_path) == []
    assert final_bias(tmp_path / "run") == final_bias(reference)
    assert differences(numbers(reference)[4:], numbers(tmp_path / "run")[4:], 0.0) == []


def test_a_skipped_step_leaves_the_bias(corpus: Path, tmp_path: Path) -> None:
    options = dict(recipe(corpus, tmp_path / "unused", SIGMOID).model.config or {})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(options.pop("model_type"), **options))
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = torch.inf
    model.save_pretrained(tmp_path / "broken")
    broken = ["model.config=null", f"model.path={tmp_path / 'broken'}", "train.max_steps=2"]
    assert train(recipe(corpus, tmp_path / "run", *BALANCED, *broken), 1, tmp_path) == []
    lines = read_metrics(tmp_path / "run")
    assert lines[-1]["steps/skipped"] == 2
    assert any(bias_of_counts(lines[1:])), "the counts alone would have moved it"
    assert final_bias(tmp_path / "run") == [0.0] * EXPERTS


# -- keys that the model does not fit


def refusal(corpus: Path, tmp_path: Path, *overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        Trainer(recipe(corpus, tmp_path / "run", *overrides), console=Console(file=StringIO()))
    return str(caught.value)


def test_a_model_without_the_bias_is_an_error(corpus: Path, tmp_path: Path) -> None:
    message = refusal(corpus, tmp_path, SOFTMAX, "objective.router_bias_update_rate=0.001")
    assert message.startswith("objective.router_bias_update_rate: the routers of Qwen3MoeForCausalLM have ")
    assert message.endswith("set it to null, and balance with objective.router_aux_loss_coef")


@pytest.mark.parametrize("key", ["router_aux_loss_coef", "router_z_loss_coef", "router_bias_update_rate"])
def test_router_keys_of_a_dense_model_are_an_error(corpus: Path, tmp_path: Path, key: str) -> None:
    message = refusal(corpus, tmp_path, f"objective.{key}=0.01")
    assert message.startswith(f"objective.{key}: Qwen3ForCausalLM has no routers")
    assert "set it to null, or train a mixture of experts" in message
    assert "routers=" not in message, "that is advice for a loop of one's own"


def test_a_family_whose_scores_are_not_known_is_an_error(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routers, "SOFTMAX_FAMILIES", ())
    message = refusal(corpus, tmp_path, SOFTMAX, "objective.router_aux_loss_coef=0.01")
    assert message.startswith("objective.router_aux_loss_coef: how the routers of Qwen3MoeForCausalLM make ")
    assert "set it to null" in message and "RouterLosses" not in message
