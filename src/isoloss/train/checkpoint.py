"""Checkpoints: asynchronous, atomic, and readable on any number of ranks.

A checkpoint is a folder `checkpoint-<step>` with the tensors of model and optimizer, written by
torch.distributed.checkpoint, and `trainer_state.json` with everything else. It is written under another
name and renamed when it is complete, so a folder of that name is never half a checkpoint.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, final

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.optim import Optimizer

from isoloss.topology import Topology

STATE_FILE = "trainer_state.json"
FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d+)")


class CheckpointError(ValueError):
    """A checkpoint that cannot be found, read, or continued from; the message says what to do."""


def complete_checkpoints(output_dir: Path) -> dict[int, Path]:
    """Step -> folder of every complete checkpoint of a run, oldest first."""
    found = {}
    for folder in output_dir.glob("checkpoint-*"):
        name = _NAME.fullmatch(folder.name)
        if name and (folder / STATE_FILE).is_file():
            found[int(name[1])] = folder
    return dict(sorted(found.items()))


def find_checkpoint(output_dir: Path, wanted: str | None) -> Path | None:
    """The folder to resume from.

    Args:
        output_dir: of the run.
        wanted: None: no resume; "auto": the newest complete one, None if there is none; else a folder.

    Raises:
        CheckpointError: the folder is no complete checkpoint.
    """
    if wanted is None:
        return None
    if wanted == "auto":
        return max(complete_checkpoints(output_dir).items(), default=(0, None))[1]
    folder = Path(wanted)
    if not (folder / STATE_FILE).is_file():
        known = ", ".join(str(path) for path in complete_checkpoints(output_dir).values()) or "none"
        raise CheckpointError(
            f"train.resume_from_checkpoint: {folder} is no complete checkpoint (it has no {STATE_FILE}); "
            f"complete ones in {output_dir}: {known}"
        )
    return folder


def read_state(folder: Path) -> dict[str, Any]:
    """Everything of a checkpoint but its tensors.

    Raises:
        CheckpointError: written in another format.
    """
    state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    if state["format"] != FORMAT:
        raise CheckpointError(
            f"{folder} has checkpoint format {state['format']}, this version reads format {FORMAT}"
        )
    return state


@final
class Checkpointer:
    """Saves and loads the state of one run.

    Args:
        output_dir: of the run.
        model: the unwrapped model, whose parameters may be sharded.
        optimizer: of the model's parameters.
        topology: of the run.
        keep: how many complete checkpoints to keep, the newest; None: all.

    Collectives: makes a gloo group of its own, so that saving in the background never mixes with training.
    """

    def __init__(
        self,
        output_dir: Path,
        model: nn.Module,
        optimizer: Optimizer,
        topology: Topology,
        *,
        keep: int | None = None,
    ) -> None:
        self._output_dir = output_dir
        self._model = model
        self._optimizer = optimizer
        self._topology = topology
        self._keep = keep
        self._group = dist.new_group(backend="gloo") if topology.world_group is not None else None
        self._running: tuple[int, Future[Any]] | None = None

    def save(self, step: int, state: Mapping[str, Any], lanes: Mapping[int, Any]) -> float:
        """Start saving, after `finish`; training goes on as soon as the tensors are copied.

        Args:
            step: number of optimizer steps done.
            state: what else belongs to the run, the same on every rank; JSON.
            lanes: state of this rank's data lanes; JSON.

        Returns:
            Seconds for which training was held up.

        Collectives: one gather of the lanes, and those of torch.distributed.checkpoint in the background.
        """
        assert self._running is None, "finish() the save before this one first"
        started = time.perf_counter()
        folder = self._partial(step)
        everything = {
            "format": FORMAT,
            "step": step,
            "parameters": _shapes(self._model),
            **state,
            "lanes": self._gather(lanes),
        }
        if self._topology.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        if self._group is not None:
            dist.barrier(self._group)
        tensors: dict[str, Any] = {
            "model": get_model_state_dict(self._model),
            "optimizer": get_optimizer_state_dict(self._model, self._optimizer),
        }
        writer = _Writer(folder, json.dumps(everything) if self._topology.rank == 0 else None)
        future = async_save(
            tensors, storage_writer=writer, process_group=self._group, no_dist=self._group is None
        )
        assert isinstance(future, Future)
        self._running = (step, future)
        return time.perf_counter() - started

    def poll(self) -> None:
        """Publish a save that has ended in the background; never waits.

        Only rank 0 acts, and errors wait for `finish`, so that ranks do not drift apart.
        """
        if self._running is not None and self._topology.rank == 0:
            step, future = self._running
            if future.done() and future.exception() is None:
                self._publish(step)

    def finish(self) -> None:
        """Wait for the save in the background, and publish it.

        Raises:
            CheckpointError: it failed, on every rank alike. Complete checkpoints are untouched.

        Collectives: one barrier.
        """
        if self._running is None:
            return
        step, future = self._running
        self._running = None
        folder = self._partial(step)
        try:
            future.result()
        except (CheckpointException, OSError, RuntimeError) as error:
            if self._topology.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            kept = [path.name for path in complete_checkpoints(self._output_dir).values()]
            raise CheckpointError(
                f"checkpoint {step} could not be written to {self._output_dir}: {_root_cause(error)}. "
                f"{_free_space(self._output_dir)} Complete checkpoints are untouched: "
                f"{', '.join(kept) or 'none'}"
            ) from error
        if self._topology.rank == 0:
            self._publish(step)
        if self._group is not None:
            dist.barrier(self._group)

    def load(self, folder: Path) -> None:
        """Read model and optimizer from a checkpoint that was written on any number of ranks.

        Raises:
            CheckpointError: it belongs to another model.
        """
        _check_parameters(folder, read_state(folder)["parameters"], _shapes(self._model))
        tensors: dict[str, Any] = {
            "model": get_model_state_dict(self._model),
            "optimizer": get_optimizer_state_dict(self._model, self._optimizer),
        }
        load_tensors(tensors, checkpoint_id=folder, process_group=self._group, no_dist=self._group is None)
        set_model_state_dict(self._model, tensors["model"])
        set_optimizer_state_dict(self._model, self._optimizer, tensors["optimizer"])

    def _gather(self, lanes: Mapping[int, Any]) -> dict[str, Any]:
        gathered: list[Any] = [dict(lanes)]
        if self._group is not None:
            gathered = [None] * self._topology.world_size
            dist.all_gather_object(gathered, dict(lanes), group=self._group)
        merged = {lane: state for part in gathered for lane, state in part.items()}
        return {str(lane): merged[lane] for lane in sorted(merged)}

    def _partial(self, step: int) -> Path:
        return self._output_dir / f".checkpoint-{step}.partial"

    def _publish(self, step: int) -> None:
        """Rename the finished folder and drop the oldest ones; again does nothing."""
        partial = self._partial(step)
        if not partial.exists():
            return
        final_folder = self._output_dir / f"checkpoint-{step}"
        shutil.rmtree(final_folder, ignore_errors=True)
        partial.rename(final_folder)
        if self._keep is not None:
            for folder in list(complete_checkpoints(self._output_dir).values())[: -self._keep]:
                shutil.rmtree(folder)


class _Writer(FileSystemWriter):
    """Also writes the JSON state, in the same thread and under the same error handling as the tensors."""

    def __init__(self, folder: Path, state: str | None) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True, overwrite=True)
        self._folder = folder
        self._state = state

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        if self._state is not None:
            with open(self._folder / STATE_FILE, "w", encoding="utf-8") as file:
                file.write(self._state)
                file.flush()
                os.fsync(file.fileno())


def load_model(folder: Path, model: nn.Module, *, left_out: str | None = None) -> None:
    """Read the weights of a checkpoint into an unsharded model, in one process.

    Args:
        folder: of the checkpoint.
        model: to fill.
        left_out: name of a part that the checkpoint may hold and the model does not have.

    Raises:
        CheckpointError: it belongs to another model.
    """
    saved = {
        name: shape
        for name, shape in read_state(folder)["parameters"].items()
        if left_out is None or not name.startswith(f"{left_out}.")
    }
    _check_parameters(folder, saved, _shapes(model))
    tensors: dict[str, Any] = {"model": get_model_state_dict(model)}
    load_tensors(tensors, checkpoint_id=folder, no_dist=True)
    set_model_state_dict(model, tensors["model"])


def _shapes(model: nn.Module) -> dict[str, list[int]]:
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def _check_parameters(folder: Path, saved: Mapping[str, list[int]], wanted: Mapping[str, list[int]]) -> None:
    if saved == wanted:
        return
    missing = [name for name in wanted if name not in saved]
    unknown = [name for name in saved if name not in wanted]
    other = [
        f"{name} {saved[name]} in the checkpoint, {wanted[name]} in the model"
        for name in wanted
        if name in saved and saved[name] != wanted[name]
    ]
    details = [
        f"{len(found)} {what}, such as {found[0]}"
        for what, found in (
            ("parameters are not in it", missing),
            ("parameters of it are not in the model", unknown),
            ("have another shape", other),
        )
        if found
    ]
    raise CheckpointError(
        f"{folder} is a checkpoint of another model: {'; '.join(details)}. Resume with the model section "
        "that the run was started with (recipe.yaml in its folder), or start a new run in another "
        "train.output_dir"
    )


def _root_cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        return f"rank {rank}: {cause}"
    return str(error)


def _free_space(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB are free there."
