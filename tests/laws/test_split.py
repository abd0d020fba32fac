"""Law: any assignment of documents to ranks and micro-batches gives the same loss, gradients and counts.

The mutants are steps as trainers write them; each must be caught by the comparison that the law uses.
Rows 1, 23.
"""

import random
import warnings
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from exactness.driving import (
    CHANNELS,
    Wrapped,
    build_window,
    draw_documents,
    full_gradients,
    run_step,
    shard,
    wrap,
)
from isoloss import Ledger, LossModel, PackedBatch, Term, Topology, sum_gradients
from oracle.models import build_model
from oracle.single_process import PlainDocument, answer, worst_difference
from ranks import run_on_ranks

TOLERANCE = 1e-10
INVARIANT = ("train/loss", "tokens/loss", "tokens/source", "documents")


def deal(documents: Sequence[PlainDocument], seed: int, hands: int) -> list[list[PlainDocument]]:
    """Documents dealt at random; a hand may stay empty."""
    draw = random.Random(seed)
    dealt: list[list[PlainDocument]] = [[] for _ in range(hands)]
    for document in draw.sample(list(documents), len(documents)):
        dealt[draw.randrange(hands)].append(document)
    return dealt


def windows_of(dealt: Sequence[Sequence[PlainDocument]], window: int = 88) -> list[PackedBatch]:
    return [build_window(held, padded_length=window) for held in dealt]


@pytest.mark.parametrize("reduction", ["token", "sample", "square"])
def test_any_split_into_micro_batches(reduction: str) -> None:
    documents = draw_documents(seed=1)
    wrapped = wrap(build_model(), "alone", 1)
    whole = run_step(wrapped, windows_of([documents]), reduction=reduction)
    gradients = {name: values.clone() for name, values in full_gradients(wrapped.inner).items()}
    for seed in range(4):
        dealt = deal(documents, seed, hands=2 + seed)
        metrics = run_step(wrapped, windows_of(dealt), reduction=reduction)
        difference, where = worst_difference(full_gradients(wrapped.inner), gradients)
        assert difference < TOLERANCE, (seed, where, difference)
        for name, value in whole.items():
            if name in INVARIANT or name.startswith("channel"):
                assert metrics[name] == pytest.approx(value, rel=TOLERANCE), (seed, name)


def test_any_split_over_ranks() -> None:
    documents = draw_documents(seed=1)
    expected = answer(build_model(), documents, reduction="square", num_channels=len(CHANNELS))

    def body() -> None:
        rank = dist.get_rank()
        for wrapper in ("ddp", "fsdp"):
            wrapped = wrap(build_model(), wrapper, 3)
            for seed in range(4):
                dealt = deal(documents, 10 + seed, hands=3 * (1 + seed % 3))
                metrics = run_step(wrapped, windows_of(dealt[rank::3]), reduction="square")
                difference, where = worst_difference(full_gradients(wrapped.inner), expected.gradients)
                assert difference < TOLERANCE, (wrapper, seed, where, difference)
                assert metrics["train/loss"] == pytest.approx(expected.loss, rel=TOLERANCE)
                assert metrics["tokens/loss"] == expected.loss_tokens

    run_on_ranks(3, body)


# -- mutants


def uneven() -> tuple[list[list[PlainDocument]], dict[str, Tensor]]:
    """Four windows of unequal target counts, and the right gradients."""
    documents = draw_documents(seed=1)
    dealt = [documents[:2], documents[2:5], documents[5:7], documents[7:]]
    return dealt, answer(build_model(), documents, num_channels=len(CHANNELS)).gradients


def test_mutant_mean_of_means_is_caught() -> None:
    dealt, expected = uneven()
    model = LossModel(build_model())
    for held in dealt:
        with Ledger([Term("text")]).step(windows_of([held])) as step:  # a denominator per micro-batch
            for batch in step:
                (model(step, batch) / len(dealt)).backward()
    assert worst_difference(full_gradients(model.model), expected)[0] > 0.01


def step_without_sum(wrapped: Wrapped, windows: Sequence[PackedBatch]) -> dict[str, Tensor]:
    """The documented loop without `gradients=`: the wrapper does what it was told elsewhere, or not."""
    ledger = Ledger([Term("text")], topology=wrapped.topology)
    wrapped.inner.zero_grad(set_to_none=True)
    with ledger.step(windows) as step:
        for batch in step:
            wrapped.outer(step, batch).backward()
    return full_gradients(wrapped.inner)


def bare_ddp(topology: Topology) -> Wrapped:
    inner = build_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return Wrapped(inner, DistributedDataParallel(LossModel(inner)), topology, None)


def test_mutant_ddp_averaging_is_caught() -> None:
    dealt, expected = uneven()

    def body() -> None:
        wrapped = bare_ddp(Topology(dp_replicate_size=2))
        gradients = step_without_sum(wrapped, windows_of(dealt)[dist.get_rank() :: 2][:1])
        halves = {name: 2 * values for name, values in gradients.items()}
        right = answer(build_model(), dealt[0] + dealt[1], num_channels=len(CHANNELS)).gradients
        assert worst_difference(gradients, right)[0] > 0.4
        assert worst_difference(halves, right)[0] < TOLERANCE, "it is wrong by the number of ranks only"

    run_on_ranks(2, body)


def test_mutant_synchronising_every_micro_batch_is_caught() -> None:
    """A mean survives repeated synchronisation, a sum does not."""
    dealt, expected = uneven()

    def sum_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def body() -> None:
        wrapped = bare_ddp(Topology(dp_replicate_size=2))
        wrapped.outer.register_comm_hook(None, sum_hook)
        windows = windows_of(dealt)[dist.get_rank() :: 2]
        assert worst_difference(step_without_sum(wrapped, windows), expected)[0] > 0.1
        # and the package's own loop on the same windows is right
        summed = wrap(build_model(), "ddp", 2)
        run_step(summed, windows)
        assert worst_difference(full_gradients(summed.inner), expected)[0] < TOLERANCE

    run_on_ranks(2, body)


def test_a_second_synchronised_backward_raises() -> None:
    """Two backward passes for the last micro-batch would sum the first one twice."""
    dealt, _ = uneven()

    def body() -> None:
        for wrapper in ("ddp", "fsdp"):
            wrapped = wrap(build_model(), wrapper, 2)
            ledger = Ledger([Term("text")], topology=wrapped.topology)
            with pytest.raises(RuntimeError, match="second backward pass"):
                with ledger.step(
                    windows_of(dealt)[dist.get_rank() :: 2], gradients=wrapped.gradients
                ) as step:
                    for batch in step:
                        share = wrapped.outer(step, batch)
                        share.backward(retain_graph=True)
                        share.backward()

    run_on_ranks(2, body)


def test_mutant_sum_on_the_fsdp_root_only_is_caught() -> None:
    """Neither setter of FSDP2 recurses: the layers keep averaging, without a warning."""
    dealt, expected = uneven()

    def body() -> None:
        topology = Topology()
        inner = build_model()
        outer = shard(LossModel(inner), topology)
        outer.set_gradient_divide_factor(1.0)
        outer.set_force_sum_reduction_for_comms(True)
        windows = windows_of([dealt[0] + dealt[1], dealt[2] + dealt[3]])[dist.get_rank() :: 2]
        gradients = step_without_sum(Wrapped(inner, outer, topology, None), windows)
        assert worst_difference(gradients, expected)[0] > 0.4
        of_root = {name: values for name, values in gradients.items() if ".layers." not in name}
        assert of_root and worst_difference(of_root, {n: expected[n] for n in of_root})[0] < TOLERANCE

    run_on_ranks(2, body)


def test_mutant_averaging_over_the_replicate_axis_is_caught() -> None:
    """FSDP2 told to sum over the shard axis, replicas averaged."""
    dealt, expected = uneven()

    def body() -> None:
        topology = Topology(dp_replicate_size=2)
        assert topology.mesh is not None
        inner = build_model()
        outer: nn.Module = LossModel(inner)
        from torch.distributed.fsdp import fully_shard

        outer = fully_shard(outer, mesh=topology.mesh["dp_shard"])
        sum_gradients(outer, topology)
        windows = windows_of(dealt)[topology.data_rank :: 4]
        step_without_sum(Wrapped(inner, outer, topology, None), windows)
        for parameter in inner.parameters():
            local = parameter.grad.to_local()
            dist.all_reduce(local, group=topology.mesh["dp_replicate"].get_group())
            local /= 2
        gradients = full_gradients(inner)
        assert worst_difference(gradients, expected)[0] > 0.4
        doubled = {name: 2 * values for name, values in gradients.items()}
        assert worst_difference(doubled, expected)[0] < TOLERANCE

    run_on_ranks(4, body)
