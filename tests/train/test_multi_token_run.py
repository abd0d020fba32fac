"""Multi-token prediction through a recipe."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from isoloss.train.export import export_run
from train.objective_runs import recipe_maker, run_everywhere
from train.runs import make_corpus, numbers, train


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    make_corpus(folder)
    return folder


def test_a_run_learns_resumes_and_moves_between_layouts(corpus: Path, tmp_path: Path) -> None:
    """Rows 21 and 24: a curve for every depth, by channel; the export is the plain model."""
    make = recipe_maker(corpus / "docs.jsonl", corpus / "tokenizer", "{type: multi_token, mtp_depths: 2}")
    lines = run_everywhere(make, tmp_path, [(2, ("parallel.cp_size=2",))])
    first, last = lines[0], lines[-1]
    for name in ("loss/text", "loss/mtp_1", "loss/mtp_2", "channel_loss/words/mtp_2"):
        assert last[f"eval/{name}"] < first[f"eval/{name}"] - 0.2, name
    assert last["train/loss"] == pytest.approx(
        last["loss/text"] + 0.3 * (last["loss/mtp_1"] + last["loss/mtp_2"]), rel=1e-5
    )
    assert last["targets/text"] > last["targets/mtp_1"] > last["targets/mtp_2"]
    model = AutoModelForCausalLM.from_pretrained(export_run(tmp_path / "run"))
    assert not [name for name, _ in model.named_parameters() if "multi_token" in name]
    ids = torch.tensor([[5, 6, 7, 8]])
    assert float(model(input_ids=ids, labels=ids).loss.detach()) < 5.0


def test_with_recomputation_and_without_depth_coefficient(corpus: Path, tmp_path: Path) -> None:
    """A coefficient of 0 shows the depths and trains the model alone: the same next-token losses."""
    depths = recipe_maker(
        corpus / "docs.jsonl", corpus / "tokenizer", "{type: multi_token, mtp_coefficient: 0.0}"
    )
    plain = recipe_maker(corpus / "docs.jsonl", corpus / "tokenizer", "{type: causal_lm}")
    short = ("train.max_steps=4", "data.eval_fraction=0", "train.eval_steps=null", "train.max_grad_norm=null")
    assert train(depths(tmp_path / "a", *short, "train.gradient_checkpointing=true"), 1, tmp_path) == []
    assert train(plain(tmp_path / "b", *short), 1, tmp_path) == []
    left, right = numbers(tmp_path / "a"), numbers(tmp_path / "b")
    assert [line["loss/text"] for line in left] == pytest.approx(
        [line["loss/text"] for line in right], rel=1e-5
    )
