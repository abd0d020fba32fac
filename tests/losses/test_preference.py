"""Losses of pairs beside their formulas, and options at fault."""

import math
from typing import Any

import pytest
import torch

from isoloss.losses.preference import preference_losses


def pairs() -> tuple[torch.Tensor, ...]:
    """chosen, rejected, and both under the reference."""
    return tuple(
        torch.tensor(values, dtype=torch.float64)
        for values in ([-1.0, -9.0, -3.0], [-2.0, -4.0, -3.0], [-1.5, -8.0, -3.0], [-1.0, -7.0, -3.0])
    )


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


FORMULAS: dict[str, tuple[dict[str, Any], Any]] = {
    "sigmoid": ({}, lambda h: -math.log(sigmoid(0.5 * h))),
    "smoothed": (
        {"label_smoothing": 0.1},
        lambda h: -0.9 * math.log(sigmoid(0.5 * h)) - 0.1 * math.log(sigmoid(-0.5 * h)),
    ),
    "hinge": ({"loss_type": "hinge"}, lambda h: max(0.0, 1 - 0.5 * h)),
    "ipo": ({"loss_type": "ipo"}, lambda h: (h - 1) ** 2),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("with_reference", [True, False])
def test_each_loss_is_its_formula(name: str, with_reference: bool) -> None:
    options, formula = FORMULAS[name]
    chosen, rejected, *reference = pairs()
    output = preference_losses(chosen, rejected, *(reference if with_reference else ()), beta=0.5, **options)
    margins = [1.5, -4.0, 0.0] if with_reference else [1.0, -5.0, 0.0]
    assert output.losses.tolist() == pytest.approx([formula(margin) for margin in margins])
    gained = (output.chosen_rewards - output.rejected_rewards).tolist()
    assert gained == pytest.approx([0.5 * margin for margin in margins])
    if with_reference:
        assert output.chosen_rewards.tolist() == pytest.approx([0.25, -0.5, 0.0])


def test_far_margins_stay_finite() -> None:
    """Log-probabilities of long answers differ by thousands; the loss is then linear in them."""
    chosen = torch.tensor([-9000.0, -1.0], requires_grad=True)
    output = preference_losses(chosen, torch.tensor([-1.0, -9000.0]), beta=1.0)
    output.losses.sum().backward()
    assert output.losses.tolist() == pytest.approx([8999.0, 0.0])
    assert chosen.grad is not None
    assert chosen.grad.tolist() == pytest.approx([-1.0, 0.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta must be above 0"),
        ({"label_smoothing": 0.5}, r"label_smoothing must be in \[0, 0.5\)"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, "label_smoothing is of the loss 'sigmoid'"),
        ({"loss_type": "dpo"}, "loss_type must be sigmoid, hinge or ipo"),
        ({"reference_chosen": torch.zeros(3)}, "for both sides, or for none"),
        (
            {"reference_chosen": torch.zeros(2), "reference_rejected": torch.zeros(3)},
            "one log-probability per",
        ),
    ],
)
def test_an_option_at_fault_says_what_to_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preference_losses(torch.zeros(3), torch.zeros(3), **options)
