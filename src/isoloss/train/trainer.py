"""The training loop: windows in, optimizer steps out, every number of them exact in every layout."""

import json
import logging
import math
import resource
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from isoloss.batch.packed_batch import PackedBatch
from isoloss.data.row_format import RowFormat
from isoloss.data.sources import SourceSpec
from isoloss.data.training_data import DataSettings, TrainingData
from isoloss.objectives.loss_model import LossModel
from isoloss.parallel.routers import update_expert_bias
from isoloss.parallel.wrap import compute_context, wrap_model
from isoloss.reduction.gradients import clip_grad_norm_, sum_gradients
from isoloss.reduction.ledger import Ledger
from isoloss.reduction.maxima import reduce_maxima
from isoloss.reduction.record import StepRecord
from isoloss.reduction.step import Step
from isoloss.topology import Topology, training_device
from isoloss.train.checkpoint import Checkpointer, CheckpointError, find_checkpoint, read_state
from isoloss.train.model import MODEL_FOLDER, build_model, load_tokenizer, model_class, transformer_blocks
from isoloss.train.optimizer import build_optimizer, learning_rate_factor
from isoloss.train.progress import ProgressDisplay, channel_table, packing_summary
from isoloss.train.recipe import Recipe, dump_recipe, windows_per_step
from isoloss.train.rundir import check_output_dir, set_aside
from isoloss.train.task import (
    build_objective,
    build_row_format,
    check_routers,
    class_names,
    router_losses,
    router_terms,
)
from isoloss.train.trackers import Tracker, open_trackers, read_metrics

logger = logging.getLogger(__name__)

PACKING_FOLDER = "packing"
"""Folder of a run with a line for every row that was truncated, split or dropped, and why."""


class NonFiniteError(RuntimeError):
    """A loss or a gradient is not finite, and the recipe says to stop."""


def run(recipe: Recipe, console: Console | None = None, *, command: str = "isoloss") -> None:
    """Train a recipe as one rank of the run that this process has joined, or alone."""
    Trainer(recipe, console=console, command=command).train()


def build_topology(recipe: Recipe) -> Topology:
    """The topology of a recipe's parallel section, over the ranks that this process has joined."""
    parallel = recipe.parallel
    return Topology(
        dp_replicate_size=parallel.dp_replicate_size,
        dp_shard_size=parallel.dp_shard_size,
        cp_size=parallel.cp_size,
        sp_size=parallel.sp_size,
        tp_size=parallel.tp_size,
        ep_size=parallel.ep_size,
        device=training_device(),
    )


@dataclass
class LogWindow:
    """What has happened since the last logged step."""

    record: StepRecord | None = None
    step_seconds: float = 0.0
    data_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    """For which saving held training up; not part of the steps."""
    max_document_length: int = 0

    def add(self, step: Step, *, step_seconds: float, data_seconds: float) -> None:
        """Add a closed step."""
        self.record = step.record if self.record is None else self.record + step.record
        self.step_seconds += step_seconds
        self.data_seconds += data_seconds
        self.max_document_length = max(self.max_document_length, step.max_document_length)


@final
class Trainer:
    """Trains the model of a recipe.

    Args:
        recipe: what to train.
        topology: of the run; None: made from the recipe's parallel section.
        console: where rank 0 shows progress; None: standard output.
        command: how the user starts `isoloss`, for the commands that are shown at the end.

    Raises:
        ValueError: data, model, tokenizer or checkpoint do not fit the recipe; says which key to change.

    Collectives: every rank constructs it alike, and calls `train`.
    """

    def __init__(
        self,
        recipe: Recipe,
        topology: Topology | None = None,
        *,
        console: Console | None = None,
        command: str = "isoloss",
    ) -> None:
        topology = build_topology(recipe) if topology is None else topology
        self.recipe = recipe
        self.topology = topology
        self.output_dir = Path(recipe.train.output_dir)
        check_output_dir(self.output_dir)
        self._command = command
        self.num_steps = 0
        """Optimizer steps done."""
        self._console = console if console is not None else Console()
        self._resume_from = find_checkpoint(self.output_dir, recipe.train.resume_from_checkpoint)
        self.tokenizer = load_tokenizer(recipe)
        classes = class_names(recipe)
        row_format = build_row_format(recipe, self.tokenizer, classes)
        self.data = open_data(recipe, self.tokenizer, row_format, topology)
        self.model: Any = build_model(recipe, self.tokenizer, classes)
        check_routers(recipe, self.model)
        self._objective = build_objective(recipe, self.model, topology)
        loss_model = LossModel(self.model, router_losses(recipe))
        self._wrapped = wrap_model(
            loss_model, transformer_blocks(self.model), topology, bf16=recipe.train.bf16
        )
        self._gradients = sum_gradients(self._wrapped, topology)
        self._optimizer = build_optimizer(
            self.model,
            learning_rate=recipe.train.learning_rate,
            betas=(recipe.train.adam_beta1, recipe.train.adam_beta2),
            epsilon=recipe.train.adam_epsilon,
            weight_decay=recipe.train.weight_decay,
        )
        self.ledger = Ledger(
            [*self._objective.terms, *router_terms(recipe)],
            channels=self.data.channels,
            topology=topology,
            routing=loss_model.routing,
            measures=self._objective.measures,
        )
        self._checkpointer = Checkpointer(
            self.output_dir,
            self.model,
            self._optimizer,
            topology,
            keep=recipe.train.save_total_limit,
        )
        self._warned_weightless = False
        self._log_window = LogWindow()
        self._total_steps = self._count_steps()
        if self._total_steps == 0:
            raise ValueError(
                f"data.sources: train.num_train_epochs={recipe.train.num_train_epochs} gives no window, as "
                f"every row is dropped; use a larger data.window ({recipe.data.window}), or set "
                "data.long_documents to truncate or split"
            )
        if self._resume_from is not None:
            self._resume(self._resume_from)

    # -- the run

    def train(self) -> None:
        """Run to the end of the recipe: steps, evaluations, checkpoints, the table of channels.

        Raises:
            NonFiniteError: a loss or gradient is not finite and train.on_nonfinite is "stop".
            CheckpointError: the checkpoint at the end could not be written.
        """
        settings = self.recipe.train
        self._prepare_output()
        trackers: list[Tracker] = []
        display = None
        if self.topology.rank == 0:
            trackers = open_trackers(self.output_dir, settings.report_to, self.num_steps)
            display = ProgressDisplay(self._console, self._total_steps, self.num_steps)
            if self._resume_from is not None:
                display.say(f"resumed from {self._resume_from} after step {self.num_steps}")
                if self._progress() >= 1.0:
                    display.say(
                        "the run had reached its end, so nothing was left to do; a larger train.max_steps, "
                        "max_tokens or num_train_epochs goes on with it"
                    )
        has_more = True
        try:
            if self.num_steps == 0:
                self._write(trackers, display, self._evaluate())
            while has_more and self._progress() < 1.0:
                has_more = self._train_step()
                ends = not has_more or self._progress() >= 1.0
                metrics: dict[str, float] = {}
                if ends or self.num_steps % settings.logging_steps == 0:
                    metrics |= self._log_metrics()
                if ends or (settings.eval_steps and self.num_steps % settings.eval_steps == 0):
                    metrics |= self._evaluate()
                self._write(trackers, display, metrics)
                if ends or (settings.save_steps and self.num_steps % settings.save_steps == 0):
                    self._save(last=ends)
                self._checkpointer.poll()
            self._checkpointer.finish()
        finally:
            if display is not None:
                display.close()
            for tracker in trackers:
                tracker.close()
        if self.topology.rank == 0:
            self._show_result()

    def _train_step(self) -> bool:
        """One optimizer step. Returns whether any rank has data for another."""
        started = time.perf_counter()
        windows, has_more = self.data.next_step()
        data_seconds = time.perf_counter() - started
        rate = self._learning_rate()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        with self.ledger.step(windows, gradients=self._gradients, has_more=has_more) as step:
            for batch in step:
                self._forward(step, batch).backward()
        limit = self.recipe.train.max_grad_norm
        norm = float(clip_grad_norm_(self._wrapped, float("inf") if limit is None else limit))
        faults = step.record.nonfinite()
        if not faults and not math.isfinite(norm):
            faults = [f"the gradient (norm {norm})"]
        self.num_steps += 1
        self._warn_weightless(step.record)
        if faults:
            self._skip(faults)
        else:
            self._optimizer.step()
            bias_rate = self.recipe.objective.router_bias_update_rate
            if bias_rate is not None:
                update_expert_bias(self.model, self.ledger, bias_rate)
        self._optimizer.zero_grad(set_to_none=True)
        self._last_norm, self._last_rate = norm, rate
        self._log_window.add(step, step_seconds=time.perf_counter() - started, data_seconds=data_seconds)
        return step.has_more

    def _forward(self, step: Step, batch: PackedBatch) -> Tensor:
        """This rank's share of the loss of a micro-batch, in training and in evaluation alike."""
        with compute_context(self.topology, bf16=self.recipe.train.bf16):
            share: Tensor = self._wrapped(step, batch, self._objective)
        return share

    def _skip(self, faults: Sequence[str]) -> None:
        """Leave the weights as they are: the record and the norm are global, so all ranks do alike."""
        message = f"step {self.num_steps}: not finite: {'; '.join(faults)}"
        if self.recipe.train.on_nonfinite == "stop":
            raise NonFiniteError(
                f"{message}. The weights are those before this step; train.on_nonfinite: skip would go on"
            )
        self.ledger.skip_step()
        if self.topology.rank == 0:
            logger.warning("isoloss: %s; the step is skipped, the weights stay as they are", message)

    def _warn_weightless(self, record: StepRecord) -> None:
        """Say once that a step trains on no target: a loss of 0 alone may pass for success."""
        terms = len(self._objective.terms)  # those of the routers stand behind, and need no target
        if self._warned_weightless or any(record.opened("weights")[:terms]):
            return
        self._warned_weightless = True
        targets = int(record.opened("tokens")[0])
        if self.topology.rank == 0:
            logger.warning(
                "isoloss: step %d trains on no target: %s. Look at the weights of rows and messages, and at "
                "what data.loss_on makes targets; later steps like this one are not reported",
                self.num_steps,
                f"all of its {targets} targets have weight 0" if targets else "its documents have no targets",
            )

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Exact losses over the held-out windows: one step of the ledger, however many windows there are."""
        if not self.data.eval_windows:
            return {}
        self._wrapped.eval()
        with self.ledger.step(self.data.eval_windows, training=False) as step:
            for batch in step:
                self._forward(step, batch)
        self._wrapped.train()
        return step.metrics()

    def _log_metrics(self) -> dict[str, float]:
        """The numbers of the steps since the last logged one; also writes the events of packing.

        Collectives: one MAX.
        """
        self._write_events()
        window, self._log_window = self._log_window, LogWindow()
        assert window.record is not None
        steps = window.record.num_steps
        metrics = self.ledger.metrics(window.record)
        metrics["data/digest"] = float(window.record.digest)
        metrics["train/grad_norm"] = self._last_norm
        metrics["train/learning_rate"] = self._last_rate
        slowest = reduce_maxima(
            {
                "packing/max_document_length": window.max_document_length,
                "time/step": window.step_seconds / steps,
                "time/data": window.data_seconds / steps,
                "time/checkpoint": window.checkpoint_seconds,
                "memory/max_reserved_gib": _memory_gib(self.topology.device),
            },
            self.topology,
        )
        metrics |= slowest
        for kind in ("source", "physical"):
            rate = metrics[f"tokens/{kind}"] / (steps * slowest["time/step"])
            metrics[f"throughput/{kind}_tokens_per_sec"] = rate
            metrics[f"throughput/{kind}_tokens_per_sec_per_device"] = rate / self.topology.world_size
        return metrics

    def _write(
        self, trackers: Sequence[Tracker], display: ProgressDisplay | None, metrics: dict[str, float]
    ) -> None:
        if metrics:
            for tracker in trackers:
                tracker.log(self.num_steps, metrics)
        if display is not None:
            display.advance(self.num_steps, self._progress(), metrics)

    # -- how far the run is

    def _count_steps(self) -> int | None:
        """Steps of the run; None where tokens end it."""
        settings = self.recipe.train
        if settings.max_steps is not None:
            return settings.max_steps
        if settings.num_train_epochs is not None:
            windows = reduce_maxima({"windows": float(self.data.count_steps())}, self.topology)
            return int(windows["windows"])
        return None

    def _progress(self) -> float:
        """Part of the run that is done, in [0, 1]; the same on every rank."""
        if self._total_steps is not None:
            return min(1.0, self.num_steps / self._total_steps)
        assert self.recipe.train.max_tokens is not None
        return min(1.0, self.ledger.totals["source"] / self.recipe.train.max_tokens)

    def _learning_rate(self) -> float:
        settings = self.recipe.train
        return settings.learning_rate * learning_rate_factor(
            self.num_steps,
            self._progress(),
            schedule=settings.lr_scheduler_type,
            warmup_steps=settings.warmup_steps,
        )

    # -- the folder of the run

    def _write_events(self) -> None:
        """Append what was truncated, split or dropped on this rank, and why."""
        events = self.data.take_events()
        if events:
            folder = self.output_dir / PACKING_FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"rank-{self.topology.rank}.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({"step": self.num_steps, **event}) + "\n" for event in events)

    def _prepare_output(self) -> None:
        """Make the folder, on rank 0: earlier runs are set aside, recipe, config and tokenizer written."""
        if self.topology.rank != 0:
            return
        if self._resume_from is None:
            aside = set_aside(self.output_dir)
            if aside is not None:
                self._console.print(
                    f"{self.output_dir} holds an earlier run, which is now {aside}; to go on with one, set "
                    "train.resume_from_checkpoint=auto",
                    soft_wrap=True,
                    highlight=False,
                )
        self.output_dir.mkdir(parents=True, exist_ok=True)
        resolved = dump_recipe(self.recipe)
        (self.output_dir / "recipe.yaml").write_text(resolved, encoding="utf-8")
        self.model.config.save_pretrained(self.output_dir / MODEL_FOLDER)
        self.tokenizer.save_pretrained(self.output_dir / MODEL_FOLDER)
        if self._resume_from is None:
            self._console.print(resolved, highlight=False, markup=False, soft_wrap=True)

    def _save(self, *, last: bool) -> None:
        """Start a checkpoint; the last one is waited for and must succeed."""
        state = {
            "ledger": self.ledger.state_dict(),
            "data": self.data.identity(),
            "log_window": self._pending_state(),
        }
        self._report_failed_save()
        self._log_window.checkpoint_seconds += self._checkpointer.save(
            self.num_steps, state, self.data.lane_states()
        )
        if last:
            self._checkpointer.finish()

    def _report_failed_save(self) -> None:
        """Wait for the save before; if it failed, say so and go on."""
        try:
            self._checkpointer.finish()
        except CheckpointError as error:
            if self.topology.rank == 0:
                logger.error("isoloss: %s. Training goes on; the next checkpoint is tried as planned", error)

    def _pending_state(self) -> dict[str, Any] | None:
        window = self._log_window
        if window.record is None:
            return None
        return {
            "opening": window.record.opening.tolist(),
            "closing": window.record.closing.tolist(),
            "num_steps": window.record.num_steps,
            "step_seconds": window.step_seconds,
            "data_seconds": window.data_seconds,
            "max_document_length": window.max_document_length,
        }

    def _resume(self, folder: Path) -> None:
        state = read_state(folder)
        self._checkpointer.load(folder)
        self.ledger.load_state_dict(state["ledger"])
        self.data.load(state["data"], {int(lane): value for lane, value in state["lanes"].items()})
        self.num_steps = state["step"]
        pending = state["log_window"]
        if pending is not None:
            self._log_window = LogWindow(
                record=self.ledger.restore_record(
                    pending["opening"], pending["closing"], pending["num_steps"]
                ),
                step_seconds=pending["step_seconds"],
                data_seconds=pending["data_seconds"],
                max_document_length=pending["max_document_length"],
            )

    def _show_result(self) -> None:
        evaluations = [line for line in read_metrics(self.output_dir) if "eval/loss" in line]
        first, last = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
        self._console.print(channel_table(self.data.channels, self.ledger.channel_totals, first, last))
        newest = find_checkpoint(self.output_dir, "auto")
        if newest is not None:
            self._console.print(packing_summary(read_state(newest)["lanes"]), soft_wrap=True, highlight=False)
        run_dir = shlex.quote(str(self.output_dir))
        command = self._command
        objective = self.recipe.objective
        pooled = objective.type == "classification" and objective.level == "sequence"
        suffix, override, other = (
            ("sample", "objective.loss_reduction=sample", "with another weighting of documents")
            if objective.type != "preference" and not pooled  # which have one loss a pair, or a document
            else ("seed-1", "train.seed=1", "from another start, with another order of the data")
        )
        self._console.print(
            f"The run is in {self.output_dir}: metrics.jsonl has its numbers, recipe.yaml how it was made, "
            "packing/ the rows that were not packed whole.\n"
            "What to try next:\n"
            f"  {command} export {run_dir}\n"
            f"      a folder for transformers: {model_class(self.recipe).__name__}.from_pretrained\n"
            f"  {command} train {run_dir}/recipe.yaml train.output_dir={run_dir}-{suffix} "
            f"{override}\n"
            f"      the same run {other}\n"
            f"  {command} train --help\n"
            "      every key of a recipe",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def open_data(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, row_format: RowFormat, topology: Topology
) -> TrainingData:
    """The data of a recipe, as this rank reads it."""
    data = recipe.data
    settings = DataSettings(
        sources=tuple(
            SourceSpec(name=source.name, path=source.path, weight=source.weight) for source in data.sources
        ),
        window=data.window,
        alignment=data.alignment,
        windows_per_step=windows_per_step(recipe, topology.world_size),
        seed=recipe.train.seed,
        long_documents=data.long_documents,
        weight_by=data.weight_by,
        small_sources=data.small_sources,
        eval_fraction=data.eval_fraction,
        num_passes=recipe.train.num_train_epochs,
    )
    return TrainingData(
        settings, tokenizer, row_format, data_rank=topology.data_rank, data_size=topology.data_size
    )


def _memory_gib(device: torch.device) -> float:
    """Most memory reserved so far on a CUDA device, or resident in this process on the CPU, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
