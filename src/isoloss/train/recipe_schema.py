"""What a run is: the recipe's sections as frozen dataclasses, and how a YAML file becomes one.

Keys have the names of Hugging Face's trainers where one exists. Relative paths in a recipe start at the
working directory, not at the recipe's folder. Every fault is reported at once, with its line.
"""

import dataclasses
import math
from collections.abc import Iterator
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, Strict
from pydantic.dataclasses import dataclass

from isoloss.topology import resolve_sizes
from isoloss.train.recipe_file import KeyPath, Problem, RecipeError

_STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)

# pydantic reads "3" as 3 and 1 as true unless told otherwise; in a recipe that hides a mistake.
_Bool = Annotated[bool, Strict()]
_Int = Annotated[int, Strict()]
_Float = Annotated[float, Strict(), Field(allow_inf_nan=False)]
_Text = Annotated[str, Strict(), Field(min_length=1)]
_Count = Annotated[_Int, Field(ge=1)]
_Fraction = Annotated[_Float, Field(ge=0, lt=1)]


def _whole_number(value: object) -> object:
    """1e9 as an integer, the way token counts are written; anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _listed(value: object) -> object:
    """`tensorboard` as [tensorboard] and `none` as [], as transformers accepts them."""
    if value == "none":
        return ()
    return (value,) if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ModelConfig:
    """The model: weights from a folder, or a random start from a configuration."""

    path: _Text | None = None
    """Folder (or name) of a transformers model whose weights to start from. This or `config`."""

    config: dict[Any, Any] | None = None
    """A transformers configuration as a mapping with `model_type`, for a random start. This or `path`."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the stored parameters; `train.bf16` sets the type of the computation."""

    attention: Literal["auto", "sdpa", "varlen", "flash"] = "auto"
    """Attention over packed documents: `auto` takes the fastest that this machine has. `varlen` and `flash`
    are not built yet."""

    lora: dict[Any, Any] | None = None
    """Options of low-rank adapters. Not built yet: only null, which trains all parameters."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class SourceConfig:
    """One source of documents, which is one channel in metrics."""

    name: _Text
    """Name of the channel for rows that do not name one themselves; unique."""

    path: _Text
    """JSONL, JSON or Parquet file, or a Hugging Face dataset folder."""

    weight: Annotated[_Float, Field(ge=0)] | None = None
    """Share of the mixture, relative to the other sources. All sources have one or none has; without
    weights each document is trained once per epoch."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class DataConfig:
    """Where documents come from and how they become windows."""

    sources: Annotated[tuple[SourceConfig, ...], Field(min_length=1)]
    """List of {name, path, weight}."""

    window: _Count = 2048
    """Token slots of a packed window; data.alignment must divide it."""

    alignment: _Count = 8
    """Each document starts at a multiple of this many slots. Stored with the run; 2 * parallel.cp_size must
    divide it, so a larger value keeps more context-parallel sizes open."""

    tokenizer: _Text | None = None
    """Folder (or name) of a tokenizer; null: that of `model.path`."""

    chat_template: _Text | None = None
    """Chat template as Jinja text, or the path of a file with it; null: that of the tokenizer."""

    loss_on: Literal["assistant", "completion", "all"] = "assistant"
    """Which tokens are targets: assistant turns (of `messages`) and completions, completions, or all."""

    long_documents: Literal["truncate", "split", "drop"] = "truncate"
    """What becomes of a document longer than the window; counted either way."""

    weight_by: Literal["token", "document"] = "token"
    """What the weights of the sources are shares of."""

    small_sources: Literal["error", "repeat"] = "error"
    """A source with weights that has fewer documents than windows per step: refuse it, or repeat it."""

    eval_fraction: _Fraction = 0.0
    """Part of every source's documents held out for evaluation; in [0, 1)."""

    num_workers: Annotated[_Int, Field(ge=0)] = 0
    """Processes that prepare data beside training. Not built yet: only 0, the training process itself."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ObjectiveConfig:
    """What is minimised."""

    type: Literal[
        "causal_lm",
        "preference",
        "classification",
        "multi_token",
        "multimodal",
        "distillation",
        "policy_gradient",
    ] = "causal_lm"
    """The objective; multimodal is not built yet."""

    loss_reduction: Literal["token", "sample", "square"] = "token"
    """Weight of a target: 1, 1 / n or 1 / sqrt(n), where n counts the targets of its document."""

    label_smoothing: Annotated[_Float, Field(ge=0, le=1)] = 0.0
    """causal_lm, multi_token, classification: spread over all classes. preference: chance that a pair is
    labelled the wrong way round, below 0.5."""

    z_loss: Annotated[_Float, Field(ge=0)] = 0.0
    """causal_lm, multi_token: coefficient of the squared log-sum-exp of the logits."""

    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """preference: the loss of a pair."""

    beta: Annotated[_Float, Field(gt=0)] = 0.1
    """preference: how strongly the policy is held to the reference."""

    length_normalized: _Bool = False
    """preference: mean instead of sum of the log-probabilities of a side."""

    reference: Literal["frozen", "data", "none"] = "frozen"
    """preference: a frozen copy of the model as it starts, log-probabilities that the rows carry, or none."""

    shared_prompt: _Bool = False
    """preference: hold the prompt of a pair once; the same numbers for fewer tokens."""

    level: Literal["sequence", "token"] = "sequence"
    """classification: a label for each document, or for each token."""

    problem_type: Literal["single_label_classification", "regression"] = "single_label_classification"
    """classification: labels are classes, or numbers."""

    labels: Annotated[tuple[_Text, ...], Field(min_length=2)] | None = None
    """classification: names of the classes in the order of the head's rows; null: those that rows name."""

    mtp_depths: _Count = 1
    """multi_token: how many further tokens are predicted beside the next one."""

    mtp_coefficient: Annotated[_Float, Field(ge=0)] = 0.3
    """multi_token: coefficient of the loss of each depth."""

    teacher: _Text | None = None
    """distillation: folder (or name) of the teacher; null: rows carry its most probable tokens."""

    kl_direction: Literal["forward", "reverse"] = "forward"
    """distillation: KL(teacher || student), or KL(student || teacher)."""

    temperature: Annotated[_Float, Field(gt=0)] = 1.0
    """distillation: divides the logits of both."""

    ce_coefficient: Annotated[_Float, Field(ge=0)] = 0.0
    """distillation: coefficient of the cross entropy of the data beside the divergence; 0: none."""

    clip_low: Annotated[_Float, Field(ge=0, le=1)] = 0.2
    """policy_gradient: how far below 1 the ratio of probabilities may count."""

    clip_high: Annotated[_Float, Field(ge=0)] = 0.2
    """policy_gradient: how far above 1 the ratio of probabilities may count."""

    router_aux_loss_coef: Annotated[_Float, Field(ge=0)] | None = None
    """Coefficient of the balancing loss of a mixture of experts, which is 1 when experts are balanced; null:
    no such loss."""

    router_z_loss_coef: Annotated[_Float, Field(ge=0)] | None = None
    """Coefficient of the router z-loss of a mixture of experts; null: no such loss."""

    router_counts: Literal["previous_step", "window", "micro_batch"] = "previous_step"
    """Where the expert frequencies of the balancing loss come from: the whole step before, the token's own
    window, or the windows that all ranks run at the same time."""

    router_bias_update_rate: Annotated[_Float, Field(gt=0)] | None = None
    """Balances a mixture of experts without a loss: after each step the bias by which routers choose experts
    moves by this much (such as 0.001), up where an expert got fewer tokens than the mean of its layer, down
    where it got more. For models whose routers have such a bias (deepseek_v3, glm4_moe); null: it stays."""


_BUILT_OBJECTIVES = (
    "causal_lm",
    "preference",
    "classification",
    "multi_token",
    "distillation",
    "policy_gradient",
)

_OBJECTIVES_OF_KEY = MappingProxyType(
    {
        "loss_reduction": ("causal_lm", "multi_token", "distillation", "policy_gradient", "classification"),
        "label_smoothing": ("causal_lm", "multi_token", "preference", "classification"),
        "z_loss": ("causal_lm", "multi_token"),
        **dict.fromkeys(
            ("loss_type", "beta", "length_normalized", "reference", "shared_prompt"), ("preference",)
        ),
        **dict.fromkeys(("level", "problem_type", "labels"), ("classification",)),
        **dict.fromkeys(("mtp_depths", "mtp_coefficient"), ("multi_token",)),
        **dict.fromkeys(("teacher", "kl_direction", "temperature", "ce_coefficient"), ("distillation",)),
        **dict.fromkeys(("clip_low", "clip_high"), ("policy_gradient",)),
    }
)
"""Keys that not every objective has."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TrainConfig:
    """How long, how fast and what is kept."""

    output_dir: _Text
    """Folder of the run: recipe.yaml, metrics.jsonl, checkpoint-<step>/."""

    run_name: _Text | None = None
    """Name shown in trackers; null: the last part of output_dir."""

    max_steps: _Count | None = None
    """Length of the run in optimizer steps. Give exactly one of the three lengths."""

    max_tokens: Annotated[_Count, BeforeValidator(_whole_number)] | None = None
    """Length of the run in source tokens, over all ranks."""

    num_train_epochs: _Count | None = None
    """Length of the run in passes over the data."""

    windows_per_step: _Count | None = None
    """Windows of an optimizer step over all ranks: the batch size. Stored with the run. Give this or
    gradient_accumulation_steps; with neither, gradient_accumulation_steps is 1."""

    gradient_accumulation_steps: _Count | None = None
    """Micro-batches per data rank and step; windows_per_step is this times the data ranks."""

    learning_rate: Annotated[_Float, Field(ge=0)] = 5e-5
    """Peak of the schedule."""

    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "cosine"
    """Shape of the schedule after the warm-up; linear and cosine end at 0."""

    warmup_steps: Annotated[_Int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from 0."""

    weight_decay: Annotated[_Float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay; norms and biases are left out."""

    adam_beta1: _Fraction = 0.9
    """AdamW's decay of the first moment."""

    adam_beta2: _Fraction = 0.999
    """AdamW's decay of the second moment."""

    adam_epsilon: Annotated[_Float, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""

    max_grad_norm: Annotated[_Float, Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this norm; null: no clipping."""

    bf16: _Bool = False
    """Compute in bfloat16; parameters keep `model.dtype` and reductions are float32."""

    gradient_checkpointing: _Bool = False
    """Recompute activations in backward: less memory, about a third more compute."""

    seed: Annotated[_Int, Field(ge=0, le=2**63 - 1)] = 42
    """Seed of the initial weights and of the data order."""

    on_nonfinite: Literal["skip", "stop"] = "skip"
    """A step whose loss or gradient is not finite: leave the weights and go on, or end the run."""

    logging_steps: _Count = 10
    """Steps between lines of metrics.jsonl."""

    eval_steps: _Count | None = None
    """Steps between evaluations, which also run before the first step and after the last; null: only then."""

    save_steps: _Count | None = 500
    """Steps between checkpoints, one of which is also made at the end; null: only then."""

    save_total_limit: _Count | None = None
    """Checkpoints kept, the newest; null: all."""

    resume_from_checkpoint: _Text | None = None
    """`auto` (the newest complete checkpoint of output_dir, if there is one), or a checkpoint folder."""

    report_to: Annotated[tuple[Literal["tensorboard"], ...], BeforeValidator(_listed)] = ()
    """Trackers beside metrics.jsonl: [tensorboard]."""

    profile: _Bool = False
    """Record a trace of a few steps in output_dir. Not built yet: only false."""

    peak_flops: Annotated[_Float, Field(gt=0)] | None = None
    """Floating-point operations per second of one device, for MFU. Not built yet: only null."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ParallelConfig:
    """How the work is split over ranks; the sizes multiply to the number of processes."""

    dp_replicate_size: _Count = 1
    """Data-parallel ranks with a copy of the parameters. With dp_shard_size 1 this is DDP, with both above
    1 HSDP."""

    dp_shard_size: Annotated[_Int, Field(ge=-1)] = -1
    """Data-parallel ranks that share the parameters (FSDP2); -1: the ranks that the other sizes leave."""

    cp_size: _Count = 1
    """Context-parallel ranks."""

    sp_size: _Count = 1
    """Sequence-parallel (Ulysses) ranks."""

    tp_size: _Count = 1
    """Tensor-parallel ranks."""

    ep_size: _Count = 1
    """Data ranks over which experts are spread; a factor of the data ranks."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Recipe:
    """A whole run.

    Raises:
        pydantic.ValidationError: a value has the wrong type or range, or values contradict one another.
    """

    model: ModelConfig
    """The model: weights from a folder, or a random start from a configuration."""

    data: DataConfig
    """Where documents come from and how they become windows."""

    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    """What is minimised."""

    train: TrainConfig
    """How long, how fast and what is kept."""

    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    """How the work is split over ranks."""

    def __post_init__(self) -> None:
        check_consistent(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialRecipe:
    """The sections of a faulty recipe that can be made, so that all of its faults are found at once."""

    model: ModelConfig | None
    data: DataConfig | None
    objective: ObjectiveConfig | None
    train: TrainConfig | None
    parallel: ParallelConfig | None


def data_ranks(recipe: Recipe, world_size: int) -> int:
    """The ranks that read different windows, among `world_size` processes.

    Raises:
        RecipeError: the parallel sizes do not multiply to `world_size`; shows the arithmetic.
    """
    sizes = recipe.parallel
    try:
        replicate_size, shard_size, *_ = resolve_sizes(
            world_size,
            dp_replicate_size=sizes.dp_replicate_size,
            dp_shard_size=sizes.dp_shard_size,
            cp_size=sizes.cp_size,
            sp_size=sizes.sp_size,
            tp_size=sizes.tp_size,
            ep_size=sizes.ep_size,
        )
    except ValueError as error:
        raise RecipeError([Problem((("parallel",),), f"parallel: {error}")]) from error
    return replicate_size * shard_size


def check_world_size(recipe: Recipe, world_size: int) -> None:
    """Raise `RecipeError`, with the arithmetic, when the parallel sizes do not fit `world_size` processes."""
    data_ranks(recipe, world_size)


def windows_per_step(recipe: Recipe, world_size: int) -> int:
    """G, the windows of an optimizer step over all ranks.

    `train.windows_per_step`, else `train.gradient_accumulation_steps` (1 when neither is given) times the
    data ranks, in which case another number of processes is another G.
    """
    if recipe.train.windows_per_step is not None:
        return recipe.train.windows_per_step
    return (recipe.train.gradient_accumulation_steps or 1) * data_ranks(recipe, world_size)


def check_supported(recipe: Recipe | PartialRecipe) -> None:
    """Refuse what the schema has and the trainer does not do yet.

    Raises:
        RecipeError: names each such key.
    """
    model, data, objective, train = recipe.model, recipe.data, recipe.objective, recipe.train
    refused: dict[KeyPath, str] = {}
    if objective and objective.type not in _BUILT_OBJECTIVES:
        built = ", ".join(_BUILT_OBJECTIVES)
        message = f"objective.type {objective.type} is not built yet; use one of {built}"
        refused["objective", "type"] = message
    if model and model.lora is not None:
        refused["model", "lora"] = "model.lora is not built yet; remove it to train all parameters"
    if model and model.attention in ("varlen", "flash"):
        message = f"model.attention {model.attention} is not built yet; use auto or sdpa"
        refused["model", "attention"] = message
    if data and data.num_workers:
        message = (
            f"data.num_workers {data.num_workers} is not built yet; remove it: the training process makes "
            "the windows itself"
        )
        refused["data", "num_workers"] = message
    if train and train.profile:
        refused["train", "profile"] = "train.profile is not built yet; remove it"
    if train and train.peak_flops is not None:
        refused["train", "peak_flops"] = "train.peak_flops: MFU is not built yet; remove it"
    if refused:
        raise RecipeError([Problem((path,), message) for path, message in refused.items()])


def check_consistent(recipe: Recipe | PartialRecipe) -> None:
    """Refuse keys that contradict one another.

    Raises:
        RecipeError: every contradiction, with its arithmetic.
    """
    model, data, train, parallel = recipe.model, recipe.data, recipe.train, recipe.parallel
    problems: list[Problem] = []
    if model:
        problems += _check_model(model)
    if data:
        problems += _check_sources(data)
    if recipe.objective:
        problems += _check_objective(recipe.objective)
    if train:
        problems += _check_train(train)
    if parallel and parallel.dp_shard_size == 0:
        message = "parallel.dp_shard_size must be -1 or at least 1, got 0; use -1 for the ranks left"
        problems.append(Problem((("parallel", "dp_shard_size"),), message))
    if model and data and model.path is None and model.config is not None and data.tokenizer is None:
        message = "data.tokenizer is missing: model.config has none of its own; give a tokenizer's folder"
        problems.append(Problem((("data", "tokenizer"), ("model", "path")), message))
    if model and train and train.bf16 and model.dtype == "float64":
        message = "train.bf16 computes in bfloat16, but model.dtype is float64; set one of them otherwise"
        problems.append(Problem((("train", "bf16"), ("model", "dtype")), message))
    if data and train and train.eval_steps is not None and data.eval_fraction == 0:
        message = (
            f"train.eval_steps is {train.eval_steps}, but data.eval_fraction is 0, so nothing is held out; "
            "set data.eval_fraction, for example 0.02, or remove train.eval_steps"
        )
        problems.append(Problem((("train", "eval_steps"), ("data", "eval_fraction")), message))
    objective = recipe.objective
    pooled = objective is not None and objective.type == "classification" and objective.level == "sequence"
    if data and pooled and data.long_documents == "split":
        message = (
            "data.long_documents is split, but with objective.level sequence the pieces of a document would "
            "have no label of their own; use truncate or drop"
        )
        problems.append(Problem((("data", "long_documents"), ("objective", "level")), message))
    if data and parallel:
        problems += _check_window(data, parallel)
    if problems:
        raise RecipeError(problems)


def _check_model(model: ModelConfig) -> Iterator[Problem]:
    keys: tuple[KeyPath, ...] = (("model", "config"), ("model", "path"))
    if model.path is not None and model.config is not None:
        message = (
            "model.path and model.config are both given; path for its weights, config for a random start"
        )
        yield Problem(keys, message)
    if model.path is None and model.config is None:
        yield Problem(
            keys, "neither model.path nor model.config is given; path for weights, config for a random start"
        )


def _check_objective(objective: ObjectiveConfig) -> Iterator[Problem]:
    """A key of another objective would have no effect, which its author should know."""
    for field in dataclasses.fields(ObjectiveConfig):
        owners = _OBJECTIVES_OF_KEY.get(field.name)
        value = vars(objective)[field.name]
        if owners is None or objective.type in owners or value == field.default:
            continue
        message = (
            f"objective.{field.name} is {value}, which has no effect with objective.type {objective.type}; "
            f"remove it, or set objective.type to {' or '.join(owners)}"
        )
        yield Problem((("objective", field.name), ("objective", "type")), message)
    if objective.labels is not None and len(set(objective.labels)) < len(objective.labels):
        twice = next(name for name in objective.labels if objective.labels.count(name) > 1)
        yield Problem(
            (("objective", "labels"),), f"objective.labels names {twice!r} twice; give each class once"
        )
    if objective.problem_type == "regression":
        for name in ("labels", "label_smoothing"):
            if vars(objective)[name]:
                message = f"objective.{name} is of classes; remove it, objective.problem_type is regression"
                yield Problem((("objective", name), ("objective", "problem_type")), message)
    if objective.type == "preference" and objective.label_smoothing >= 0.5:
        message = (
            f"objective.label_smoothing is {objective.label_smoothing}: with 0.5 a pair says nothing, above "
            "it the opposite; use a value below 0.5"
        )
        yield Problem((("objective", "label_smoothing"),), message)
    elif objective.type == "preference" and objective.label_smoothing and objective.loss_type != "sigmoid":
        message = (
            f"objective.label_smoothing is {objective.label_smoothing}, which objective.loss_type "
            f"{objective.loss_type} does not know; remove it, or use sigmoid"
        )
        yield Problem((("objective", "label_smoothing"), ("objective", "loss_type")), message)


def _check_sources(data: DataConfig) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for index, source in enumerate(data.sources):
        if source.name in first:
            message = (
                f"data.sources.{index}.name is {source.name!r}, as data.sources.{first[source.name]} has; "
                "rename one, or their losses would share a curve"
            )
            yield Problem((("data", "sources", index, "name"),), message)
        first.setdefault(source.name, index)
    # A source without a weight comes first: the first key says where.
    order = sorted(range(len(data.sources)), key=lambda index: data.sources[index].weight is not None)
    keys: tuple[KeyPath, ...] = tuple(("data", "sources", index, "weight") for index in order)
    without = [source.name for source in data.sources if source.weight is None]
    if without and len(without) < len(data.sources):
        message = (
            f"data.sources: {', '.join(without)} without a weight while others have one; give all or none"
        )
        yield Problem(keys, message)
    elif not without and not any(source.weight for source in data.sources):
        yield Problem(keys, "data.sources: all weights are 0; give at least one source a weight above 0")


def _check_train(train: TrainConfig) -> Iterator[Problem]:
    lengths = {
        "max_steps": train.max_steps,
        "max_tokens": train.max_tokens,
        "num_train_epochs": train.num_train_epochs,
    }
    keys: tuple[KeyPath, ...] = tuple(("train", name) for name in lengths)
    given = [f"train.{name} = {value}" for name, value in lengths.items() if value is not None]
    if not given:
        yield Problem(
            keys, "none of train.max_steps, max_tokens and num_train_epochs is given; give one of them"
        )
    if len(given) > 1:
        last = tuple(path for path in keys if lengths[str(path[-1])] is not None)
        message = f"{' and '.join(given)} are given; keep one and remove the others (or set them to null)"
        yield Problem(last[::-1] + keys, message)
    if train.windows_per_step is not None and train.gradient_accumulation_steps is not None:
        message = (
            f"train.windows_per_step = {train.windows_per_step} and train.gradient_accumulation_steps = "
            f"{train.gradient_accumulation_steps} are both given; keep one: windows_per_step is "
            "gradient_accumulation_steps times the data ranks"
        )
        yield Problem((("train", "gradient_accumulation_steps"), ("train", "windows_per_step")), message)


def _check_window(data: DataConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    cp_size, sp_size = parallel.cp_size, parallel.sp_size
    # Without context parallelism no document is cut into pieces (and the two pieces of one rank are one).
    alignment_unit = 2 * cp_size if cp_size > 1 else 1
    window_unit = alignment_unit * sp_size
    aligned = data.alignment % alignment_unit == 0
    # a window that fits the alignment too, unless that has to change itself
    fitting = math.lcm(window_unit, data.alignment) if aligned else window_unit
    if not aligned:
        message = (
            f"data.alignment is {data.alignment}, which 2 * parallel.cp_size = 2 * {cp_size} = "
            f"{alignment_unit} does not divide; nearest that fit: {_nearest(data.alignment, alignment_unit)}"
        )
        yield Problem((("data", "alignment"), ("parallel", "cp_size")), message)
    if data.window % window_unit:
        arithmetic = f"2 * {cp_size} * {sp_size}" if cp_size > 1 else f"{sp_size}"
        names = "2 * parallel.cp_size * parallel.sp_size" if cp_size > 1 else "parallel.sp_size"
        message = (
            f"data.window is {data.window}, which {names} = {arithmetic} = {window_unit} does not divide; "
            f"nearest that fit: {_nearest(data.window, fitting)}"
        )
        yield Problem((("data", "window"), ("parallel", "cp_size"), ("parallel", "sp_size")), message)
    if data.alignment > data.window:
        message = (
            f"data.alignment {data.alignment} exceeds data.window {data.window}, so no document fits; "
            f"use an alignment of at most {data.window}"
        )
        yield Problem((("data", "alignment"), ("data", "window")), message)
    elif aligned and data.window % data.alignment and not data.window % window_unit:
        longest = data.window // data.alignment * data.alignment
        message = (
            f"data.window is {data.window}, which data.alignment = {data.alignment} does not divide: "
            f"a document of more than {longest} tokens would not fit whole; nearest that fit: "
            f"{_nearest(data.window, fitting)}"
        )
        yield Problem((("data", "window"), ("data", "alignment")), message)


def _nearest(size: int, unit: int) -> str:
    above = math.ceil(size / unit) * unit
    return f"{above - unit} or {above}" if above > unit else f"{above}"
