"""Writes a checkpoint as a transformers folder."""

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

from isoloss.objectives.multi_token import DEPTHS
from isoloss.train.checkpoint import CheckpointError, complete_checkpoints, load_model
from isoloss.train.model import MODEL_FOLDER, model_class
from isoloss.train.recipe import load_recipe


def export_run(run: Path, checkpoint: int | None = None, output: Path | None = None) -> Path:
    """Write the weights of a run's checkpoint, its config and its tokenizer, for `from_pretrained`.

    Further depths of multi-token prediction, which transformers does not know, stay in the checkpoint.

    Args:
        run: folder of the run.
        checkpoint: step of the checkpoint; None: the newest.
        output: folder to write; None: `RUN/export-<step>`.

    Returns:
        The folder written.

    Raises:
        CheckpointError: the run has no such checkpoint.
        FileExistsError: `output` is there and not empty.
    """
    found = complete_checkpoints(run)
    if not found:
        raise CheckpointError(
            f"{run} has no complete checkpoint; give the folder of a run (train.output_dir of its recipe) "
            "that has saved one"
        )
    step = max(found) if checkpoint is None else checkpoint
    if step not in found:
        raise CheckpointError(
            f"{run} has no checkpoint {step}; it has {', '.join(str(number) for number in found)}"
        )
    target = run / f"export-{step}" if output is None else output
    if output is not None and output.exists() and any(output.iterdir()):
        raise FileExistsError(f"{output} is there and not empty; give another folder with --output")
    recipe = load_recipe(run / "recipe.yaml")
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
    config = AutoConfig.from_pretrained(run / MODEL_FOLDER)
    model = model_class(recipe).from_config(config, dtype=dtypes[recipe.model.dtype])
    load_model(found[step], model, left_out=DEPTHS)
    # Written beside and renamed: a folder of this name is never half an export.
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(run / MODEL_FOLDER).save_pretrained(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target
