"""Law: the step equals twenty lines of plain torch on the unpacked documents. Row 27."""

import math
import random

import pytest
import torch
from torch import Tensor

from isoloss import Layout, PackedBatch, Term
from laws.gain import Gain, Lookup, lookup_window, run_windows

VOCABULARY = 12
Documents = list[tuple[list[int], list[int]]]


def draw(seed: int) -> Documents:
    """(ids, unshifted labels) of documents of 1 to 9 tokens."""
    random_state = random.Random(seed)
    documents = []
    for _ in range(7):
        ids = [random_state.randrange(VOCABULARY) for _ in range(random_state.randint(1, 9))]
        documents.append((ids, [-100 if random_state.random() < 0.3 else token for token in ids]))
    return documents


def plain(
    documents: Documents, reduction: str, *, lose: int | None = None, early: bool = False
) -> tuple[float, Tensor]:
    """Loss and gradient of a table of logits, one document at a time.

    Args:
        lose: a mutant: this token starts a shard, and no target crosses into it.
        early: a mutant: targets are counted before the shift.
    """
    table = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    table += torch.randn(table.shape, generator=generator, dtype=torch.float64)
    table.requires_grad_()
    total, denominator = torch.zeros((), dtype=torch.float64), 0.0
    for ids, labels in documents:
        pairs = [(ids[i], labels[i + 1]) for i in range(len(ids) - 1) if labels[i + 1] != -100]
        if lose is not None:
            pairs = [
                (ids[i], labels[i + 1])
                for i in range(len(ids) - 1)
                if labels[i + 1] != -100 and i + 1 != lose
            ]
        count = sum(label != -100 for label in labels) if early else len(pairs)
        if not count:
            continue
        weight = {"token": 1.0, "sample": 1 / count, "square": 1 / math.sqrt(count)}[reduction]
        denominator += weight * count
        for token, label in pairs:
            total = total - weight * torch.log_softmax(table[token], dim=-1)[label]
    loss = total / denominator
    loss.backward()
    assert table.grad is not None
    return loss.item(), table.grad


def step(documents: Documents, reduction: str) -> tuple[float, Tensor]:
    model = Lookup(VOCABULARY)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        model.table += torch.randn(model.table.shape, generator=generator, dtype=torch.float64)
    windows = [
        lookup_window([ids for ids, _ in part], [labels for _, labels in part])
        for part in (documents[:2], documents[2:])
    ]
    metrics, gradients = run_windows(windows, module=model, terms=[Term("text", reduction)])
    return metrics["train/loss"], gradients["table"]


def relative(value: Tensor, reference: Tensor) -> float:
    return ((value - reference).abs().max() / reference.abs().max()).item()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("reduction", ["token", "sample", "square"])
def test_equal_to_plain_torch(reduction: str, seed: int) -> None:
    documents = draw(seed)
    loss, gradient = step(documents, reduction)
    expected, reference = plain(documents, reduction)
    assert math.isclose(loss, expected, rel_tol=1e-12)
    assert relative(gradient, reference) < 1e-12


@pytest.mark.parametrize("reduction", ["token", "sample", "square"])
def test_mutants_are_caught(reduction: str) -> None:
    """A target lost at a boundary of each document, and targets counted before the shift."""
    documents = draw(0)
    _, gradient = step(documents, reduction)
    assert relative(gradient, plain(documents, reduction, lose=4)[1]) > 0.01
    if reduction != "sample":
        assert relative(gradient, plain(documents, reduction, early=True)[1]) > 0.01
    for other in {"token", "sample", "square"} - {reduction}:
        assert relative(gradient, plain(documents, other)[1]) > 0.01


@pytest.mark.parametrize("via", ["loss", "loss_from_logits", "add"])
def test_targets_of_32_bits(via: str) -> None:
    """A batch may hold them; no method of the step takes them amiss."""
    targets = torch.tensor([0, -100, 0], dtype=torch.int32)
    costs = {"costs": torch.tensor([1.0, 0.0, 3.0])}
    batch = PackedBatch(torch.zeros(3, dtype=torch.int64), {"text": targets}, Layout([3]), token_extras=costs)
    metrics, gradients = run_windows([batch], module=Gain(via))
    assert metrics["train/loss"] == pytest.approx(2.0, rel=1e-12)
    assert gradients["gain"].item() == pytest.approx(2.0, rel=1e-12)
