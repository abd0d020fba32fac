"""docs/policy_gradient.md: its loop runs, learns, and is what the objective does."""

import re
from pathlib import Path
from typing import Any

import pytest

from isoloss import Ledger, LossModel, PolicyGradient

PAGE = Path(__file__).parents[2] / "docs/policy_gradient.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page's only program leaves behind."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(program, str(PAGE), "exec"), names)
    return names


def test_reward_rises_and_the_policy_moves_between_epochs(page: dict[str, Any]) -> None:
    first, second = page["history"][::2], page["history"][1::2]
    early, late = (sum(one["reward"] for one in part) / 4 for part in (first[:4], first[-4:]))
    assert late > early + 0.15
    for one in first:  # the policy that sampled is the one that trains
        assert one["policy/ratio"] == pytest.approx(1.0, abs=1e-4)
        assert one["policy/approx_kl"] == pytest.approx(0.0, abs=1e-6)
        assert one["tokens/loss"] == 16 * 6
        assert one["train/loss"] == pytest.approx(0.0, abs=1e-4)  # minus the mean of normalised advantages
    assert max(one["policy/approx_kl"] for one in second) > 1e-4
    assert all(one["train/loss"] < -1e-4 for one in second)


def test_the_objective_does_the_same(page: dict[str, Any]) -> None:
    term = page["term"]
    shown = []
    for objective in (page["objective"], PolicyGradient(term, clip_low=0.2, clip_high=0.28)):
        ledger = Ledger([term], measures=PolicyGradient(term).measures)
        with ledger.step(page["windows"]) as step:
            for batch in step:
                LossModel(page["policy"])(step, batch, objective).backward()
        shown.append(step.metrics())
    assert shown[0] == shown[1]
    assert shown[0]["policy/clip_fraction"] > 0
