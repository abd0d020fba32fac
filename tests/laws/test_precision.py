"""bfloat16 models: losses and weights stay float32, gradients are summed in float32. Row 23."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from exactness.driving import CHANNELS, build_window, draw_documents, full_gradients
from isoloss import Layout, Ledger, LossModel, PackedBatch, Step, Term, Topology, sum_gradients
from isoloss.objectives.loss_model import causal_lm
from oracle.models import build_model, decoder_layers
from ranks import run_on_ranks

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def fsdp_step(
    policy: MixedPrecisionPolicy, replicates: int, windows: list[PackedBatch], seen: dict[str, torch.dtype]
) -> tuple[dict[str, float], dict[str, Tensor]]:
    topology = Topology(dp_replicate_size=replicates)
    inner = build_model(dtype=torch.float32)
    outer = LossModel(inner)
    for layer in decoder_layers(inner):
        fully_shard(layer, mesh=topology.fsdp_mesh, mp_policy=policy)
    fully_shard(outer, mesh=topology.fsdp_mesh, mp_policy=policy)
    gradients = sum_gradients(outer, topology)
    ledger = Ledger([Term("text", "square")], CHANNELS, topology)

    def looking(model: nn.Module, step: Step, batch: PackedBatch) -> Tensor:
        share = causal_lm(model, step, batch)
        seen["parameter"] = model.get_output_embeddings().weight.dtype
        seen["weights"] = batch.weights["text"].dtype
        seen["extra"] = batch.token_extras["reference"].dtype
        seen["share"] = share.dtype
        return share

    with ledger.step(windows[topology.data_rank :: topology.data_size], gradients=gradients) as step:
        for batch in step:
            outer(step, batch, looking).backward()
    return step.metrics(), full_gradients(inner)


@pytest.mark.parametrize(("ranks", "replicates"), [(2, 1), (4, 2), (2, 2)])
def test_row_23_fsdp_in_bfloat16_reduces_in_float32(ranks: int, replicates: int) -> None:
    documents = draw_documents(seed=9)

    def windows() -> list[PackedBatch]:
        built = [build_window(documents[start::4], alignment=8, padded_length=64) for start in range(4)]
        return [
            PackedBatch(
                window.input_ids,
                window.targets,
                window.layout,
                window.weights or {"text": torch.ones(64)},
                token_extras={"reference": torch.zeros(64)},
            )
            for window in built
        ]

    def body() -> None:
        seen: dict[str, torch.dtype] = {}
        exact, reference = fsdp_step(MixedPrecisionPolicy(), replicates, windows(), seen)
        assert seen["parameter"] == torch.float32
        metrics, gradients = fsdp_step(POLICY, replicates, windows(), seen)
        assert seen == {
            "parameter": torch.bfloat16,  # the policy is at work
            "weights": torch.float32,
            "extra": torch.float32,
            "share": torch.float32,
        }
        assert metrics["train/loss"] == pytest.approx(exact["train/loss"], rel=5e-3)
        for name in ("tokens/loss", "documents", "health/books_balance"):
            assert metrics[name] == exact[name]
        for name, values in gradients.items():
            assert values.dtype == torch.float32
            error = (values - reference[name]).abs().max() / reference[name].abs().max()
            assert error < 0.06, (name, error)  # bfloat16 has 8 bits; averaging instead gives 0.5

    run_on_ranks(ranks, body)


class Parts(nn.Module):
    """One bfloat16 parameter whose gradient on each rank is that rank's cost."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

    def forward(self, step: Step, batch: PackedBatch) -> Tensor:
        return step.add(None, self.gain * batch.token_extras["costs"], batch)


@pytest.mark.parametrize("wrapper", ["plain", "ddp"])
def test_row_23_gradients_of_bfloat16_parameters_are_summed_in_float32(wrapper: str) -> None:
    """256 + 1 + 1 + 1: in bfloat16 each 1 is lost, one after the other; in float32 the sum rounds once."""

    def body() -> float:
        topology = Topology(dp_replicate_size=4)
        inner = Parts()
        outer: nn.Module = inner
        if wrapper == "ddp":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                outer = DistributedDataParallel(inner)
        gradients = sum_gradients(outer, topology)
        cost = 4 * (256.0 if dist.get_rank() == 0 else 1.0)  # 4 targets in all
        batch = PackedBatch(
            torch.zeros(1, dtype=torch.int64),
            {"text": torch.zeros(1, dtype=torch.int64)},
            Layout([1]),
            token_extras={"costs": torch.tensor([cost], dtype=torch.bfloat16)},
        )
        with Ledger([Term("text")], topology=topology).step([batch], gradients=gradients) as step:
            for one in step:
                outer(step, one).backward()
        assert step.metrics()["train/loss"] == 259.0
        assert inner.gain.grad is not None and inner.gain.grad.dtype == torch.bfloat16
        return inner.gain.grad.item()

    once_rounded = torch.tensor(259.0).bfloat16().item()
    one_by_one = torch.tensor(256.0, dtype=torch.bfloat16)
    for _ in range(3):
        one_by_one += 1.0
    assert once_rounded != one_by_one.item() == 256.0
    assert run_on_ranks(4, body) == [once_rounded] * 4
