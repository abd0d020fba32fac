"""Makes documents with a class out of the running Python's own standard library.

    python recipes/prepare_classification.py [--output runs/classification-data]

A row is a docstring, its class what the module is for: files, gui, language, network, numbers or tasks.

    functions.jsonl  {"text": ..., "label": "files"}   docstrings of functions and methods
    classes.jsonl    {"text": ..., "label": "gui"}     docstrings of classes and modules

and a tokenizer like that of the quickstart. The same Python gives the same files. Nothing is imported
from the modules that are read, and nothing is downloaded.
"""

import argparse
import ast
import inspect
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import prepare_quickstart
from prepare_quickstart import (
    corpus_folder,
    fingerprint_scripts,
    is_made_by,
    source_files,
    train_tokenizer,
    write_manifest,
    write_rows,
)

TOPICS = {
    "files": "bz2 csv fileinput filecmp fnmatch genericpath glob gzip io _pyio lzma mailbox netrc ntpath os "
    "pathlib pickle plistlib posixpath shelve shutil stat tarfile tempfile zipfile zipimport",
    "gui": "tkinter turtle",
    "language": "ast bdb code codeop compileall copyreg dis doctest enum importlib inspect modulefinder pdb "
    "pkgutil pyclbr pydoc symtable tokenize trace traceback types typing unittest",
    "network": "cgi email ftplib http imaplib nntplib poplib smtplib socket socketserver ssl telnetlib "
    "urllib wsgiref xmlrpc",
    "numbers": "_pydecimal _strptime calendar colorsys datetime fractions ipaddress numbers random "
    "statistics",
    "tasks": "_threading_local _weakrefset asyncio concurrent multiprocessing queue sched selectors signal "
    "subprocess threading",
}
"""Class -> modules and packages whose docstrings have it."""

MAX_ROWS = 450
"""Rows kept of each class, so that none is much more frequent than the others."""

MIN_CHARACTERS = 40
"""Shorter docstrings say too little."""

Rows = dict[str, list[dict[str, Any]]]


def main() -> None:
    """Make the corpus, unless the same script has made it with the same Python."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/classification-data"), metavar="DIR")
    output = parser.parse_args().output
    if is_current(output):
        print(f"classification data: {output} is up to date")
        return
    counts = make_corpus(output)
    kept = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    print(f"classification data: {sum(counts.values()):,} rows ({kept}) in {output}")


def fingerprint() -> dict[str, str]:
    """What the corpus depends on: the scripts and the Python that runs them."""
    return fingerprint_scripts(Path(__file__), Path(prepare_quickstart.__file__))


def is_current(output: Path) -> bool:
    """Whether `output` holds the corpus that this script would make."""
    return is_made_by(fingerprint(), output)


def make_corpus(output: Path, max_rows: int = MAX_ROWS) -> dict[str, int]:
    """Write sources, tokenizer and manifest to `output`; return the rows kept of each class."""
    rows, counts = labelled_rows(source_files(), max_rows)
    tokenizer = train_tokenizer(row["text"] for name in rows for row in rows[name])
    with corpus_folder(output) as made:
        for name, own in rows.items():
            write_rows(made / f"{name}.jsonl", own)
        tokenizer.save_pretrained(made / "tokenizer")
        write_manifest(made, fingerprint(), rows=counts)
    return counts


def labelled_rows(files: Iterable[Path], max_rows: int) -> tuple[Rows, dict[str, int]]:
    """The rows of each source, each text once, and how many rows each class has."""
    library = Path(sysconfig.get_paths()["stdlib"])
    topic_of = {module: topic for topic, modules in TOPICS.items() for module in modules.split()}
    rows: Rows = {"functions": [], "classes": []}
    counts: Counter[str] = Counter()
    seen: set[str] = set()
    for file in files:
        topic = topic_of.get(file.relative_to(library).parts[0].removesuffix(".py"))
        if topic is None or counts[topic] == max_rows:
            continue
        for source, text in docstrings(file):
            if len(text) >= MIN_CHARACTERS and text not in seen and counts[topic] < max_rows:
                seen.add(text)
                counts[topic] += 1
                rows[source].append({"text": text, "label": topic})
    return rows, dict(sorted(counts.items()))


def docstrings(file: Path) -> Iterable[tuple[str, str]]:
    """The docstrings of a file and the source that each belongs to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        tree = ast.parse(file.read_text(encoding="utf-8", errors="ignore"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            text = inspect.cleandoc(ast.get_docstring(node) or "").strip()
            yield ("functions" if is_function else "classes"), text


if __name__ == "__main__":
    main()
