"""Whole training steps on packed chat rows: ours, transformers' Trainer, and TRL's SFTTrainer.

The model has the shape of SmolLM2-135M (30 layers of width 576, a vocabulary of 49152, tied) and a random
start; the rows are random tokens in the shape of chats, of which about 75 % are prompt and have no target. A
step is one window of 2048 tokens: forward, backward, clipping at 1, AdamW. All train in float32 on the same
rows in one process.

* ours: `pack`, `Ledger` with 50 channels, `LossModel`, a loop of one's own
* Trainer: the very windows of ours with their positions, by which transformers keeps documents apart; full
  logits, as it has no other loss
* SFTTrainer: packing on, its own chunked loss, which it uses by default

Arms alternate in blocks of steps, in random order; a step is timed from its first forward to the end of its
update, for the two trainers by their own callbacks, and the first step of a block is left out. Tokens are
counted without padding. Memory is the peak of a fresh process above what it held after its imports, so it
includes the model, its gradients and the optimizer's state.

    python benchmarks/end_to_end.py              about 12 minutes on two quiet cores
    python benchmarks/end_to_end.py --quick      a small model, seconds
"""

import argparse
import json
import math
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from measuring import (
    describe_machine,
    in_fresh_process,
    peak_memory_mib,
    print_table,
    spread,
)

from isoloss import (
    IGNORE_INDEX,
    Document,
    Ledger,
    LossModel,
    PackedBatch,
    Term,
    Topology,
    clip_grad_norm_,
    pack,
)

NUM_CHANNELS = 50
IGNORED_FRAC = 0.75
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Setting:
    """The model, the window and the number of threads."""

    config: dict[str, int]
    window: int
    threads: int

    def build_model(self) -> transformers.PreTrainedModel:
        """The same weights at each call."""
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**self.config, tie_word_embeddings=True, use_cache=False)
        return transformers.LlamaForCausalLM(config)


SMOLLM2_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}
SMALL = SMOLLM2_135M | {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@dataclass(frozen=True)
class Timing:
    """One step."""

    wall_s: float
    cpu_s: float
    tokens: int


def make_documents(setting: Setting, num_windows: int) -> list[Document]:
    """Chats of 64 to 1000 tokens that fill windows exactly: a prompt without targets, then an answer."""
    generator = random.Random(0)
    documents = []
    for _ in range(num_windows):
        left = setting.window
        while left:
            length = min(left, 8 * round(min(max(math.exp(generator.gauss(5.3, 0.8)), 64), 1000) / 8))
            length = left if left - length < 64 else length
            ids = [generator.randrange(setting.config["vocab_size"]) for _ in range(length)]
            num_prompt = max(1, round(length * min(max(generator.gauss(IGNORED_FRAC, 0.1), 0.3), 0.95)))
            labels = [IGNORE_INDEX] * num_prompt + ids[num_prompt:]
            documents.append(Document(ids, labels, source=generator.randrange(NUM_CHANNELS)))
            left -= length
    return documents


def make_windows(setting: Setting, num_windows: int) -> list[PackedBatch]:
    """Packed by ours."""
    return list(pack(make_documents(setting, num_windows), setting.window))


# --- arms -------------------------------------------------------------------------------------------------


class Ours:
    """A loop of one's own."""

    def __init__(self, setting: Setting, num_windows: int, directory: str) -> None:
        self.windows = make_windows(setting, num_windows)
        self.model = LossModel(setting.build_model())
        channels = [f"source {number}" for number in range(NUM_CHANNELS)]
        self.ledger = Ledger([Term("text")], channels=channels, topology=Topology.single())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.number = 0

    def run(self, num_steps: int) -> list[Timing]:
        """So many steps."""
        timings = []
        for _ in range(num_steps):
            window = self.windows[self.number % len(self.windows)]
            self.number += 1
            wall, cpu = time.perf_counter(), time.process_time()
            with self.ledger.step([window]) as step:
                for batch in step:
                    self.model(step, batch).backward()
            clip_grad_norm_(self.model, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            metrics = step.metrics()
            assert math.isfinite(metrics["train/loss"])
            tokens = window.layout.source_tokens
            timings.append(Timing(time.perf_counter() - wall, time.process_time() - cpu, tokens))
        return timings


class Clock(transformers.TrainerCallback):
    """Times what a trainer does between the begin and the end of its steps."""

    def __init__(self) -> None:
        self.timings: list[Timing] = []
        self.tokens = 0
        self.begin = (0.0, 0.0)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Starts the clocks."""
        self.begin = (time.perf_counter(), time.process_time())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stops them."""
        wall, cpu = time.perf_counter() - self.begin[0], time.process_time() - self.begin[1]
        self.timings.append(Timing(wall, cpu, self.tokens))


def trainer_options(directory: str, num_steps: int) -> dict[str, Any]:
    """What both trainers are told."""
    return {
        "output_dir": directory,
        "per_device_train_batch_size": 1,
        "max_steps": num_steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,  # torch's default, which ours has
        "max_grad_norm": 1.0,
        "optim": "adamw_torch",
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 0,
    }


class Blocks:
    """A trainer of transformers, whose `train` is called once a block."""

    def __init__(self) -> None:
        self.clock = Clock()

    def make(self, num_steps: int) -> transformers.Trainer:
        """A trainer for so many steps of the one model."""
        raise NotImplementedError

    def run(self, num_steps: int) -> list[Timing]:
        """So many steps."""
        self.clock.timings = []
        trainer = self.make(num_steps)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return self.clock.timings


class TransformersTrainer(Blocks):
    """On windows that are packed before, with the positions of their documents."""

    def __init__(self, setting: Setting, num_windows: int, directory: str) -> None:
        super().__init__()
        self.model, self.directory = setting.build_model(), directory
        rows = []
        windows = make_windows(setting, num_windows)
        self.clock.tokens = round(sum(window.layout.source_tokens for window in windows) / len(windows))
        for window in windows:
            labels = torch.full_like(window.targets["text"], IGNORE_INDEX)
            labels[1:] = window.targets["text"][:-1]  # it shifts them again
            rows.append(
                {
                    "input_ids": window.input_ids.tolist(),
                    "labels": labels.tolist(),
                    "position_ids": window.position_ids.tolist(),
                }
            )
        self.rows = datasets.Dataset.from_list(rows)

    def make(self, num_steps: int) -> transformers.Trainer:
        """With the default collator."""
        return transformers.Trainer(
            self.model,
            transformers.TrainingArguments(**trainer_options(self.directory, num_steps)),
            train_dataset=self.rows,
            data_collator=transformers.default_data_collator,
            callbacks=[self.clock],
        )


class SFTTrainer(Blocks):
    """On the rows, which it packs itself."""

    def __init__(self, setting: Setting, num_windows: int, directory: str) -> None:
        super().__init__()
        self.model, self.directory, self.window = setting.build_model(), directory, setting.window
        self.model.config.name_or_path = directory
        words = {f"w{number}": number for number in range(setting.config["vocab_size"])}
        from tokenizers import Tokenizer, models

        self.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
            eos_token="w1",
            pad_token="w2",
        )
        documents = make_documents(setting, num_windows)
        rows = [{"input_ids": list(d.input_ids), "labels": list(d.labels)} for d in documents]
        self.rows = datasets.Dataset.from_list(rows)

    def make(self, num_steps: int) -> transformers.Trainer:
        """With its defaults but for packing."""
        import trl

        options = trainer_options(self.directory, num_steps)
        trainer = trl.SFTTrainer(
            self.model,
            trl.SFTConfig(**options, packing=True, max_length=self.window, padding_free=True),
            train_dataset=self.rows,
            processing_class=self.tokenizer,
            callbacks=[self.clock],
        )
        lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
        self.clock.tokens = round(sum(lengths) / len(lengths))
        return trainer


ARMS: dict[str, Callable[[Setting, int, str], Any]] = {
    "ours": Ours,
    "transformers Trainer": TransformersTrainer,
    "TRL SFTTrainer": SFTTrainer,
}


# --- measuring --------------------------------------------------------------------------------------------


def be_quiet() -> None:
    """Neither progress bars nor the advice of either trainer."""
    warnings.simplefilter("ignore")
    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()


def measure_memory(name: str, setting: Setting) -> float:
    """Peak MiB of two steps, everything but the imports; to be run in a fresh process."""
    be_quiet()
    torch.set_num_threads(setting.threads)
    if name.startswith("TRL"):
        import trl

        assert trl.SFTTrainer is not None

    def train() -> object:
        with tempfile.TemporaryDirectory() as directory:
            return ARMS[name](setting, 2, directory).run(2)

    return peak_memory_mib(lambda: train)


def measure_time(setting: Setting, arms: Sequence[str], blocks: int, steps: int) -> list[dict[str, Any]]:
    """Of each block, seconds and tokens of each arm."""
    order = random.Random(1)
    measured: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        made = {name: ARMS[name](setting, max(4, steps + 1), directory) for name in arms}
        for _ in range(blocks):
            block = {}
            for name in order.sample(arms, len(arms)):
                timings = made[name].run(steps + 1)[1:]
                block[name] = {
                    "tokens": sum(timing.tokens for timing in timings),
                    "wall_s": sum(timing.wall_s for timing in timings),
                    "cpu_s": sum(timing.cpu_s for timing in timings),
                }
            measured.append(block)
    return measured


def report(
    setting: Setting, blocks: Sequence[dict[str, Any]], memory: dict[str, float]
) -> dict[str, dict[str, Any]]:
    """The table; its numbers are returned."""
    rows, cells = {}, []
    for name in blocks[0]:
        rates = {clock: [_rate(block[name], clock) for block in blocks] for clock in ("wall_s", "cpu_s")}
        paired = {
            clock: [_rate(block["ours"], clock) / _rate(block[name], clock) for block in blocks]
            for clock in ("wall_s", "cpu_s")
        }
        rows[name] = {
            "tokens_per_s": asdict(spread(rates["wall_s"])),
            "tokens_per_cpu_s": asdict(spread(rates["cpu_s"])),
            "ours_over_it_wall": asdict(spread(paired["wall_s"])),
            "ours_over_it_cpu": asdict(spread(paired["cpu_s"])),
            "mib": memory[name],
        }
        cells.append(
            [
                name,
                f"{spread(rates['wall_s']).median:.1f}",
                str(spread(paired["wall_s"])),
                f"{spread(rates['cpu_s']).median:.1f}",
                str(spread(paired["cpu_s"])),
                f"{memory[name]:.0f}",
            ]
        )
    columns = ["arm", "tokens / s", "ours / it", "tokens / CPU s", "ours / it, CPU", "peak MiB"]
    print_table(f"{setting.window} tokens a step, {setting.threads} threads", columns, cells)
    return rows


def _rate(measured: dict[str, float], clock: str) -> float:
    return measured["tokens"] / measured[clock]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="ours is always there")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="timed in a block; one more is made before them")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: all cores")
    parser.add_argument("--quick", action="store_true", help="a small model, two blocks of one step")
    parser.add_argument("--output", type=Path, help="a JSON file")
    arguments = parser.parse_args(argv)
    be_quiet()
    torch.set_num_threads(arguments.threads)
    setting = Setting(SMOLLM2_135M, 2048, arguments.threads)
    if arguments.quick:
        setting = Setting(SMALL, 256, arguments.threads)
        arguments.blocks, arguments.steps = 2, 1
    machine = describe_machine(("transformers", "trl"))
    print(" | ".join(f"{key}: {value}" for key, value in machine.items()), flush=True)
    arms = ["ours", *(name for name in arguments.arms if name != "ours")]
    memory = dict.fromkeys(arms, math.nan)
    for name in () if arguments.quick else arms:
        memory[name] = in_fresh_process(measure_memory, name, setting)
    rows = report(setting, measure_time(setting, arms, arguments.blocks, arguments.steps), memory)
    if arguments.output is not None:
        arguments.output.write_text(
            json.dumps({"machine": machine, "rows": rows}, indent=1), encoding="utf-8"
        )
        print(f"\nresults: {arguments.output}")


if __name__ == "__main__":
    main()
