"""A shared prompt packed once equals separate documents of prompt and answer."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from exactness.driving import compare, full_gradients, run_step, wrap
from isoloss import Layout, PackedBatch, shift_targets
from oracle import models
from oracle.models import MODEL_KINDS, build_special_model, with_float64_norms
from oracle.single_process import PlainDocument, answer
from ranks import run_on_ranks

CHANNELS = ("chat", "docs")
PROMPT = [11, 5, 40, 23, 8, 31, 17]
ANSWERS = ([50, 3, 9], [22], [7, 45, 33, 60, 12])
OTHER = [29, 14, 55, 6]


def build_model(kind: str = "qwen3-tied") -> nn.Module:
    """With norms in float64, as the gradient of a prefix is summed before its norms (`Float64Norm`)."""
    build = models.build_model if kind in MODEL_KINDS else build_special_model
    return with_float64_norms(build(kind))


def plain_documents(answers: Sequence[list[int]]) -> list[PlainDocument]:
    """Each answer behind its own copy of the prompt, and one document beside them."""
    ignored = [-100] * len(PROMPT)
    documents = [PlainDocument(OTHER, OTHER, channel=1)]
    for number, tokens in enumerate(answers):
        documents.append(
            PlainDocument(
                PROMPT + tokens, ignored + tokens, shared_tokens=len(PROMPT) - 1 if number else 0, channel=0
            )
        )
    return documents


def shared_window(
    answers: Sequence[list[int]], *, cuts: Sequence[int] = (), alignment: int = 1
) -> PackedBatch:
    """The prompt without its last token once (cut into a chain of prefixes), then the answers."""
    edges = [0, *cuts, len(PROMPT) - 1]
    prefixes = [PROMPT[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    pieces = [OTHER, *prefixes, *([PROMPT[-1], *tokens] for tokens in answers)]
    layout = Layout(
        [len(piece) for piece in pieces],
        [1] + [0] * (len(pieces) - 1),
        [-1] + [4] * (len(pieces) - 1),
        [-1, -1, *range(1, len(prefixes)), *[len(prefixes)] * len(answers)],
        alignment=alignment,
        padded_length=80,
    )
    input_ids = torch.zeros(80, dtype=torch.int64)
    labels = torch.full((80,), -100)
    for index, (start, piece) in enumerate(zip(layout.document_starts, pieces, strict=True)):
        input_ids[start : start + len(piece)] = torch.tensor(piece)
        if index == 0:
            labels[start : start + len(piece)] = torch.tensor(piece)
        elif index > len(prefixes):
            labels[start + 1 : start + len(piece)] = torch.tensor(piece[1:])
    return PackedBatch(input_ids, {"text": shift_targets(labels, layout)}, layout)


@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("cuts", [(), (3,), (1, 2)])
@pytest.mark.parametrize("kind", [*MODEL_KINDS, "mistral", "gemma2"])
def test_a_shared_prompt_equals_separate_documents(kind: str, cuts: tuple[int, ...], alignment: int) -> None:
    expected = answer(build_model(kind), plain_documents(ANSWERS), reduction="sample", num_channels=2)
    wrapped = wrap(build_model(kind), "alone", 1)
    window = shared_window(ANSWERS, cuts=cuts, alignment=alignment)
    metrics = run_step(wrapped, [window], reduction="sample", channels=CHANNELS)
    differences = compare(
        metrics,
        full_gradients(wrapped.inner),
        expected,
        aligned=window.layout.aligned_tokens,
        physical=80,
        channels=CHANNELS,
    )
    assert not differences, differences
    shared = (len(ANSWERS) - 1) * (len(PROMPT) - 1)
    copied = sum(len(document.tokens) for document in plain_documents(ANSWERS))
    assert metrics["tokens/source"] == copied - shared


def sharded_step(windows: list[PackedBatch]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    wrapped = wrap(build_model(), "fsdp", 2)
    mine = windows[wrapped.topology.data_rank :: 2]
    metrics = run_step(wrapped, mine, reduction="square", channels=CHANNELS)
    return metrics, {name: values.numpy() for name, values in full_gradients(wrapped.inner).items()}


def test_a_shared_prompt_beside_an_empty_rank() -> None:
    expected = answer(build_model(), plain_documents(ANSWERS), reduction="square", num_channels=2)
    windows = [shared_window(ANSWERS, alignment=8), PackedBatch.empty(80)]
    for metrics, gradients in run_on_ranks(2, sharded_step, windows):
        differences = compare(
            metrics,
            {name: torch.from_numpy(values) for name, values in gradients.items()},
            expected,
            aligned=windows[0].layout.aligned_tokens,
            physical=160,
            channels=CHANNELS,
        )
        assert not differences, differences


def test_a_prefix_that_is_not_attended_to_would_show() -> None:
    """Mutant: the same window without parents."""
    window = shared_window(ANSWERS)
    lone = Layout(
        window.layout.document_lengths,
        window.layout.document_sources,
        padded_length=window.layout.physical_tokens,
    )
    expected = answer(build_model(), plain_documents(ANSWERS), num_channels=2)
    wrapped = wrap(build_model(), "alone", 1)
    metrics = run_step(wrapped, [PackedBatch(window.input_ids, window.targets, lone)], channels=CHANNELS)
    assert abs(metrics["train/loss"] - expected.loss) > 1e-3
