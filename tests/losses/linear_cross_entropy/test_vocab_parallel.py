"""The contract of `linear_cross_entropy` where the vocabulary is spread over 2 and 3 ranks.

Slices are even, uneven and empty. Every rank sees the whole loss and all token losses, the whole gradients
of hidden and a, and its slice of the others.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from isoloss.losses.linear_cross_entropy import chunk_rows, linear_cross_entropy
from isoloss.losses.linear_cross_entropy.chunked import compute_row_losses_
from isoloss.losses.linear_cross_entropy.problem import Problem, build_problem
from isoloss.losses.linear_cross_entropy.vocab_parallel import find_shard, shard_of
from losses.linear_cross_entropy.test_contract import (
    OPTIONS,
    Case,
    assert_close,
    assert_same_bits,
    make_case,
    oracle,
)
from ranks import on_ranks, run_on_ranks

BIAS_KINDS = ("none", "class", "row", "factors", "all")
SLICES = {
    2: ([7, 6], [5, 8], [13, 0], [0, 13]),
    3: ([5, 5, 3], [1, 12, 0], [0, 6, 7], [4, 5, 4]),
}
"""Sizes of the ranks' slices of a vocabulary of 13."""

for_2_and_3_ranks = pytest.mark.parametrize("ranks", [2, 3])


def rank_slice(sizes: Sequence[int]) -> slice:
    start = sum(sizes[: dist.get_rank()])
    return slice(start, start + sizes[dist.get_rank()])


def local_case(case: Case, sizes: Sequence[int]) -> Case:
    """This rank's part of a case, leaves that require what the case's tensors do."""
    mine = rank_slice(sizes)
    tensors = {}
    for name, tensor in case.tensors.items():
        part = tensor.detach()
        if name in ("weight", "b") or (name == "bias" and part.ndim == 1):
            part = part[mine]
        elif name == "bias":
            part = part[:, mine]
        tensors[name] = part.clone().requires_grad_(tensor.requires_grad)
    return Case(tensors, case.targets, case.token_weights, case.options)


def run_local(case: Case, backend: str = "auto", **overrides: Any) -> Any:
    return case.run(backend, vocab_group=dist.group.WORLD, **overrides)


def expected_part(name: str, gradient: Tensor, sizes: Sequence[int]) -> Tensor:
    mine = rank_slice(sizes)
    if name in ("weight", "b") or (name == "bias" and gradient.ndim == 1):
        return gradient[mine]
    return gradient[:, mine] if name == "bias" else gradient


def check(case: Case, sizes: Sequence[int], *, tolerance: float = 1e-12, **overrides: Any) -> None:
    """Loss, token losses and every gradient of this rank against full logits in one process."""
    local = local_case(case, sizes)
    output = run_local(local, **overrides)
    loss, losses, z_losses, gradients = oracle(case)
    assert_close(output.loss, loss, tolerance)
    assert_close(output.token_losses, losses, tolerance)
    assert_close(output.token_z_losses, z_losses, tolerance)
    output.loss.backward()
    for name, gradient in local.gradients().items():
        assert_close(gradient, expected_part(name, gradients[name], sizes), tolerance)
    # Alike on all ranks, bit for bit: what is shown does not depend on who shows it.
    seen = [output.token_losses, output.token_z_losses, output.loss.detach()]
    seen.append(local.tensors["hidden"].grad)
    for values in seen:
        copies = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, values.contiguous())
        for copy in copies:
            assert_same_bits(copy, values)


@for_2_and_3_ranks
def test_loss_and_gradients_match_full_logits(ranks: int) -> None:
    """Row 15 over slices of the vocabulary: every option, every bias form, every cut, several chunks."""

    def body() -> None:
        for number, (options, bias_kind) in enumerate(itertools.product(OPTIONS.values(), BIAS_KINDS)):
            case = make_case(bias_kind=bias_kind, **options)
            for turn in (number, number + number // len(SLICES[ranks]) + 1):
                check(case, SLICES[ranks][turn % len(SLICES[ranks])], chunk_size=(None, 5, 1)[turn % 3])

    run_on_ranks(ranks, body)


@for_2_and_3_ranks
def test_every_class_may_be_the_target(ranks: int) -> None:
    """A target on another rank reads no column here, also where this rank has fewer columns than that one."""

    def body() -> None:
        for sizes in SLICES[ranks]:
            case = make_case(13, ignored=0.0)
            case.targets = torch.arange(13)
            check(case, sizes)

    run_on_ranks(ranks, body)


@on_ranks(2)
def test_a_target_on_another_ranks_padded_column_is_finite() -> None:
    """A vocabulary of 13 padded to 7 columns a rank, the last removed by a bias of -inf.

    Elsewhere a sentinel for "not mine" pointed at that column and made the loss infinite.
    """
    sizes = [7, 7]
    case = make_case(13, 14, bias_kind="class", ignored=0.0)
    with torch.no_grad():
        case.tensors["bias"][13] = -math.inf
    case.targets = torch.arange(13)
    local = local_case(case, sizes)
    output = run_local(local)
    loss, losses, _, gradients = oracle(case)
    assert torch.isfinite(losses).all()
    assert_close(output.token_losses, losses)
    output.loss.backward()
    assert_close(local.tensors["weight"].grad, gradients["weight"][rank_slice(sizes)])


@on_ranks(2)
def test_a_rank_whose_classes_are_all_removed() -> None:
    case = make_case(bias_kind="class", ignored=0.0)
    with torch.no_grad():
        case.tensors["bias"][6:] = -math.inf
    case.targets = case.targets % 6
    check(case, [6, 7])


@on_ranks(2)
def test_any_part_may_be_frozen() -> None:
    for trained in (("hidden",), ("weight",), ("bias",), ("a", "b"), ("hidden", "a"), ()):
        case = make_case(bias_kind="all", label_smoothing=0.1)
        local = local_case(case, [5, 8])
        for name, tensor in local.tensors.items():
            tensor.requires_grad_(name in trained)
        output = run_local(local, chunk_size=4)
        *_, gradients = oracle(case)
        if trained:
            output.loss.backward()
        for name, gradient in local.gradients().items():
            if name in trained:
                assert_close(gradient, expected_part(name, gradients[name], [5, 8]))
            else:
                assert gradient is None


@on_ranks(2)
def test_dtypes() -> None:
    """The losses are float32 for narrower inputs, and gradients are rounded once, after the ranks' sum."""
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        case = make_case(40, bias_kind="all", dtype=dtype, softcap=3.0)
        local = local_case(case, [6, 7])
        output = run_local(local, chunk_size=7)
        loss, losses, _, gradients = oracle(case)
        assert output.loss.dtype == output.token_losses.dtype == torch.float32
        assert_close(output.loss, loss, 1e-6)
        assert_close(output.token_losses, losses, 1e-5)
        output.loss.backward()
        for name, gradient in local.gradients().items():
            assert gradient is not None and gradient.dtype == dtype
            assert_close(gradient, expected_part(name, gradients[name], [6, 7]), tolerance)
        one_process = case.copy()
        one_process.run("chunked").loss.backward()
        assert_close(
            local.tensors["hidden"].grad, one_process.tensors["hidden"].grad, torch.finfo(dtype).eps * 2
        )


@on_ranks(2)
def test_ignored_rows_zero_rows_and_no_target() -> None:
    """Case A30 and A33: whatever an ignored row holds reaches nothing; without targets all is zeros."""
    for rows in (0, 1, 5):
        case = make_case(rows, ignored=0.0, bias_kind="class", z_loss=0.1)
        case.targets = torch.full((rows,), -100)
        local = local_case(case, [7, 6])
        output = run_local(local, chunk_size=2)
        output.loss.backward()
        assert output.loss.item() == 0.0
        for gradient in local.gradients().values():
            assert gradient is not None and not gradient.any()
    poisoned = make_case(ignored=0.5)
    with torch.no_grad():
        poisoned.tensors["hidden"][poisoned.targets == -100] = math.nan
    local = local_case(poisoned, [7, 6])
    output = run_local(local, chunk_size=4)
    output.loss.backward()
    clean = poisoned.copy()
    with torch.no_grad():
        clean.tensors["hidden"].nan_to_num_()
    assert_close(output.loss, oracle(clean)[0])
    for name, gradient in local.gradients().items():
        assert_close(gradient, expected_part(name, oracle(clean)[3][name], [7, 6]))


@on_ranks(2)
def test_large_logits_and_a_common_offset() -> None:
    case = make_case(12, ignored=0.0, dtype=torch.float32)
    with torch.no_grad():
        case.tensors["hidden"] *= 1e4
    check(case, [7, 6], tolerance=1e-5)
    offset = make_case(12, bias_kind="class", ignored=0.0, dtype=torch.float32)
    with torch.no_grad():
        offset.tensors["bias"] += 1e4
    local = local_case(offset, [7, 6])
    # what remains of the logits beside 1e4 is right to their own rounding, not to that of their square
    assert_close(run_local(local).token_losses, oracle(offset)[1], 5e-4)


@on_ranks(2)
def test_the_incoming_gradient_and_a_kept_graph() -> None:
    case = make_case(bias_kind="all")
    *_, gradients = oracle(case)
    for factor in (0.0, 2.0):
        local = local_case(case, [7, 6])
        loss = run_local(local).loss
        (factor * loss).backward(retain_graph=True)
        (factor * loss).backward()
        for name, gradient in local.gradients().items():
            assert_close(gradient, 2 * factor * expected_part(name, gradients[name], [7, 6]))


@on_ranks(2)
def test_forms_of_the_inputs_give_the_same_bits() -> None:
    """int32 targets, autocast, offloaded tensors, and the gradients made in backward."""
    plain = local_case(make_case(dtype=torch.float32, bias_kind="all"), [7, 6])
    expected = run_local(plain, chunk_size=4)
    expected.loss.backward()

    def same(case: Case, output: Any) -> None:
        output.loss.backward()
        assert_same_bits(output.loss, expected.loss)
        assert_same_bits(output.token_losses, expected.token_losses)
        for name, gradient in case.gradients().items():
            assert_same_bits(gradient, plain.gradients()[name])

    narrow = plain.copy(targets=plain.targets.int())
    same(narrow, run_local(narrow, chunk_size=4))
    cast = plain.copy()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = run_local(cast, chunk_size=4)
    same(cast, output)
    offloaded = plain.copy()
    with torch.autograd.graph.save_on_cpu():
        output = run_local(offloaded, chunk_size=4)
    same(offloaded, output)
    recomputed = plain.copy()
    output = run_local(recomputed, chunk_size=4, backend="auto/backward")
    output.loss.backward()
    assert_same_bits(output.loss, expected.loss)
    for name, gradient in recomputed.gradients().items():
        assert_close(gradient, plain.gradients()[name], 1e-6)


@on_ranks(2)
def test_extreme_vocabularies() -> None:
    """One class a rank, all classes on one, and 131072."""
    for rows in (1, 6):
        check(make_case(rows, 2, ignored=0.0), [1, 1])
        check(make_case(rows, 2, ignored=0.0), [0, 2], chunk_size=2)
    check(make_case(3, 131072, width=3, ignored=0.0), [65536, 65536], tolerance=1e-11)


@on_ranks(2)
def test_recomputation_gives_the_same_bits() -> None:
    case = make_case(label_smoothing=0.1)
    plain, recomputed = local_case(case, [7, 6]), local_case(case, [7, 6])
    run_local(plain).loss.backward()

    def loss(hidden: Tensor) -> Tensor:
        recomputed.tensors["hidden"] = hidden
        return run_local(recomputed).loss

    hidden = recomputed.tensors["hidden"]
    checkpoint(loss, hidden, use_reentrant=False).backward()
    assert_same_bits(hidden.grad, plain.tensors["hidden"].grad)
    assert_same_bits(recomputed.tensors["weight"].grad, plain.tensors["weight"].grad)


def test_a_target_outside_the_whole_vocabulary_is_an_error_on_every_rank() -> None:
    def body(bad: int) -> str:
        case = make_case(5, ignored=0.0)
        case.targets = torch.tensor([0, 12, bad, 1, 2])
        with pytest.raises(ValueError) as error:
            run_local(local_case(case, [7, 6]))
        return str(error.value)

    for bad in (13, -1):
        for message in run_on_ranks(2, body, bad):
            assert f"must lie in [0, 13) or be ignore_index, got {bad}" in message


# ---------------------------------------------------------------------------------------------------------
# What is communicated, and what is in memory


def collectives(run: Callable[[], object]) -> tuple[int, Counter[str]]:
    with CommDebugMode() as communication:
        run()
    counts = Counter({str(op): count for op, count in communication.get_comm_counts().items()})
    return communication.get_total_counts(), counts


@on_ranks(2)
def test_two_reductions_a_chunk_and_one_for_the_hidden_gradient() -> None:
    """Whatever part of the rows has a target, so that ranks stay in step."""
    for rows, chunk_size in ((20, 5), (21, 5), (600, 512), (1, None), (0, 5)):
        chunks = math.ceil(rows / chunk_rows(rows, 7, chunk_size))
        for ignored, options, bias_kind in itertools.product((0.0, 0.7, 1.1), ({}, OPTIONS["all"]), ("all",)):
            case = make_case(rows, ignored=ignored, bias_kind=bias_kind, **options)
            local = local_case(case, [6, 7])
            shard = find_shard(dist.group.WORLD, local.tensors["weight"])

            def run(local: Case = local, shard: object = shard, chunk: int | None = chunk_size) -> None:
                local.run("auto", vocab_group=shard, chunk_size=chunk).loss.backward()

            assert collectives(run)[0] == 2 * chunks + 1
            with torch.no_grad():
                total, _ = collectives(lambda local=local, shard=shard: local.run("auto", vocab_group=shard))
            assert total == 2 * math.ceil(rows / chunk_rows(rows, 7)), "losses alone need no gradient's sum"
    # a bare group is asked for the sizes
    local = local_case(make_case(5), [6, 7])
    assert collectives(lambda: run_local(local))[0] == 2 + 1 + 1


@on_ranks(2)
def test_reductions_go_on_beside_products() -> None:
    """The logits of the next chunk during a sum, gradients of the last during a maximum; the same bits."""

    class Products(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func._opname in ("mm", "addmm_"):
                events.append("product")
            return func(*args, **(kwargs or {}))

    def watched(begin: Any, name: str) -> Any:
        def begin_watched(values: Tensor) -> Callable[[], object]:
            events.append(name)
            wait = begin(values)
            return lambda: (wait(), events.append(f"{name} done"))

        return begin_watched

    events: list[str] = []
    overlapped = local_case(make_case(20, ignored=0.0, bias_kind="class", label_smoothing=0.1), [6, 7])
    alone = overlapped.copy()
    shard = find_shard(dist.group.WORLD, overlapped.tensors["weight"])
    assert shard.begin_max is not None and shard.begin_sum is not None
    watched_shard = replace(
        shard, begin_max=watched(shard.begin_max, "max"), begin_sum=watched(shard.begin_sum, "sum")
    )
    with Products():
        output = overlapped.run("auto", vocab_group=watched_shard, chunk_size=10)
    logits, gradients = ["product"], ["product"] * 2
    assert events == [
        *[*logits, "max", "max done", "sum"],
        *[*logits, "max", "sum done", *gradients, "max done", "sum", "sum done", *gradients],
    ]

    expected = alone.run("auto", vocab_group=replace(shard, begin_max=None, begin_sum=None), chunk_size=10)
    output.loss.backward()
    expected.loss.backward()
    assert_same_bits(output.loss, expected.loss)
    assert_same_bits(output.token_losses, expected.token_losses)
    for name, gradient in overlapped.gradients().items():
        assert_same_bits(gradient, alone.gradients()[name])


@on_ranks(2)
def test_what_is_reduced_is_small_and_does_not_depend_on_the_targets() -> None:
    class Sizes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.sizes: list[int] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func.namespace == "c10d" and "allreduce" in func._opname:
                self.sizes.append(args[0][0].numel())
            return func(*args, **(kwargs or {}))

    for smoothing, numbers in ((0.0, 2), (0.1, 3)):
        seen = []
        for ignored in (0.0, 0.8):
            local = local_case(make_case(20, ignored=ignored, label_smoothing=smoothing), [6, 7])
            shard = find_shard(dist.group.WORLD, local.tensors["weight"])
            with Sizes() as watched:
                local.run("auto", vocab_group=shard, chunk_size=8).loss.backward()
            seen.append(watched.sizes)
        assert seen[0] == seen[1] == [8, numbers * 8] * 3 + [20 * 7]


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest storage that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.largest = max(self.largest, value.untyped_storage().nbytes())
        return result


@for_2_and_3_ranks
def test_no_tensor_is_larger_than_a_shard_of_a_chunk(ranks: int) -> None:
    """No logits of the whole vocabulary, and none of all rows, in the worst mix of options."""
    rows, width, vocabulary, chunk = 96, 8, 1200, 24

    def body() -> None:
        for options in OPTIONS.values():
            case = make_case(rows, vocabulary, width=width, bias_kind="class", ignored=0.2, **options)
            local = local_case(case, [vocabulary // ranks] * ranks)
            with LargestTensor() as watched:
                run_local(local, chunk_size=chunk).loss.backward()
            assert watched.largest == chunk * vocabulary // ranks * 8

    run_on_ranks(ranks, body)
    watched = LargestTensor()
    with watched:
        make_case(rows, vocabulary, width=width).run("chunked", chunk_size=chunk)
    assert watched.largest >= chunk * vocabulary * 8, "the watch sees whole logits where there are some"


# ---------------------------------------------------------------------------------------------------------
# Slices of a sharded parameter


@for_2_and_3_ranks
def test_a_sharded_tensor_says_which_classes_are_here(ranks: int) -> None:
    """As torch cuts: 13 over 3 ranks are 5, 5, 3; 2 over 3 are 1, 1, 0."""

    def body() -> None:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        for vocabulary in (13, 12, 2, 1):
            weight = torch.arange(vocabulary * 2.0).view(vocabulary, 2)
            sharded = distribute_tensor(weight, mesh, [Shard(0)])
            shard = shard_of(sharded)
            local = sharded.to_local()
            assert torch.equal(local, weight[shard.start : shard.start + local.shape[0]])
            found = find_shard(mesh.get_group(), local)
            assert (int(found.start), int(found.size)) == (shard.start, shard.size)
            assert shard.size == vocabulary

    run_on_ranks(ranks, body)


@on_ranks(2)
def test_mistakes_are_named() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weight = torch.ones(4, 2)
    for placement in (Shard(1), Replicate()):
        with pytest.raises(ValueError, match="must be sharded by rows over the tensor-parallel axis alone"):
            shard_of(distribute_tensor(weight, mesh, [placement]))
    arguments = (torch.ones(3, 2), torch.ones(2, 2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeError, match="must be a ProcessGroup or a VocabularyShard, got str"):
        linear_cross_entropy(*arguments, vocab_group="tp")
    with pytest.raises(ValueError, match="'reference' needs the logits of the whole vocabulary"):
        linear_cross_entropy(*arguments, vocab_group=dist.group.WORLD, backend="reference")


# ---------------------------------------------------------------------------------------------------------
# The checks can fail


@on_ranks(2)
def test_mutants_are_caught() -> None:
    """Faults of other vocabulary-parallel losses: each changes what `check` compares."""
    case = make_case(ignored=0.0, label_smoothing=0.1)
    case.targets %= 6
    sizes = [7, 6]
    local = local_case(case, sizes)
    loss, _, _, gradients = oracle(case)
    shard = find_shard(dist.group.WORLD, local.tensors["weight"])

    def differs(actual: Tensor | None, expected: Tensor) -> bool:
        assert actual is not None
        return bool((actual - expected).abs().max() > 1e-3 * expected.abs().max())

    # the gradient of hidden left partial
    partial = type(shard)(
        shard.start, shard.size, shard.reduce_max, lambda t: None if t.ndim == 1 else shard.reduce_sum(t)
    )
    local.run("auto", vocab_group=partial).loss.backward()
    assert differs(local.tensors["hidden"].grad, gradients["hidden"])
    # smoothing over the classes of this rank
    own = type(shard)(shard.start, sizes[dist.get_rank()], shard.reduce_max, shard.reduce_sum)
    assert differs(local.run("auto", vocab_group=own).loss.detach(), loss)
    # a softmax of one's own classes
    logits = local.tensors["hidden"].detach() @ local.tensors["weight"].detach().T
    alone = compute_row_losses_(logits, case.targets, problem_of(local), add_bias=None, needs_gradient=False)
    assert differs((alone.losses * case.token_weights).sum(), loss)


def problem_of(case: Case) -> Problem:
    options = {"bias": None, "bias_factors": None, "softcap": None, "logit_scale": 1.0, "z_loss": 0.0}
    options |= {"label_smoothing": 0.0, "ignore_index": -100, "chunk_size": None} | case.options
    return build_problem(
        case.tensors["hidden"],
        case.tensors["weight"],
        case.targets,
        token_weights=case.token_weights,
        **options,
    )
