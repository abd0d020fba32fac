"""Makes the corpus of the quickstart out of the running Python's own standard library.

    python recipes/prepare_quickstart.py [--output runs/quickstart-data]

Three sources, which the recipe trains as three channels:

    code.jsonl   {"text": ...}      source files
    docs.jsonl   {"text": ...}      the language reference as `pydoc` carries it
    qa.jsonl     {"messages": ...}  "what does this function do?", answered by its docstring

and a byte-level BPE tokenizer trained on them, as a transformers folder with a chat template. The same
Python gives the same files. Nothing is imported from the modules that are read, and nothing is downloaded.
"""

import argparse
import ast
import hashlib
import inspect
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCABULARY = 2048
MAX_TOKENS = {"code": 330_000, "docs": 150_000, "qa": 120_000}
"""Tokens kept of each source, 0.6 M in all: a little more than 200 steps of four windows see."""

MAX_FILE_CHARACTERS = 40_000
"""Longer source files are left out, so that the source is many files rather than a few."""

MAX_CHARACTERS_PER_TOKEN = 5
"""More text than this times the tokens never fits, so it is not read."""

END, PAD = "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

# What stands between the generation markers is what the model learns: the answer and the end of its turn.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + eos_token -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "turtledemo",
    "encodings",
    "__pycache__",
}
"""Folders of the standard library that are not its own text, are tests, or are tables of numbers."""


def main() -> None:
    """Make the corpus, unless the same script has made it with the same Python."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart-data"), metavar="DIR")
    output = parser.parse_args().output
    if is_current(output):
        print(f"quickstart data: {output} is up to date")
        return
    tokens = make_corpus(output)
    kept = ", ".join(f"{name} {count:,}" for name, count in tokens.items())
    print(f"quickstart data: {sum(tokens.values()):,} tokens ({kept}) in {output}")


def fingerprint() -> dict[str, str]:
    """What the corpus depends on: this script and the Python that runs it."""
    return fingerprint_scripts(Path(__file__))


def is_current(output: Path) -> bool:
    """Whether `output` holds the corpus that this script would make."""
    return is_made_by(fingerprint(), output)


def fingerprint_scripts(*scripts: Path) -> dict[str, str]:
    """What a corpus depends on that `scripts` make: them and the Python that runs them."""
    digest = hashlib.sha256(b"".join(script.read_bytes() for script in scripts)).hexdigest()
    return {"python": sys.version, "script": digest}


def is_made_by(made_by: dict[str, str], output: Path) -> bool:
    """Whether `output` holds a corpus with this fingerprint."""
    manifest = output / "manifest.json"
    return manifest.is_file() and json.loads(manifest.read_text())["made_by"] == made_by


@contextmanager
def corpus_folder(output: Path) -> Iterator[Path]:
    """A new folder to write to, which takes the place of `output` when the block ends without an exception.

    It lies beside `output` until then, so that a corpus is there whole or not at all.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f"{output.name}-") as directory:
        made = Path(directory) / "corpus"
        made.mkdir()
        yield made
        shutil.rmtree(output, ignore_errors=True)
        os.replace(made, output)


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Rows as lines of JSON."""
    with file.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_manifest(corpus: Path, made_by: dict[str, str], **facts: Any) -> None:
    """What `is_made_by` reads, with `facts` beside it."""
    (corpus / "manifest.json").write_text(json.dumps({"made_by": made_by, **facts}, indent=2))


def make_corpus(output: Path, max_tokens: dict[str, int] = MAX_TOKENS) -> dict[str, int]:
    """Write sources, tokenizer and manifest to `output`; return the tokens kept of each source."""
    files = source_files()
    rows = {"code": code_rows(files), "docs": docs_rows(), "qa": qa_rows(files)}
    texts: dict[str, list[dict[str, Any]]] = {}
    for name, limit in max_tokens.items():
        texts[name] = list(up_to(rows[name], limit * MAX_CHARACTERS_PER_TOKEN))
        print(f"quickstart data: {name}: read {len(texts[name]):,} rows", flush=True)
    print(f"quickstart data: training a byte-level BPE tokenizer of {VOCABULARY} tokens", flush=True)
    tokenizer = train_tokenizer(as_text(row) for name in texts for row in texts[name])
    counts = {}
    with corpus_folder(output) as made:
        for name, limit in max_tokens.items():
            lengths = [len(ids) for ids in tokenizer([as_text(row) for row in texts[name]])["input_ids"]]
            kept, counts[name] = [], 0
            for row, length in zip(texts[name], lengths, strict=True):
                if counts[name] + length > limit:
                    continue  # a shorter one may still fit
                kept.append(row)
                counts[name] += length
            write_rows(made / f"{name}.jsonl", kept)
            print(f"quickstart data: {name}: kept {len(kept):,} rows, {counts[name]:,} tokens", flush=True)
        tokenizer.save_pretrained(made / "tokenizer")
        write_manifest(made, fingerprint(), tokens=counts)
    return counts


def up_to(rows: Iterable[dict[str, Any]], max_characters: int) -> Iterator[dict[str, Any]]:
    """The first rows whose texts have at most `max_characters` in all."""
    total = 0
    for row in rows:
        total += len(as_text(row))
        if total > max_characters:
            return
        yield row


def as_text(row: dict[str, Any]) -> str:
    """The text of a row; of `messages` about as the chat template shows it."""
    if "text" in row:
        return str(row["text"])
    return "".join(f"<|{message['role']}|>{message['content']}{END}" for message in row["messages"])


def source_files() -> list[Path]:
    """The standard library's own source files, in an order that mixes its parts and is always the same."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in library.rglob("*.py")
        if not SKIPPED.intersection(file.relative_to(library).parts)
        and not file.name.startswith("_sysconfigdata")
    ]
    if not files:
        sys.exit(f"no source files in {library}: this Python has no standard library to read; use another")
    return sorted(files, key=lambda file: hashlib.sha256(str(file.relative_to(library)).encode()).digest())


def code_rows(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """One row a source file."""
    for file in files:
        text = file.read_text(encoding="utf-8", errors="ignore")
        if text.strip() and len(text) <= MAX_FILE_CHARACTERS:
            yield {"text": text}


def docs_rows() -> Iterator[dict[str, Any]]:
    """One row a topic of the language reference."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield {"text": topics[name].strip() + "\n"}


def qa_rows(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """A question and its answer for every documented function, each answer once."""
    library = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    for file in files:
        module = ".".join(file.relative_to(library).with_suffix("").parts).removesuffix(".__init__")
        for name, function in documented_functions(file):
            answer = inspect.cleandoc(ast.get_docstring(function) or "").strip()
            if len(answer) < 30 or answer in seen:
                continue
            seen.add(answer)
            call = f"{name}({ast.unparse(function.args)})"
            question = f"What does {call} in the Python module {module} do?"
            yield {
                "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            }


def documented_functions(file: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Public functions and methods of a file with a docstring, with their names (`Class.method`)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        tree = ast.parse(file.read_text(encoding="utf-8", errors="ignore"))
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for function in inner:
            if isinstance(function, ast.FunctionDef) and not function.name.startswith("_"):
                if ast.get_docstring(function):
                    yield prefix + function.name, function


def train_tokenizer(texts: Iterable[str]) -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer with the chat template, as transformers loads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        model_max_length=10**9,  # the trainer cuts documents to windows itself; without a limit nothing warns
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    main()
