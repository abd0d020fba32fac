"""Small runs for the tests of the trainer: a corpus, a tokenizer, a recipe, and ranks that can be killed."""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from isoloss.topology import process_group
from isoloss.train.recipe import Recipe, parse_recipe
from isoloss.train.trackers import read_metrics
from isoloss.train.trainer import run

WORDS = [f"w{number}" for number in range(56)]


def make_corpus(folder: Path) -> None:
    """Two sources of sentences with very unequal lengths, and a tokenizer of one token per word."""
    draw = random.Random(7)
    for name, count in (("code", 90), ("docs", 70)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for _ in range(count):
                length = draw.choice([1, 2, 5, 11, 23, 40])
                start = draw.randrange(len(WORDS))
                words = [
                    WORDS[(start + step * (1 + (name == "docs"))) % len(WORDS)] for step in range(length)
                ]
                file.write(json.dumps({"text": " ".join(words)}) + "\n")
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder / "tokenizer")


RECIPE = """
model:
  config: {{model_type: qwen3, vocab_size: 64, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
            num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, tie_word_embeddings: true}}
data:
  sources:
    - {{name: code, path: {corpus}/code.jsonl}}
    - {{name: docs, path: {corpus}/docs.jsonl}}
  tokenizer: {corpus}/tokenizer
  window: 48
  eval_fraction: 0.1
train: {{output_dir: {output}, max_steps: 12, windows_per_step: 4, learning_rate: 0.01, logging_steps: 1,
         save_steps: 3, eval_steps: 6, warmup_steps: 2}}
"""


def recipe(corpus: Path, output: Path, *overrides: str) -> Recipe:
    return parse_recipe(RECIPE.format(corpus=corpus, output=output), overrides)


def _rank(
    rank: int, world_size: int, rendezvous: Path, made: Recipe, before: Callable[[], None] | None, log: Path
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.setpgid(0, 0)
    if before is not None:
        before()
    group = nullcontext()
    if world_size > 1:
        group = process_group(
            rank=rank, world_size=world_size, local_rank=rank, init_method=f"file://{rendezvous}"
        )
    try:
        with group:
            run(made, Console(file=StringIO()))
    except BaseException as error:  # noqa: BLE001 - handed to the test
        log.with_suffix(f".{rank}").write_text(f"{type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)


def train(
    made: Recipe,
    world_size: int,
    scratch: Path,
    *,
    kill_after_step: int | None = None,
    before: Callable[[], None] | None = None,
    timeout_s: float = 120.0,
) -> list[str]:
    """Run a recipe on forked ranks; kill them all with SIGKILL once a step is logged.

    Returns:
        The error of each rank that ended with one.
    """
    output = Path(made.train.output_dir)
    name = f"{time.time_ns()}"
    context = mp.get_context("fork")
    log = scratch / f"errors-{name}"
    processes = [
        context.Process(target=_rank, args=(rank, world_size, scratch / f"store-{name}", made, before, log))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    killed = False
    while any(process.is_alive() for process in processes):
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
            raise AssertionError(f"the run did not end within {timeout_s} s")
        if kill_after_step is not None and not killed:
            steps = [line["step"] for line in read_metrics(output)]
            if steps and steps[-1] >= kill_after_step:
                for process in processes:
                    os.kill(process.pid or 0, signal.SIGKILL)
                killed = True
        time.sleep(0.002)
    for process in processes:
        process.join()
    if kill_after_step is not None:
        assert killed, "the run ended before it could be killed"
    return [path.read_text() for path in sorted(scratch.glob(f"errors-{name}.*"))]


def numbers(output: Path) -> list[dict[str, Any]]:
    """The lines of a run, without what depends on the clock, the machine and the layout of the ranks."""
    return [
        {
            name: value
            for name, value in line.items()
            if not name.startswith(("time/", "throughput/", "memory/"))
        }
        for line in read_metrics(output)
    ]


def differences(
    left: Sequence[dict[str, Any]], right: Sequence[dict[str, Any]], tolerance: float
) -> list[str]:
    """Where two runs differ: other steps, other names, or values further apart than `tolerance` (relative).

    Empty windows that fill up a layout's ranks add physical slots only.
    """
    free = {"tokens/physical", "tokens/physical_total", "packing/fill", "packing/loss_fill"}
    found = []
    if [line["step"] for line in left] != [line["step"] for line in right]:
        found.append("steps")
    for one, other in zip(left, right, strict=False):
        if set(one) != set(other):
            found.append(f"step {one['step']}: names {set(one) ^ set(other)}")
        for name in set(one) & set(other):
            if tolerance and name.removeprefix("eval/") in free:
                continue
            if abs(one[name] - other[name]) > tolerance * max(abs(one[name]), 1e-30):
                found.append(f"step {one['step']}: {name} {one[name]!r} != {other[name]!r}")
    return found
