"""Log-probabilities of preference pairs under the model as it starts, stored with the rows."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isoloss.batch.collation import build_batch
from isoloss.batch.document import Document
from isoloss.batch.packed_batch import PackedBatch
from isoloss.data.errors import DataError, RowError
from isoloss.data.preference_rows import REFERENCE_FIELDS, preference_format
from isoloss.data.sources import Source, SourceSpec
from isoloss.losses.linear_cross_entropy import linear_log_probs
from isoloss.objectives.loss_model import LossModel, head_options, run_decoder
from isoloss.objectives.preference import PREFERENCE_TERM
from isoloss.parallel.wrap import compute_context
from isoloss.topology import Topology, training_device
from isoloss.train.model import build_model, load_tokenizer
from isoloss.train.recipe import Recipe

Pair = tuple[dict[str, Any], Sequence[Document]]


def store_reference(recipe: Recipe, output: Path) -> dict[str, Path]:
    """Write the rows of every source with `reference_chosen_logp` and `reference_rejected_logp`.

    They are sums over the targets of each side, in nats, under the model that a run of the recipe starts
    from, computed as it computes (`train.bf16`), so `objective.reference: data` trains as `frozen` does
    without a second model. Other fields are kept; those that JSON does not know are written as text.

    Args:
        recipe: with objective.type preference.
        output: folder for `<source>.jsonl`; each file appears whole or not at all.

    Returns:
        Source name -> the file written.

    Raises:
        ValueError: another objective, or a model that does not fit the recipe.
        DataError: a row at fault, with file and line, or a file that would be written over its own source.
    """
    if recipe.objective.type != "preference":
        raise ValueError(f"objective.type is {recipe.objective.type}; only preference has such a reference")
    tokenizer = load_tokenizer(recipe)
    model = build_model(recipe, tokenizer).requires_grad_(False).eval().to(training_device())
    LossModel(model)  # sets attention by document
    row_format = preference_format(tokenizer, shared_prompt=recipe.objective.shared_prompt)
    written = {}
    for settings in recipe.data.sources:
        source = Source(SourceSpec(name=settings.name, path=settings.path))
        target = output / f"{settings.name}.jsonl"
        if target.resolve() == Path(settings.path).resolve():
            raise DataError(f"{target} is the source {settings.name!r} itself; choose another folder")
        partial = target.with_name(f".{target.name}.partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as lines:
            for pairs in _windows(_read(source, row_format.documents), recipe.data.window):
                sums = _side_log_probs(model, [unit for _, unit in pairs], recipe)
                for (row, _), values in zip(pairs, sums, strict=True):
                    stored = row | dict(zip(REFERENCE_FIELDS, values, strict=True))
                    lines.write(json.dumps(stored, ensure_ascii=False, default=str) + "\n")
        partial.replace(target)
        written[settings.name] = target
    return written


def _read(source: Source, make: Any) -> Iterator[Pair]:
    for place in range(len(source)):
        try:
            row = dict(source.read(place))
            yield row, make(row, 0)
        except RowError as error:
            raise DataError(error.at(source.place(place))) from error


def _windows(pairs: Iterator[Pair], window: int) -> Iterator[list[Pair]]:
    """Pairs in their order, as many as fit a window; one that does not fit stands alone."""
    held: list[Pair] = []
    for pair in pairs:
        if held and _num_tokens([*held, pair]) > window:
            yield held
            held = []
        held.append(pair)
    if held:
        yield held


def _num_tokens(pairs: Sequence[Pair]) -> int:
    return sum(len(document) for _, unit in pairs for document in unit)


@torch.no_grad()
def _side_log_probs(model: Any, units: Sequence[Sequence[Document]], recipe: Recipe) -> list[list[float]]:
    """[pairs][chosen, rejected]: the sum over each side's targets."""
    slots = sum(len(document) for unit in units for document in unit)
    batch = build_batch(units, slots, alignment=1, term=PREFERENCE_TERM).to(model.device)
    with compute_context(Topology.single(), bf16=recipe.train.bf16):
        log_probs = _log_probs(model, batch)
    sums = log_probs.new_zeros(batch.layout.num_documents, dtype=torch.float64)
    # slots of prefixes have no document, nor a target: they add 0 to any
    sums.index_add_(0, batch.counted_document_ids.clamp(min=0), log_probs.to(torch.float64))
    values: list[list[float]] = sums.view(len(units), 2).tolist()
    return values


def _log_probs(model: Any, batch: PackedBatch) -> Tensor:
    hidden, head = run_decoder(model, batch)
    rows = hidden.reshape(-1, hidden.shape[-1])
    return linear_log_probs(rows, head.weight, batch.targets[PREFERENCE_TERM], **head_options(model, head))
