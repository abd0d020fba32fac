"""Preference pairs through a recipe."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from isoloss.data.errors import DataError
from isoloss.train.export import export_run
from isoloss.train.reference import store_reference
from train.objective_runs import recipe_maker, run_everywhere
from train.runs import WORDS, make_corpus, numbers, train


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The better answer counts on from the prompt, the worse one stands still."""
    folder = tmp_path_factory.mktemp("pairs")
    make_corpus(folder)
    draw = random.Random(3)
    with (folder / "pairs.jsonl").open("w") as file:
        for _ in range(120):
            first, length = draw.randrange(40), draw.choice([1, 2, 5])
            prompt = " ".join(WORDS[first : first + 3])
            chosen = " " + " ".join(WORDS[first + 3 : first + 3 + length])
            rejected = " " + " ".join([WORDS[first + 2]] * draw.choice([1, 3]))
            row = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "channel": f"c{first % 2}"}
            file.write(json.dumps(row) + "\n")
    return folder


def test_a_run_learns_resumes_and_moves_between_layouts(corpus: Path, tmp_path: Path) -> None:
    """Rows 20 and 21: losses, rewards and counts by channel, in training and evaluation."""
    make = recipe_maker(
        corpus / "pairs.jsonl", corpus / "tokenizer", "{type: preference, beta: 0.5, shared_prompt: true}"
    )
    lines = run_everywhere(make, tmp_path, [(2, ("parallel.tp_size=2",))])
    first, last = lines[0], lines[-1]
    assert first["eval/loss"] == pytest.approx(0.693147, abs=1e-5)  # the policy is its reference
    assert first["eval/rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert last["eval/loss"] < 0.5
    assert last["eval/rewards/accuracies"] > 0.8
    assert {"eval/channel_rewards/margins/c0", "eval/channel_loss/c1"} <= set(last)
    assert lines[5]["documents"] % 2 == 0
    folder = export_run(tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert bool(torch.isfinite(model(input_ids=torch.tensor([[5, 6, 7]])).logits).all())


def test_a_frozen_reference_is_the_start_also_after_a_resume(corpus: Path, tmp_path: Path) -> None:
    """Mutant: a reference copied from the resumed weights would start at a loss of ln 2 again."""
    make = recipe_maker(corpus / "pairs.jsonl", corpus / "tokenizer", "{type: preference, beta: 0.5}")
    assert train(make(tmp_path / "run", "train.max_steps=10"), 1, tmp_path) == []
    more = make(tmp_path / "run", "train.max_steps=12", "train.resume_from_checkpoint=auto")
    assert train(more, 1, tmp_path) == []
    assert numbers(tmp_path / "run")[11]["train/loss"] < 0.6


def test_stored_references_are_asked_for_by_row(corpus: Path, tmp_path: Path) -> None:
    make = recipe_maker(corpus / "pairs.jsonl", corpus / "tokenizer", "{type: preference, reference: data}")
    (error,) = train(make(tmp_path / "run"), 1, tmp_path)
    assert "pairs.jsonl:1: reference_chosen_logp is missing" in error


@pytest.mark.parametrize("shared_prompt", ["true", "false"])
def test_stored_references_train_as_a_frozen_one_does(
    corpus: Path, tmp_path: Path, shared_prompt: str
) -> None:
    options = f"{{type: preference, beta: 0.5, shared_prompt: {shared_prompt}}}"
    make = recipe_maker(corpus / "pairs.jsonl", corpus / "tokenizer", options)
    frozen = make(tmp_path / "frozen", "train.max_steps=4")
    written = store_reference(frozen, tmp_path / "stored")
    assert written == {"words": tmp_path / "stored/words.jsonl"}
    rows = [json.loads(line) for line in written["words"].read_text().splitlines()]
    before = [json.loads(line) for line in (corpus / "pairs.jsonl").read_text().splitlines()]
    assert [{name: row[name] for name in before[0]} for row in rows] == before
    assert train(frozen, 1, tmp_path) == []
    place = f"data.sources.0.path={written['words']}"
    stored = make(tmp_path / "stored-run", "train.max_steps=4", "objective.reference=data", place)
    assert train(stored, 1, tmp_path) == []
    left, right = numbers(tmp_path / "frozen"), numbers(tmp_path / "stored-run")
    for one, other in zip(left, right, strict=True):
        for name in one:
            if name.removeprefix("eval/").startswith(("loss", "rewards/margins", "logps", "tokens/")):
                assert other[name] == pytest.approx(one[name], rel=1e-4, abs=2e-5), name


def test_references_are_not_written_over_their_rows(corpus: Path, tmp_path: Path) -> None:
    rows = tmp_path / "words.jsonl"
    rows.write_text((corpus / "pairs.jsonl").read_text())
    made = recipe_maker(rows, corpus / "tokenizer", "{type: preference}")(tmp_path / "run")
    with pytest.raises(DataError, match=r"is the source 'words' itself"):
        store_reference(made, tmp_path)
    other = recipe_maker(rows, corpus / "tokenizer", "{type: causal_lm}")(tmp_path / "run")
    with pytest.raises(ValueError, match="only preference"):
        store_reference(other, tmp_path / "out")


def test_a_reference_of_a_row_at_fault_names_its_line(corpus: Path, tmp_path: Path) -> None:
    rows = tmp_path / "words.jsonl"
    rows.write_text('{"prompt": "w1", "chosen": "w2", "rejected": "w3"}\n{"prompt": "w1", "chosen": "w2"}\n')
    made = recipe_maker(rows, corpus / "tokenizer", "{type: preference}")(tmp_path / "run")
    with pytest.raises(DataError, match=r"words.jsonl:2: rejected is missing"):
        store_reference(made, tmp_path / "out")
