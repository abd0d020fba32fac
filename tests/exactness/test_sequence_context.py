"""Sequence (Ulysses) and context parallelism against the oracle and against one process.

The same windows on one rank, on shards of every shape, under FSDP2 and replicated, give the same loss,
gradients, channels and counters. Rows 8, 16 and 18.
"""

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from exactness.driving import (
    CHANNELS,
    TOLERANCE,
    Wrapped,
    build_window,
    close,
    compare,
    draw_documents,
    full_gradients,
    replicate,
    run_step,
    shard,
)
from exactness.test_prefixes import ANSWERS, plain_documents, shared_window
from isoloss import Ledger, LossModel, PackedBatch, Term, Topology, sum_gradients
from laws.gain import Gain, Lookup, cost_window, lookup_window, whole
from oracle.models import build_model, build_special_model, decoder_layers, with_float64_norms
from oracle.single_process import Answer, PlainDocument, aligned_tokens, answer, worst_difference
from ranks import run_on_ranks

REDUCTIONS = ("token", "sample", "square")
WINDOW, ALIGNMENT = 320, 8
# room for all documents, so that any window may hold them all

TOPOLOGIES: dict[str, tuple[int, dict[str, int]]] = {
    "sp2": (2, {"sp_size": 2}),
    "cp2": (2, {"cp_size": 2}),
    "sp4": (4, {"sp_size": 4}),
    "cp4": (4, {"cp_size": 4}),
    "dp2sp2": (4, {"sp_size": 2}),
    "dp2cp2": (4, {"cp_size": 2}),
    "sp2cp2": (4, {"sp_size": 2, "cp_size": 2}),
    "dp2sp2cp2": (8, {"sp_size": 2, "cp_size": 2}),
}
"""name -> (ranks, sizes besides dp_shard)"""


def draw_long_documents() -> list[PlainDocument]:
    """Lengths of 1, odd lengths, one longer than a shard whose first 60 tokens are no targets."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 64, (101,), generator=generator).tolist()
    return [PlainDocument(tokens, [-100] * 60 + tokens[60:], channel=1), *draw_documents()]


@functools.cache
def oracle(kind: str, reduction: str) -> Answer:
    return answer(build_model(kind), draw_long_documents(), reduction=reduction, num_channels=len(CHANNELS))


def wrap(inner: nn.Module, wrapper: str, topology: Topology) -> Wrapped:
    loss_model = LossModel(inner)
    outer = shard(loss_model, topology) if wrapper == "fsdp" else loss_model
    return Wrapped(inner, outer, topology, sum_gradients(outer, topology))


def own_windows(
    documents: Sequence[PlainDocument], topology: Topology, accumulation: int, **options: int
) -> list[PackedBatch]:
    """This data rank's windows, documents in turn; with accumulation each rank's last window is empty."""
    full = max(accumulation - 1, 1)
    places = list(itertools.product(range(full), range(topology.data_size)))
    mine = []
    for number, (_, data_rank) in enumerate(places):
        if data_rank == topology.data_rank:
            mine.append(build_window(documents[number :: len(places)], **options))
    return mine + [PackedBatch.empty(options["padded_length"])] * (accumulation - full)


@dataclass(frozen=True)
class Configuration:
    topology: str
    kind: str
    wrapper: str
    accumulation: int
    reduction: str


WRAPPERS = ("fsdp", "replicated")


def configurations(ranks: int) -> Iterator[Configuration]:
    """Every shape, model, accumulation and reduction under every wrapper."""
    names = [name for name, (size, _) in TOPOLOGIES.items() if size == ranks]
    for name, kind, wrapper in itertools.product(names, ("qwen3-tied", "qwen3-untied"), WRAPPERS):
        for accumulation, reduction in itertools.product((1, 3), REDUCTIONS):
            yield Configuration(name, kind, wrapper, accumulation, reduction)


def alternating(ranks: int) -> list[Configuration]:
    """The same with one of the wrappers each: both see every value of every other column."""
    chosen = []
    for one in configurations(ranks):
        columns = (one.kind == "qwen3-tied", one.accumulation == 1, REDUCTIONS.index(one.reduction))
        if WRAPPERS[sum(columns) % 2] == one.wrapper:
            chosen.append(one)
    return chosen


def run_configurations(chosen: list[Configuration], answers: dict[tuple[str, str], Answer]) -> list[str]:
    failures = []
    documents = draw_long_documents()
    for (name, kind, wrapper), group in itertools.groupby(
        chosen, key=lambda one: (one.topology, one.kind, one.wrapper)
    ):
        topology = Topology(**TOPOLOGIES[name][1])
        wrapped = wrap(build_model(kind), wrapper, topology)
        for one in group:
            windows = own_windows(
                documents, topology, one.accumulation, alignment=ALIGNMENT, padded_length=WINDOW
            )
            metrics = run_step(wrapped, windows, reduction=one.reduction)
            differences = compare(
                metrics,
                full_gradients(wrapped.inner),
                answers[one.kind, one.reduction],
                aligned=aligned_tokens(documents, ALIGNMENT),
                physical=WINDOW * topology.data_size * one.accumulation,
            )
            failures += [f"{one}: {difference}" for difference in differences]
    return failures


def check_configurations(ranks: int, chosen: list[Configuration]) -> None:
    answers = {(one.kind, one.reduction): oracle(one.kind, one.reduction) for one in chosen}
    for rank, failures in enumerate(run_on_ranks(ranks, run_configurations, chosen, answers, timeout_s=280)):
        assert not failures, f"rank {rank}: {len(failures)} differences\n" + "\n".join(failures[:20])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_row_8_every_shape_of_shards_gives_the_answer_of_the_oracle(ranks: int) -> None:
    """Rows 8, 16, 18: loss, every gradient element, channels, and counters as integers."""
    check_configurations(ranks, alternating(ranks))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_shape_of_shards_under_every_wrapper(ranks: int) -> None:
    check_configurations(ranks, list(configurations(ranks)))


def test_the_documents_hold_what_the_matrix_claims() -> None:
    documents = draw_long_documents()
    lengths = [len(document.tokens) for document in documents]
    assert lengths.count(1) >= 2 and sum(length % 2 for length in lengths) > 4
    assert max(lengths) > WINDOW / 4, "longer than a shard of four"
    # contiguous shards of the first window: all of one is the long document before its first target
    (window,) = own_windows(documents, Topology.single(), 1, alignment=ALIGNMENT, padded_length=WINDOW)
    targets = window.targets["text"].view(8, -1)
    assert not (targets[0] != -100).any() and window.layout.document_lengths[0] > targets.shape[1]
    assert (targets != -100).any()


def run_replicas(expected: Answer) -> list[str]:
    failures = []
    documents = draw_long_documents()
    for axis, wrapper in itertools.product(("sp_size", "cp_size"), ("ddp", "fsdp")):
        topology = Topology(dp_replicate_size=2, dp_shard_size=1, **{axis: 2})
        inner = build_model()
        if wrapper == "ddp":
            outer = replicate(LossModel(inner), topology)
            wrapped = Wrapped(inner, outer, topology, sum_gradients(outer, topology))
        else:  # HSDP: sharded over the ranks of a window, copied over those with their own windows
            assert topology.fsdp_mesh is not None and topology.fsdp_mesh.shape == (2, 2)
            wrapped = wrap(inner, "fsdp", topology)
        metrics = run_step(wrapped, own_windows(documents, topology, 1, **SLOTS))
        found = compare(
            metrics,
            full_gradients(wrapped.inner),
            expected,
            aligned=aligned_tokens(documents, ALIGNMENT),
            physical=WINDOW * 2,
        )
        failures += [f"{axis}, {wrapper}: {difference}" for difference in found]
    return failures


def test_replicas_of_shards_under_ddp_and_hsdp() -> None:
    for failures in run_on_ranks(4, run_replicas, oracle("qwen3-tied", "token")):
        assert not failures, failures


# -- one process against shards, bit by bit of what is shown


def metrics_of(name: str | None) -> dict[str, float]:
    topology = Topology.single() if name is None else Topology(**TOPOLOGIES[name][1])
    wrapped = wrap(build_model(), "replicated", topology)
    (window,) = own_windows(
        draw_long_documents(), Topology.single() if name is None else topology, 1, **SLOTS
    )
    return run_step(wrapped, [window], reduction="square")


SLOTS = {"alignment": ALIGNMENT, "padded_length": WINDOW}


@pytest.mark.parametrize("name", ["sp4", "sp2cp2"])
def test_every_number_shown_is_that_of_one_process(name: str) -> None:
    alone = metrics_of(None)
    for sharded in run_on_ranks(4, metrics_of, name):
        # the longest document is a maximum: on several ranks it comes from `reduce_maxima`
        assert sharded.keys() == alone.keys() - {"packing/max_document_length"}
        for key, value in sharded.items():
            assert math.isclose(value, alone[key], rel_tol=TOLERANCE), key
            if key.startswith(
                ("tokens/", "documents", "channel_tokens", "channel_source", "channel_documents")
            ):
                assert value == alone[key], f"{key} is a count"


# -- layouts at random


@st.composite
def windows(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Two windows of documents as (tokens, the first token that is a target)."""
    documents = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))
    return [draw(st.lists(documents, max_size=4)), draw(st.lists(documents, max_size=4))]


def plain(shapes: list[tuple[int, int]], seed: int) -> list[PlainDocument]:
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for index, (length, first) in enumerate(shapes):
        tokens = torch.randint(3, 64, (length,), generator=generator).tolist()
        documents.append(PlainDocument(tokens, [-100] * first + tokens[first:], channel=index % 3))
    return documents


def without_rounding(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Zeros for a gradient that is nothing but rounding.

    Where only first tokens predict, each query sees one key: gradients of queries and keys are exactly zero,
    of which 1e-16 is left on both sides.
    """
    return {
        name: values if values.abs().max() > 1e-14 else torch.zeros_like(values)
        for name, values in gradients.items()
    }


def run_drawn(drawn: list[list[list[PlainDocument]]], answers: list[Answer]) -> list[str]:
    failures = []
    for sizes in ({"sp_size": 4}, {"cp_size": 4}, {"sp_size": 2, "cp_size": 2}):
        wrapped = wrap(build_model(), "replicated", Topology(**sizes))
        for number, (documents, expected) in enumerate(zip(drawn, answers, strict=True)):
            batches = [
                build_window(held, alignment=8, padded_length=176) if held else PackedBatch.empty(176)
                for held in documents
            ]
            metrics = run_step(wrapped, batches, reduction="sample")
            differences = compare(
                metrics,
                without_rounding(full_gradients(wrapped.inner)),
                expected,
                aligned=aligned_tokens(list(itertools.chain(*documents)), 8),
                physical=2 * 176,
            )
            failures += [f"{sizes}, example {number}: {difference}" for difference in differences]
    return failures


def check_drawn(examples: int) -> None:
    """Draws first and forks once: a fork for every example would cost more than the examples."""
    drawn: list[list[list[PlainDocument]]] = []

    @settings(max_examples=examples, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(windows())
    def collect(shapes: list[list[tuple[int, int]]]) -> None:
        drawn.append([plain(part, seed=len(drawn) + index) for index, part in enumerate(shapes)])

    collect()
    answers = [
        answer(build_model(), list(itertools.chain(*documents)), reduction="sample", num_channels=3)
        for documents in drawn
    ]
    for one in answers:
        one.gradients = without_rounding(one.gradients)
    for failures in run_on_ranks(4, run_drawn, drawn, answers, timeout_s=280):
        assert not failures, "\n".join(failures[:10])


def test_layouts_at_random() -> None:
    check_drawn(8)


@pytest.mark.slow
def test_many_layouts_at_random() -> None:
    check_drawn(100)


# -- kinds of models


def special_model(kind: str) -> nn.Module:
    return with_float64_norms(build_special_model(kind))


def run_special(expected: dict[str, Answer], prefixed: Answer) -> list[str]:
    failures = []
    for sizes in ({"sp_size": 4}, {"cp_size": 4}, {"sp_size": 2, "cp_size": 2}):
        topology = Topology(**sizes)
        for kind, right in expected.items():
            wrapped = wrap(special_model(kind), "replicated", topology)
            documents = draw_long_documents()
            metrics = run_step(wrapped, own_windows(documents, topology, 1, **SLOTS))
            found = compare(
                metrics,
                full_gradients(wrapped.inner),
                right,
                aligned=aligned_tokens(documents, ALIGNMENT),
                physical=WINDOW,
            )
            failures += [f"{sizes}, {kind}: {difference}" for difference in found]
        window = shared_window(ANSWERS, cuts=(3,), alignment=8)
        wrapped = wrap(special_model("mistral"), "replicated", topology)
        metrics = run_step(wrapped, [window], channels=CHANNELS[:2])
        found = compare(
            metrics,
            full_gradients(wrapped.inner),
            prefixed,
            aligned=window.layout.aligned_tokens,
            physical=80,
            channels=CHANNELS[:2],
        )
        failures += [f"{sizes}, shared prompt: {difference}" for difference in found]
    return failures


def test_sliding_windows_capped_scores_and_shared_prompts_on_shards() -> None:
    expected = {
        kind: answer(special_model(kind), draw_long_documents(), num_channels=len(CHANNELS))
        for kind in ("mistral", "gemma2")
    }
    prefixed = answer(special_model("mistral"), plain_documents(ANSWERS), num_channels=2)
    for failures in run_on_ranks(4, run_special, expected, prefixed):
        assert not failures, failures


# -- recomputation


def run_checkpointed(expected: Answer) -> list[str]:
    failures = []
    documents = draw_long_documents()
    for sizes, wrapper in itertools.product(
        ({"sp_size": 2, "cp_size": 2}, {"cp_size": 2}), ("replicated", "fsdp")
    ):
        topology = Topology(**sizes)
        for use_reentrant in (False, True):
            inner = build_model()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of its name, which transformers 5.0 needs
                inner.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            wrapped = wrap(inner, wrapper, topology)
            batches = own_windows(documents, topology, 3, **SLOTS)
            metrics = run_step(wrapped, batches)
            found = compare(
                metrics,
                full_gradients(wrapped.inner),
                expected,
                aligned=aligned_tokens(documents, ALIGNMENT),
                physical=WINDOW * 3 * topology.data_size,
            )
            failures += [f"{sizes}, {wrapper}, reentrant {use_reentrant}: {one}" for one in found]
    return failures


def test_activation_checkpointing_in_both_modes() -> None:
    """Collectives run again in backward, in the same order on all ranks: a hang would be a time-out."""
    expected = oracle("qwen3-tied", "token")
    for failures in run_on_ranks(4, run_checkpointed, expected):
        assert not failures, failures


# -- bfloat16


def run_bfloat16() -> list[tuple[str, float, float]]:
    """(how, loss, worst relative difference of a gradient) against float32 masters computed in bfloat16."""
    found = []
    documents = draw_long_documents()
    expected = oracle("qwen3-tied", "token")
    for sizes, how in itertools.product(({"sp_size": 2}, {"cp_size": 2}), ("fsdp", "autocast")):
        topology = Topology(dp_shard_size=1, **sizes)
        wrapped = wrap_bfloat16(build_model(dtype=torch.float32), how, topology)
        with torch.autocast("cpu", torch.bfloat16) if how == "autocast" else contextlib.nullcontext():
            metrics = run_step(wrapped, own_windows(documents, topology, 1, **SLOTS))
        gradients = {name: values.double() for name, values in full_gradients(wrapped.inner).items()}
        found.append((how, metrics["train/loss"], worst_difference(gradients, expected.gradients)[0]))
    return found


def wrap_bfloat16(inner: nn.Module, how: str, topology: Topology) -> Wrapped:
    outer: nn.Module = LossModel(inner)
    if how == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        assert topology.fsdp_mesh is not None
        for layer in decoder_layers(inner):
            fully_shard(layer, mesh=topology.fsdp_mesh, mp_policy=policy)
        fully_shard(outer, mesh=topology.fsdp_mesh, mp_policy=policy)
    return Wrapped(inner, outer, topology, sum_gradients(outer, topology))


def test_bfloat16_under_fsdp2_and_autocast() -> None:
    """The exchange takes what either hands to attention; as near to float64 as bfloat16 is."""
    expected = oracle("qwen3-tied", "token")
    for outcome in run_on_ranks(2, run_bfloat16):
        for how, loss, difference in outcome:
            assert abs(loss - expected.loss) < 0.02, how
            assert difference < 0.1, how


# -- counters


def run_counts(sizes: dict[str, int], lengths: list[int], slots: int) -> dict[str, float]:
    topology = Topology(**sizes)
    documents = [PlainDocument([5] * length, [5] * length) for length in lengths]
    windows = [build_window(documents, alignment=4, padded_length=slots, channels=False)]
    empty = [PackedBatch.empty(slots)]
    wrapped = wrap(build_model(), "replicated", topology)
    return run_step(wrapped, windows if topology.data_rank == 0 else empty, channels=())


@pytest.mark.parametrize("slots", [12, 16])
def test_row_8_the_same_integers_on_every_shape(slots: int) -> None:
    """Row 8: three documents and five tokens, with tail padding and without."""
    for sizes in ({"sp_size": 2}, {"cp_size": 2}, {"sp_size": 4}, {"dp_shard_size": 4}):
        data_size = 4 // math.prod(size for name, size in sizes.items() if name != "dp_shard_size")
        for metrics in run_on_ranks(4, run_counts, sizes, [3, 1, 1], slots):
            assert metrics["documents"] == 3
            assert metrics["tokens/source"] == 5
            assert metrics["tokens/loss"] == 2
            assert metrics["tokens/aligned"] == 12
            assert metrics["tokens/physical"] == slots * data_size


def test_row_8_one_token_with_a_class() -> None:
    """Row 8: one document of one token whose only label is a class has one target."""

    def body() -> tuple[float, float]:
        for sizes in ({"sp_size": 2}, {"cp_size": 2}):
            topology = Topology(**sizes)
            window = cost_window([[2.5]], alignment=4)
            model = Gain()
            ledger = Ledger([Term("text")], topology=topology)
            with ledger.step([window], gradients=sum_gradients(model, topology)) as step:
                for batch in step:
                    model(step, batch).backward()
            metrics = step.metrics()
            assert metrics["tokens/loss"] == metrics["documents"] == metrics["tokens/source"] == 1
            assert metrics["train/loss"] == whole(model.gain.grad).item() == 2.5
        return 0.0, 0.0

    run_on_ranks(2, body)


# -- cases


def step_on(
    topology: Topology, window: PackedBatch, model: nn.Module, reduction: str = "token"
) -> tuple[dict[str, float], dict[str, Tensor]]:
    ledger = Ledger([Term("text", reduction)], topology=topology)
    with ledger.step([window], gradients=sum_gradients(model, topology)) as step:
        for batch in step:
            model(step, batch).backward()
    return step.metrics(), {name: whole(values.grad) for name, values in model.named_parameters()}


BOTH_AXES = ({"sp_size": 2}, {"cp_size": 2})


def test_a25_attended_tokens_are_no_denominator() -> None:
    def body() -> None:
        for sizes in BOTH_AXES:
            costs: list[float | None] = [None] * 6 + [5.0] * 4
            metrics, gradients = step_on(Topology(**sizes), cost_window([costs], alignment=4), Gain())
            assert metrics["tokens/loss"] == 4 and metrics["tokens/source"] == 10
            assert metrics["train/loss"] == gradients["gain"].item() == 5.0

    run_on_ranks(2, body)


def test_a26_weights_are_cut_like_their_targets() -> None:
    """The documented choice: the sum is divided by the sum of the weights, 14 / 4.5."""

    def body() -> None:
        for sizes in BOTH_AXES:
            window = cost_window(
                [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], weights=[[1.0, 0.0, 2.0], [0.5, 1.0, 0.0]], alignment=4
            )
            metrics, gradients = step_on(Topology(**sizes), window, Gain())
            assert close(metrics["train/loss"], 14.0 / 4.5)
            assert close(gradients["gain"].item(), 14.0 / 4.5)
            assert metrics["tokens/loss"] == 6

    run_on_ranks(2, body)


def test_a27_targets_are_shifted_once() -> None:
    def body() -> None:
        window = lookup_window([[10, 11, 12, 13, 14, 15]], [[10, 11, 12, 13, 14, -100]])
        metrics, gradients = step_on(Topology(sp_size=2), window, Lookup(16))
        assert metrics["tokens/loss"] == 4
        assert math.isclose(gradients["table"][10, 11].item(), -0.234375, rel_tol=1e-12)
        assert gradients["table"][10, 12].item() > 0

    run_on_ranks(2, body)


def test_a28_a_shard_without_targets_trains_the_model() -> None:
    """Through attention: the context rank without targets still hands its keys their gradient."""
    document = draw_long_documents()[0]
    expected = answer(build_model(), [document], num_channels=len(CHANNELS))

    def body() -> tuple[list[str], list[int]]:
        found, held = [], []
        for sizes in BOTH_AXES:
            topology = Topology(**sizes)
            wrapped = wrap(build_model(), "replicated", topology)
            window = build_window([document], alignment=8, padded_length=144)
            metrics = run_step(wrapped, [window])
            held.append(int((window.shard(topology).targets["text"] != -100).sum()))
            found += compare(metrics, full_gradients(wrapped.inner), expected, aligned=104, physical=144)
        return found, held

    outcomes = run_on_ranks(2, body)
    assert not any(found for found, _ in outcomes), outcomes
    assert outcomes[0][1][0] < outcomes[1][1][0]


# -- mutants: what must be seen


def test_attention_that_forgets_the_other_shards_would_show() -> None:
    """Mutants: keys in the order of the ranks, and keys whose gradient does not travel back."""
    document = draw_long_documents()[0]
    expected = answer(build_model(), [document], num_channels=2)

    def body() -> list[float]:
        import isoloss.parallel.attention as attention

        topology = Topology(cp_size=2)
        window = build_window([document], alignment=8, padded_length=144, channels=False)
        order, gather = attention.window_order, attention.gather_slots
        differences = []
        for mutant in ("none", "order", "gradient"):
            attention.window_order = order if mutant != "order" else lambda layout, cp_size: torch.arange(144)
            attention.gather_slots = (
                gather
                if mutant != "gradient"
                else lambda parts, group: [part.detach() for part in gather(parts, group)]
            )
            wrapped = wrap(build_model(), "replicated", topology)
            run_step(wrapped, [window], channels=())
            differences.append(worst_difference(full_gradients(wrapped.inner), expected.gradients)[0])
        dist.barrier()
        return differences

    for right, order, gradient in run_on_ranks(2, body):
        assert right <= TOLERANCE < 1e-3 < min(order, gradient)
