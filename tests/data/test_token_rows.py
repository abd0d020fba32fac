"""Rows whose targets carry a teacher's classes, or advantages."""

import math
from typing import Any

import pytest
import torch

from data.corpora import byte_tokenizer
from isoloss import pack
from isoloss.data.errors import RowError
from isoloss.data.token_rows import distillation_format, policy_format

STORED = {
    "input_ids": [5, 6, 7],
    "labels": [-100, 6, 7],
    "teacher_token_ids": [[6, 1], [7, 2], [8, 3]],
    "teacher_logprobs": [[-0.1, -3.0], [-0.2, -2.0], [-0.3, -1.0]],
}
SAMPLED = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8], "advantage": [0.5, -1.0]}


def test_stored_classes_lie_at_the_slot_that_predicts() -> None:
    made = distillation_format(byte_tokenizer(), "assistant", stored_classes=300, with_cross_entropy=True)
    assert not made.check(STORED)
    (batch,) = pack(made.documents(STORED, 0), 8, term="distillation")
    batch = made.complete(batch)
    assert batch.targets["distillation"].tolist()[:3] == batch.targets["text"].tolist()[:3] == [6, 7, -100]
    assert batch.token_extras["teacher_ids"][:2].tolist() == [[6, 1], [7, 2]]
    assert int(batch.loss_tokens.sum()) == 2  # a slot of two terms is one target


def test_weights_go_to_both_terms() -> None:
    made = distillation_format(byte_tokenizer(), "assistant", with_cross_entropy=True)
    (batch,) = pack(made.documents({"text": "ab", "weight": 2.0}, 0), 8, term="distillation")
    batch = made.complete(batch)
    assert torch.equal(batch.weights["text"], batch.weights["distillation"])


def test_advantages_lie_at_the_slot_that_predicts() -> None:
    made = policy_format(byte_tokenizer(), "assistant")
    made.check(SAMPLED | {"old_log_probs": [-0.5, -0.25]})
    (batch,) = pack(made.documents(SAMPLED | {"old_log_probs": [-0.5, -0.25]}, 0), 8, term="policy")
    assert batch.targets["policy"].tolist()[:4] == [-100, 7, 8, -100]
    assert batch.token_extras["advantages"][:4].tolist() == [0, 0.5, -1.0, 0]
    assert batch.token_extras["old_log_probs"][:4].tolist() == [0, -0.5, -0.25, 0]


def test_one_advantage_is_that_of_every_token_of_the_answer() -> None:
    """Rows with and without recorded log-probabilities share a window."""
    made = policy_format(byte_tokenizer(), "assistant")
    row = {"prompt": "2+2?", "completion": "4", "advantage": 1.5}
    made.check(row)
    documents = [*made.documents(row, 0), *made.documents(SAMPLED | {"old_log_probs": [-1.0, -2.0]}, 0)]
    (batch,) = pack(documents, 64, term="policy")
    is_target = batch.targets["policy"] != -100
    assert sorted(batch.token_extras["advantages"][is_target].tolist()) == [-1.0, 0.5, 1.5, 1.5]
    assert int(batch.token_extras["old_log_probs"].isnan().sum()) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher_token_ids": None}, "teacher_token_ids is missing"),
        (
            {"teacher_logprobs": [[-0.1, -3.0]]},
            "teacher_logprobs must be a list with an entry for each",
        ),
        ({"teacher_token_ids": [[6, 1], [7, 2], [8]]}, r"teacher_token_ids\[2\] must be a list of 2 entries"),
        ({"teacher_token_ids": [[6, 1], [7, 2], [8, 9999]]}, r"\[2\] holds 9999, the model's vocabulary has"),
        ({"teacher_token_ids": [[6, 1], [7, 7], [8, 3]]}, r"\[1\] holds a class twice"),
        ({"teacher_logprobs": [[-0.1, -3.0], [0.5, -2.0], [-0.3, -1.0]]}, r"\[1\] holds 0.5; give log-prob"),
        ({"teacher_logprobs": [[-0.1, -3.0], [math.nan, -2.0], [-0.3, -1.0]]}, "holds nan"),
        ({"input_ids": None, "labels": None, "text": "abc"}, "needs input_ids"),
    ],
)
def test_stored_classes_at_fault(change: dict[str, Any], message: str) -> None:
    made = distillation_format(byte_tokenizer(), "assistant", stored_classes=300)
    with pytest.raises(RowError, match=message):
        made.check(STORED | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantage": None}, "advantage is missing"),
        ({"advantage": [0.5, math.nan]}, r"advantage\[1\] must be a finite number"),
        ({"advantage": "high"}, r"advantage\[0\] must be a finite number, got 'high'"),
        ({"old_log_probs": -1.0}, "old_log_probs must be a list"),
        ({"old_log_probs": [-1.0, 0.5]}, "log-probabilities are at most 0"),
    ],
)
def test_advantages_at_fault(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        policy_format(byte_tokenizer(), "assistant").check(SAMPLED | change)


def test_lists_that_do_not_fit_the_tokens() -> None:
    made = policy_format(byte_tokenizer(), "assistant")
    with pytest.raises(RowError, match="advantage has 3 entries for 2 sampled tokens"):
        made.documents(SAMPLED | {"advantage": [1, 2, 3]}, 0)
