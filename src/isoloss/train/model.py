"""The model and tokenizer of a recipe."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from isoloss.objectives.classification import classification_head
from isoloss.objectives.multi_token import add_depths
from isoloss.train.recipe import DataConfig, Recipe

MODEL_FOLDER = "model"
"""Folder of a run with the model's config and tokenizer, for export."""


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The tokenizer of `data.tokenizer`, else of `model.path`, with the recipe's chat template.

    Raises:
        ValueError: it cannot be loaded.
    """
    key, name = "data.tokenizer", recipe.data.tokenizer
    if name is None:
        key, name = "model.path", recipe.model.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key}: no tokenizer can be loaded from {name!r} ({_first_line(error)}); give a folder with "
            "tokenizer.json and tokenizer_config.json, as tokenizer.save_pretrained writes it"
        ) from error
    template = _chat_template(recipe.data)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _chat_template(data: DataConfig) -> str | None:
    if data.chat_template is None:
        return None
    if "{" in data.chat_template:
        return data.chat_template
    path = Path(data.chat_template)
    if not path.is_file():
        raise ValueError(
            f"data.chat_template: {path} is no file, and no Jinja text either (it has no braces); give a "
            "path or the template itself"
        )
    return path.read_text(encoding="utf-8")


def model_class(recipe: Recipe) -> Any:
    """The transformers class whose models a recipe trains."""
    if recipe.objective.type != "classification":
        return AutoModelForCausalLM
    if recipe.objective.level == "token":
        return AutoModelForTokenClassification
    return AutoModelForSequenceClassification


def build_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, classes: Sequence[str] | None = None
) -> Any:
    """The weights of `model.path`, or a random start from `model.config` and seed.

    A causal language model, or for classification its decoder with a new head (that of `model.path` where it
    has one of this size), or for multi-token prediction with further depths. Every rank builds the same
    weights.

    Args:
        recipe: what to train.
        tokenizer: of the model.
        classes: names of the classes; empty for numbers, None where nothing is classified.

    Raises:
        ValueError: the folder holds no model, or one whose head has the classes in another order; there is no
            class of transformers for this objective; the vocabulary is smaller than the tokenizer's.
    """
    model = recipe.model
    dtype = getattr(torch, model.dtype)
    head = _head_options(recipe, classes)
    torch.manual_seed(recipe.train.seed)
    if model.path is not None:
        try:
            if classes:
                _check_order(AutoConfig.from_pretrained(model.path), classes)
                head |= {"ignore_mismatched_sizes": True}  # a head of other classes is made anew
            built = model_class(recipe).from_pretrained(model.path, dtype=dtype, **head)
        except (OSError, ValueError) as error:
            what = "causal language model" if classes is None else "model for classification"
            raise ValueError(
                f"model.path: no {what} can be loaded from {model.path!r} "
                f"({_first_line(error)}); give a folder with config.json and safetensors weights"
            ) from error
    else:
        options = dict(model.config or {})
        config = AutoConfig.for_model(options.pop("model_type"), **options, **head)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if name not in options:
                setattr(config, name, _token_id(tokenizer, name))
        try:
            built = model_class(recipe).from_config(config, dtype=dtype)
        except ValueError as error:
            raise ValueError(
                f"model.config: transformers has no class for objective.type {recipe.objective.type} of "
                f"model_type {config.model_type} ({_first_line(error)}); use another model_type"
            ) from error
    if classes is not None:
        classification_head(built)
        if built.config.pad_token_id is None:
            # transformers' classification of several rows finds their last tokens by it
            built.config.pad_token_id = tokenizer.pad_token_id
    vocabulary = built.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > vocabulary:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocabulary only {vocabulary}; set "
            f"model.config.vocab_size to at least {len(tokenizer)}, or use the model's own tokenizer"
        )
    if recipe.objective.type == "multi_token":
        add_depths(built, recipe.objective.mtp_depths)
    if recipe.train.gradient_checkpointing:
        built.activation_checkpointing_enable({"use_reentrant": False})
    return built.train()


def _check_order(config: Any, classes: Sequence[str]) -> None:
    """Raise where a trained head has the classes in other rows: its answers would change places."""
    known = [config.id2label[number] for number in sorted(config.id2label)]
    if sorted(known) == sorted(classes) and known != list(classes):
        raise ValueError(
            f"its classes are [{', '.join(known)}] in this order, those of the run [{', '.join(classes)}]; "
            "set objective.labels to the order of the model"
        )


def _head_options(recipe: Recipe, classes: Sequence[str] | None) -> dict[str, Any]:
    """What a config says of a head that classifies."""
    if classes is None:
        return {}
    options: dict[str, Any] = {"problem_type": recipe.objective.problem_type, "num_labels": 1}
    if classes:
        names = dict(enumerate(classes))
        options |= {"id2label": names, "label2id": {name: number for number, name in names.items()}}
        del options["num_labels"]  # follows from the names
    if recipe.objective.level == "token":
        options["classifier_dropout"] = 0.0  # with dropout the loss would depend on the order of the work
    return options


def vocabulary_size(recipe: Recipe) -> int:
    """Rows of the head that a recipe's model has."""
    if recipe.model.path is not None:
        config = AutoConfig.from_pretrained(recipe.model.path)
    else:
        options = dict(recipe.model.config or {})
        config = AutoConfig.for_model(options.pop("model_type"), **options)
    size: int = config.get_text_config().vocab_size
    return size


def transformer_blocks(model: Any) -> list[nn.Module]:
    """The repeated blocks of a transformers model: what its authors say must not be split."""
    names: set[str] = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _token_id(tokenizer: PreTrainedTokenizerBase, name: str) -> int | None:
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }[name]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
