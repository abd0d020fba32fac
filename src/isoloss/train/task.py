"""What a recipe's objective asks of the rows, of the model and of the step."""

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from isoloss.data.classification_rows import classification_format, collect_classes
from isoloss.data.preference_rows import preference_format
from isoloss.data.row_format import RowFormat, text_format
from isoloss.data.sources import Source, SourceSpec
from isoloss.objectives.classification import CLASSIFICATION_TERM, Classification
from isoloss.objectives.loss_model import LossModel
from isoloss.objectives.objective import TEXT_TERM, AbstractObjective, CausalLM
from isoloss.objectives.preference import Preference
from isoloss.parallel.routers import RouterLosses
from isoloss.parallel.wrap import wrap_frozen
from isoloss.reduction.terms import Term
from isoloss.topology import Topology
from isoloss.train.model import transformer_blocks
from isoloss.train.recipe import Recipe

BALANCE_TERM = "moe_balance"
Z_TERM = "moe_z"


def class_names(recipe: Recipe) -> tuple[str, ...] | None:
    """The classes that a recipe lists, else those that its rows name; None where nothing is classified.

    Empty where numbers are predicted. Reads every row where the recipe does not list them, on every rank.

    Raises:
        ValueError: rows name too few classes, or in two ways.
        DataError: a source cannot be opened.
    """
    settings = recipe.objective
    if settings.type != "classification":
        return None
    if settings.problem_type == "regression":
        return ()
    if settings.labels is not None:
        return settings.labels
    specs = [SourceSpec(name=one.name, path=one.path, weight=one.weight) for one in recipe.data.sources]
    return collect_classes((row for spec in specs for row in Source(spec).rows()), settings.level)


def build_row_format(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, classes: Sequence[str] | None = None
) -> RowFormat:
    """How the rows of a recipe become documents; `classes` as `class_names` tells them."""
    match recipe.objective.type:
        case "causal_lm":
            return text_format(tokenizer, recipe.data.loss_on)
        case "preference":
            return preference_format(
                tokenizer,
                shared_prompt=recipe.objective.shared_prompt,
                stored_reference=recipe.objective.reference == "data",
            )
        case "classification":
            return classification_format(
                tokenizer,
                classes or (),
                level=recipe.objective.level,
                problem_type=recipe.objective.problem_type,
            )
        case other:
            raise AssertionError(f"the recipe should have refused objective.type {other}")


def build_objective(recipe: Recipe, model: Any, topology: Topology) -> AbstractObjective:
    """The objective of a recipe.

    Args:
        recipe: what to train.
        model: as `build_model` made it, before it is wrapped: a frozen reference is a copy of it.
        topology: of the run, over which a frozen model is spread like the trained one.
    """
    settings = recipe.objective
    match settings.type:
        case "causal_lm":
            term = Term(TEXT_TERM, settings.loss_reduction)
            return CausalLM(term, label_smoothing=settings.label_smoothing, z_loss=settings.z_loss)
        case "preference":
            references: dict[str, Any] = {"data": "data", "none": None}
            reference = references.get(settings.reference)
            if settings.reference == "frozen":
                reference = freeze(copy.deepcopy(model), topology, bf16=recipe.train.bf16)
            return Preference(
                reference=reference,
                loss_type=settings.loss_type,
                beta=settings.beta,
                label_smoothing=settings.label_smoothing,
                length_normalized=settings.length_normalized,
            )
        case "classification":
            return Classification(
                Term(CLASSIFICATION_TERM, settings.loss_reduction),
                problem_type=settings.problem_type,
                label_smoothing=settings.label_smoothing,
            )
        case other:
            raise AssertionError(f"the recipe should have refused objective.type {other}")


def freeze(model: Any, topology: Topology, *, bf16: bool) -> nn.Module:
    """A model that is asked and not trained, spread over the ranks like the trained one."""
    return wrap_frozen(LossModel(model), transformer_blocks(model), topology, bf16=bf16)


def router_terms(recipe: Recipe) -> list[Term]:
    """The terms of the routers' losses, which stand behind those of the objective."""
    objective = recipe.objective
    terms = []
    if objective.router_aux_loss_coef is not None:
        terms.append(Term(BALANCE_TERM, "source", objective.router_aux_loss_coef))
    if objective.router_z_loss_coef is not None:
        terms.append(Term(Z_TERM, "source", objective.router_z_loss_coef))
    return terms


def router_losses(recipe: Recipe) -> RouterLosses | None:
    """Which router losses the recipe wants; None for none."""
    objective = recipe.objective
    balance = BALANCE_TERM if objective.router_aux_loss_coef is not None else None
    z_loss = Z_TERM if objective.router_z_loss_coef is not None else None
    if balance is None and z_loss is None:
        return None
    return RouterLosses(balance=balance, z=z_loss, counts=objective.router_counts)
