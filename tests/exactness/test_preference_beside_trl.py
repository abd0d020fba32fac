"""The same rows and weights through TRL's DPO trainer on one process: losses, gradients and rewards agree.

Both tokenise the rows by themselves. TRL pads and takes a mean over the pairs of a batch; here the sides are
packed into one window. All in float32.
"""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data.corpora import byte_tokenizer
from isoloss import Ledger, LossModel
from isoloss.batch.collation import build_batch
from isoloss.data.preference_rows import preference_format
from isoloss.objectives.preference import Preference
from oracle.models import build_model

ROWS: list[dict[str, Any]] = [
    {"prompt": "2+2?", "chosen": "4", "rejected": "a number, five or so"},
    {"prompt": "Say it: ", "chosen": "it", "rejected": "it"},
    {
        "prompt": "A rather long prompt with a short answer?",
        "chosen": "Yes, and it goes on.",
        "rejected": "n",
    },
]
BETA = 0.3
METRICS = {
    "rewards/chosen": "rewards/chosen",
    "rewards/rejected": "rewards/rejected",
    "rewards/margins": "rewards/margins",
    "logps/chosen": "logps/chosen",
    "logps/rejected": "logps/rejected",
}

LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    # name: (options here, options of TRL, rows)
    "sigmoid": ({}, {"loss_type": ["sigmoid"]}, 3),
    "hinge": ({"loss_type": "hinge"}, {"loss_type": ["hinge"]}, 3),
    # TRL divides by the lengths of the answers in IPO, whatever else is asked for
    "ipo": ({"loss_type": "ipo", "length_normalized": True}, {"loss_type": ["ipo"]}, 3),
    # of one pair alone, TRL's optimal transport is the smoothed sigmoid, which it has under no other name
    "smoothed": ({"label_smoothing": 0.2}, {"loss_type": ["aot"], "label_smoothing": 0.2}, 1),
}


def make_model(seed: int) -> Any:
    """Large enough weights for rewards that are not 0 to rounding."""
    return build_model(
        "qwen3-tied", dtype=torch.float32, seed=seed, vocab_size=len(byte_tokenizer()), initializer_range=0.1
    )


def trl_answer(rows: list[dict[str, Any]], options: dict[str, Any], folder: Path) -> Any:
    """(loss, gradients, metrics) of TRL on one batch of all rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        model = make_model(0)
        trainer = DPOTrainer(
            model=model,
            ref_model=make_model(1),
            args=DPOConfig(
                output_dir=str(folder),
                use_cpu=True,
                bf16=False,
                report_to=[],
                beta=BETA,
                max_length=None,
                gradient_checkpointing=False,
                per_device_train_batch_size=len(rows),
                **options,
            ),
            processing_class=byte_tokenizer(),
            train_dataset=Dataset.from_list(rows),
        )
        inputs = trainer.data_collator([trainer.train_dataset[place] for place in range(len(rows))])
        model.train()
        loss = trainer.compute_loss(model, inputs)
        loss.backward()
        metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return loss.item(), gradients_of(model), metrics


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize("shared_prompt", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_gradients_and_rewards_are_those_of_trl(name: str, shared_prompt: bool, tmp_path: Path) -> None:
    ours, theirs, count = LOSSES[name]
    rows = ROWS[:count]
    loss, gradients, shown = trl_answer(copy.deepcopy(rows), theirs, tmp_path)
    made = preference_format(byte_tokenizer(), shared_prompt=shared_prompt)
    window = build_batch([made.documents(row, 0) for row in rows], 512, term="preference")
    reference = LossModel(make_model(1)).requires_grad_(False).eval()
    preference = Preference(reference=reference, beta=BETA, **ours)
    model = make_model(0)
    loss_model = LossModel(model)
    ledger = Ledger(preference.terms, measures=preference.measures)
    with ledger.step([window]) as step:
        for batch in step:
            loss_model(step, batch, preference).backward()
    metrics = step.metrics()
    assert abs(loss - 0.6931) > 1e-2, "the policy is not its reference"
    assert metrics["train/loss"] == pytest.approx(loss, rel=2e-6)
    found = gradients_of(model)
    assert found.keys() == gradients.keys()
    for parameter, expected in gradients.items():
        size = expected.abs().max()
        assert (found[parameter] - expected).abs().max() <= 1e-5 * size, parameter
    if not ours.get("length_normalized"):
        for key, other in METRICS.items():
            assert metrics[key] == pytest.approx(shown[other], rel=2e-5, abs=2e-5), key
