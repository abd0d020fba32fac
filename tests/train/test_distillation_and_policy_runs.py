"""Distillation and policy gradients through recipes."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from isoloss.train.export import export_run
from train.objective_runs import recipe_maker, run_everywhere
from train.runs import WORDS, make_corpus, numbers, train


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences, a teacher trained on them, its classes stored, and sampled answers with advantages."""
    folder = tmp_path_factory.mktemp("teacher")
    make_corpus(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    make = recipe_maker(folder / "docs.jsonl", folder / "tokenizer", "{type: causal_lm}")
    assert train(make(folder / "lm", "train.max_steps=25", "train.eval_steps=25"), 1, folder) == []
    export_run(folder / "lm", output=folder / "teacher")
    model = AutoModelForCausalLM.from_pretrained(folder / "teacher").eval()
    draw = random.Random(1)
    with (folder / "stored.jsonl").open("w") as stored, (folder / "sampled.jsonl").open("w") as sampled:
        for line in (folder / "docs.jsonl").read_text().splitlines():
            ids = tokenizer(json.loads(line)["text"]).input_ids
            with torch.no_grad():
                best = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1).topk(4)
            row = {"input_ids": ids, "teacher_token_ids": best.indices.tolist()}
            stored.write(json.dumps(row | {"teacher_logprobs": best.values.tolist()}) + "\n")
        for _ in range(120):
            first, right = draw.randrange(40), draw.random() < 0.5
            answer = WORDS[first + 1] if right else WORDS[draw.randrange(56)]
            row = {"prompt": WORDS[first], "completion": f" {answer}", "advantage": 1.0 if right else -0.5}
            sampled.write(json.dumps(row) + "\n")
    return folder


def test_a_student_learns_from_a_teacher(corpus: Path, tmp_path: Path) -> None:
    make = recipe_maker(
        corpus / "docs.jsonl",
        corpus / "tokenizer",
        f"{{type: distillation, teacher: {corpus / 'teacher'}, temperature: 2.0, ce_coefficient: 0.2}}",
    )
    lines = run_everywhere(make, tmp_path, [(2, ("parallel.tp_size=2",))])
    first, last = lines[0], lines[-1]
    assert last["eval/loss/distillation"] < 0.6 * first["eval/loss/distillation"]
    assert last["eval/loss/text"] < first["eval/loss/text"]
    model = AutoModelForCausalLM.from_pretrained(export_run(tmp_path / "run"))
    assert model.num_parameters() == AutoModelForCausalLM.from_pretrained(corpus / "teacher").num_parameters()


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_student_learns_from_stored_classes(corpus: Path, tmp_path: Path, direction: str) -> None:
    make = recipe_maker(
        corpus / "stored.jsonl", corpus / "tokenizer", f"{{type: distillation, kl_direction: {direction}}}"
    )
    assert train(make(tmp_path / "run"), 2, tmp_path) == []
    lines = numbers(tmp_path / "run")
    assert lines[-1]["eval/loss/distillation"] < 0.8 * lines[0]["eval/loss/distillation"]


def test_a_teacher_with_another_vocabulary_is_refused(corpus: Path, tmp_path: Path) -> None:
    make = recipe_maker(
        corpus / "docs.jsonl",
        corpus / "tokenizer",
        f"{{type: distillation, teacher: {corpus / 'teacher'}}}",
    )
    (error,) = train(make(tmp_path / "run", "model.config.vocab_size=72"), 1, tmp_path)
    assert "has a vocabulary of 64, the student one of 72" in error
    other = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    other.add_tokens(["extra"])
    other.save_pretrained(tmp_path / "other")
    (error,) = train(make(tmp_path / "run2", f"data.tokenizer={tmp_path / 'other'}"), 1, tmp_path)
    assert "the tokenizer of" in error
    (error,) = train(make(tmp_path / "run3", f"objective.teacher={tmp_path / 'absent'}"), 1, tmp_path)
    assert "objective.teacher: no causal language model can be loaded" in error


def test_better_answers_become_more_probable(corpus: Path, tmp_path: Path) -> None:
    make = recipe_maker(corpus / "sampled.jsonl", corpus / "tokenizer", "{type: policy_gradient}")
    lines = run_everywhere(make, tmp_path, [(2, ("parallel.sp_size=2",))])
    assert all(line["policy/ratio"] == pytest.approx(1.0) for line in lines[1:])
    assert {"policy/clip_fraction", "policy/approx_kl", "channel_policy/ratio/words"} <= set(lines[-1])
    model = AutoModelForCausalLM.from_pretrained(export_run(tmp_path / "run")).eval()
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    chances = {True: [], False: []}
    for line in (corpus / "sampled.jsonl").read_text().splitlines():
        row = json.loads(line)
        ids = tokenizer(row["prompt"] + row["completion"]).input_ids
        with torch.no_grad():
            log_probs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
        chances[row["advantage"] > 0].append(float(log_probs[0, ids[1]]))
    right, wrong = (sum(values) / len(values) for values in (chances[True], chances[False]))
    assert right > wrong + 0.5
