"""What a recipe's objective asks of the rows, of the model and of the step."""

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from isoloss.data.classification_rows import classification_format, collect_classes
from isoloss.data.preference_rows import preference_format
from isoloss.data.row_format import RowFormat, text_format
from isoloss.data.sources import Source, SourceSpec
from isoloss.data.token_rows import distillation_format, policy_format
from isoloss.objectives.classification import CLASSIFICATION_TERM, Classification
from isoloss.objectives.distillation import Distillation
from isoloss.objectives.loss_model import LossModel
from isoloss.objectives.multi_token import MultiToken
from isoloss.objectives.objective import TEXT_TERM, AbstractObjective, CausalLM
from isoloss.objectives.policy_gradient import POLICY_TERM, PolicyGradient
from isoloss.objectives.preference import Preference
from isoloss.parallel.routers import BIAS, RouterLosses, expert_biases, find_routers, router_scores
from isoloss.parallel.wrap import wrap_frozen
from isoloss.reduction.terms import Term
from isoloss.topology import Topology
from isoloss.train.model import load_tokenizer, transformer_blocks, vocabulary_size
from isoloss.train.recipe import Recipe

BALANCE_TERM = "moe_balance"
Z_TERM = "moe_z"
ROUTER_KEYS = ("router_aux_loss_coef", "router_z_loss_coef", "router_bias_update_rate")


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
        case "multi_token":
            return text_format(tokenizer, recipe.data.loss_on, num_depths=recipe.objective.mtp_depths)
        case "preference":
            return preference_format(
                tokenizer,
                shared_prompt=recipe.objective.shared_prompt,
                stored_reference=recipe.objective.reference == "data",
            )
        case "distillation":
            return distillation_format(
                tokenizer,
                recipe.data.loss_on,
                stored_classes=vocabulary_size(recipe) if recipe.objective.teacher is None else None,
                with_cross_entropy=recipe.objective.ce_coefficient > 0,
            )
        case "policy_gradient":
            return policy_format(tokenizer, recipe.data.loss_on)
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
        case "multi_token":
            return MultiToken(
                settings.mtp_depths,
                settings.loss_reduction,
                coefficient=settings.mtp_coefficient,
                label_smoothing=settings.label_smoothing,
                z_loss=settings.z_loss,
            )
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
        case "distillation":
            return Distillation(
                settings.loss_reduction,
                teacher=None if settings.teacher is None else load_teacher(recipe, model, topology),
                direction=settings.kl_direction,
                temperature=settings.temperature,
                ce_coefficient=settings.ce_coefficient,
            )
        case "policy_gradient":
            term = Term(POLICY_TERM, settings.loss_reduction)
            return PolicyGradient(term, clip_low=settings.clip_low, clip_high=settings.clip_high)
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


def load_teacher(recipe: Recipe, student: Any, topology: Topology) -> nn.Module:
    """The frozen teacher of a recipe.

    Raises:
        ValueError: it cannot be loaded, or has another vocabulary than the student.
    """
    name = recipe.objective.teacher
    try:
        teacher = AutoModelForCausalLM.from_pretrained(name, dtype=student.dtype)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ValueError(
            f"objective.teacher: no causal language model can be loaded from {name!r} ({first_line}); give a "
            "folder with config.json and safetensors weights, such as `isoloss export` writes"
        ) from error
    theirs, ours = (one.get_output_embeddings().weight.shape[0] for one in (teacher, student))
    if theirs != ours:
        raise ValueError(
            f"objective.teacher: {name!r} has a vocabulary of {theirs}, the student one of {ours}; both must "
            "know the same tokens: use a teacher with the student's tokenizer, or a student with the "
            "teacher's"
        )
    try:
        vocabulary = AutoTokenizer.from_pretrained(name).get_vocab()
    except (OSError, ValueError):  # a folder of weights alone, which says no more than the size
        vocabulary = None
    if vocabulary is not None and vocabulary != load_tokenizer(recipe).get_vocab():
        raise ValueError(
            f"objective.teacher: the tokenizer of {name!r} has as many tokens as the student's, but others; "
            "use a teacher with the student's tokenizer"
        )
    return freeze(teacher, topology, bf16=recipe.train.bf16)


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
    """What the recipe wants of the routers: losses, or their tokens counted alone; None for neither."""
    objective = recipe.objective
    balance = BALANCE_TERM if objective.router_aux_loss_coef is not None else None
    z_loss = Z_TERM if objective.router_z_loss_coef is not None else None
    if balance is None and z_loss is None and objective.router_bias_update_rate is None:
        return None
    return RouterLosses(balance=balance, z=z_loss, counts=objective.router_counts)


def check_routers(recipe: Recipe, model: Any) -> None:
    """Raise ValueError where the model does not have the routers that keys of the objective are about."""
    objective, name = recipe.objective, type(model).__name__
    keys = ", ".join(f"objective.{key}" for key in ROUTER_KEYS if vars(objective)[key] is not None)
    if not keys:
        return
    try:
        num_routers = len(find_routers(model))
    except ValueError as error:
        raise ValueError(f"{keys}: {error}. Set it to null, or train another model") from error
    if not num_routers:
        raise ValueError(
            f"{keys}: {name} has no routers that transformers tells of, as a mixture of experts has; set it "
            "to null, or train a mixture of experts, such as model.config.model_type qwen3_moe"
        )
    if objective.router_aux_loss_coef is not None:
        try:
            router_scores(model)
        except ValueError as error:
            raise ValueError(
                f"objective.router_aux_loss_coef: how the routers of {name} make scores, which the "
                "balancing loss needs, is not known here; set it to null, or train another model "
                "(objective.router_bias_update_rate needs no scores)"
            ) from error
    if objective.router_bias_update_rate is not None:
        try:
            expert_biases(model)
        except ValueError as error:
            raise ValueError(
                f"objective.router_bias_update_rate: the routers of {name} have no bias by which they choose "
                f"experts ({BIAS}), so there is nothing to move; set it to null, and balance with "
                "objective.router_aux_loss_coef"
            ) from error
