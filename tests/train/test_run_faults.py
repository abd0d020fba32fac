"""Runs that cannot write, or that train on nothing: what their author is told."""

import json
import logging
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from isoloss.train.recipe import Recipe
from isoloss.train.trainer import Trainer, run
from train.runs import WORDS, make_corpus, recipe


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    return folder


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder that permits and then refuses")
@pytest.mark.parametrize("name", ["/proc/run", "/proc/some/run"])
def test_a_folder_that_permissions_allow_and_the_disk_refuses(tmp_path: Path, name: str) -> None:
    """Root may write to /proc, where nothing can be made."""
    with pytest.raises(ValueError, match=rf"train\.output_dir: {name} cannot be written, as no folder can "):
        Trainer(recipe(tmp_path / "no-corpus", Path(name)))


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.output_dir: .*too long\); name another folder"):
        Trainer(recipe(tmp_path / "no-corpus", tmp_path / ("long" * 100)))


def weighted(corpus: Path, folder: Path, *weights: float) -> Recipe:
    """A run on rows of these weights, over and over."""
    rows = [{"text": " ".join(WORDS[:9]), "weight": weights[place % len(weights)]} for place in range(60)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = f"data.sources=[{{name: rows, path: {folder / 'rows.jsonl'}}}]"
    short = ("train.max_steps=3", "data.eval_fraction=0", "train.eval_steps=null")
    return recipe(corpus, folder / "run", sources, *short)


def test_a_run_without_a_target_that_weighs_anything_says_so_once(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run(weighted(corpus, tmp_path, 0.0), Console(file=StringIO()))
    [message] = [record.getMessage() for record in caplog.records if "no target" in record.getMessage()]
    assert message.startswith("isoloss: step 1 trains on no target: all of its ")
    assert "targets have weight 0. Look at the weights of rows" in message


def test_rows_of_weight_zero_among_others_are_no_fault(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run(weighted(corpus, tmp_path, 0.0, 1.0), Console(file=StringIO()))
    assert not [record for record in caplog.records if "no target" in record.getMessage()]
