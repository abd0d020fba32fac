"""The command line: what it starts, what it prints, and with which status it ends."""

import errno
import os
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from isoloss import cli
from isoloss.train.recipe import Problem, Recipe, RecipeError

RECIPE = """\
model: {path: some/model}
data: {sources: [{name: code, path: code.jsonl}]}
train: {output_dir: runs/test, max_steps: 10}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return str(path)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Recipe], None]], None]:
    """Puts a function in the place of the trainer; forked workers inherit it."""

    def install(run: Callable[[Recipe], None]) -> None:
        module = types.ModuleType("isoloss.train.trainer")
        module.run = lambda recipe, command: run(recipe)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "isoloss.train.trainer", module)

    return install


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return int(ended.value.code or 0)


# help and wrong commands


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--help") == 0
    assert {"train", "export"} <= set(capsys.readouterr().out.split())
    assert status("train", "--help") == 0
    text = capsys.readouterr().out
    assert "isoloss train recipes/quickstart.yaml --nproc 2" in text
    assert "torchrun --nproc-per-node 8 -m isoloss train" in text
    assert "windows_per_step (null)  Windows of an optimizer step over all ranks" in text
    assert status("--version") == 0
    assert capsys.readouterr().out.startswith("isoloss 0.")
    assert status("export", "--help") == 0
    assert "AutoModelForCausalLM.from_pretrained" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "required: RECIPE.yaml"),
        (["train", "r.yaml", "--nproc", "0"], "must be a number of processes from 1, got '0'"),
        (["train", "r.yaml", "--nproc", "two"], "must be a number of processes from 1, got 'two'"),
        (["train", "r.yaml", "--train.max_steps=4"], "write overrides without dashes: train.max_steps=4"),
        (["train", "r.yaml", "--gpus"], "train does not know --gpus; see isoloss train --help"),
        (["export", "run", "extra"], "export does not know extra"),
    ],
)
def test_a_wrong_command_ends_with_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(*arguments) == 2
    assert words in capsys.readouterr().err


def test_help_works_without_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    for name in [name for name in sys.modules if name.startswith("isoloss.train")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pydantic", None)
    assert status("train", "--help") == 0
    assert "pip install 'isoloss[train]'" in capsys.readouterr().out
    assert status("train", recipe) == 2
    assert capsys.readouterr().err == (
        "isoloss: the package pydantic is not installed; pip install 'isoloss[train]'\n"
    )


# recipes


def test_faults_of_a_recipe_are_printed_without_a_traceback(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("train", recipe, "train.max_step=4", "--nproc", "2", "train.seed=x") == 2
    assert capsys.readouterr().err == (
        "override train.max_step=4: train.max_step is not a key of train; did you mean max_steps?\n"
        "override train.seed=x: train.seed must be an integer, got the text 'x'; change it: Seed of the "
        "initial weights and of the data order.\n"
    )


def test_sizes_that_do_not_fit_the_processes(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("train", recipe, "--nproc", "3", "parallel.dp_shard_size=2") == 2
    assert "x dp_shard_size 2 = 2, but the run has 3 ranks" in capsys.readouterr().err


def test_a_recipe_that_is_absent(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("train", "absent.yaml") == 2
    assert capsys.readouterr().err.startswith("absent.yaml: cannot read the recipe: No such file")


def test_a_seed_that_no_generator_takes(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("train", recipe, f"train.seed={2**64}") == 2
    assert "train.seed must be at most 9.22337e+18, got 18446744073709551616" in capsys.readouterr().err


def test_commands_are_shown_as_they_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / ".venv" / "bin" / "isoloss"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", "")
    assert cli._command(str(program), tmp_path) == ".venv/bin/isoloss"
    assert cli._command(str(program), tmp_path / "elsewhere") == str(program)
    monkeypatch.setenv("PATH", str(program.parent))
    assert cli._command(str(program), tmp_path) == "isoloss"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "my venv" / "python"))
    assert cli._command("/site-packages/isoloss/__main__.py", tmp_path) == "'my venv/python' -m isoloss"


# one process


def test_one_process_has_no_process_group(recipe: str, trainer: Callable[..., None]) -> None:
    """row 3"""
    seen: list[tuple[int | None, bool]] = []
    trainer(lambda made: seen.append((made.train.max_steps, dist.is_initialized())))
    assert status("train", recipe, "train.max_steps=4") == 0
    assert status("train", recipe, "--nproc", "1", "train.max_steps=5") == 0
    assert seen == [(4, False), (5, False)]


def test_overrides_may_stand_on_both_sides_of_a_flag(recipe: str, trainer: Callable[..., None]) -> None:
    seen: list[Recipe] = []
    trainer(seen.append)
    assert status("train", recipe, "train.seed=1", "--nproc", "1", "train.max_steps=7") == 0
    assert (seen[0].train.seed, seen[0].train.max_steps) == (1, 7)


def refuse_data(recipe: Recipe) -> None:
    from isoloss.batch.layout import Layout

    Layout([1], alignment=0)  # any ValueError that isoloss itself raises


def test_an_error_of_ours_is_shown_without_a_traceback(
    recipe: str, trainer: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(refuse_data)
    assert status("train", recipe) == 1
    assert capsys.readouterr().err == "isoloss: alignment must be at least 1 slot, got 0\n"
    assert status("train", recipe, "--traceback") == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "addressed"),
    [
        (ValueError("data.window is 3; use 4"), True),
        (FileNotFoundError("runs/a holds no run; give another folder"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RecipeError([]), True),
        (RuntimeError("size mismatch"), False),
        (KeyError("x"), False),
    ],
)
def test_which_errors_need_no_traceback(error: Exception, addressed: bool) -> None:
    assert cli._is_addressed(error) is addressed


def test_any_other_error_keeps_its_traceback(
    recipe: str, trainer: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(lambda made: int("x"))
    assert status("train", recipe) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_ends_with_130(recipe: str, trainer: Callable[..., None]) -> None:
    def interrupt(made: Recipe) -> None:
        raise KeyboardInterrupt

    trainer(interrupt)
    assert status("train", recipe) == 130


# several processes


def show_rank(recipe: Recipe) -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    place = f"rank {dist.get_rank()} of {dist.get_world_size()}, {int(total)} summed"
    Path(recipe.train.output_dir, f"{dist.get_rank()}.txt").write_text(place)


def test_nproc_starts_ranks_that_share_a_group(
    recipe: str, trainer: Callable[..., None], tmp_path: Path
) -> None:
    trainer(show_rank)
    assert status("train", recipe, "--nproc", "3", f"train.output_dir={tmp_path}") == 0
    written = [(tmp_path / f"{rank}.txt").read_text() for rank in range(3)]
    assert written == [f"rank {rank} of 3, 3 summed" for rank in range(3)]


def fail_on_rank_1(recipe: Recipe) -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        raise OSError("data/code.jsonl:3: the disk is gone")
    dist.barrier()


def test_the_error_of_the_rank_that_failed_is_shown_once(
    recipe: str, trainer: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    """The peer fails too, since its collective is cut off; that must not hide the cause."""
    trainer(fail_on_rank_1)
    assert status("train", recipe, "--nproc", "2") == 1
    shown = capfd.readouterr().err
    assert shown.startswith("isoloss: rank 1 failed; the run has stopped\n\nTraceback")
    assert shown.endswith("OSError: data/code.jsonl:3: the disk is gone\n")
    assert shown.count("Traceback") == 1
    assert "by peer" not in shown


def refuse_on_every_rank(recipe: Recipe) -> None:
    raise RecipeError([Problem(((),), "the run was started with 4 windows per step, now 2", "r.yaml:3")])


def test_a_fault_that_all_workers_find_is_shown_once(
    recipe: str, trainer: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    trainer(refuse_on_every_rank)
    assert status("train", recipe, "--nproc", "2") == 2
    assert capfd.readouterr().err == "r.yaml:3: the run was started with 4 windows per step, now 2\n"


def refuse_data_on_every_rank(recipe: Recipe) -> None:
    refuse_data(recipe)


def test_an_error_of_ours_in_all_workers_is_one_line(
    recipe: str, trainer: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    trainer(refuse_data_on_every_rank)
    assert status("train", recipe, "--nproc", "2") == 1
    assert capfd.readouterr().err == "isoloss: alignment must be at least 1 slot, got 0\n"


def kill_rank_1(recipe: Recipe) -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_ends_the_run(
    recipe: str, trainer: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    trainer(kill_rank_1)
    assert status("train", recipe, "--nproc", "2") == 1
    assert "killed" in capfd.readouterr().err


@pytest.mark.parametrize(("nproc", "expected"), [(2, 4), (3, 2), (16, 1)])
def test_workers_share_the_cores(
    nproc: int, expected: int, monkeypatch: pytest.MonkeyPatch, trainer: Callable[..., None]
) -> None:
    threads: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cli, "_usable_cores", lambda: 8)
    monkeypatch.setattr(cli, "_work", lambda *_: None)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    cli._worker(Path("r.yaml"), [], nproc, Path())
    assert threads == [expected]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    cli._worker(Path("r.yaml"), [], nproc, Path())
    assert threads == [expected]  # what the user has set stays


# torchrun


def test_a_process_of_torchrun_joins_its_run(
    recipe: str, trainer: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer(show_rank)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", port)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert status("train", recipe, f"train.output_dir={tmp_path}") == 0
    assert (tmp_path / "0.txt").read_text() == "rank 0 of 1, 1 summed"


def test_nproc_under_torchrun_is_refused(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert status("train", recipe, "--nproc", "2") == 2
    assert "leave --nproc out" in capsys.readouterr().err


def test_one_rank_of_a_machine_prints_the_faults_of_a_recipe(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert status("train", recipe, "train.max_step=1") == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    assert status("train", recipe, "train.max_step=1") == 2
    assert "did you mean max_steps?" in capsys.readouterr().err


# export


def test_export_prints_the_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[object, ...]] = []

    def export_run(run: Path, checkpoint: int | None, output: Path | None) -> Path:
        calls.append((run, checkpoint, output))
        if checkpoint == 7:
            raise ValueError("runs/a has no checkpoint 7; it has 4, 8")
        return Path("runs/a/export-8")

    module = types.ModuleType("isoloss.train.export")
    module.export_run = export_run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "isoloss.train.export", module)
    assert status("export", "runs/a") == 0
    assert capsys.readouterr().out == "runs/a/export-8\n"
    assert status("export", "runs/a", "--checkpoint", "8", "--output", "out") == 0
    assert calls == [(Path("runs/a"), None, None), (Path("runs/a"), 8, Path("out"))]
    assert status("export", "runs/a", "--checkpoint", "7") == 1
    assert capsys.readouterr().err == "isoloss: runs/a has no checkpoint 7; it has 4, 8\n"


def test_python_m_isoloss_is_the_command() -> None:
    command = [sys.executable, "-m", "isoloss", "train", "absent.yaml"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("absent.yaml: cannot read the recipe")
