"""The corpus of the quickstart: three sources and a tokenizer, the same each time, made once."""

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

ROOT = Path(__file__).parents[2]
LIMITS = {"code": 30_000, "docs": 15_000, "qa": 10_000}


def load_script() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(
        "prepare_quickstart", ROOT / "recipes/prepare_quickstart.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> types.ModuleType:
    return load_script()


@pytest.fixture(scope="module")
def corpus(script: types.ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("quickstart") / "data"
    script.make_corpus(output, LIMITS)
    return output


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(corpus / "tokenizer")


def rows(corpus: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (corpus / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_each_source_has_its_rows_within_its_limit(
    script: types.ModuleType, corpus: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    counts = json.loads((corpus / "manifest.json").read_text())["tokens"]
    for name, limit in LIMITS.items():
        texts = [script.as_text(row) for row in rows(corpus, name)]
        assert len(texts) > 3
        assert counts[name] == sum(len(ids) for ids in tokenizer(texts)["input_ids"])
        assert 0.5 * limit < counts[name] <= limit
    assert all(set(row) == {"text"} for name in ("code", "docs") for row in rows(corpus, name))


def test_the_whole_corpus_has_about_0_6_million_tokens(script: types.ModuleType) -> None:
    assert sum(script.MAX_TOKENS.values()) == 600_000


def test_answers_are_docstrings(corpus: Path) -> None:
    for row in rows(corpus, "qa"):
        question, answer = row["messages"]
        assert question["role"] == "user"
        assert question["content"].startswith("What does ")
        assert answer["role"] == "assistant"
        assert len(answer["content"]) >= 30


def test_a_question_names_function_signature_and_module(script: types.ModuleType, tmp_path: Path) -> None:
    import textwrap

    asked = list(script.qa_rows([Path(textwrap.__file__)]))
    by_question = {row["messages"][0]["content"]: row["messages"][1]["content"] for row in asked}
    answer = by_question["What does fill(text, width=70, **kwargs) in the Python module textwrap do?"]
    assert answer.startswith("Fill a single paragraph of text, returning a new string.\n\nReformat")
    assert "What does TextWrapper.wrap(self, text) in the Python module textwrap do?" in by_question


def test_the_tokenizer_is_lossless_and_fits_the_recipe(tokenizer: PreTrainedTokenizerBase) -> None:
    from isoloss.train.recipe import load_recipe

    recipe = load_recipe(ROOT / "recipes/quickstart.yaml")
    assert recipe.model.config is not None
    assert len(tokenizer) == recipe.model.config["vocab_size"]
    text = "def f(x):\n\treturn  'é \U0001f600'\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.pad_token == "<|pad|>"


def test_the_chat_template_marks_answers_and_their_end(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "This.\n"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": " That."},
    ]
    made = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    marked = [token for token, mask in zip(made["input_ids"], made["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(marked) == "This.\n<|end|> That.<|end|>"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|system|>Be brief.<|end|><|user|>What?<|end|><|assistant|>This.\n<|end|>"
        "<|user|>And?<|end|><|assistant|> That.<|end|>"
    )
    asked = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert asked.endswith("<|user|>What?<|end|><|assistant|>")


def test_the_same_python_makes_the_same_files(script: types.ModuleType, corpus: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    script.make_corpus(again, LIMITS)
    files = sorted(path.relative_to(corpus) for path in corpus.rglob("*") if path.is_file())
    assert len(files) >= 6
    for file in files:
        assert (again / file).read_bytes() == (corpus / file).read_bytes(), file


def test_it_is_made_once(
    script: types.ModuleType,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made: list[Path] = []
    monkeypatch.setattr(script, "make_corpus", lambda output: made.append(output) or {"code": 1})
    monkeypatch.setattr(sys, "argv", ["prepare_quickstart.py", "--output", str(corpus)])
    script.main()
    assert made == []
    assert "up to date" in capsys.readouterr().out
    monkeypatch.setattr(script, "fingerprint", lambda: {"python": "another", "script": "another"})
    script.main()
    assert made == [corpus]


def test_an_interrupted_run_leaves_the_old_corpus(
    script: types.ModuleType, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    before = (corpus / "manifest.json").read_bytes()
    monkeypatch.setattr(script.json, "dumps", interrupt)
    with pytest.raises(KeyboardInterrupt):
        script.make_corpus(corpus, LIMITS)
    assert (corpus / "manifest.json").read_bytes() == before
    assert sorted(path.name for path in corpus.parent.iterdir()) == [corpus.name]
