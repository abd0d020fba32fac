"""Whole runs of the trainer on 1, 2 and 4 ranks: the same windows, losses and counts, also when killed."""

import json
import math
import resource
import signal
import tempfile
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from isoloss.train.checkpoint import complete_checkpoints
from isoloss.train.export import export_run
from isoloss.train.rundir import check_output_dir
from isoloss.train.trackers import read_metrics
from isoloss.train.trainer import Trainer, run
from train.runs import differences, make_corpus, numbers, recipe, train


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run on two FSDP2 ranks."""
    folder = tmp_path_factory.mktemp("reference")
    assert train(recipe(corpus, folder / "run"), 2, folder) == []
    return folder / "run"


def test_the_run_learns_and_logs_every_step(reference: Path) -> None:
    lines = read_metrics(reference)
    assert [line["step"] for line in lines] == list(range(13))
    assert lines[-1]["train/loss"] < lines[1]["train/loss"] - 0.2
    assert lines[-1]["eval/loss"] < lines[0]["eval/loss"] - 0.2
    assert {"eval/loss", "eval/channel_loss/code", "eval/channel_loss/docs"} <= set(lines[0]) & set(lines[6])
    assert all(line["health/books_balance"] == 1 for line in lines[1:])
    assert [path.name for path in complete_checkpoints(reference).values()] == [
        f"checkpoint-{step}" for step in (3, 6, 9, 12)
    ]


@pytest.mark.parametrize("kill_after_step", [1, pytest.param(4, marks=pytest.mark.slow), 8, 11])
def test_a_run_killed_and_resumed_is_the_same_to_the_bit(
    corpus: Path, reference: Path, tmp_path: Path, kill_after_step: int
) -> None:
    """SIGKILL at some step, then resume on the same number of ranks: every line is identical."""
    train(recipe(corpus, tmp_path / "run"), 2, tmp_path, kill_after_step=kill_after_step)
    resumed = recipe(corpus, tmp_path / "run", "train.resume_from_checkpoint=auto")
    assert train(resumed, 2, tmp_path) == []
    assert differences(numbers(reference), numbers(tmp_path / "run"), 0.0) == []


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (1, []),
        (4, []),
        (3, ["parallel.dp_replicate_size=3"]),
        (4, ["parallel.dp_replicate_size=2"]),
        (2, ["parallel.dp_replicate_size=2", "train.gradient_checkpointing=true"]),
        (2, ["parallel.sp_size=2"]),
        (2, ["parallel.cp_size=2", "train.gradient_checkpointing=true"]),
        (4, ["parallel.sp_size=2", "parallel.cp_size=2"]),
        (2, ["parallel.tp_size=2"]),
        pytest.param(4, ["parallel.tp_size=2"], marks=pytest.mark.slow),
    ],
)
def test_the_layout_of_the_ranks_changes_nothing(
    corpus: Path, reference: Path, tmp_path: Path, world_size: int, overrides: list[str]
) -> None:
    """Row 35: the same documents in each step (by their digest), the same losses to float32 rounding."""
    assert train(recipe(corpus, tmp_path / "run", *overrides), world_size, tmp_path) == []
    left, right = numbers(reference), numbers(tmp_path / "run")
    assert [line.get("data/digest") for line in left] == [line.get("data/digest") for line in right]
    assert differences(left, right, 2e-4) == []


def test_killed_on_two_ranks_resumed_on_four(corpus: Path, reference: Path, tmp_path: Path) -> None:
    """Row 35: the resumed run on another number of ranks goes on with the same documents and counts."""
    train(recipe(corpus, tmp_path / "run"), 2, tmp_path, kill_after_step=7)
    resumed = recipe(corpus, tmp_path / "run", "train.resume_from_checkpoint=auto")
    assert train(resumed, 4, tmp_path) == []
    assert differences(numbers(reference), numbers(tmp_path / "run"), 2e-4) == []


def test_lines_of_several_steps_survive_a_resume_between_them(corpus: Path, tmp_path: Path) -> None:
    """With logging_steps=5 and a checkpoint after step 6, the line of step 10 still covers steps 6 to 10."""
    often = ["train.logging_steps=5", "train.save_steps=6"]
    assert train(recipe(corpus, tmp_path / "whole", *often), 1, tmp_path) == []
    train(recipe(corpus, tmp_path / "run", *often), 1, tmp_path, kill_after_step=10)
    resumed = recipe(corpus, tmp_path / "run", *often, "train.resume_from_checkpoint=auto")
    assert train(resumed, 1, tmp_path) == []
    assert differences(numbers(tmp_path / "whole"), numbers(tmp_path / "run"), 0.0) == []


def test_another_batch_size_on_resume_is_an_error_that_shows_both(corpus: Path, tmp_path: Path) -> None:
    assert train(recipe(corpus, tmp_path / "run", "train.max_steps=3"), 1, tmp_path) == []
    other = recipe(corpus, tmp_path / "run", "train.windows_per_step=6", "train.resume_from_checkpoint=auto")
    (error,) = train(other, 1, tmp_path)
    assert "4" in error
    assert "6" in error
    assert "windows_per_step" in error


def test_a_checkpoint_of_another_model_is_an_error(corpus: Path, tmp_path: Path) -> None:
    assert train(recipe(corpus, tmp_path / "run", "train.max_steps=3"), 1, tmp_path) == []
    other = recipe(
        corpus, tmp_path / "run", "model.config.hidden_size=64", "train.resume_from_checkpoint=auto"
    )
    (error,) = train(other, 1, tmp_path)
    assert error.startswith("CheckpointError")
    assert "another model" in error
    assert "[64, 32]" in error


def test_a_new_run_sets_an_earlier_one_aside(corpus: Path, tmp_path: Path) -> None:
    short = ["train.max_steps=2"]
    assert train(recipe(corpus, tmp_path / "run", *short), 1, tmp_path) == []
    first = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert train(recipe(corpus, tmp_path / "run", *short), 1, tmp_path) == []
    assert (tmp_path / "run.1" / "metrics.jsonl").read_text() == first
    assert numbers(tmp_path / "run") == numbers(tmp_path / "run.1")


def _limit_file_size() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))


def test_a_full_disk_loses_nothing(corpus: Path, tmp_path: Path) -> None:
    """A save that fails in mid-run is reported and training goes on; at the end it is an error."""
    assert train(recipe(corpus, tmp_path / "run", "train.max_steps=3"), 2, tmp_path) == []
    kept = numbers(tmp_path / "run")
    longer = recipe(corpus, tmp_path / "run", "train.max_steps=9", "train.resume_from_checkpoint=auto")
    errors = train(longer, 2, tmp_path, before=_limit_file_size)
    assert len(errors) == 2
    assert all(error.startswith("CheckpointError: checkpoint 9 could not be written") for error in errors)
    assert "checkpoint-3" in errors[0]
    assert list(complete_checkpoints(tmp_path / "run")) == [3]
    assert not list((tmp_path / "run").glob(".checkpoint-*"))
    assert [line["step"] for line in numbers(tmp_path / "run")] == list(range(10))
    assert numbers(tmp_path / "run")[:3] == kept[:3]


def _broken_model(corpus: Path, folder: Path) -> None:
    made = recipe(corpus, folder / "unused").model.config
    from transformers import AutoConfig

    options = dict(made or {})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(options.pop("model_type"), **options))
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = math.inf
    model.save_pretrained(folder / "broken")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_that_is_not_finite_is_skipped_and_counted(
    corpus: Path, tmp_path: Path, world_size: int
) -> None:
    _broken_model(corpus, tmp_path)
    overrides = ["model.config=null", f"model.path={tmp_path / 'broken'}", "train.max_steps=3"]
    assert train(recipe(corpus, tmp_path / "run", *overrides), world_size, tmp_path) == []
    lines = read_metrics(tmp_path / "run")
    assert [line["steps/skipped"] for line in lines[1:]] == [1, 2, 3]
    assert lines[-1]["train/loss"] is None
    exported = AutoModelForCausalLM.from_pretrained(export_run(tmp_path / "run"))
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "broken")
    for (name, after), old in zip(exported.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(after, old), name


def test_a_step_that_is_not_finite_can_stop_the_run_and_is_named(corpus: Path, tmp_path: Path) -> None:
    _broken_model(corpus, tmp_path)
    overrides = [
        "model.config=null",
        f"model.path={tmp_path / 'broken'}",
        "train.on_nonfinite=stop",
    ]
    errors = train(recipe(corpus, tmp_path / "run", *overrides), 2, tmp_path)
    assert len(errors) == 2
    assert all(
        error.startswith("NonFiniteError: step 1: not finite: term 'text' in channel") for error in errors
    )


def test_export_gives_a_folder_that_transformers_loads(corpus: Path, reference: Path) -> None:
    folder = export_run(reference, output=reference.parent / "exported")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config._attn_implementation != "isoloss"
    ids = tokenizer("w1 w2 w3 w4 w5", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 7)
    with pytest.raises(ValueError, match="no checkpoint 5; it has 3, 6, 9, 12"):
        export_run(reference, checkpoint=5)
    with pytest.raises(FileExistsError, match="--output"):
        export_run(reference, output=folder)


def test_bf16_trains_close_to_float32(corpus: Path, reference: Path, tmp_path: Path) -> None:
    for world_size in (1, 2):
        output = tmp_path / f"run{world_size}"
        assert train(recipe(corpus, output, "train.bf16=true"), world_size, tmp_path) == []
        for line, exact in zip(read_metrics(output)[1:], read_metrics(reference)[1:], strict=True):
            assert line["train/loss"] == pytest.approx(exact["train/loss"], rel=0.03)
            assert line["tokens/loss"] == exact["tokens/loss"]


def test_length_in_tokens_and_in_epochs(corpus: Path, tmp_path: Path) -> None:
    """max_tokens ends after the step that reaches it; an epoch trains each document once."""
    by_tokens = ["train.max_steps=null", "train.max_tokens=600"]
    assert train(recipe(corpus, tmp_path / "tokens", *by_tokens), 2, tmp_path) == []
    totals = [line["tokens/source_total"] for line in read_metrics(tmp_path / "tokens")[1:]]
    assert totals[-1] >= 600 > totals[-2]
    by_epochs = [
        "train.max_steps=null",
        "train.num_train_epochs=2",
        "data.eval_fraction=0",
        "train.eval_steps=null",
    ]
    assert train(recipe(corpus, tmp_path / "epochs", *by_epochs), 2, tmp_path) == []
    lines = read_metrics(tmp_path / "epochs")
    assert lines[-1]["documents_total"] == 2 * 160
    assert lines[-1]["train/learning_rate"] > 0


def test_a_finished_run_says_that_nothing_was_left_to_do(corpus: Path, tmp_path: Path) -> None:
    made = recipe(corpus, tmp_path / "run", "train.max_steps=2", "train.resume_from_checkpoint=auto")
    shown = []
    for _ in range(2):
        console = Console(file=StringIO())
        run(made, console, command=".venv/bin/isoloss")
        shown.append(console.file.getvalue())  # type: ignore[attr-defined]
    assert "nothing was left to do" not in shown[0]
    assert "the run had reached its end, so nothing was left to do; a larger train.max_steps" in shown[1]
    assert f"\n  .venv/bin/isoloss export {tmp_path}/run\n" in shown[0]
    assert f"\n  .venv/bin/isoloss train {tmp_path}/run/recipe.yaml train.output_dir" in shown[0]
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [0, 1, 2]


def test_data_without_a_window_is_an_error_before_the_run(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": "w1 " * 100}) + "\n")
    made = recipe(
        corpus,
        tmp_path / "run",
        "train.max_steps=null",
        "train.num_train_epochs=1",
        "data.long_documents=drop",
        "data.eval_fraction=0",
        "train.eval_steps=null",
        f"data.sources=[{{name: long, path: {path}}}]",
    )
    with pytest.raises(ValueError, match=r"num_train_epochs=1 gives no window.* larger data\.window \(48\)"):
        Trainer(made, console=Console(file=StringIO()))
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_made_is_an_error_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "file/run", "link"):
        with pytest.raises(
            ValueError, match=r"train\.output_dir: .* is there and is no folder; name another"
        ):
            Trainer(recipe(tmp_path / "no-corpus", tmp_path / name))


def test_a_folder_without_permission_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)  # root may write anywhere
    with pytest.raises(ValueError, match=rf"can be made in {tmp_path} \(Permission denied\); name another"):
        check_output_dir(tmp_path / "some" / "run")


def test_tensorboard_is_written_when_asked(corpus: Path, tmp_path: Path) -> None:
    made = recipe(corpus, tmp_path / "run", "train.max_steps=2", "train.report_to=tensorboard")
    assert train(made, 1, tmp_path) == []
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


def test_the_resolved_recipe_is_kept_and_runs_again(corpus: Path, reference: Path) -> None:
    from isoloss.train.recipe import load_recipe

    kept = load_recipe(reference / "recipe.yaml")
    assert kept.train.output_dir == str(reference)
    assert json.loads((reference / "checkpoint-12" / "trainer_state.json").read_text())["step"] == 12


def test_rows_that_are_not_packed_whole_are_recorded_and_counted(corpus: Path, tmp_path: Path) -> None:
    """Every truncated row has a line with its place and reason; the checkpoint holds the counts."""
    overrides = ["data.window=24", "train.max_steps=null", "train.num_train_epochs=1", "data.eval_fraction=0"]
    made = recipe(corpus, tmp_path / "run", *overrides, "train.eval_steps=null")
    assert train(made, 2, tmp_path) == []
    events = [
        json.loads(line)
        for path in (tmp_path / "run" / "packing").glob("rank-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    long_rows = sum(
        len(json.loads(line)["text"].split()) + 1 > 24
        for name in ("code", "docs")
        for line in (corpus / f"{name}.jsonl").read_text().splitlines()
    )
    assert len(events) == long_rows > 10
    assert {event["action"] for event in events} == {"truncated"}
    assert all(event["place"].rpartition(":")[2].isdecimal() for event in events)
    newest = max(complete_checkpoints(tmp_path / "run").items())[1]
    records = [
        lane["packer"]["record"]
        for lane in json.loads((newest / "trainer_state.json").read_text())["lanes"].values()
    ]
    assert sum(record["rows_in"] for record in records) == 160
    assert sum(record["rows_truncated"] for record in records) == long_rows
    for record in records:
        assert record["tokens_in"] == sum(
            record[name] for name in ("tokens_packed", "tokens_truncated", "tokens_dropped")
        )


MIXTURE = (
    "model.config={model_type: qwen3_moe, vocab_size: 64, hidden_size: 32, intermediate_size: 48, "
    "moe_intermediate_size: 16, num_experts: 4, num_experts_per_tok: 2, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, norm_topk_prob: true}",
    "objective.router_aux_loss_coef=0.02",
    "objective.router_z_loss_coef=0.001",
)


def test_a_mixture_of_experts_killed_and_resumed_is_the_same_to_the_bit(corpus: Path, tmp_path: Path) -> None:
    """The expert frequencies of the step before are part of the checkpoint; ep_size may change on resume."""
    assert train(recipe(corpus, tmp_path / "whole", *MIXTURE), 2, tmp_path) == []
    lines = read_metrics(tmp_path / "whole")
    assert lines[1]["loss/moe_balance"] == pytest.approx(1.0)
    assert lines[-1]["moe/max_violation"] > 0
    train(recipe(corpus, tmp_path / "run", *MIXTURE), 2, tmp_path, kill_after_step=7)
    resumed = recipe(corpus, tmp_path / "run", *MIXTURE, "train.resume_from_checkpoint=auto")
    assert train(resumed, 2, tmp_path) == []
    assert differences(numbers(tmp_path / "whole"), numbers(tmp_path / "run"), 0.0) == []
    train(recipe(corpus, tmp_path / "spread", *MIXTURE), 2, tmp_path, kill_after_step=7)
    spread = recipe(
        corpus, tmp_path / "spread", *MIXTURE, "train.resume_from_checkpoint=auto", "parallel.ep_size=2"
    )
    assert train(spread, 2, tmp_path) == []
    assert differences(numbers(tmp_path / "whole"), numbers(tmp_path / "spread"), 2e-4) == []
