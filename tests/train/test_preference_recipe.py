"""The recipe of preference pairs on docstrings: its data, and what it promises on the held-out pairs."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from isoloss.data.preference_rows import preference_format
from isoloss.train.recipe import Recipe, load_recipe
from isoloss.train.trackers import read_metrics
from train.runs import train

ROOT = Path(__file__).parents[2]


def load_script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """recipes/prepare_preference.py, which imports the script beside it."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    spec = importlib.util.spec_from_file_location(
        "prepare_preference", ROOT / "recipes/prepare_preference.py"
    )
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.delitem(sys.modules, "prepare_quickstart")
    return script


def preference(corpus: Path, output: Path, *overrides: str) -> Recipe:
    return load_recipe(
        ROOT / "recipes/preference.yaml",
        [
            f"data.sources.0.path={corpus / 'pairs.jsonl'}",
            f"data.tokenizer={corpus / 'tokenizer'}",
            f"train.output_dir={output}",
            *overrides,
        ],
    )


def test_pairs_share_no_answer_and_their_prompts_save_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Row 20: source tokens fall by the tokens of each prompt but its last."""
    count = load_script(monkeypatch).make_corpus(tmp_path / "data", 40)
    rows = [json.loads(line) for line in (tmp_path / "data/pairs.jsonl").read_text().splitlines()]
    answers = [row[side][0]["content"] for row in rows for side in ("chosen", "rejected")]
    assert len(set(answers)) == len(answers) == 2 * count > 100
    assert {row["channel"] for row in rows} == {"functions", "methods"}
    recipe = preference(tmp_path / "data", tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "data/tokenizer")
    assert recipe.model.config is not None
    assert len(tokenizer) <= recipe.model.config["vocab_size"]
    counts = {}
    for shared in (False, True):
        made = preference_format(tokenizer, shared_prompt=shared)
        assert all(made.check(row) for row in rows)
        counts[shared] = sum(len(document) for row in rows for document in made.documents(row, 0))
    prompts = sum(
        len(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False))
        for row in rows
    )
    assert counts[False] - counts[True] == prompts - len(rows)
    assert counts[True] < 0.8 * counts[False]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The held-out loss falls below ln 2, and more pairs than chance explains are told apart."""
    load_script(monkeypatch).make_corpus(tmp_path / "data")
    assert train(preference(tmp_path / "data", tmp_path / "run"), 2, tmp_path, timeout_s=1500) == []
    lines = [line for line in read_metrics(tmp_path / "run") if "eval/loss" in line]
    first, last = lines[0], lines[-1]
    assert first["eval/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert last["eval/loss"] < 0.66
    assert last["eval/rewards/accuracies"] > 0.6  # chance is 0.5, and 284 pairs are held out
    assert last["eval/rewards/margins"] > 0.1
