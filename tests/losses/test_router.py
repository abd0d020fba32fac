"""Router losses against sums written by hand, and the cases A48 to A51 as far as one process shows them."""

import math

import pytest
import torch

from isoloss.losses.router import (
    balancing_loss,
    count_experts,
    expert_frequencies,
    expert_pull,
    router_gradient,
    router_probabilities,
    router_z_loss,
)


def draw(rows: int = 5, experts: int = 4, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, experts, generator=generator, dtype=torch.float64)


def test_probabilities_sum_to_one() -> None:
    logits = draw()
    for scores in ("softmax", "sigmoid"):
        probabilities = router_probabilities(logits, scores)
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(5, dtype=torch.float64))
    by_hand = [1 / (1 + math.exp(-value)) for value in logits[0].tolist()]
    expected = [value / sum(by_hand) for value in by_hand]
    assert router_probabilities(logits, "sigmoid")[0].tolist() == pytest.approx(expected)


def test_row_26_the_balancing_loss_is_the_sum_written_by_hand() -> None:
    """row 26"""
    probabilities = router_probabilities(draw())
    frequencies = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    losses = balancing_loss(probabilities, frequencies)
    for token, row in enumerate(probabilities.tolist()):
        expected = 4 * sum(f * p for f, p in zip(frequencies.tolist(), row, strict=True))
        assert losses[token].item() == pytest.approx(expected, rel=1e-14)


def test_a49_padding_is_excluded_from_counts() -> None:
    """Two real tokens, two pads: 1.0; with the pads it would be 1.25."""
    probabilities = torch.tensor([[0.8, 0.2], [0.4, 0.6], [0.9, 0.1], [0.9, 0.1]], dtype=torch.float64)
    chosen = torch.tensor([[0], [1], [0], [0]])
    is_token = torch.tensor([True, True, False, False])
    counts = count_experts(chosen, 2, is_token)
    assert counts.tolist() == [1.0, 1.0]
    assert balancing_loss(probabilities[:2], expert_frequencies(counts)).mean().item() == 1.0
    everything = expert_frequencies(count_experts(chosen, 2, torch.ones(4, dtype=torch.bool)))
    assert balancing_loss(probabilities, everything).mean().item() == pytest.approx(1.25)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("experts", [4, 7, 49])
def test_uniform_frequencies_give_one_and_exactly_no_gradient(scores: str, experts: int) -> None:
    logits = draw(6, experts).requires_grad_()
    for counts in (torch.zeros(experts), torch.full((experts,), 3.0)):
        losses = balancing_loss(router_probabilities(logits, scores), expert_frequencies(counts))
        assert losses.tolist() == [1.0] * 6
        [gradient] = torch.autograd.grad(losses.sum(), logits)
        assert not gradient.any()


def test_frequencies_are_detached() -> None:
    frequencies = torch.tensor([0.25, 0.75], dtype=torch.float64, requires_grad=True)
    losses = balancing_loss(router_probabilities(draw(3, 2).requires_grad_()), frequencies)
    losses.sum().backward()
    assert frequencies.grad is None


def test_z_losses_are_the_square_of_the_logsumexp() -> None:
    logits = draw()
    for token, row in enumerate(logits.tolist()):
        expected = math.log(sum(math.exp(value) for value in row)) ** 2
        assert router_z_loss(logits)[token].item() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("parts", ["balance", "z", "both"])
def test_the_closed_gradient_is_that_of_the_losses(scores: str, parts: str) -> None:
    logits = draw(7, 5).requires_grad_()
    frequencies = expert_frequencies(torch.tensor([0.0, 3.0, 1.0, 1.0, 9.0]))
    balance, z = torch.tensor(0.7, dtype=torch.float64), torch.tensor(0.03, dtype=torch.float64)
    total = logits.new_zeros(())
    if parts != "z":
        total = total + balance * balancing_loss(router_probabilities(logits, scores), frequencies).sum()
    if parts != "balance":
        total = total + z * router_z_loss(logits).sum()
    [expected] = torch.autograd.grad(total, logits)
    gradient = router_gradient(
        logits.detach(),
        scores,
        push=None if parts == "z" else balance * expert_pull(frequencies),
        z_scale=None if parts == "balance" else z,
    )
    torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=1e-16)


def test_low_precision_logits_are_computed_in_float32() -> None:
    logits = draw().to(torch.bfloat16)
    assert router_probabilities(logits).dtype == torch.float32
    assert router_z_loss(logits).dtype == torch.float32
    assert router_gradient(logits, "softmax", push=torch.ones(4), z_scale=None).dtype == torch.float32


def test_frequencies_of_another_number_of_experts_are_an_error() -> None:
    with pytest.raises(ValueError, match="one frequency per expert"):
        balancing_loss(router_probabilities(draw()), torch.ones(3) / 3)
