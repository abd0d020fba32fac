"""Models of which a part is frozen, against the oracle: gradients of the rest, none for the frozen part."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

from exactness.driving import CHANNELS, WRAPPERS, build_window, draw_documents, run_step, whole_gradient, wrap
from oracle.models import build_model
from oracle.single_process import answer, worst_difference
from ranks import run_on_ranks

TRAINED: dict[str, Callable[[str], bool]] = {
    "head only": lambda name: name.startswith("lm_head"),
    "all but the head": lambda name: not name.startswith("lm_head"),
    "last layer": lambda name: ".layers.1." in name,
    "norms": lambda name: "norm" in name,
    "first query of each layer": lambda name: "q_proj" in name,
}


@pytest.mark.parametrize("trained", TRAINED)
def test_a_frozen_part_gets_no_gradient_and_changes_no_other(trained: str) -> None:
    documents = draw_documents(seed=11)
    expected = answer(build_model("qwen3-untied"), documents, num_channels=len(CHANNELS))

    def body() -> None:
        for wrapper, (_, worlds) in WRAPPERS.items():
            if 2 not in worlds:
                continue
            inner = build_model("qwen3-untied")
            for name, parameter in inner.named_parameters():
                parameter.requires_grad_(TRAINED[trained](name))
            wrapped = wrap(inner, wrapper, 2)
            windows = [build_window(documents[start::4], padded_length=64) for start in range(4)]
            metrics = run_step(wrapped, windows[dist.get_rank() :: 2])
            assert metrics["train/loss"] == pytest.approx(expected.loss, rel=1e-10)
            gradients = {}
            for name, parameter in inner.named_parameters():
                if TRAINED[trained](name):
                    gradients[name] = whole_gradient(parameter)
                else:
                    assert parameter.grad is None
            assert gradients
            reference = {name: expected.gradients[name] for name in gradients}
            difference, where = worst_difference(gradients, reference)
            assert difference < 1e-10, (wrapper, where)

    run_on_ranks(2, body)
