"""Makes preference pairs out of the docstrings of the running Python's standard library.

    python recipes/prepare_preference.py [--output runs/preference-data]

Each row of pairs.jsonl asks what a function does. The better answer is the beginning of its docstring, the
worse one that of a function of another module:

    {"prompt": [{"role": "user", ...}], "chosen": [{"role": "assistant", ...}], "rejected": [...],
     "channel": "functions" or "methods"}

Beside it stands a byte-level BPE tokenizer trained on the rows. The same Python gives the same files. Nothing
is imported from the modules that are read, and nothing is downloaded.
"""

import argparse
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prepare_quickstart
from prepare_quickstart import (
    as_text,
    corpus_folder,
    fingerprint_scripts,
    is_made_by,
    qa_rows,
    source_files,
    train_tokenizer,
    write_manifest,
    write_rows,
)

MAX_ANSWER_CHARACTERS = 240
MIN_ANSWER_CHARACTERS = 30


def main() -> None:
    """Make the pairs, unless the same scripts have made them with the same Python."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/preference-data"), metavar="DIR")
    output = parser.parse_args().output
    if is_current(output):
        print(f"preference data: {output} is up to date")
        return
    print(f"preference data: {make_corpus(output):,} pairs in {output}")


def fingerprint() -> dict[str, str]:
    """What the pairs depend on: the scripts and the Python that runs them."""
    return fingerprint_scripts(Path(__file__), Path(prepare_quickstart.__file__))


def is_current(output: Path) -> bool:
    """Whether `output` holds the pairs that these scripts would make."""
    return is_made_by(fingerprint(), output)


def make_corpus(output: Path, max_files: int | None = None) -> int:
    """Write pairs, tokenizer and manifest to `output`; return the number of pairs."""
    pairs = list(pair_rows(source_files()[:max_files]))
    tokenizer = train_tokenizer(as_text({"messages": row["prompt"] + row["chosen"]}) for row in pairs)
    with corpus_folder(output) as made:
        write_rows(made / "pairs.jsonl", pairs)
        tokenizer.save_pretrained(made / "tokenizer")
        write_manifest(made, fingerprint(), pairs=len(pairs))
    return len(pairs)


def pair_rows(files: list[Path]) -> Iterator[dict[str, Any]]:
    """One row a documented function, in an order that mixes modules and is always the same."""
    asked = []
    seen: set[str] = set()
    for row in qa_rows(files):
        question, answer = (message["content"] for message in row["messages"])
        found = re.fullmatch(r"What does (.*)\((?:.*)\) in the Python module (\S+) do\?", question)
        summary = answer.split("\n\n")[0][:MAX_ANSWER_CHARACTERS]
        if found and len(summary) >= MIN_ANSWER_CHARACTERS and summary not in seen:
            seen.add(summary)
            asked.append((found[1], found[2], question, summary))
    asked.sort(key=lambda one: hashlib.sha256(one[2].encode()).digest())
    # An answer stands in one pair only. If it were the better one here and the worse one there, what is
    # learned from the pairs that are trained would mislead about those that are held out.
    wrong_answers = asked[len(asked) // 2 :]
    for name, module, question, summary in asked[: len(asked) // 2]:
        place = next(place for place, other in enumerate(wrong_answers) if other[1] != module)
        wrong = wrong_answers.pop(place)[3]
        yield {
            "prompt": [{"role": "user", "content": question}],
            "chosen": [{"role": "assistant", "content": summary}],
            "rejected": [{"role": "assistant", "content": wrong}],
            "channel": "methods" if "." in name else "functions",
        }


if __name__ == "__main__":
    main()
