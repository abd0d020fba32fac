"""The clipped surrogate on numbers worked out by hand, and preference losses beside it."""

import math

import pytest
import torch

from isoloss.losses.policy import clipped_policy_losses
from isoloss.losses.preference import preference_losses

F64 = torch.float64


def test_bounds_hold_on_the_side_that_would_gain() -> None:
    ratios = torch.tensor([0.5, 0.5, 1.5, 1.5, 1.0], dtype=F64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0], dtype=F64)
    log_probs = ratios.log().requires_grad_()
    output = clipped_policy_losses(log_probs, torch.zeros(5, dtype=F64), advantages)
    assert output.losses.tolist() == pytest.approx([-0.5, 0.8, -1.2, 1.5, -2.0])
    assert output.is_clipped.tolist() == [False, True, True, False, False]
    output.losses.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-0.5, 0.0, 0.0, 1.5, -2.0])
    assert output.kl.tolist() == pytest.approx([r - 1 - math.log(r) for r in ratios.tolist()])


def test_on_policy_it_is_the_plain_policy_gradient() -> None:
    log_probs = torch.tensor([-0.3, -2.0], dtype=F64, requires_grad=True)
    advantages = torch.tensor([0.7, -1.3], dtype=F64)
    clipped_policy_losses(log_probs, log_probs, advantages).losses.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [-0.7, 1.3]


def test_bounds_of_their_own() -> None:
    log_probs = torch.tensor([1.5, 0.5], dtype=F64).log()
    advantages = torch.tensor([1.0, -1.0], dtype=F64)
    output = clipped_policy_losses(
        log_probs, torch.zeros(2, dtype=F64), advantages, clip_low=0.4, clip_high=0.28
    )
    assert output.losses.tolist() == pytest.approx([-1.28, 0.6])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"clip_low": 1.5}, "clip_low must be in"), ({"clip_high": -0.1}, "clip_high from 0")],
)
def test_bounds_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clipped_policy_losses(torch.zeros(1), torch.zeros(1), torch.zeros(1), **options)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\[2\], \[1\] and \[2\]"):
        clipped_policy_losses(torch.zeros(2), torch.zeros(1), torch.zeros(2))
    with pytest.raises(ValueError, match="one log-probability per pair on each side"):
        preference_losses(torch.zeros(2), torch.zeros(1))


def test_preference_losses_by_hand() -> None:
    sides = [torch.tensor([value], dtype=F64) for value in (-2.0, -4.0, -2.5, -3.5)]
    margin = 1.0  # 0.5 - (-0.5)
    for options, expected in (
        ({}, math.log(1 + math.exp(-0.1 * margin))),
        ({"label_smoothing": 0.3}, 0.7 * math.log(1 + math.exp(-0.1)) + 0.3 * math.log(1 + math.exp(0.1))),
        ({"loss_type": "hinge", "beta": 0.5}, 0.5),
        ({"loss_type": "ipo", "beta": 0.25}, (margin - 2) ** 2),
    ):
        assert preference_losses(*sides, **options).losses.item() == pytest.approx(expected)  # type: ignore[arg-type]
    output = preference_losses(*sides, beta=0.1)
    assert (output.chosen_rewards.item(), output.rejected_rewards.item()) == pytest.approx((0.05, -0.05))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta must be above 0"),
        ({"label_smoothing": 0.5}, r"label_smoothing must be in \[0, 0.5\)"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, "is of the loss 'sigmoid'"),
        ({"loss_type": "kto"}, "loss_type must be"),
    ],
)
def test_preference_options_out_of_range(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preference_losses(torch.zeros(1), torch.zeros(1), **options)  # type: ignore[arg-type]


def test_margins_of_any_size_are_finite() -> None:
    chosen = torch.tensor([1e4, -1e4], dtype=torch.float32, requires_grad=True)
    losses = preference_losses(chosen, torch.zeros(2), beta=1.0).losses
    losses.sum().backward()
    assert losses.tolist() == [0.0, 1e4]
    assert chosen.grad is not None
    assert bool(chosen.grad.isfinite().all())
