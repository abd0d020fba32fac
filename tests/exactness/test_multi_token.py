"""Multi-token prediction in every layout against the oracle: losses of each depth, gradients, counts.

Rows 6, 21 and 29; cases A46 and A47.
"""

import random
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from exactness.driving import CHANNELS, draw_documents
from exactness.objective_driving import (
    MIXTURE_SETTINGS,
    SETTINGS,
    Expected,
    Trial,
    check_layouts,
    differences,
    run_trial,
)
from isoloss import Document, Layout, Ledger, LossModel, PackedBatch, Term, Topology, shift_targets
from isoloss.objectives.multi_token import MultiToken, add_depths, look_ahead
from oracle.mixture import build_moe
from oracle.models import VOCABULARY, build_model
from oracle.multi_token import DepthAnswer, multi_token_answer
from oracle.single_process import PlainDocument

WINDOW = 256


def draw() -> list[PlainDocument]:
    """Short documents that have no target of some depth, masked targets, one longer than a shard."""
    draw = random.Random(1)
    tokens = [draw.randrange(3, VOCABULARY) for _ in range(71)]
    return [PlainDocument(tokens, [-100] * 40 + tokens[40:], channel=1), *draw_documents()]


def only_deep() -> list[PlainDocument]:
    """One label, right behind the middle of the window: with two shards the first has the target of depth 1
    and none of the next token, the second the other way round."""
    draw = random.Random(2)
    tokens = [draw.randrange(3, VOCABULARY) for _ in range(140)]
    labels = [-100] * 140
    labels[WINDOW // 2 + 1] = tokens[WINDOW // 2 + 1]
    return [PlainDocument(tokens, labels), PlainDocument([8, 9], [-100, -100], channel=1)]


def build(kind: str, num_depths: int = 2) -> nn.Module:
    if kind == "moe":
        model = build_moe("qwen3-moe")
    else:
        model = build_model(kind, num_key_value_heads=4)
    add_depths(model, num_depths)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.multi_token_depths.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(torch.float64)


def blocks(model: Any) -> list[nn.Module]:
    return [*model.get_decoder().layers, *(depth.block for depth in model.multi_token_depths)]


def units_of(documents: list[PlainDocument]) -> list[list[Document]]:
    return [
        [
            Document(
                one.tokens,
                one.labels,
                source=one.channel,
                weight=torch.tensor(one.weights) if one.weights else 1.0,
            )
        ]
        for one in documents
    ]


def expect(answer: DepthAnswer) -> Expected:
    metrics: dict[str, float] = {"train/loss": answer.total, "tokens/loss": answer.loss_tokens}
    for depth, loss in enumerate(answer.losses):
        name = f"mtp_{depth}" if depth else "text"
        metrics[f"loss/{name}"] = loss
        metrics[f"targets/{name}"] = answer.targets[depth]
        for channel, value in answer.channel_losses[depth].items():
            suffix = f"/{name}" if depth else ""
            metrics[f"channel_loss/{CHANNELS[channel]}{suffix}"] = value
    return Expected(metrics, answer.gradients)


def objective(reduction: str, num_depths: int, _: Topology) -> MultiToken:
    return MultiToken(num_depths, reduction, coefficient=0.4)  # type: ignore[arg-type]


@cache
def trial(kind: str, reduction: str, num_depths: int = 2, deep: bool = False) -> tuple[str, Trial, Expected]:
    documents = only_deep() if deep else draw()
    answer = multi_token_answer(
        build(kind, num_depths), documents, reduction=reduction, coefficient=0.4, num_channels=3
    )
    made = Trial(
        partial(build, kind, num_depths),
        units_of(documents),
        WINDOW,
        CHANNELS,
        partial(objective, reduction, num_depths),
        "text",
        partial(look_ahead, num_depths=num_depths),
        blocks,
    )
    return f"{kind} {reduction} {num_depths}{' deep' if deep else ''}", made, expect(answer)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_row_29_every_layout_gives_the_answer_of_the_oracle(ranks: int) -> None:
    """Rows 6, 21 and 29: each depth has its denominator, also where the next token has no target."""
    trials = [trial("qwen3-tied", "token"), trial("qwen3-tied", "token", 1, True)]
    if ranks < 4:
        trials += [trial("qwen3-untied", "sample"), trial("llama", "square", 3)]
    check_layouts(ranks, trials)


def test_a_mixture_of_experts_on_expert_ranks() -> None:
    check_layouts(2, [trial("moe", "token", 1)], MIXTURE_SETTINGS)


def test_the_order_and_packing_of_documents_changes_nothing() -> None:
    _, made, expected = trial("qwen3-tied", "token")
    units = list(made.units)
    random.Random(4).shuffle(units)
    other = Trial(
        made.build_model, units, WINDOW, CHANNELS, made.build_objective, "text", made.complete, blocks
    )
    for layout in ("alone", "alone x 3"):
        assert differences(*run_trial(other, SETTINGS[layout]), expected) == []


def test_nothing_leaks_from_the_token_to_predict() -> None:
    """The logits of depth d at a slot do not change with the token d + 1 ahead, nor with another document."""
    model = build("qwen3-tied")
    rows = [list(range(3, 13)), list(range(20, 26))]
    lengths, seen = [10, 6], []

    def scores(ids: list[int]) -> list[torch.Tensor]:
        layout = Layout(lengths)
        window = look_ahead(
            PackedBatch(torch.tensor(ids), {"text": shift_targets(torch.tensor(ids), layout)}, layout), 2
        )
        kept: list[torch.Tensor] = []
        hooks = [
            depth.norm.register_forward_hook(lambda _, __, output: kept.append(output.detach()[0]))
            for depth in model.multi_token_depths
        ]
        made = MultiToken(2)
        wrapped = LossModel(model)
        with Ledger(made.terms).step([window]) as step:
            for batch in step:
                wrapped(step, batch, made)
        for hook in hooks:
            hook.remove()
        return kept

    ids = rows[0] + rows[1]
    seen = scores(ids)
    for changed in (5, 12):
        other = scores(ids[:changed] + [60] + ids[changed + 1 :])
        for depth in (1, 2):
            # a slot of depth d may know the tokens up to d ahead of it, in its own document
            first = changed - depth if changed < 10 else max(changed - depth, 10)
            same = torch.isclose(seen[depth - 1], other[depth - 1], rtol=0, atol=1e-12).all(-1)
            start = 0 if changed < 10 else 10
            assert bool(same[start:first].all())
            assert not bool(same[first])
            outside = torch.ones(16, dtype=torch.bool)
            outside[start : 10 if changed < 10 else 16] = False
            assert bool(same[outside].all())


def test_a47_documents_do_not_borrow_targets() -> None:
    """Documents [1, 2, 3] and [4, 5, 6]: depth 1 has targets 3 and 6 only."""
    layout = Layout([3, 3])
    ids = torch.tensor([1, 2, 3, 4, 5, 6])
    batch = look_ahead(PackedBatch(ids, {"text": shift_targets(ids, layout)}, layout), 2)
    assert batch.targets["mtp_1"].tolist() == [3, -100, -100, 6, -100, -100]
    assert batch.targets["mtp_1"].tolist() == shift_targets(ids, layout, depth=2).tolist()
    assert batch.targets["mtp_2"].tolist() == [-100] * 6
    assert batch.token_extras["tokens_ahead"].tolist() == [
        [2, 3],
        [3, -1],
        [-1, -1],
        [5, 6],
        [6, -1],
        [-1, -1],
    ]
    assert int(batch.counts["text"].num_targets.sum()) == 4
    assert int(batch.counts["mtp_1"].num_targets.sum()) == 2


@pytest.mark.parametrize("seed", range(5))
def test_targets_ahead_are_those_of_shift_targets(seed: int) -> None:
    """Labels that are masked, one-token documents, alignment and padding."""
    draw = random.Random(seed)
    lengths = [draw.choice([1, 2, 3, 7]) for _ in range(6)]
    layout = Layout(lengths, alignment=draw.choice([1, 4]), padded_length=64)
    ids = torch.randint(3, 60, (64,), generator=torch.Generator().manual_seed(seed))
    labels = torch.where(torch.rand(64, generator=torch.Generator().manual_seed(seed)) < 0.4, -100, ids)
    batch = look_ahead(PackedBatch(ids, {"text": shift_targets(labels, layout)}, layout), 3)
    for depth in (1, 2, 3):
        expected = shift_targets(labels, layout, depth=depth + 1)
        assert torch.equal(batch.targets[f"mtp_{depth}"], expected)


def test_a46_each_depth_is_divided_by_its_own_count() -> None:
    """Main: 4 targets of cost 1; depth 1: 3 targets of cost 2; weight 0.3."""
    layout = Layout([5])
    ids = torch.arange(5)
    batch = look_ahead(PackedBatch(ids, {"text": shift_targets(ids, layout)}, layout), 1)
    ledger = Ledger([Term("text"), Term("mtp_1", coefficient=0.3)])
    gain = torch.ones((), requires_grad=True)
    with ledger.step([batch]) as step:
        share = step.add("text", gain * torch.tensor([1.0, 1, 1, 1, 9]), batch)
        (share + step.add("mtp_1", gain * torch.tensor([2.0, 2, 2, 9, 9]), batch)).backward()
    assert step.metrics()["train/loss"] == pytest.approx(1.6)
    assert gain.grad is not None
    assert gain.grad.item() == pytest.approx(1.6)


def test_depths_are_added_once() -> None:
    model = build("qwen3-tied")
    with pytest.raises(ValueError, match="has further depths already"):
        add_depths(model, 1)
