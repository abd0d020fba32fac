"""Attention on shards of a window against eager attention, one document at a time, and what it costs."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from isoloss import Layout, Topology
from isoloss.parallel import document_attention
from isoloss.parallel.attention import packed_attention
from isoloss.parallel.document_attention import Scores, attend_pieces
from isoloss.parallel.exchange import gather_slots
from isoloss.sharding import document_pieces, shard_slots, zigzag_slots
from ranks import run_on_ranks

F64 = torch.float64

LAYOUTS = {
    "odd lengths": Layout([13, 1, 30, 7, 1], alignment=8, padded_length=96),
    "one long document": Layout([61], alignment=8, padded_length=64),
    "one-token documents": Layout([1] * 6, alignment=8, padded_length=64),
    "shared prefixes": Layout(
        [9, 5, 21, 3, 6], None, [0, 0, 0, 0, -1], [-1, 0, 0, 1, -1], alignment=8, padded_length=80
    ),
    "mostly padding": Layout([3], alignment=8, padded_length=128),
    "empty": Layout([], padded_length=32),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 5},
    {"sliding_window": 1},
    {"sliding_window": 17, "scaling": 0.4},
    {"softcap": 0.7},
    {"softcap": 2.0, "sliding_window": 4, "scaling": 1.5},
]
SPLITS = {2: [(1, 2), (2, 1)], 4: [(1, 4), (4, 1), (2, 2)], 8: [(2, 4), (4, 2)]}
"""ranks -> (cp_size, sp_size)"""


def draw(
    layout: Layout, heads: int, key_value_heads: int, head_dim: int = 8, value_dim: int = 8
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(layout.physical_tokens + heads)
    shapes = ((heads, head_dim), (key_value_heads, head_dim), (key_value_heads, value_dim))
    return [
        torch.randn(1, count, layout.physical_tokens, width, dtype=F64, generator=generator)
        for count, width in shapes
    ]


def eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Plain attention of the last rows of one sequence to all of it, [heads, n, width] each."""
    repeats = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
    scores = query @ key.transpose(1, 2) * (query.shape[2] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    columns = torch.arange(key.shape[1])
    rows = columns[-query.shape[1] :, None]
    hidden = columns > rows
    if sliding_window is not None:
        hidden |= columns <= rows - sliding_window
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ value


@dataclass
class Expected:
    """Inputs of a whole window, what attention makes of them, and gradients of (output * upstream).sum()."""

    inputs: list[Tensor]
    upstream: Tensor
    output: Tensor
    gradients: list[Tensor]


@functools.cache
def expect(name: str, option: int, heads: int, key_value_heads: int, value_dim: int) -> Expected:
    """One document at a time, behind the documents that it continues."""
    layout = LAYOUTS[name]
    inputs = [part.requires_grad_() for part in draw(layout, heads, key_value_heads, value_dim=value_dim)]
    query, key, value = (part[0] for part in inputs)
    output = torch.zeros(layout.physical_tokens, heads, value_dim, dtype=F64)
    spans = [
        list(range(start, start + length))
        for start, length in zip(layout.document_starts, layout.document_lengths, strict=True)
    ]
    for document, own in enumerate(spans):
        seen, parent = own, layout.document_parents[document]
        while parent != -1:
            seen, parent = spans[parent] + seen, layout.document_parents[parent]
        out = eager(query[:, own], key[:, seen], value[:, seen], **OPTIONS[option])
        output = output.index_put((torch.tensor(own),), out.transpose(0, 1))
    upstream = torch.randn(output.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    total = (output * upstream).sum() + sum(0.0 * part.sum() for part in inputs)
    gradients = list(torch.autograd.grad(total, inputs))
    return Expected([part.detach() for part in inputs], upstream, output.detach(), gradients)


def attend_on_shards(splits: list[tuple[int, int]], cases: dict[tuple[str, int], Expected]) -> list[str]:
    """Outputs and gradients of this rank's slots against the whole window's. Blank slots hold NaN."""
    failures = []
    for cp_size, sp_size in splits:
        topology = Topology(cp_size=cp_size, sp_size=sp_size)
        for (name, option), expected in cases.items():
            layout = LAYOUTS[name]
            slots = shard_slots(
                layout,
                cp_size=cp_size,
                cp_rank=topology.cp_rank,
                sp_size=sp_size,
                sp_rank=topology.sp_rank,
            )
            local = [part[:, :, slots].clone() for part in expected.inputs]
            for part in local:
                part[:, :, ~layout.is_token()[slots]] = float("nan")
                part.requires_grad_()
            output, _ = packed_attention(
                nn.Identity(), *local, None, layout=layout, topology=topology, **OPTIONS[option]
            )
            (output[0] * expected.upstream[slots]).sum().backward()
            pairs = [("output", output[0], expected.output[slots])]
            for kind, part, gradient in zip(
                ("query", "key", "value"), local, expected.gradients, strict=True
            ):
                assert part.grad is not None, f"the gradient of {kind} is None"
                pairs.append((kind, part.grad, gradient[:, :, slots]))
            failures += [
                f"cp{cp_size} sp{sp_size} {name} {OPTIONS[option]}: {kind} differs"
                for kind, found, right in pairs
                if not torch.allclose(found, right, rtol=0, atol=1e-13)  # NaN differs too
            ]
    return failures


@pytest.mark.parametrize(
    ("ranks", "heads", "key_value_heads", "value_dim"),
    [(2, 4, 4, 8), (2, 6, 3, 8), (2, 2, 1, 6), (4, 4, 2, 8), (4, 12, 3, 8), (8, 4, 1, 8)],
)
def test_attention_on_shards_is_attention_by_document(
    ranks: int, heads: int, key_value_heads: int, value_dim: int
) -> None:
    """Also key heads that sp does not divide, and fewer key heads than sequence ranks."""
    cases = {
        (name, option): expect(name, option, heads, key_value_heads, value_dim)
        for name, option in itertools.product(LAYOUTS, range(len(OPTIONS)))
    }
    for failures in run_on_ranks(ranks, attend_on_shards, SPLITS[ranks], cases):
        assert not failures, failures[:10]


def count_collectives() -> list[tuple[int, int, int, dict[str, int]]]:
    counts = []
    for cp_size, sp_size in [(1, 4), (4, 1), (2, 2)]:
        topology = Topology(cp_size=cp_size, sp_size=sp_size)
        for layout in LAYOUTS.values():
            slots = layout.physical_tokens // 4
            parts = [torch.randn(1, 4, slots, 8, requires_grad=True) for _ in range(3)]
            with CommDebugMode() as comms:
                output, _ = packed_attention(nn.Identity(), *parts, None, layout=layout, topology=topology)
                forward = comms.get_total_counts()
                output.sum().backward()
                backward = comms.get_total_counts() - forward
            names = {str(name).split(".")[-1]: n for name, n in comms.get_comm_counts().items() if n}
            counts.append((cp_size, sp_size, forward, backward, names))
    return counts


def test_collectives_do_not_depend_on_the_window() -> None:
    """Also where a rank holds no token, and where the window is empty."""
    outcomes = run_on_ranks(4, count_collectives)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    for cp_size, sp_size, forward, backward, _ in outcomes[0]:
        expected = 2 * (sp_size > 1) + (cp_size > 1)
        assert (forward, backward) == (expected, expected)


def test_slots_or_heads_that_do_not_fit_are_errors() -> None:
    def body() -> None:
        topology = Topology(sp_size=2)
        layout = LAYOUTS["odd lengths"]

        def attend(heads: int, slots: int, where: Topology | None) -> None:
            parts = [torch.randn(1, heads, slots, 8) for _ in range(3)]
            packed_attention(nn.Identity(), *parts, None, layout=layout, topology=where)

        with pytest.raises(ValueError, match="sp_size=2 does not divide the 3 attention heads of a rank"):
            attend(3, 48, topology)
        with pytest.raises(ValueError, match="got 96 slots of a window of 96, of which a rank holds 48"):
            attend(4, 96, topology)
        with pytest.raises(ValueError, match="got 48 slots of a window of 96, of which a rank holds 96"):
            attend(4, 48, None)

    run_on_ranks(2, body)


# -- what is allocated and what is kept


class Allocations(TorchDispatchMode):
    """The most elements that any result of an operation has."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.where = ""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(part, Tensor) and part.untyped_storage().nbytes() // part.itemsize > self.largest:
                self.largest = part.untyped_storage().nbytes() // part.itemsize
                self.where = f"{function} {tuple(part.shape)}"
        return result


def saved_bytes(compute: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """The result of `compute` and the bytes of the distinct storages that autograd keeps for it."""
    kept: dict[int, int] = {}

    def pack(part: Tensor) -> Tensor:
        kept[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        return part

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda part: part):
        result = compute()
    return result, sum(kept.values())


def square_free(
    layout: Layout, options: dict[str, Any], cp_size: int, value_dim: int
) -> tuple[int, str, int]:
    """(elements of the largest allocation, where, bytes kept) of forward and backward on any context rank."""
    worst, where, most = 0, "", 0
    scores = Scores(options.get("scaling"), options.get("sliding_window"), options.get("softcap"))
    query, key, value = draw(layout, 4, 2, value_dim=value_dim)
    for cp_rank in range(cp_size):
        pieces = document_pieces(layout, cp_size=cp_size, cp_rank=cp_rank)
        slots = zigzag_slots(layout, cp_size=cp_size, cp_rank=cp_rank)
        parts = [part.detach().requires_grad_() for part in (query[:, :, slots], key, value)]
        with Allocations() as seen:
            output, kept = saved_bytes(lambda: attend_pieces(*parts, layout, pieces, scores))  # noqa: B023
            output.sum().backward()
        if seen.largest > worst:
            worst, where = seen.largest, seen.where
        most = max(most, kept)
    return worst, where, most


SLOTS = 2048


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("value_dim", [8, 6])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 300}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize(
    "layout",
    [
        Layout([SLOTS], alignment=8),
        Layout([SLOTS // 2, 301, 700], None, [0, 0, 0], [-1, 0, 0], alignment=8, padded_length=SLOTS),
    ],
    ids=["one document", "prefix"],
)
def test_nothing_of_the_size_of_all_scores_is_made_or_kept(
    layout: Layout, options: dict[str, Any], value_dim: int, cp_size: int
) -> None:
    """Neither T x T elements in one tensor, nor that many kept for backward in all."""
    largest, where, kept = square_free(layout, options, cp_size, value_dim)
    assert largest < SLOTS * SLOTS, where
    # inputs once, an output and its normaliser, heads repeated; far below 8 bytes for each pair of slots
    assert kept <= 8 * SLOTS * (2 * 4 * 8 + 2 * 2 * 8 + 4 * 8 + 4)
    assert kept < 8 * SLOTS * SLOTS / 20


def test_a_whole_mask_would_be_seen() -> None:
    """Mutant: the same measure on attention that builds its mask."""
    query, key, value = (part.requires_grad_() for part in draw(Layout([SLOTS]), 1, 1))
    with Allocations() as seen:
        _, kept = saved_bytes(lambda: eager_with_mask(query, key, value))
    assert seen.largest >= SLOTS * SLOTS
    assert kept >= 8 * SLOTS * SLOTS


def test_one_chunk_of_all_rows_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the same measure on our own attention without chunks, in forward and in backward."""
    monkeypatch.setattr(document_attention, "CHUNK_ROWS", SLOTS)
    largest, where, _ = square_free(Layout([SLOTS], alignment=8), {"softcap": 5.0}, 1, 8)
    assert largest >= SLOTS * SLOTS, where


def eager_with_mask(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    hidden = torch.ones(SLOTS, SLOTS, dtype=torch.bool).triu(1)
    return torch.softmax((query @ key.transpose(2, 3)).masked_fill(hidden, float("-inf")), -1) @ value


@pytest.mark.parametrize("rows", [1, 3, 128])
def test_chunks_of_any_size_give_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_attention, "CHUNK_ROWS", rows)
    layout = LAYOUTS["shared prefixes"]
    for option, options in enumerate(OPTIONS):
        expected = expect("shared prefixes", option, 4, 2, 6)
        parts = [part.clone().requires_grad_() for part in expected.inputs]
        output, _ = packed_attention(nn.Identity(), *parts, None, layout=layout, **options)
        torch.testing.assert_close(output[0], expected.output, rtol=0, atol=1e-14)
        (output[0] * expected.upstream).sum().backward()
        for part, gradient in zip(parts, expected.gradients, strict=True):
            torch.testing.assert_close(part.grad, gradient, rtol=0, atol=1e-13)


# -- the kernel for documents of different lengths


def reference_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row_ends: Tensor,
    column_ends: Tensor,
    most_rows: int,
    most_columns: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What torch documents of `varlen_attn`, one document at a time."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert window_size[1] == 0 and row_ends.dtype == column_ends.dtype == torch.int32
    assert most_rows == row_ends.diff().max() and most_columns == column_ends.diff().max()
    window = None if window_size[0] == -1 else window_size[0] + 1
    outputs = []
    for rows, columns in zip(
        itertools.pairwise(row_ends.tolist()), itertools.pairwise(column_ends.tolist()), strict=True
    ):
        parts = (query[slice(*rows)], key[slice(*columns)], value[slice(*columns)])
        outputs.append(eager(*(part.transpose(0, 1) for part in parts), scaling=scale, sliding_window=window))
    return torch.cat([out.transpose(0, 1) for out in outputs])


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "empty"])
def test_what_the_variable_length_kernel_is_given(name: str, cp_size: int) -> None:
    """The kernel needs CUDA; which rows and columns it gets does not."""
    layout = LAYOUTS[name]
    for options in ({}, {"sliding_window": 5, "scaling": 0.3}):
        scores = Scores(options.get("scaling"), options.get("sliding_window"), None)
        for cp_rank in range(cp_size):
            pieces = document_pieces(layout, cp_size=cp_size, cp_rank=cp_rank)
            if not pieces:
                continue
            query, key, value = draw(layout, 4, 2)
            query = query[:, :, zigzag_slots(layout, cp_size=cp_size, cp_rank=cp_rank)]
            parts = [part.clone().requires_grad_() for part in (query, key, value)]
            seen = [document_attention._seen(layout, piece) for piece in pieces]
            found = document_attention._attend_variable_length(*parts, seen, scores, kernel=reference_kernel)
            others = [part.clone().requires_grad_() for part in (query, key, value)]
            expected = attend_pieces(*others, layout, pieces, scores)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
            found.square().sum().backward()
            expected.square().sum().backward()
            for part, other in zip(parts, others, strict=True):
                torch.testing.assert_close(part.grad, other.grad, rtol=0, atol=1e-13)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}], ids=str)
@pytest.mark.parametrize("cp_size", [1, 2])
def test_the_variable_length_kernel_on_cuda(cp_size: int, options: dict[str, Any]) -> None:
    """bfloat16 on CUDA against float64 on the CPU."""
    layout = LAYOUTS["shared prefixes"]
    scores = Scores(None, options.get("sliding_window"), None)
    for cp_rank in range(cp_size):
        pieces = document_pieces(layout, cp_size=cp_size, cp_rank=cp_rank)
        query, key, value = draw(layout, 4, 2)
        query = query[:, :, zigzag_slots(layout, cp_size=cp_size, cp_rank=cp_rank)]
        narrow = [part.to("cuda", torch.bfloat16).requires_grad_() for part in (query, key, value)]
        wide = [part.detach().cpu().double().requires_grad_() for part in narrow]
        found = attend_pieces(*narrow, layout, pieces, scores)
        expected = attend_pieces(*wide, layout, pieces, scores)
        found.float().square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=0.03)
        for part, other in zip(narrow, wide, strict=True):
            assert part.grad is not None and other.grad is not None
            scale = other.grad.abs().max()
            assert (part.grad.cpu().double() - other.grad).abs().max() <= 0.03 * scale


# -- precision


def test_keys_gather_their_gradient_in_float32() -> None:
    """Below 32 bits a sum over many chunks would stop growing: bfloat16 against float32 inputs."""
    layout = Layout([600], alignment=8)
    pieces = document_pieces(layout, cp_size=1, cp_rank=0)
    scores = Scores(None, None, 50.0)
    narrow = [part.to(torch.bfloat16).requires_grad_() for part in draw(layout, 2, 1)]
    wide = [part.detach().double().requires_grad_() for part in narrow]
    document_attention.attend_pieces(*narrow, layout, pieces, scores).float().sum().backward()
    document_attention.attend_pieces(*wide, layout, pieces, scores).sum().backward()
    value, reference = narrow[2].grad, wide[2].grad
    assert value is not None and reference is not None
    assert (value.double() - reference).abs().max() <= 0.01 * reference.abs().max()


def test_autocast_reaches_forward_and_backward_alike() -> None:
    """Inputs in float32 are computed with in bfloat16 under autocast, in both directions."""
    layout = LAYOUTS["shared prefixes"]
    parts = [part.float().requires_grad_() for part in draw(layout, 4, 2)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = packed_attention(nn.Identity(), *parts, None, layout=layout, softcap=5.0)
    narrow = [part.detach().to(torch.bfloat16).requires_grad_() for part in parts]
    expected, _ = packed_attention(nn.Identity(), *narrow, None, layout=layout, softcap=5.0)
    assert output.dtype == torch.bfloat16 and torch.equal(output, expected)
    output.float().sum().backward()
    expected.float().sum().backward()
    for part, other in zip(parts, narrow, strict=True):
        assert part.grad is not None and other.grad is not None
        assert torch.equal(part.grad, other.grad.float())


def test_gradients_of_keys_are_summed_over_context_ranks_in_float32() -> None:
    def body() -> float:
        part = torch.zeros(1, 1, 2, 1, dtype=torch.bfloat16, requires_grad=True)
        (gathered,) = gather_slots([part], Topology(cp_size=4).cp_group)
        # 256 + 1 + 1 + 1 in bfloat16 stays 256
        gathered.backward(torch.full_like(gathered, 256.0 if dist.get_rank() == 0 else 1.0))
        assert part.grad is not None
        return part.grad.flatten()[0].item()

    assert run_on_ranks(4, body) == [260.0] * 4  # 259 rounded once
