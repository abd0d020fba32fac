"""Row 30: the audit passes our own step in every layout, and catches steps that depend on theirs."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from isoloss.audit.matrix import data_layouts, own_layouts
from isoloss.audit.runner import Finding, cases, compare, load_step, run_layouts
from isoloss.audit.show import print_findings
from ranks import run_on_ranks

ROOT = Path(__file__).parents[2]


def _rank_entry(target: str, world_size: int, output: str) -> None:
    rank = torch.distributed.get_rank() if world_size > 1 else 0
    run_layouts(rank, target, world_size, "float64", output)


def findings(target: str, world_size: int, folder: Path) -> list[Finding]:
    output = folder / f"{world_size}.json"
    if world_size == 1:
        _rank_entry(target, 1, str(output))
    else:
        run_on_ranks(world_size, _rank_entry, target, world_size, str(output), timeout_s=1200)
    return [Finding(**values) for values in json.loads(output.read_text())]


@pytest.mark.parametrize("world_size", [1, 2])
def test_our_own_step_passes_in_every_layout(tmp_path: Path, world_size: int) -> None:
    found = findings("self", world_size, tmp_path)
    assert [f"{f.layout}, {f.model}" for f in found if not f.passed] == []
    assert len(found) == sum(1 for _ in cases("self", world_size))
    assert all(f.counts == "equal" and f.gradient_error < 1e-13 for f in found)
    if world_size == 1:
        assert all(f.num_collectives == 0 for f in found)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # nearly a hundred layouts on four ranks
@pytest.mark.parametrize("world_size", [4, 8])
def test_our_own_step_passes_on_many_ranks(tmp_path: Path, world_size: int) -> None:
    assert [f.layout for f in findings("self", world_size, tmp_path) if not f.passed] == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_right_step_of_a_user_passes(tmp_path: Path, world_size: int) -> None:
    found = findings("audit.steps:ddp_by_hand", world_size, tmp_path)
    assert found
    assert all(f.passed for f in found)


def test_a_mean_of_means_is_caught(tmp_path: Path) -> None:
    """On one rank without accumulation it is right; with accumulation or ranks it is not."""
    alone = {f"{f.layout}/{f.model}": f for f in findings("audit.steps:mean_of_means", 1, tmp_path)}
    assert alone["one rank/dense tied"].passed
    assert not alone["one rank, accumulation 3/dense tied"].passed
    assert alone["one rank, accumulation 3/dense tied"].gradient_error > 0.05
    pairs = findings("audit.steps:mean_of_means", 2, tmp_path)
    assert pairs
    assert not any(f.passed for f in pairs)


def test_a_wrong_count_is_caught_with_both_numbers(tmp_path: Path) -> None:
    for finding in findings("audit.steps:counts_before_the_shift", 1, tmp_path):
        assert not finding.passed
        assert finding.gradient_error < 1e-12
        assert "loss_tokens" in finding.counts


def test_a_missing_gradient_is_the_worst() -> None:
    from isoloss import AuditResult

    right = AuditResult(loss=1.0, gradients={"w": torch.ones(2), "v": torch.ones(2)}, counts={})
    lacking = replace(right, gradients={"v": torch.ones(2)})
    finding = compare("layout", "model", torch.float64, lacking, right)
    assert not finding.passed
    assert finding.worst_parameter == "w"
    broken = replace(right, gradients={"w": torch.tensor([1.0, torch.nan]), "v": torch.ones(2)})
    assert not compare("layout", "model", torch.float64, broken, right).passed


def test_every_axis_is_in_the_matrix_and_users_get_only_data_layouts() -> None:
    axes = {axis for layout in own_layouts() for axis in layout.sizes}
    assert axes == {"dp_replicate_size", "sp_size", "cp_size", "tp_size", "ep_size"}
    assert not any(layout.sizes for layout in data_layouts())
    assert max(layout.world_size for layout in own_layouts()) == 8


def test_targets_that_are_not_there_are_named() -> None:
    with pytest.raises(ValueError, match="MODULE:FUNCTION"):
        load_step("nothing")
    with pytest.raises(ValueError, match="no module 'not_there'"):
        load_step("not_there:step")
    with pytest.raises(ValueError, match="has no other"):
        load_step("audit.steps:other")


def test_failures_are_printed_with_their_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    finding = Finding(
        layout="ddp 2",
        model="dense tied",
        dtype="float64",
        loss_error=0.1,
        gradient_error=0.24,
        worst_parameter="model.norm.weight",
        channel_error=0.0,
        counts="loss_tokens 10 for 8",
        num_collectives=None,
        passed=False,
    )
    print_findings([[finding]], as_json=False)
    shown = capsys.readouterr().out
    assert "FAIL" in shown
    assert "0 of 1 layouts" in shown
    assert "model.norm.weight by 0.24" in shown
    assert "loss_tokens 10 for 8" in shown


def test_the_command_exits_with_1_on_a_failure_and_prints_json() -> None:
    command = [
        sys.executable,
        "-m",
        "isoloss",
        "audit",
        "audit.steps:mean_of_means",
        "--nproc",
        "1",
        "--json",
    ]
    ran = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    assert {finding["passed"] for finding in json.loads(ran.stdout)} == {True, False}
