"""The corpus of the classification recipe, and what the recipe promises of it."""

import importlib
import json
import types
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from isoloss.train.export import export_run
from isoloss.train.recipe import Recipe, load_recipe
from isoloss.train.trackers import read_metrics
from train.runs import train

RECIPES = Path(__file__).parents[2] / "recipes"
SOURCES = ("functions", "classes")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("prepare_classification")


def recipe(corpus: Path, output: Path) -> Recipe:
    places = [f"data.sources.{n}.path={corpus / name}.jsonl" for n, name in enumerate(SOURCES)]
    return load_recipe(
        RECIPES / "classification.yaml",
        [*places, f"data.tokenizer={corpus / 'tokenizer'}", f"train.output_dir={output}"],
    )


def test_every_class_has_rows_and_no_text_stands_twice(script: types.ModuleType, tmp_path: Path) -> None:
    files = script.source_files()
    rows, counts = script.labelled_rows(files, 20)
    assert counts == dict.fromkeys(recipe(tmp_path, tmp_path).objective.labels or (), 20)
    found = [row for name in SOURCES for row in rows[name]]
    assert len({row["text"] for row in found}) == len(found) == sum(counts.values())
    assert all(rows.values())
    assert script.labelled_rows(files, 20) == (rows, counts)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_recipe(script: types.ModuleType, tmp_path: Path) -> None:
    """Held-out accuracy rises from one in six to three in four and more, and the loss falls by half; the
    export names the classes."""
    corpus = tmp_path / "data"
    script.make_corpus(corpus)
    assert script.is_current(corpus)
    assert train(recipe(corpus, tmp_path / "run"), 2, tmp_path, timeout_s=1500) == []
    lines = [line for line in read_metrics(tmp_path / "run") if "eval/loss" in line]
    first, last = lines[0], lines[-1]
    assert last["eval/loss"] < 0.5 * first["eval/loss"]
    for suffix in ("classification/accuracy", *(f"channel_classification/accuracy/{n}" for n in SOURCES)):
        assert first[f"eval/{suffix}"] < 0.35
        assert last[f"eval/{suffix}"] > 0.75
    folder = export_run(tmp_path / "run")
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in (corpus / "classes.jsonl").read_text().splitlines()[:100]]
    best = [
        int(
            model(
                **tokenizer(row["text"], return_tensors="pt", truncation=True, max_length=512)
            ).logits.argmax()
        )
        for row in rows
    ]
    right = [model.config.id2label[n] == row["label"] for n, row in zip(best, rows, strict=True)]
    assert sum(right) > 80
