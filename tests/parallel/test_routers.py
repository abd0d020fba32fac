"""Router losses in a step: values and gradients by hand, faults seen elsewhere, hooks that come and go."""

import copy
import gc
import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from exactness.driving import build_window, draw_documents
from isoloss import Layout, Ledger, LossModel, PackedBatch, Step, Term, Topology, sum_gradients
from isoloss.parallel.routers import (
    RouterLosses,
    expert_biases,
    find_routers,
    router_scores,
    update_expert_bias,
)
from isoloss.reduction.terms import Routing
from laws.collectives import CollectiveCounter
from oracle.mixture import EXPERTS, build_moe
from oracle.models import build_model
from ranks import on_ranks, run_on_ranks

F64 = torch.float64


class TableRouter(nn.Module):
    """Logits from a table row by row: what a router shows is what the test says."""

    num_experts = 2

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, experts = self.logits.softmax(-1).topk(1, -1)
        return self.logits, weights, experts


class TableModel(nn.Module):
    """One router; what comes of its weights is multiplied by 0, so that router losses alone train it."""

    def __init__(self, probabilities: list[list[float]]) -> None:
        super().__init__()
        self.router = TableRouter(torch.tensor(probabilities, dtype=F64).log())


def only_router_losses(model: TableModel, step: Step, batch: PackedBatch) -> Tensor:
    _, weights, _ = model.router(torch.zeros(len(batch), 1, dtype=F64))
    return step.add("text", (weights * 0.0).sum(-1), batch)


def table_window(tokens: int, slots: int) -> PackedBatch:
    layout = Layout([tokens], padded_length=slots)
    targets = torch.where(layout.is_token(), 1, -100)
    return PackedBatch(torch.zeros(slots, dtype=torch.int64), {"text": targets}, layout)


def run_table(probabilities: list[list[float]], losses: RouterLosses, tokens: int, steps: int = 1) -> tuple:
    model = TableModel(probabilities)
    loss_model = LossModel(model, losses, routers=[model.router])
    terms = [Term("text"), Term("moe_balance", "source", 0.1)]
    if losses.z is not None:
        terms.append(Term(losses.z, "source", 0.01))
    ledger = Ledger(terms, routing=loss_model.routing)
    for _ in range(steps):
        model.zero_grad()
        with ledger.step([table_window(tokens, len(probabilities))]) as step:
            for batch in step:
                loss_model(step, batch, only_router_losses).backward()
    return step, model.router.logits.grad


PROBABILITIES = [[0.8, 0.2], [0.4, 0.6], [0.9, 0.1], [0.9, 0.1]]


def test_a49_padding_is_excluded() -> None:
    """Two real tokens and two pads: 1.0, where the pads would make it 1.25, and no gradient at the pads."""
    for counts in ("window", "micro_batch"):
        step, gradient = run_table(PROBABILITIES, RouterLosses(counts=counts, scores="softmax"), tokens=2)
        assert step.metrics()["loss/moe_balance"] == pytest.approx(1.0, abs=1e-15)
        assert step.record.expert_counts == [[1, 1]]
        assert not gradient.any()  # balanced
    step, gradient = run_table(PROBABILITIES, RouterLosses(counts="window", scores="softmax"), tokens=4)
    assert step.metrics()["loss/moe_balance"] == pytest.approx(1.25)
    assert step.metrics()["moe/max_violation"] == pytest.approx(0.5)
    assert [step.metrics()[f"moe/expert_tokens/{expert}"] for expert in range(2)] == [3.0, 1.0]
    assert gradient.abs().min() > 0


def test_frequencies_of_the_previous_step_are_uniform_at_first() -> None:
    losses = RouterLosses(scores="softmax")
    step, gradient = run_table(PROBABILITIES, losses, tokens=3)
    assert step.metrics()["loss/moe_balance"] == 1.0
    assert not gradient.any(), "exactly zero in the first step"
    step, gradient = run_table(PROBABILITIES, losses, tokens=3, steps=2)
    # f = (2/3, 1/3) from the step before, p means (2.1, 0.9) / 3
    assert step.metrics()["loss/moe_balance"] == pytest.approx(2 * (2 / 3 * 0.7 + 1 / 3 * 0.3))
    by_hand = torch.tensor([[p * (1 - p)] for p, _ in PROBABILITIES[:3]], dtype=F64)
    by_hand = by_hand * torch.tensor([[1.0, -1.0]], dtype=F64) * (0.1 / 3) * 2 * (2 / 3 - 1 / 3)
    torch.testing.assert_close(gradient[:3], by_hand, rtol=1e-13, atol=0)
    assert not gradient[3].any()


def test_a_rescaled_share_has_its_right_gradient() -> None:
    """A loss scaler, or a second loss beside it: router losses follow as if they were in the graph."""
    reference = None
    for scale in (1.0, 3.0):
        model = TableModel(PROBABILITIES)
        losses = RouterLosses(z="moe_z", counts="window", scores="softmax")
        loss_model = LossModel(model, losses, routers=[model.router])
        terms = [Term("text"), Term("moe_balance", "source", 0.1), Term("moe_z", "source", 0.01)]
        ledger = Ledger(terms, routing=loss_model.routing)
        with ledger.step([table_window(4, 4)]) as step:
            for batch in step:
                (loss_model(step, batch, only_router_losses) * scale).backward()
        gradient = model.router.logits.grad / scale
        reference = gradient if reference is None else reference
        torch.testing.assert_close(gradient, reference, rtol=1e-14, atol=0)
    assert reference.any()


def test_z_losses_by_hand() -> None:
    step, _ = run_table(PROBABILITIES, RouterLosses(z="moe_z", scores="softmax"), tokens=3)
    # logits are logarithms of probabilities, so their logsumexp is 0
    assert step.metrics()["loss/moe_z"] == pytest.approx(0.0, abs=1e-30)
    doubled = [[2 * p for p in row] for row in PROBABILITIES]
    step, gradient = run_table(doubled, RouterLosses(z="moe_z", scores="softmax"), tokens=3)
    assert step.metrics()["loss/moe_z"] == pytest.approx(math.log(2) ** 2)
    expected = 0.01 / 3 * 2 * math.log(2) * torch.tensor(PROBABILITIES[:3], dtype=F64)
    torch.testing.assert_close(gradient[:3], expected, rtol=1e-13, atol=0)


def test_nan_in_a_padding_slot_reaches_nothing() -> None:
    broken = [*PROBABILITIES[:3], [math.nan, math.nan]]
    losses = RouterLosses(z="moe_z", counts="window", scores="softmax")
    step, gradient = run_table(broken, losses, tokens=3)
    assert math.isfinite(step.metrics()["loss/moe_balance"] + step.metrics()["loss/moe_z"])
    assert gradient[:3].isfinite().all()


# -- faults seen elsewhere


def add_costs(step: Step, batch: PackedBatch, costs: Tensor, aux: Tensor) -> Tensor:
    return step.add("text", costs, batch) + step.add("aux", aux.expand(len(batch)), batch)


@on_ranks(2)
def test_a48_an_aux_loss_knows_no_world_size() -> None:
    """2.0 + 0.1 * 0.5 = 2.05 (wrong: 2.1), and 0.1 with respect to the aux loss."""
    topology = Topology()
    model = nn.Module()
    model.aux = nn.Parameter(torch.tensor(0.5, dtype=F64))
    gradients = sum_gradients(model, topology)
    ledger = Ledger([Term("text"), Term("aux", "source", 0.1)], topology=topology)
    costs = torch.full((2,), [1.0, 3.0][dist.get_rank()], dtype=F64)
    with ledger.step([table_window(2, 2)], gradients=gradients) as step:
        for batch in step:
            add_costs(step, batch, costs, model.aux).backward()
    assert step.metrics()["train/loss"] == pytest.approx(2.05, rel=1e-15)
    assert model.aux.grad.item() == pytest.approx(0.1, rel=1e-15)


def test_a50_the_shown_aux_loss_is_not_the_sum_over_micro_batches() -> None:
    ledger = Ledger([Term("text"), Term("aux", "source")])
    with ledger.step([table_window(3, 4)] * 4) as step:
        for batch in step:
            add_costs(step, batch, torch.zeros(4, dtype=F64), torch.tensor(1.0, dtype=F64))
    assert step.metrics()["loss/aux"] == 1.0
    assert step.metrics()["targets/aux"] == 12


def test_a51_an_aux_loss_is_neither_dead_nor_multiplied_by_tokens() -> None:
    """Coefficient 0.01, aux 1.2, 100 tokens: adds 0.012, with gradient 0.01."""
    aux = torch.tensor(1.2, dtype=F64, requires_grad=True)
    ledger = Ledger([Term("text"), Term("aux", "source", 0.01)])
    with ledger.step([table_window(100, 100)]) as step:
        for batch in step:
            add_costs(step, batch, torch.zeros(100, dtype=F64), aux).backward()
    assert step.metrics()["train/loss"] == pytest.approx(0.012, rel=1e-14)
    assert aux.grad.item() == pytest.approx(0.01, rel=1e-14)


def test_source_terms_count_tokens_without_targets() -> None:
    """A document of one token has no target and yet a router."""
    layout = Layout([1, 3], padded_length=6)
    targets = torch.tensor([-100, 1, 1, -100, -100, -100])
    batch = PackedBatch(torch.zeros(6, dtype=torch.int64), {"text": targets}, layout)
    ledger = Ledger([Term("text"), Term("aux", "source")])
    with ledger.step([batch]) as step:
        step.add("text", torch.ones(6, dtype=F64), batch)
        step.add("aux", torch.tensor([4.0, 1, 1, 2, 99, 99], dtype=F64), batch)
    assert step.metrics()["loss/aux"] == 2.0
    assert step.metrics()["tokens/loss"] == 2


# -- collectives


@pytest.mark.parametrize(
    ("sizes", "counts", "extra"),
    [
        ({}, "previous_step", 0),
        ({}, "window", 0),
        ({}, "micro_batch", 3),
        ({"sp_size": 2}, "previous_step", 0),
        ({"sp_size": 2}, "window", 3),
        ({"sp_size": 2}, "micro_batch", 3),
    ],
)
def test_row_26_collectives_of_each_kind_of_counts(sizes: dict, counts: str, extra: int) -> None:
    """row 26; three micro-batches, two layers: one collective per micro-batch for all layers, or none."""

    def body() -> None:
        topology = Topology(**sizes)
        documents = draw_documents(weighted=False)
        windows = [build_window(documents[start::3], padded_length=64) for start in range(3)]
        totals = []
        for losses in (None, RouterLosses(z="moe_z", counts=counts)):
            loss_model = LossModel(build_moe(), losses)
            gradients = sum_gradients(loss_model, topology)
            terms = [Term("text")]
            if losses is not None:
                terms += [Term("moe_balance", "source", 0.1), Term("moe_z", "source", 0.1)]
            ledger = Ledger(terms, topology=topology, routing=loss_model.routing)
            with CollectiveCounter() as calls, ledger.step(windows, gradients=gradients) as step:
                for batch in step:
                    loss_model(step, batch).backward()
            totals.append(calls.total)
        assert totals[1] - totals[0] == extra

    run_on_ranks(2, body)


# -- hooks, declarations, state


def step_on(loss_model: LossModel, ledger: Ledger, *, training: bool = True) -> Step:
    window = build_window(draw_documents(weighted=False)[:4], padded_length=64, channels=False)
    with ledger.step([window], training=training) as step:
        for batch in step:
            share = loss_model(step, batch)
            if training:
                share.backward()
    return step


def ledger_of(loss_model: LossModel) -> Ledger:
    return Ledger([Term("text"), Term("moe_balance", "source", 0.1)], routing=loss_model.routing)


def test_hooks_change_nothing_outside_a_step_and_can_be_removed() -> None:
    model = build_moe()
    ids = torch.randint(3, 64, (1, 9))
    before = model(input_ids=ids, use_cache=False).logits
    loss_model = LossModel(model, RouterLosses())
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
    assert all(router._forward_hooks for router in find_routers(model))
    loss_model.router_hooks.remove()
    assert not any(router._forward_hooks for router in find_routers(model))


def test_evaluation_uses_the_counts_of_training_and_does_not_replace_them() -> None:
    loss_model = LossModel(build_moe(), RouterLosses())
    ledger = ledger_of(loss_model)
    step_on(loss_model, ledger)
    counts = ledger.state_dict()["expert_counts"]
    with torch.no_grad():
        evaluated = step_on(loss_model, ledger, training=False)
    assert evaluated.metrics()["eval/loss/moe_balance"] > 1.0
    assert ledger.state_dict()["expert_counts"] == counts


def test_counts_are_saved_and_resumed() -> None:
    loss_model = LossModel(build_moe(), RouterLosses())
    first = ledger_of(loss_model)
    assert first.state_dict()["expert_counts"] is None
    step_on(loss_model, first)
    state = copy.deepcopy(first.state_dict())
    expected = step_on(loss_model, first).metrics()["loss/moe_balance"]
    second = ledger_of(loss_model)
    second.load_state_dict(state)
    assert step_on(loss_model, second).metrics()["loss/moe_balance"] == expected != 1.0
    other = Ledger([Term("text")], routing=Routing(num_layers=2, num_experts=EXPERTS + 1))
    with pytest.raises(ValueError, match="resume with the model of the run"):
        other.load_state_dict(state)


def test_a_failed_step_leaves_the_counts_alone() -> None:
    loss_model = LossModel(build_moe(), RouterLosses())
    ledger = ledger_of(loss_model)
    step_on(loss_model, ledger)
    counts = ledger.state_dict()["expert_counts"]
    window = build_window(draw_documents(weighted=False)[4:], padded_length=64, channels=False)
    with pytest.raises(KeyError), ledger.step([window]) as step:
        for batch in step:
            loss_model(step, batch)
            raise KeyError("planted")
    assert ledger.state_dict()["expert_counts"] == counts


def test_nothing_outlives_a_micro_batch() -> None:
    """What the hooks know of a batch goes with it."""
    loss_model = LossModel(build_moe(), RouterLosses())
    step_on(loss_model, ledger_of(loss_model))
    gc.collect()
    hooks = loss_model.router_hooks
    assert len(hooks._tapes) == 0 and hooks._backward() is None and hooks._forward is None


@pytest.mark.parametrize("recomputed", [False, True])
def test_router_logits_live_as_long_as_their_layer(recomputed: bool) -> None:
    """Until the layer's backward; where layers are recomputed, not even until the end of the forward."""
    model = build_moe()
    loss_model = LossModel(model, RouterLosses(z="moe_z", counts="micro_batch"))
    if recomputed:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # renamed in transformers 5.24
            model.gradient_checkpointing_enable({"use_reentrant": False})
    seen: list[StorageWeakRef] = []

    def remember(module: nn.Module, inputs: Any, outputs: Any) -> None:
        seen.append(StorageWeakRef(outputs[0].untyped_storage()))

    for router in find_routers(model):
        router.register_forward_hook(remember)
    terms = [Term("text"), Term("moe_balance", "source"), Term("moe_z", "source")]
    window = build_window(draw_documents(weighted=False), padded_length=112, channels=False)
    with Ledger(terms, routing=loss_model.routing).step([window]) as step:
        for batch in step:
            share = loss_model(step, batch)
            gc.collect()
            assert [logits.expired() for logits in seen] == [recomputed] * 2
            share.backward()
            gc.collect()
            assert all(logits.expired() for logits in seen)


def test_a_term_whose_routers_are_silent_is_an_error() -> None:
    loss_model = LossModel(build_moe(), RouterLosses())
    loss_model.router_hooks._handles.pop().remove()
    with pytest.raises(ValueError, match="'moe_balance': the step holds targets"):
        step_on(loss_model, ledger_of(loss_model))


def test_a_ledger_without_routing_is_an_error_that_says_what_to_do() -> None:
    loss_model = LossModel(build_moe(), RouterLosses())
    with pytest.raises(ValueError, match=r"Ledger\(\.\.\., routing=model\.routing\)"):
        step_on(loss_model, Ledger([Term("text"), Term("moe_balance", "source")]))


def test_router_losses_of_a_dense_model_are_an_error() -> None:
    with pytest.raises(ValueError, match="0 routers"):
        LossModel(build_model(), RouterLosses())
    with pytest.raises(ValueError, match="pass its routers"):
        LossModel(nn.Linear(2, 2), RouterLosses())


def sigmoid_model() -> nn.Module:
    config = DeepseekV3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=None,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for router in find_routers(model):
            router.weight.normal_()
    return model


def test_families_are_known_by_name() -> None:
    assert router_scores(build_moe()) == "softmax"
    assert router_scores(sigmoid_model()) == "sigmoid"
    with pytest.raises(ValueError, match='RouterLosses\\(scores="softmax"\\)'):
        router_scores(build_model())


def test_sigmoid_routers_by_hand() -> None:
    """Each expert's sigmoid over the sum of all, f from the window; logits are log(p) of the table."""
    losses = RouterLosses(counts="window", scores="sigmoid")
    step, gradient = run_table(PROBABILITIES, losses, tokens=4)
    shares = [[p / (1 + p) for p in row] for row in PROBABILITIES]  # the sigmoid of log(p)
    mean = sum(row[0] / sum(row) for row in shares) / 4
    assert step.metrics()["loss/moe_balance"] == pytest.approx(2 * (0.75 * mean + 0.25 * (1 - mean)))
    logits = torch.tensor(PROBABILITIES, dtype=F64).log().requires_grad_()
    sigmoids = logits.sigmoid()
    weighed = sigmoids / sigmoids.sum(-1, keepdim=True) * torch.tensor([0.75, 0.25], dtype=F64)
    (0.1 * 2 * weighed.sum() / 4).backward()
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-13, atol=1e-17)


def test_balancing_without_a_loss_moves_the_bias_towards_the_idle() -> None:
    model = sigmoid_model()
    loss_model = LossModel(model, RouterLosses(balance=None))
    ledger = Ledger([Term("text")], routing=loss_model.routing)
    update_expert_bias(model, ledger, 0.1)  # before the first step nothing is known
    first = step_on(loss_model, ledger)
    update_expert_bias(model, ledger, 0.1)
    for router, row in zip(find_routers(model), first.record.expert_counts, strict=True):
        mean = sum(row) / len(row)
        signs = [(mean > count) - (mean < count) for count in row]
        assert any(signs)
        assert router.e_score_correction_bias.tolist() == pytest.approx([0.1 * sign for sign in signs])
    violation = first.metrics()["moe/max_violation"]
    for _ in range(10):
        last = step_on(loss_model, ledger)
        update_expert_bias(model, ledger, 0.02)
    assert last.metrics()["moe/max_violation"] < violation
    with pytest.raises(ValueError, match="balance it with a balancing loss"):
        update_expert_bias(build_moe(), ledger, 0.1)


def test_routing_without_losses_only_counts() -> None:
    loss_model = LossModel(build_moe(), RouterLosses(balance=None))
    ledger = Ledger([Term("text")], routing=loss_model.routing)
    step = step_on(loss_model, ledger)
    tokens = step.metrics()["tokens/source"]
    assert [sum(row) for row in step.record.expert_counts] == [2 * tokens, 2 * tokens]


@on_ranks(2)
def test_a_bias_that_is_a_parameter_moves_also_where_it_is_sharded() -> None:
    """Some families keep it as a frozen parameter, which FSDP2 shards with the rest."""
    topology = Topology()
    whole = []
    for sharded in (False, True):
        model = sigmoid_model()
        for router in find_routers(model):
            bias = nn.Parameter(router.e_score_correction_bias, requires_grad=False)
            del router.e_score_correction_bias
            router.e_score_correction_bias = bias
        loss_model = LossModel(model, RouterLosses(balance=None))
        if sharded:
            fully_shard(loss_model, mesh=topology.fsdp_mesh)
        gradients = sum_gradients(loss_model, topology)
        ledger = Ledger([Term("text")], topology=topology, routing=loss_model.routing)
        documents = draw_documents(weighted=False)[dist.get_rank() :: 2]
        window = build_window(documents, padded_length=96, channels=False)
        with ledger.step([window], gradients=gradients) as step:
            for batch in step:
                loss_model(step, batch).backward()
        update_expert_bias(model, ledger, 0.1)
        biases = expert_biases(model)
        assert all(isinstance(bias, DTensor) == sharded for bias in biases)
        whole.append([bias.full_tensor() if isinstance(bias, DTensor) else bias for bias in biases])
    for alone, spread in zip(*whole, strict=True):
        assert alone.any() and torch.equal(alone, spread)
