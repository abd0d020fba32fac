"""Classification through a recipe."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from isoloss import Ledger, LossModel, pack
from isoloss.data.classification_rows import classification_format
from isoloss.objectives.classification import Classification
from isoloss.train.export import export_run
from train.objective_runs import recipe_maker, run_everywhere
from train.runs import WORDS, make_corpus, train


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text is early or late by its last word; its words are even or odd; its number is where it ends."""
    folder = tmp_path_factory.mktemp("labels")
    make_corpus(folder)
    draw = random.Random(5)
    files = {name: (folder / f"{name}.jsonl").open("w") for name in ("documents", "words", "numbers")}
    for _ in range(160):
        numbers = [draw.randrange(len(WORDS)) for _ in range(draw.choice([1, 3, 9]))]
        words, channel = [WORDS[n] for n in numbers], f"c{numbers[0] % 2}"
        text = " ".join(words)
        rows = {
            "documents": {"text": text, "label": "late" if numbers[-1] >= 28 else "early"},
            "words": {"tokens": words, "labels": [n % 2 for n in numbers]},
            "numbers": {"text": text, "label": numbers[-1] / 28 - 1},
        }
        for name, row in rows.items():
            files[name].write(json.dumps(row | {"channel": channel}) + "\n")
    for file in files.values():
        file.close()
    return folder


def test_a_run_learns_resumes_and_moves_between_layouts(corpus: Path, tmp_path: Path) -> None:
    """Rows 8 and 21: accuracy by channel, in training and evaluation; the export gives the same answers."""
    make = recipe_maker(corpus / "documents.jsonl", corpus / "tokenizer", "{type: classification}")
    lines = run_everywhere(make, tmp_path, [(2, ("parallel.cp_size=2",))])
    first, last = lines[0], lines[-1]
    assert last["eval/loss"] < first["eval/loss"] - 0.2
    assert last["eval/classification/accuracy"] > 0.8
    assert {"eval/channel_classification/accuracy/c0", "channel_classification/accuracy/c1"} <= set(last)
    assert lines[3]["tokens/loss"] == lines[3]["documents"]
    folder = export_run(tmp_path / "run")
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.id2label == {0: "early", 1: "late"}
    rows = [json.loads(line) for line in (corpus / "documents.jsonl").read_text().splitlines()]
    batch = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    best = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.argmax(-1)
    right = [model.config.id2label[int(one)] == row["label"] for one, row in zip(best, rows, strict=True)]
    assert sum(right) > 0.8 * len(right)
    assert_same_loss(model, tokenizer, rows)


def assert_same_loss(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> None:
    """A45: one row at a time, or padded on either side, transformers pools the token that was trained."""
    labels = torch.tensor([model.config.label2id[row["label"]] for row in rows])
    texts = [row["text"] for row in rows]
    with torch.no_grad():
        alone = [
            model(**tokenizer(text, return_tensors="pt"), labels=label).loss.item()
            for text, label in zip(texts, labels.split(1), strict=True)
        ]
        theirs = [sum(alone) / len(alone)]
        for side in ("left", "right"):
            batch = tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
            theirs.append(model(**batch, labels=labels).loss.item())
        row_format = classification_format(tokenizer, tuple(model.config.id2label.values()))
        documents = [document for row in rows for document in row_format.documents(row, 0)]
        windows = [row_format.complete(one) for one in pack(documents, 64, term="classification")]
        classifier, ours = Classification(), LossModel(model)
        ledger = Ledger(classifier.terms, measures=classifier.measures)
        with ledger.step(windows, training=False) as step:
            for window in step:
                ours(step, window, classifier)
    metrics = step.metrics()
    assert metrics["eval/tokens/loss"] == len(rows)
    assert theirs == pytest.approx([metrics["eval/loss"]] * 3, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("words", "{type: classification, level: token, loss_reduction: sample}"),
        ("numbers", "{type: classification, problem_type: regression}"),
    ],
)
def test_labels_of_words_and_numbers(corpus: Path, tmp_path: Path, name: str, objective: str) -> None:
    make = recipe_maker(corpus / f"{name}.jsonl", corpus / "tokenizer", objective)
    output = tmp_path / "run"
    assert train(make(output, "train.max_steps=15", "data.eval_fraction=0.2"), 1, tmp_path) == []
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["eval/loss"] < lines[0]["eval/loss"] * 0.8
    folder = export_run(output)
    if name == "words":
        assert lines[-1]["eval/classification/accuracy"] > lines[0]["eval/classification/accuracy"]
        model = AutoModelForTokenClassification.from_pretrained(folder)
        assert model(input_ids=torch.tensor([[5, 6]])).logits.shape == (1, 2, 2)
    else:
        assert lines[-1]["eval/regression/absolute_error"] < lines[0]["eval/regression/absolute_error"]
        assert AutoModelForSequenceClassification.from_pretrained(folder).config.num_labels == 1


def test_a_pretrained_decoder_gets_a_new_head(corpus: Path, tmp_path: Path) -> None:
    make = recipe_maker(corpus / "code.jsonl", corpus / "tokenizer", "{type: causal_lm}")
    assert train(make(tmp_path / "lm", "train.max_steps=2"), 1, tmp_path) == []
    export_run(tmp_path / "lm", output=tmp_path / "start")
    make = recipe_maker(corpus / "documents.jsonl", corpus / "tokenizer", "{type: classification}")
    overrides = (f"model.path={tmp_path / 'start'}", "model.config=null", "train.max_steps=2")
    assert train(make(tmp_path / "run", *overrides), 1, tmp_path) == []
    start = AutoModelForSequenceClassification.from_pretrained(export_run(tmp_path / "run"))
    again = (f"model.path={tmp_path / 'run/export-2'}", "model.config=null", "train.learning_rate=0")
    # the same classes keep the head, others get a new one, and in another order their rows would be mixed up
    assert train(make(tmp_path / "same", *again, "train.max_steps=1"), 1, tmp_path) == []
    same = AutoModelForSequenceClassification.from_pretrained(export_run(tmp_path / "same"))
    assert torch.equal(same.score.weight, start.score.weight)
    more = ("objective.labels=[late, early, never]", "train.max_steps=1")
    assert train(make(tmp_path / "more", *again, *more), 1, tmp_path) == []
    new = AutoModelForSequenceClassification.from_pretrained(export_run(tmp_path / "more"))
    assert new.score.weight.shape[0] == 3
    (error,) = train(make(tmp_path / "mixed", *again, "objective.labels=[late, early]"), 1, tmp_path)
    assert "classes are [early, late] in this order, those of the run [late, early]" in error


def test_a_model_that_has_no_class_for_it_is_named(corpus: Path, tmp_path: Path) -> None:
    make = recipe_maker(corpus / "words.jsonl", corpus / "tokenizer", "{type: classification, level: token}")
    (error,) = train(make(tmp_path / "run", "model.config={model_type: opt}"), 1, tmp_path)
    assert "no class for objective.type classification of model_type opt" in error


def test_a_class_that_the_recipe_does_not_list_is_named(corpus: Path, tmp_path: Path) -> None:
    make = recipe_maker(
        corpus / "documents.jsonl", corpus / "tokenizer", "{type: classification, labels: [soon, late]}"
    )
    (error,) = train(make(tmp_path / "run"), 1, tmp_path)
    assert "documents.jsonl:" in error
    assert "none of the classes (soon, late)" in error


def test_pieces_of_a_document_have_no_label(corpus: Path, tmp_path: Path) -> None:
    make = recipe_maker(corpus / "documents.jsonl", corpus / "tokenizer", "{type: classification}")
    with pytest.raises(ValueError, match="long_documents is split"):
        make(tmp_path / "run", "data.long_documents=split")
