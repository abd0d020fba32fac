"""The benchmarks run: each in its quick form, on shapes that take milliseconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(name: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *arguments], capture_output=True, text=True, timeout=290
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


def test_linear_cross_entropy(tmp_path: Path) -> None:
    """Every part has numbers, ours are right ones, and a second run adds to the first."""
    printed = run("linear_cross_entropy.py", "--quick", "--output", str(tmp_path))
    document = json.loads((tmp_path / "results.json").read_text())
    (case,) = document["cases"].values()
    assert (
        {"ours", "eager", "torch, chunk 512"}
        <= case["time"]["rows"].keys()
        == case["error"].keys()
        | {
            "floor",
            "floor of all rows",
        }
    )
    for row in case["time"]["rows"].values():
        assert row["wall_s"] > 0 and row["cpu_ratio"]["median"] > 0
    assert all(error < 1e-5 for error in case["error"]["ours"].values())
    assert "ours" in case["memory"]
    for part in ("options", "kernels"):
        assert len(document[part]) == 1
    assert "| softcap" in printed and "| forward KL, top 8" in printed
    ours = [row["grad_weight"] for row in document["bfloat16"] if row["variant"] == "ours"]
    assert [row["chunks"] for row in document["bfloat16"] if row["variant"] == "ours"] == [2, 16, 128]
    assert max(ours) <= 1.5 * min(ours) < 1e-2


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run for minutes on this device")
def test_gpu_linear_cross_entropy_without_a_device() -> None:
    assert "no CUDA device" in run("gpu_linear_cross_entropy.py")


@pytest.mark.parametrize(
    "peer", ["transformers Trainer", pytest.param("TRL SFTTrainer", marks=pytest.mark.slow)]
)
def test_end_to_end(tmp_path: Path, peer: str) -> None:
    """Both arms take steps on the same windows and have numbers."""
    if peer.startswith("TRL"):
        pytest.importorskip("trl")
    path = tmp_path / "results.json"
    assert peer in run("end_to_end.py", "--quick", "--arms", peer, "--output", str(path))
    rows = json.loads(path.read_text())["rows"]
    assert list(rows) == ["ours", peer]
    assert rows[peer]["ours_over_it_cpu"]["median"] > 0
