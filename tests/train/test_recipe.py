"""Recipes: what is accepted, and the message for everything that is not."""

import dataclasses
from pathlib import Path

import pydantic
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from isoloss.train.recipe import (
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    ParallelConfig,
    Recipe,
    RecipeError,
    SourceConfig,
    TrainConfig,
    check_supported,
    check_world_size,
    data_ranks,
    describe_keys,
    dump_recipe,
    load_recipe,
    parse_recipe,
    windows_per_step,
)
from isoloss.train.recipe_file import write_yaml
from isoloss.train.recipe_keys import FOREIGN_KEYS

ROOT = Path(__file__).parents[2]

GOOD = """\
model:
  path: some/model
data:
  sources:
    - name: code
      path: code.jsonl
    - name: docs
      path: docs.jsonl
  window: 512
train:
  output_dir: runs/test
  max_steps: 10
"""


def faults(text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, overrides)
    lines = str(caught.value).splitlines()
    assert lines == [str(problem) for problem in caught.value.problems]
    return lines


def fault(text: str, *overrides: str) -> str:
    (line,) = faults(text, *overrides)
    return line


def replaced(old: str, new: str) -> str:
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


# what is accepted


def test_a_recipe_with_defaults() -> None:
    recipe = parse_recipe(GOOD)
    assert recipe == Recipe(
        model=ModelConfig(path="some/model"),
        data=DataConfig(
            sources=(
                SourceConfig(name="code", path="code.jsonl"),
                SourceConfig(name="docs", path="docs.jsonl"),
            ),
            window=512,
        ),
        train=TrainConfig(output_dir="runs/test", max_steps=10),
    )
    assert recipe.data.alignment == 8
    assert recipe.model.dtype == "float32"
    assert recipe.parallel == ParallelConfig()
    assert recipe.objective == ObjectiveConfig()


def test_sections_are_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse_recipe(GOOD).train.max_steps = 3  # type: ignore[misc]
    with pytest.raises((TypeError, pydantic.ValidationError)):
        SourceConfig("code", "code.jsonl")  # type: ignore[misc]


def test_the_quickstart_recipe_loads() -> None:
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml", ["train.max_steps=4"])
    assert recipe.train.max_steps == 4
    assert recipe.train.learning_rate == 4e-3
    assert windows_per_step(recipe, 1) == windows_per_step(recipe, 2) == windows_per_step(recipe, 4) == 4
    assert [source.name for source in recipe.data.sources] == ["code", "docs", "qa"]
    # 0, 30 and the last step are evaluated: the step before training and the last always are
    assert recipe.train.eval_steps == 30


def test_a_dumped_recipe_loads_again() -> None:
    overrides = [
        "data.sources.0.weight=1e-6",
        "data.sources.1.weight=2",
        "data.sources.1.name=on",
        "train.run_name='1e-6'",
        "train.report_to=tensorboard",
        "train.max_grad_norm=null",
        "data.chat_template='{% generation %}\n  x: [\n{% endgeneration %}'",
    ]
    recipe = parse_recipe(GOOD, overrides)
    text = dump_recipe(recipe)
    assert parse_recipe(text) == recipe
    assert dump_recipe(parse_recipe(text)) == text
    written = {line.split(":")[0].strip() for line in text.splitlines()}
    assert {
        field.name for field in dataclasses.fields(TrainConfig)
    } <= written  # every default is written out


def test_the_quickstart_recipe_survives_a_dump() -> None:
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml")
    assert parse_recipe(dump_recipe(recipe)) == recipe


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.learning_rate=1e-6", "train", "learning_rate", 1e-6),
        ("train.learning_rate=1", "train", "learning_rate", 1.0),
        ("train.report_to=none", "train", "report_to", ()),
        ("train.report_to=tensorboard", "train", "report_to", ("tensorboard",)),
        ("train.report_to=[tensorboard]", "train", "report_to", ("tensorboard",)),
        ("train.resume_from_checkpoint=auto", "train", "resume_from_checkpoint", "auto"),
        ("parallel.dp_replicate_size=2", "parallel", "dp_replicate_size", 2),
        ("data.alignment=1", "data", "alignment", 1),
        ("train.save_steps=null", "train", "save_steps", None),
        ("model.dtype=float64", "model", "dtype", "float64"),
        ("objective.loss_reduction=square", "objective", "loss_reduction", "square"),
        ("data.long_documents=split", "data", "long_documents", "split"),
        ("train.on_nonfinite=stop", "train", "on_nonfinite", "stop"),
        ("objective.router_bias_update_rate=1e-3", "objective", "router_bias_update_rate", 1e-3),
    ],
)
def test_values(override: str, section: str, key: str, value: object) -> None:
    read = vars(vars(parse_recipe(GOOD, [override]))[section])[key]
    assert read == value
    assert type(read) is type(value)


def test_token_counts_may_be_written_with_an_exponent() -> None:
    recipe = parse_recipe(GOOD, ["train.max_steps=null", "train.max_tokens=1e9"])
    assert recipe.train.max_tokens == 1_000_000_000
    assert isinstance(recipe.train.max_tokens, int)


# unknown keys


def test_a_misspelt_key_names_its_line_and_the_nearest_key() -> None:
    assert faults(replaced("  max_steps: 10", "  seed: 3\n  max_step: 10")) == [
        "recipe.yaml:13: train.max_step is not a key of train; did you mean max_steps?"
    ]


def test_a_misspelt_key_of_a_source() -> None:
    lines = faults(replaced("      path: docs.jsonl", "      pth: docs.jsonl"))
    assert "recipe.yaml:8: data.sources.1.pth is not a key of data.sources.1; did you mean path?" in lines


def test_a_misspelt_section() -> None:
    assert fault(GOOD + "paralel: {}\n") == "recipe.yaml:13: paralel is not a section; did you mean parallel?"


def test_a_key_without_a_neighbour_lists_the_keys() -> None:
    message = fault(GOOD + "parallel:\n  zzz: 1\n")
    assert message == (
        "recipe.yaml:14: parallel.zzz is not a key of parallel; use one of dp_replicate_size, "
        "dp_shard_size, cp_size, sp_size, tp_size, ep_size"
    )


def test_a_key_in_the_wrong_section_or_at_the_top() -> None:
    assert fault(GOOD, "train.window=64").endswith("train.window is not a key of train; write data.window")
    assert fault("seed: 3\n" + GOOD) == "recipe.yaml:1: seed is not a section; write train.seed"


@pytest.mark.parametrize("key", sorted(FOREIGN_KEYS))
@pytest.mark.parametrize("section", ["", "train.", "data."])
def test_a_key_of_another_tool_is_answered_with_ours(key: str, section: str) -> None:
    message = fault(GOOD, f"{section}{key}=1")
    assert message.startswith(f"override {section}{key}=1: {section}{key} is not a ")
    assert f"here it is {FOREIGN_KEYS[key]}" in message


def test_what_the_advice_names_exists() -> None:
    """Advice that sends users to a key that does not exist would send them in a circle."""
    sections = {
        "model": ModelConfig,
        "data": DataConfig,
        "objective": ObjectiveConfig,
        "train": TrainConfig,
        "parallel": ParallelConfig,
    }
    known = {
        f"{name}.{field.name}" for name, section in sections.items() for field in dataclasses.fields(section)
    }
    seen = set()
    for advice in FOREIGN_KEYS.values():
        for word in advice.replace(",", " ").replace(";", " ").replace(":", " ").split():
            section, dot, key = word.strip("().").partition(".")
            if dot and section in sections:
                seen.add(f"{section}.{key}")
    assert len(seen) > 20
    assert seen - {"model.config.model_type"} <= known


def test_our_own_keys_are_not_listed_as_foreign() -> None:
    sections = (ModelConfig, DataConfig, ObjectiveConfig, TrainConfig, ParallelConfig)
    own = {field.name for section in sections for field in dataclasses.fields(section)}
    assert not own & set(FOREIGN_KEYS)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("per_device_train_batch_size", "gradient accumulation x data-parallel ranks"),
        ("max_seq_length", "data.window"),
        ("sequence_len", "data.window"),
        ("micro_batch_size", "train.windows_per_step"),
        ("datasets", "data.sources"),
        ("warmup_ratio", "ratio x total steps"),
        ("num_epochs", "train.num_train_epochs"),
        ("lr", "train.learning_rate"),
        ("seq_len", "data.window"),
        ("cutoff_len", "data.window"),
    ],
)
def test_advice_says_how_to_convert(key: str, words: str) -> None:
    assert words in fault(GOOD, f"train.{key}=1")


# wrong values


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.learning_rate='1e-6'", "must be a number, got the text '1e-6'; write 1e-6 without quotes"),
        ("train.max_steps='4'", "must be an integer, got the text '4'; write 4 without quotes"),
        ("train.max_steps=1_000", "write 1000 without quotes or underscores"),
        ("train.max_steps=4.0", "must be an integer, got 4.0; write 4"),
        ("train.max_steps=true", "must be an integer, got true"),
        ("train.max_steps=0", "must be at least 1, got 0"),
        ("train.seed=null", "must be an integer, got null"),
        ("train.bf16=yes", "YAML 1.2 has no yes; write true"),
        ("train.bf16=off", "YAML 1.2 has no off; write false"),
        ("train.bf16=1", "must be true or false, got 1"),
        ("train.learning_rate=.nan", "must be a finite number"),
        ("train.learning_rate=-1e-3", "must be at least 0, got -0.001"),
        ("objective.router_bias_update_rate=0", "must be above 0, got 0; change it: Balances a mixture"),
        ("train.max_grad_norm=0", "must be above 0, got 0; change it: Gradients are scaled down"),
        ("train.adam_beta2=1.0", "must be below 1, got 1.0"),
        ("train.save_steps=0", "must be at least 1, got 0"),
        ("train.save_steps=-5", "must be at least 1, got -5"),
        ("train.logging_steps=0", "must be at least 1, got 0"),
        ("train.save_total_limit=0", "must be at least 1, got 0"),
        ("train.output_dir=''", "must be text that is not empty"),
        ("train.resume_from_checkpoint=true", "must be text, got true"),
        ("train.report_to=wandb", "must be one of 'tensorboard', got the text 'wandb'"),
        ("train.on_nonfinite=halt", "must be one of 'skip', 'stop'"),
        ("train.lr_scheduler_type=cosin", "did you mean cosine?"),
        ("data.long_documents=Split", "did you mean split?"),
        ("data.loss_on=answers", "must be one of 'assistant', 'completion', 'all'"),
        ("data.small_sources=ignore", "must be one of 'error', 'repeat'"),
        ("data.eval_fraction=1", "must be below 1, got 1"),
        ("data.eval_fraction=-0.1", "must be at least 0, got -0.1"),
        ("data.window=0", "must be at least 1, got 0"),
        ("data.sources={name: a}", "must be a list"),
        ("data.sources=[]", "must be a list that is not empty"),
        ("data.sources.0=x", "must be a mapping of keys, got the text 'x'"),
        ("data.sources.0.name=7", "must be text, got 7"),
        ("model.dtype=fp32", "must be one of 'float32', 'bfloat16', 'float64'"),
        ("objective.loss_reduction=mean", "must be one of 'token', 'sample', 'square'"),
        ("parallel.dp_shard_size=0", "must be -1 or at least 1, got 0"),
        ("parallel.cp_size=0", "must be at least 1, got 0"),
        ("parallel=4", "is a mapping of keys, got 4"),
    ],
)
def test_a_wrong_value_names_key_value_and_fix(override: str, words: str) -> None:
    message = fault(GOOD, override)
    assert message.startswith(f"override {override}: {override.partition('=')[0]} ")
    assert words in message


@pytest.mark.parametrize("missing", ["name", "path"])
def test_a_source_without_name_or_path(missing: str) -> None:
    text = GOOD.replace("    - name: docs\n      path: docs.jsonl\n", f"    - {missing}: x\n")
    other = {"name": "path", "path": "name"}[missing]
    assert fault(text).startswith(f"recipe.yaml:7: data.sources.1.{other} is missing; add it: ")


def test_missing_sections_name_what_is_missing() -> None:
    lines = faults("")
    assert [line.split(" ")[1] for line in lines[:2]] == ["data.sources", "train.output_dir"]
    assert fault("- a\n- b\n").startswith("recipe.yaml:1: a recipe is a mapping of sections, got ['a', 'b'];")


# contradictions


def test_sources_must_have_names_of_their_own() -> None:
    message = fault(replaced("name: docs", "name: code"))
    assert message.startswith(
        "recipe.yaml:7: data.sources.1.name is 'code', as data.sources.0 has; rename one"
    )


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ((0, 0), "all weights are 0"),
        ((-1, 1), "data.sources.0.weight must be at least 0, got -1"),
        ((1, None), "data.sources: docs without a weight while others have one"),
        ((None, 1.5), "data.sources: code without a weight while others have one"),
        ((".inf", 1), "must be a finite number"),
        (("heavy", 1), "must be a number, got the text 'heavy'"),
    ],
)
def test_weights(weights: tuple[object, object], words: str) -> None:
    given = [f"data.sources.{i}.weight={w}" for i, w in enumerate(weights) if w is not None]
    assert words in fault(GOOD, *given)


def test_one_weight_may_be_zero() -> None:
    recipe = parse_recipe(GOOD, ["data.sources.0.weight=0", "data.sources.1.weight=1"])
    assert [source.weight for source in recipe.data.sources] == [0.0, 1.0]


def test_exactly_one_length() -> None:
    assert "none of train.max_steps, max_tokens and num_train_epochs" in fault(
        replaced("  max_steps: 10\n", "")
    )
    message = fault(GOOD, "train.max_tokens=100")
    assert message == (
        "override train.max_tokens=100: train.max_steps = 10 and train.max_tokens = 100 are given; "
        "keep one and remove the others (or set them to null)"
    )
    assert (
        parse_recipe(GOOD, ["train.max_steps=null", "train.num_train_epochs=2"]).train.num_train_epochs == 2
    )


def test_windows_per_step_or_accumulation() -> None:
    message = fault(GOOD, "train.windows_per_step=8", "train.gradient_accumulation_steps=2")
    assert "train.windows_per_step = 8 and train.gradient_accumulation_steps = 2 are both given" in message


def test_windows_per_step_follows_from_accumulation() -> None:
    assert windows_per_step(parse_recipe(GOOD), 4) == 4  # accumulation 1 with neither key
    accumulated = parse_recipe(GOOD, ["train.gradient_accumulation_steps=3"])
    assert [windows_per_step(accumulated, size) for size in (1, 2, 4)] == [3, 6, 12]
    fixed = parse_recipe(GOOD, ["train.windows_per_step=5"])
    assert [windows_per_step(fixed, size) for size in (1, 2, 4)] == [5, 5, 5]


def test_the_model_is_a_path_or_a_config() -> None:
    both = fault(GOOD, "model.config={model_type: qwen3}", "data.tokenizer=t")
    assert "model.path and model.config are both given" in both
    assert "neither model.path nor model.config is given" in fault(
        replaced("  path: some/model", "  dtype: float32")
    )


def test_a_config_needs_a_tokenizer() -> None:
    message = fault(GOOD, "model={config: {model_type: qwen3}}")
    assert message.startswith("recipe.yaml:3: data.tokenizer is missing: model.config has none of its own")


def test_bf16_and_float64_exclude_each_other() -> None:
    assert "train.bf16" in fault(GOOD, "train.bf16=true", "model.dtype=float64")


def test_evaluation_needs_held_out_documents() -> None:
    assert "data.eval_fraction is 0" in fault(GOOD, "train.eval_steps=10")
    assert parse_recipe(GOOD, ["train.eval_steps=10", "data.eval_fraction=0.1"]).train.eval_steps == 10


def test_alignment_and_window_fit_the_context_and_sequence_sizes() -> None:
    lines = faults(GOOD, "parallel.cp_size=3", "parallel.sp_size=2", "data.window=100", "data.alignment=8")
    assert (
        "override data.alignment=8: data.alignment is 8, which 2 * parallel.cp_size = 2 * 3 = 6 does not "
        "divide; nearest that fit: 6 or 12"
    ) in lines
    assert (
        "override data.window=100: data.window is 100, which 2 * parallel.cp_size * parallel.sp_size = "
        "2 * 3 * 2 = 12 does not divide; nearest that fit: 96 or 108"
    ) in lines


def test_a_window_for_sequence_shards_alone() -> None:
    lines = faults(GOOD, "parallel.sp_size=3")
    assert any(
        "which parallel.sp_size = 3 = 3 does not divide; nearest that fit: 504 or 528" in line
        for line in lines
    )


def test_the_nearest_size_is_never_zero() -> None:
    lines = faults(GOOD, "parallel.cp_size=4", "data.alignment=2")
    assert any(line.endswith("does not divide; nearest that fit: 8") for line in lines)


def test_a_window_that_the_alignment_does_not_divide() -> None:
    """Documents fill multiples of the alignment: those of 9 to 13 tokens would be cut at 8."""
    message = fault(GOOD, "data.window=13")
    assert message == (
        "override data.window=13: data.window is 13, which data.alignment = 8 does not divide: a document of "
        "more than 8 tokens would not fit whole; nearest that fit: 8 or 16"
    )
    assert parse_recipe(GOOD, ["data.window=13", "data.alignment=1"]).data.window == 13
    fitting = fault(GOOD, "data.window=100", "parallel.sp_size=4", "data.alignment=6")
    assert fitting.endswith("would not fit whole; nearest that fit: 96 or 108")


def test_an_alignment_beyond_the_window() -> None:
    assert "no document fits" in fault(GOOD, "data.window=4")


# parallel sizes


@pytest.mark.parametrize(
    ("sizes", "world_size", "ranks"),
    [
        ({}, 1, 1),
        ({}, 8, 8),
        ({"dp_replicate_size": 2}, 8, 8),
        ({"dp_replicate_size": 2, "dp_shard_size": 4}, 8, 8),
        ({"dp_replicate_size": 4, "dp_shard_size": 1}, 4, 4),
    ],
)
def test_data_ranks(sizes: dict[str, int], world_size: int, ranks: int) -> None:
    recipe = parse_recipe(GOOD, [f"parallel.{name}={size}" for name, size in sizes.items()])
    check_world_size(recipe, world_size)
    assert data_ranks(recipe, world_size) == ranks


def test_data_ranks_leave_out_what_shares_windows() -> None:
    recipe = dataclasses.replace(parse_recipe(GOOD), parallel=ParallelConfig(sp_size=2, cp_size=2, tp_size=2))
    assert data_ranks(recipe, 16) == 2
    assert windows_per_step(recipe, 16) == 2


def test_sizes_that_do_not_multiply_to_the_world_size() -> None:
    recipe = parse_recipe(GOOD, ["parallel.dp_replicate_size=3"])
    with pytest.raises(RecipeError, match=r"dp_replicate_size 3 x .* = 3 does not divide the 4 ranks"):
        check_world_size(recipe, 4)
    recipe = parse_recipe(GOOD, ["parallel.dp_shard_size=2"])
    with pytest.raises(RecipeError, match=r"x dp_shard_size 2 = 2, but the run has 3 ranks"):
        check_world_size(recipe, 3)


# what is not built yet


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("objective.type=multimodal", "objective.type"),
        ("model.lora={r: 8}", "model.lora"),
        ("data.num_workers=2", "data.num_workers"),
        ("train.profile=true", "train.profile"),
        ("train.peak_flops=1e15", "train.peak_flops"),
        ("model.attention=flash", "model.attention"),
    ],
)
def test_what_is_not_built_yet_is_refused(override: str, key: str) -> None:
    message = fault(GOOD, override)
    assert message.startswith(f"override {override}: {key}")
    assert "built yet" in message


def test_the_schema_has_what_is_not_built_yet() -> None:
    recipe = dataclasses.replace(parse_recipe(GOOD), objective=ObjectiveConfig(type="multimodal"))
    with pytest.raises(RecipeError, match="objective.type multimodal"):
        check_supported(recipe)


def test_a_key_of_another_objective_is_named() -> None:
    message = fault(GOOD, "objective.beta=0.2")
    assert message.startswith("override objective.beta=0.2: objective.beta is 0.2, which has no effect with")
    assert "objective.type causal_lm; remove it, or set objective.type to preference" in message
    assert parse_recipe(GOOD, ["objective.label_smoothing=0.1"]).objective.label_smoothing == 0.1


# all at once


def test_all_faults_at_once_in_the_order_of_their_lines() -> None:
    text = """\
model:
  path: some/model
  dtipe: float32
data:
  sources:
    - {name: a, path: a.jsonl, weight: -1}
    - {name: a, path: b.jsonl, weight: 1}
  max_seq_length: 512
train:
  output_dir: runs/test
  max_step: 10
  seed: 1
  seed: 2
  learning_rate: '1e-6'
"""
    lines = faults(text, "model.lora={r: 8}", "train.max_token=5")
    assert [line.partition(" ")[0] for line in lines] == [
        f"recipe.yaml:{number}:" for number in (3, 6, 7, 8, 11, 13, 14)
    ] + ["override", "override"]


def test_a_fault_has_no_echo() -> None:
    """What follows only from another fault is not reported: the misspelt length is no missing length."""
    assert len(faults(replaced("max_steps", "max_step"))) == 1
    assert len(faults(GOOD, "data.sources.0.weight=x", "data.sources.1.weight=1")) == 1


def test_a_recipe_made_in_python_is_checked_too() -> None:
    good = parse_recipe(GOOD)
    with pytest.raises(pydantic.ValidationError, match="are given; keep one"):
        dataclasses.replace(good, train=TrainConfig(output_dir="x", max_steps=1, max_tokens=2))
    with pytest.raises(pydantic.ValidationError):
        TrainConfig(output_dir="x", max_steps="4")  # type: ignore[arg-type]
    with pytest.raises(pydantic.ValidationError):
        TrainConfig(output_dir="x", max_step=4)  # type: ignore[call-arg]


_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
    ),
    max_leaves=5,
)
_paths = st.sampled_from(
    [
        *[("model", field.name) for field in dataclasses.fields(ModelConfig)],
        *[("data", field.name) for field in dataclasses.fields(DataConfig)],
        *[("train", field.name) for field in dataclasses.fields(TrainConfig)],
        *[("parallel", field.name) for field in dataclasses.fields(ParallelConfig)],
        *[("data", "sources", index, key) for index in (0, 1) for key in ("name", "path", "weight", "other")],
        *[
            ("data", "sources", 0),
            ("model",),
            ("data",),
            ("objective",),
            ("train",),
            ("other",),
            ("train", "other"),
        ],
    ]
)


@given(st.lists(st.tuples(_paths, _junk), min_size=1, max_size=4))
def test_no_value_anywhere_breaks_the_reader(changes: list[tuple[tuple[str | int, ...], object]]) -> None:
    """Whatever stands where: a recipe, or faults that each name their place."""
    values = yaml.safe_load(GOOD)
    for path, junk in changes:
        *above, key = path
        inside = values
        for step in above:
            if isinstance(inside, dict):
                inside = inside.setdefault(step, {})
            elif isinstance(inside, list) and isinstance(step, int) and step < len(inside):
                inside = inside[step]
        if isinstance(inside, dict) or (isinstance(inside, list) and key in range(len(inside))):
            inside[key] = junk
    try:
        recipe = parse_recipe(write_yaml(values))
    except RecipeError as error:
        assert all(problem.location.startswith("recipe.yaml:") for problem in error.problems)
    else:
        assert parse_recipe(dump_recipe(recipe)) == recipe


def test_a_faulty_list_does_not_hide_other_faults() -> None:
    lines = faults(GOOD, "train.report_to=[wandb]", "train.max_tokens=5", "data.sources.0=3", "data.window=0")
    assert [line.split(": ")[1].split(" ")[0] for line in lines] == [
        "train.report_to",
        "train.max_steps",
        "data.sources.0",
        "data.window",
    ]


# files


def test_lines_name_the_file_that_was_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(replaced("max_steps", "max_step"), encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"{path}:12: train.max_step is not a key")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="absent.yaml: cannot read the recipe: No such file"):
        load_recipe(tmp_path / "absent.yaml")
    with pytest.raises(RecipeError, match="cannot read the recipe: Is a directory"):
        load_recipe(tmp_path)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"model: {path: caf\xe9}\n")
    with pytest.raises(RecipeError, match="byte 17 is not UTF-8"):
        load_recipe(latin)


def test_every_key_is_described() -> None:
    text = describe_keys()
    for section in (ModelConfig, DataConfig, SourceConfig, ObjectiveConfig, TrainConfig, ParallelConfig):
        for field in dataclasses.fields(section):
            assert f" {field.name} (" in text
    assert "output_dir (required)  Folder of the run" in text


@pytest.mark.parametrize("key", ["lora", "attention", "num_workers", "profile", "peak_flops"])
def test_the_help_tells_what_is_not_built(key: str) -> None:
    after = " ".join(describe_keys().split()).partition(f" {key} (")[2]
    assert "not built yet" in after[:200].lower()
