"""The tensor plan of a transformers model on its ranks: what it shards, sums, keeps and communicates.

transformers' `apply_tensor_parallelism` and the styles of its plans are young; what is relied on is here.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from exactness.driving import Wrapped, build_window, draw_documents, full_gradients, run_step
from isoloss import (
    Layout,
    Ledger,
    LossModel,
    PackedBatch,
    Term,
    Topology,
    clip_grad_norm_,
    shift_targets,
    sum_gradients,
)
from isoloss.parallel.tensor import (
    PARTIAL_GRADIENT,
    VocabularyParallelEmbedding,
    apply_tensor_plan,
    expand_plan,
)
from isoloss.parallel.wrap import wrap_model
from isoloss.train.checkpoint import Checkpointer, find_checkpoint
from isoloss.train.optimizer import build_optimizer
from laws.collectives import CollectiveCounter
from oracle.models import build_model, build_special_model, decoder_layers
from oracle.single_process import answer, worst_difference
from ranks import on_ranks, run_on_ranks

WINDOW = 144


def tensor_model(kind: str, topology: Topology, **options: Any) -> Wrapped:
    inner = build_model(kind, **options)
    outer = wrap_model(LossModel(inner), decoder_layers(inner), topology)
    return Wrapped(inner, outer, topology, sum_gradients(outer, topology))


def windows(topology: Topology, accumulation: int = 1) -> list[PackedBatch]:
    documents = draw_documents()
    parts = topology.data_size * accumulation
    return [
        build_window(
            documents[micro * topology.data_size + topology.data_rank :: parts], padded_length=WINDOW
        )
        for micro in range(accumulation)
    ]


# ---------------------------------------------------------------------------------------------------------
# What the plan does to the model


def test_a_plan_names_parameters_before_their_module() -> None:
    model = build_model("qwen2-bias")
    plan = expand_plan(model, {"model.layers.*.self_attn.q_proj": "colwise", "lm_head": "other"})
    assert list(plan.items()) == [
        ("model.layers.0.self_attn.q_proj.weight", "colwise"),
        ("model.layers.0.self_attn.q_proj.bias", "colwise"),
        ("model.layers.0.self_attn.q_proj", "colwise"),
        ("model.layers.1.self_attn.q_proj.weight", "colwise"),
        ("model.layers.1.self_attn.q_proj.bias", "colwise"),
        ("model.layers.1.self_attn.q_proj", "colwise"),
        ("lm_head.weight", "other"),
        ("lm_head", "other"),
    ]


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-untied", "llama"])
def test_shards_and_their_bytes(kind: str) -> None:
    """Each rank holds its part of the vocabulary and of every matrix, and the memory of no more."""

    def body(vocabulary: int) -> list[int]:
        topology = Topology(tp_size=2)
        model = build_model(kind, vocab_size=vocabulary)
        names = [name for name, _ in model.named_parameters()]
        state = list(model.state_dict())
        apply_tensor_plan(model, topology)
        assert [name for name, _ in model.named_parameters()] == names
        assert list(model.state_dict()) == state, "marks have no state"
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        assert (head.weight is embedding.weight) == (kind == "qwen3-tied")
        found = []
        for module in (embedding, head):
            assert module.weight.device_mesh == topology.tp_mesh
            assert module.weight.placements == (Shard(0),) and module.weight.shape == (vocabulary, 32)
            found.append(module.weight.to_local().untyped_storage().nbytes())
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad
            if name.endswith("proj.weight"):
                local = parameter.to_local()
                assert local.numel() * 2 == parameter.numel()
                assert local.untyped_storage().nbytes() == local.nbytes
            elif "norm" in name:
                assert not isinstance(parameter, DTensor)
        return found

    assert run_on_ranks(2, body, 64) == [[32 * 32 * 8] * 2] * 2
    assert run_on_ranks(2, body, 67) == [[34 * 32 * 8] * 2, [33 * 32 * 8] * 2]


@on_ranks(4)
def test_fsdp_shards_what_a_tensor_rank_has() -> None:
    topology = Topology(tp_size=2)
    wrapped = tensor_model("qwen3-tied", topology)
    embedding = wrapped.inner.get_input_embeddings().weight
    assert embedding.device_mesh.mesh_dim_names == ("fsdp", "tp")
    assert embedding.to_local().untyped_storage().nbytes() == 64 * 32 * 8 // 4
    assert wrapped.inner.get_output_embeddings().weight is embedding


def test_one_tensor_rank_changes_nothing() -> None:
    model = build_model()
    apply_tensor_plan(model, Topology.single())
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_mistakes_are_named() -> None:
    def body() -> None:
        topology = Topology(tp_size=2)

        def refuses(model: nn.Module, message: str) -> None:
            with pytest.raises(ValueError, match=message):
                apply_tensor_plan(model, topology)

        refuses(nn.Linear(2, 2), "tp_size=2, but Linear has no tensor plan; use a transformers model")
        planless = build_model()
        planless.tp_plan = None
        refuses(planless, "tp_size=2, but Qwen3ForCausalLM has no tensor plan")
        twice = build_model()
        apply_tensor_plan(twice, topology)
        refuses(twice, "embed_tokens.weight is sharded already; apply the tensor plan to a built model once")
        refuses(
            build_model(num_key_value_heads=1), "tp_size=2 does not divide num_key_value_heads = 1, and a"
        )
        three = build_model("qwen3-untied", num_attention_heads=3, num_key_value_heads=3)
        refuses(three, "tp_size=2 does not divide num_attention_heads = 3")
        with pytest.raises(ValueError, match="spread over tensor ranks, but sum_gradients got no topology"):
            sum_gradients(twice)
        with pytest.raises(ValueError, match=r"but sum_gradients got Topology\(dp_shard_size=2; rank"):
            sum_gradients(twice, Topology())

    run_on_ranks(2, body)


@on_ranks(2)
def test_a_head_over_other_ranks_than_the_tensor_ranks_is_an_error() -> None:
    """Row 5: outside the wrapped forward, a head that is sharded over data ranks."""
    from torch.distributed.fsdp import fully_shard

    topology = Topology()
    head = fully_shard(nn.Linear(4, 8, bias=False), mesh=topology.fsdp_mesh)
    layout = Layout([3])
    ids = torch.arange(3)
    batch = PackedBatch(ids, {"text": shift_targets(ids, layout)}, layout)
    with pytest.raises(TypeError, match="weight is a DTensor, .* call the loss inside the wrapped forward"):
        with Ledger([Term("text")], topology=topology).step([batch]) as step:
            for one in step:
                step.loss(torch.ones(3, 4), head.weight, one)


# ---------------------------------------------------------------------------------------------------------
# Gradients of which each rank has a part


class OwnRule(nn.Module):
    """What transformers' plan does by itself: sums `.grad` of q_norm and k_norm in every backward."""

    @staticmethod
    def apply(model: Any, topology: Topology) -> None:
        from transformers.integrations.tensor_parallel import apply_tensor_parallelism

        apply_tensor_parallelism(model, topology.tp_mesh, expand_plan(model, model.tp_plan))


def test_the_plans_own_rule_is_wrong_with_accumulation_and_ours_is_not() -> None:
    """The reason for the adapter; when this fails because transformers is right, the adapter can go."""

    def body() -> dict[str, tuple[float, float]]:
        topology = Topology(tp_size=2)
        found = {}
        for accumulation in (1, 2):
            differences = []
            for apply in (OwnRule.apply, apply_tensor_plan):
                model = build_model("qwen3-untied")
                apply(model, topology)
                outer = LossModel(model)
                run_step(
                    Wrapped(model, outer, topology, sum_gradients(outer, topology)),
                    windows(topology, accumulation),
                )
                differences.append(worst_difference(full_gradients(model), expected.gradients))
            (own, where), (ours, _) = differences
            assert ours < 1e-10
            found[str(accumulation)] = (own, where)
        return found

    expected = answer(build_model("qwen3-untied"), draw_documents(), num_channels=3)
    for found in run_on_ranks(2, body):
        assert found["1"][0] < 1e-10
        assert found["2"][0] > 0.1 and found["2"][1].endswith(("q_norm.weight", "k_norm.weight"))


def test_a_part_that_is_not_summed_is_caught() -> None:
    """Mutant: the marks taken off."""

    def body() -> tuple[float, str]:
        topology = Topology(tp_size=2)
        model = build_model("qwen3-untied")
        apply_tensor_plan(model, topology)
        for name, module in list(model.named_modules()):
            if name.endswith(("q_norm", "k_norm")):
                del module.partial_over_tensor_ranks
        outer = LossModel(model)
        run_step(Wrapped(model, outer, topology, sum_gradients(outer, topology)), windows(topology))
        return worst_difference(full_gradients(model), expected.gradients)

    expected = answer(build_model("qwen3-untied"), draw_documents(), num_channels=3)
    for difference, where in run_on_ranks(2, body):
        assert difference > 0.1 and where.endswith(("q_norm.weight", "k_norm.weight"))


def test_frozen_norms_and_a_frozen_head() -> None:
    def body() -> None:
        topology = Topology(tp_size=2)
        model = build_model("qwen3-untied")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        outer = wrap_model(LossModel(model), decoder_layers(model), topology)
        run_step(Wrapped(model, outer, topology, sum_gradients(outer, topology)), windows(topology, 2))
        found = dict(model.named_parameters())
        for name in frozen:
            assert found[name].grad is None
            del found[name]
        gradients = full_gradients(nn.ParameterDict({n.replace(".", "/"): p for n, p in found.items()}))
        reference = {n.replace(".", "/"): expected.gradients[n] for n in found}
        assert worst_difference(gradients, reference)[0] < 1e-10

    frozen = {"model.layers.0.self_attn.q_norm.weight", "lm_head.weight", "model.embed_tokens.weight"}
    expected = answer(build_model("qwen3-untied"), draw_documents(), num_channels=3)
    run_on_ranks(2, body)


# ---------------------------------------------------------------------------------------------------------
# Loss, counts and norm


def test_a14_a65_tensor_ranks_share_one_batch() -> None:
    """8 ranks, two replicas with 7 and 9 tokens: 16 tokens, once; the loss is that of one process."""
    lengths = (7, 9)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 64, (length,), generator=generator) for length in lengths]

    def window(rank: int) -> PackedBatch:
        layout = Layout([lengths[rank]], [0], padded_length=12)
        tokens = torch.cat([ids[rank], torch.zeros(12 - lengths[rank], dtype=torch.int64)])
        labels = tokens.masked_fill(torch.arange(12) >= lengths[rank], -100)
        return PackedBatch(tokens, {"text": shift_targets(labels, layout)}, layout)

    def step(wrapped: Wrapped, mine: list[PackedBatch]) -> dict[str, float]:
        return run_step(wrapped, mine, channels=("code",))

    def body() -> dict[str, float]:
        topology = Topology(tp_size=4)
        wrapped = tensor_model("qwen3-tied", topology, num_key_value_heads=4)
        metrics = step(wrapped, [window(topology.data_rank)])
        difference, where = worst_difference(full_gradients(wrapped.inner), expected)
        assert difference < 1e-10, where
        return metrics

    one = LossModel(build_model(num_key_value_heads=4))
    right = step(Wrapped(one.model, one, Topology.single(), None), [window(0), window(1)])
    expected = {name: parameter.grad for name, parameter in one.model.named_parameters()}
    for metrics in run_on_ranks(8, body):
        assert metrics["tokens/source"] == metrics["tokens/source_total"] == 16
        assert metrics["tokens/loss"] == 14 and metrics["documents"] == 2
        assert metrics["tokens/physical"] == 24
        assert math.isclose(metrics["train/loss"], right["train/loss"], rel_tol=1e-10)


def test_evaluation_is_the_same_on_tensor_ranks() -> None:
    def evaluate(outer: nn.Module, topology: Topology) -> dict[str, float]:
        ledger = Ledger([Term("text")], channels=["code", "docs", "chat"], topology=topology)
        with torch.no_grad(), ledger.step(windows(topology), training=False) as step:
            for batch in step:
                outer(step, batch)
        return step.metrics()

    def body() -> dict[str, float]:
        topology = Topology(tp_size=2)
        return evaluate(tensor_model("qwen3-tied", topology).outer, topology)

    right = evaluate(LossModel(build_model()), Topology.single())
    for metrics in run_on_ranks(2, body):
        assert metrics.keys() == right.keys()
        for name, value in right.items():
            assert math.isclose(metrics[name], value, rel_tol=1e-12), name


@pytest.mark.parametrize(("ranks", "sizes"), [(2, {}), (4, {}), (4, {"dp_replicate_size": 2})])
def test_a55_the_norm_is_that_of_one_process(ranks: int, sizes: dict[str, int]) -> None:
    """Sharded, replicated and summed parts each count once; every gradient is scaled by the same factor."""

    def body() -> None:
        topology = Topology(tp_size=2, **sizes)
        wrapped = tensor_model("qwen3-tied", topology)
        run_step(wrapped, windows(topology, 2))
        with CollectiveCounter() as counter:
            norm = clip_grad_norm_(wrapped.outer, 0.01)
        assert counter.total == 1
        assert math.isclose(norm.item(), right, rel_tol=1e-12)
        assert math.isclose(clip_grad_norm_(wrapped.outer, math.inf).item(), 0.01, rel_tol=1e-12)

    gradients = answer(build_model(), draw_documents(), num_channels=3).gradients.values()
    right = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    assert right > 0.01, "not vacuous"
    run_on_ranks(ranks, body)


def test_recomputation_sliding_windows_and_caps_under_tensor_ranks() -> None:
    """Gemma 2: attention and logits with a cap, sliding windows, a tied head; also recomputed."""

    def run(model: Any, topology: Topology) -> dict[str, Tensor]:
        outer = wrap_model(LossModel(model), decoder_layers(model), topology)
        run_step(Wrapped(model, outer, topology, sum_gradients(outer, topology)), windows(topology))
        return full_gradients(model)

    def body() -> None:
        for recomputes in (False, True):
            model = build_special_model("gemma2")
            if recomputes:
                model.activation_checkpointing_enable({"use_reentrant": False})
            difference, where = worst_difference(run(model, Topology(tp_size=2)), right)
            assert difference < 1e-10, where

    right = run(build_special_model("gemma2"), Topology.single())
    run_on_ranks(2, body)


@on_ranks(4)
def test_bfloat16_under_fsdp_and_tensor_ranks() -> None:
    topology = Topology(tp_size=2)
    inner = build_model("qwen3-tied", dtype=torch.float32)
    outer = wrap_model(LossModel(inner), decoder_layers(inner), topology, bf16=True)
    wrapped = Wrapped(inner, outer, topology, sum_gradients(outer, topology))
    metrics = run_step(wrapped, windows(topology, 2))
    expected = answer(build_model("qwen3-tied"), draw_documents(), num_channels=3)
    assert math.isclose(metrics["train/loss"], expected.loss, rel_tol=1e-3)
    for name, gradient in full_gradients(inner).items():
        assert gradient.dtype == torch.float32
        right = expected.gradients[name]
        assert (gradient - right).norm() < 0.05 * right.norm(), name


# ---------------------------------------------------------------------------------------------------------
# What is communicated, and what is in memory


@on_ranks(2)
def test_the_parts_are_summed_in_one_collective_when_the_step_ends() -> None:
    """One over the data ranks and one over the tensor ranks, whatever the number of micro-batches."""
    topology = Topology(tp_size=2)
    wrapped = tensor_model("qwen3-tied", topology)
    # forward: embedding, 2 per layer, 2 of the loss; backward: q, k, v, gate and up of each layer, and hidden
    micro_batch = 1 + 2 * 2 + 2 + 2 * 5 + 1
    opening_and_closing = 2
    for accumulation in (1, 3):
        with CollectiveCounter() as counter:
            run_step(wrapped, windows(topology, accumulation))
        assert counter.total == accumulation * micro_batch + opening_and_closing + 2


class LastDimension(TorchDispatchMode):
    """The most elements of any tensor with `size` columns or rows, seen below DTensors."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if type(value) is Tensor and self.size in value.shape:
                self.shapes.add(tuple(value.shape))
        return result


@on_ranks(2)
def test_nothing_has_the_whole_vocabulary() -> None:
    """No logits, no weight and no gradient of all 67 classes on any rank, in a whole step."""
    topology = Topology(tp_size=2)
    for kind in ("qwen3-tied", "qwen3-untied"):
        wrapped = tensor_model(kind, topology, vocab_size=67)
        mine = windows(topology, 2)
        with LastDimension(67) as whole, LastDimension(34 - dist.get_rank()) as part:
            run_step(wrapped, mine)
        assert whole.shapes == set()
        assert (WINDOW, 32) not in part.shapes and part.shapes, "the watch sees slices"


def check_the_watch(run: Callable[[], object], size: int) -> set[tuple[int, ...]]:
    with LastDimension(size) as watched:
        run()
    return watched.shapes


def test_the_watch_sees_whole_logits_where_there_are_some() -> None:
    inner = build_model(vocab_size=67)
    outer = LossModel(inner)
    wrapped = Wrapped(inner, outer, Topology.single(), None)
    shapes = check_the_watch(lambda: run_step(wrapped, windows(wrapped.topology)), 67)
    assert (67, 32) in shapes and any(shape[-1] == 67 for shape in shapes)


def test_the_plan_of_qwen3_has_the_rule_that_is_taken_out() -> None:
    plan = expand_plan(build_model(), build_model().tp_plan)
    assert plan["model.layers.1.self_attn.q_norm"] == PARTIAL_GRADIENT
    assert plan["model.layers.0.self_attn.k_norm"] == PARTIAL_GRADIENT


# ---------------------------------------------------------------------------------------------------------
# The embedding, training and checkpoints


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_embedding_over_ranks_is_the_embedding(ranks: int) -> None:
    """Uneven and empty slices, a padding row whose gradient stays zero, frozen or not."""

    def body() -> None:
        topology = Topology(tp_size=ranks)
        assert topology.tp_mesh is not None
        for vocabulary, padding, frozen in ((7, 5, False), (7, None, False), (2, 0, False), (4, 3, True)):
            torch.manual_seed(0)
            whole = nn.Embedding(vocabulary, 3, padding_idx=padding, dtype=torch.float64)
            whole.weight.requires_grad_(not frozen)
            spread = VocabularyParallelEmbedding(whole, topology.tp_mesh)
            ids = torch.randint(vocabulary, (1, 20))
            factors = torch.randn(1, 20, 3, dtype=torch.float64)
            assert torch.equal(spread(ids), whole(ids))
            assert spread.weight.requires_grad != frozen
            if frozen:
                continue
            (spread(ids) * factors).sum().backward()
            (whole(ids) * factors).sum().backward()
            gradient = spread.weight.grad
            assert isinstance(gradient, DTensor) and whole.weight.grad is not None
            assert gradient.to_local().shape == spread.weight.to_local().shape
            assert torch.equal(gradient.full_tensor(), whole.weight.grad)

    run_on_ranks(ranks, body)


def test_training_and_checkpoints_move_between_layouts(tmp_path: Path) -> None:
    """Two steps, a checkpoint, a third step: weights are those of one process, whoever wrote or reads it."""

    def train(sizes: dict[str, int] | None, write: Path | None, read: Path | None) -> dict[str, Any]:
        topology = Topology.single() if sizes is None else Topology(**sizes)
        wrapped = tensor_model("qwen3-tied", topology, vocab_size=67)
        optimizer = build_optimizer(
            wrapped.inner, learning_rate=1e-2, betas=(0.9, 0.99), epsilon=1e-8, weight_decay=0.1
        )

        def run_steps(count: int) -> None:
            for _ in range(count):
                run_step(wrapped, windows(topology))
                clip_grad_norm_(wrapped.outer, 1.0)
                optimizer.step()

        if read is not None:
            folder = find_checkpoint(read, "auto")
            assert folder is not None
            Checkpointer(read, wrapped.inner, optimizer, topology).load(folder)
        else:
            run_steps(2)
        if write is not None:
            writer = Checkpointer(write, wrapped.inner, optimizer, topology)
            writer.save(2, {}, {})
            writer.finish()
        run_steps(1)
        return {
            name: (values.full_tensor() if isinstance(values, DTensor) else values).detach().numpy()
            for name, values in wrapped.inner.named_parameters()
        }

    def agree(found: dict[str, Any]) -> None:
        assert found.keys() == right.keys()
        for name, values in right.items():
            # AdamW's first steps are little more than signs: rounding shows
            assert abs(found[name] - values).max() < 1e-10, name

    right = train(None, tmp_path / "one", None)
    for ranks, sizes in ((2, {"tp_size": 2}), (4, {"tp_size": 2})):
        written = tmp_path / f"tensor-{ranks}"
        agree(run_on_ranks(ranks, train, sizes, written, None)[0])
        agree(run_on_ranks(ranks, train, sizes, None, tmp_path / "one")[0])
        agree(train(None, None, written))
