"""`PackedBatch`: checks, shards, pickling, and a wrapped forward that must leave it alone."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from batch.strategies import documents
from isoloss import IGNORE_INDEX, Document, Layout, PackedBatch, Topology
from isoloss.batch.collation import build_batch
from isoloss.sharding import shard_slots
from ranks import on_ranks, run_on_ranks

IGN = IGNORE_INDEX


def example() -> PackedBatch:
    units = [
        [Document([1, 2, 3, 4, 5], source=1, weight=0.5, document_extras={"value": torch.tensor(2.0)})],
        [
            Document([6, 7], group=0),
            Document([7, 8, 9], group=0, parent=0, source=0, document_extras={"value": torch.tensor(3.0)}),
        ],
        [
            Document(
                [4], [IGN], term_labels={"class": [1]}, document_extras={"value": torch.tensor(4.0)}
            )
        ],
    ]  # fmt: skip
    return build_batch(units, 40, alignment=8)


def per_slot(batch: PackedBatch) -> dict[str, Tensor]:
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "document_ids": batch.document_ids,
        "counted_document_ids": batch.counted_document_ids,
        "sources": batch.sources,
        **{f"targets/{name}": values for name, values in batch.targets.items()},
        **{f"weights/{name}": values for name, values in batch.weights.items()},
        **{f"extras/{name}": values for name, values in batch.token_extras.items()},
    }


def assert_same(one: PackedBatch, other: PackedBatch) -> None:
    assert one.layout == other.layout
    assert one.shards == other.shards
    mine, theirs = per_slot(one), per_slot(other)
    assert mine.keys() == theirs.keys()
    for name, values in mine.items():
        assert values.dtype == theirs[name].dtype, name
        assert torch.equal(values, theirs[name]), name
    assert one.counts.keys() == other.counts.keys()
    for term, counts in one.counts.items():
        assert torch.equal(counts.num_targets, other.counts[term].num_targets)
        assert torch.equal(counts.weight_sums, other.counts[term].weight_sums)
        assert torch.equal(counts.first_weights, other.counts[term].first_weights)


def test_what_a_batch_holds() -> None:
    batch = example()
    assert len(batch) == 40
    assert batch.layout.num_documents == 3
    assert batch.counts["text"].num_targets.tolist() == [4, 0, 2, 0]
    assert batch.counts["text"].weight_sums.tolist() == [2.0, 0.0, 2.0, 0.0]
    assert batch.counts["class"].num_targets.tolist() == [0, 0, 0, 1]
    assert batch.loss_tokens.tolist() == [4, 0, 2, 1]
    assert batch.document_extras["value"].tolist() == [2.0, 3.0, 4.0]
    inputs = batch.model_inputs()
    assert inputs["input_ids"].shape == inputs["position_ids"].shape == (1, 40)
    assert inputs["layout"] is batch.layout


def test_a_slot_with_targets_of_two_terms_is_one_loss_token() -> None:
    batch = build_batch([[Document([1, 2], term_labels={"class": [5, IGN]})]], 8)
    assert batch.loss_tokens.tolist() == [1]


@given(st.lists(documents(max_tokens=12, min_tokens=1), max_size=5))
def test_law_loss_is_at_most_source_is_at_most_aligned_is_at_most_physical(
    given_documents: list[Document],
) -> None:
    batch = build_batch([[document] for document in given_documents], 80)
    layout = batch.layout
    assert (
        int(batch.loss_tokens.sum())
        <= layout.source_tokens
        <= layout.aligned_tokens
        <= layout.physical_tokens
    )
    lengths = torch.tensor(layout.document_lengths, dtype=torch.int64)
    assert bool((batch.loss_tokens <= lengths).all())


@pytest.mark.parametrize("copier", [lambda batch: pickle.loads(pickle.dumps(batch)), copy.deepcopy])
def test_a_batch_survives_pickling_and_copying(copier: object) -> None:
    batch = example()
    assert_same(copier(batch), batch)  # type: ignore[operator]


def test_an_empty_window_has_terms_without_targets() -> None:
    batch = PackedBatch.empty(16, ["text", "class"], pad_token_id=3)
    assert batch.input_ids.tolist() == [3] * 16
    assert sorted(batch.targets) == ["class", "text"]
    assert batch.layout.num_documents == 0
    assert int(batch.loss_tokens.sum()) == 0
    assert batch.counts["text"].num_targets.tolist() == []


def test_to_moves_every_tensor_and_leaves_the_counts() -> None:
    moved = example().to("meta")
    assert {values.device.type for values in per_slot(moved).values()} == {"meta"}
    assert moved.document_extras["value"].device.type == "meta"
    assert moved.counts["text"].num_targets.device.type == "cpu"
    assert_same(example().to("cpu"), example())


def _shard(cp_size: int, sp_size: int) -> list[dict[str, object]]:
    topology = Topology(cp_size=cp_size, sp_size=sp_size)
    whole = example()
    shard = whole.shard(topology)
    assert shard.layout is whole.layout
    assert shard.shards == cp_size * sp_size
    assert len(whole) == 40, "the whole is left as it was"
    if cp_size * sp_size > 1:
        with pytest.raises(ValueError, match="already; shard whole windows"):
            shard.shard(topology)
    values: dict[str, object] = {name: column.tolist() for name, column in per_slot(shard).items()}
    values["counts"] = {term: counts.num_targets.tolist() for term, counts in shard.counts.items()}
    return [values, {"place": (topology.data_rank, topology.cp_rank, topology.sp_rank)}]


@pytest.mark.parametrize(("cp_size", "sp_size"), [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2)])
def test_row_8_shards_hold_every_slot_once_and_know_the_counts_of_the_whole(
    cp_size: int, sp_size: int
) -> None:
    results = run_on_ranks(4, _shard, cp_size, sp_size)
    whole = per_slot(example())
    data_size = 4 // (cp_size * sp_size)
    for replica in range(data_size):
        shards = [values for values, where in results if where["place"][0] == replica]
        assert len(shards) == cp_size * sp_size
        for name, column in whole.items():
            together = [value for shard in shards for value in shard[name]]
            assert sorted(together) == sorted(column.tolist()), name
        for shard in shards:
            assert len(shard["input_ids"]) == 40 // (cp_size * sp_size)
            assert shard["counts"] == {"text": [4, 0, 2, 0], "class": [0, 0, 0, 1]}
            for token, document in zip(shard["input_ids"], shard["document_ids"], strict=True):
                assert (document == -1) == (token == 0), "columns are cut alike"


def test_row_16_boundaries_on_two_contiguous_shards() -> None:
    batch = build_batch([[Document([1, 2, 3])], [Document([4, 5, 6])], [Document([7, 8])]], 8, alignment=1)
    assert batch.layout.cu_seqlens.tolist() == [0, 3, 6, 8]
    boundaries = []
    for sp_rank in range(2):
        slots = shard_slots(batch.layout, cp_size=1, cp_rank=0, sp_size=2, sp_rank=sp_rank)
        held = batch.document_ids[slots].tolist()
        boundaries.append([0, *[place for place in range(1, 4) if held[place] != held[place - 1]], 4])
    assert boundaries == [[0, 3, 4], [0, 2, 4]]


class Spy(nn.Module):
    """Notes what reaches a wrapped forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, batch: PackedBatch, bare: Tensor, in_dict: dict[str, Tensor]) -> Tensor:
        self.seen = {
            "weights": batch.weights["text"].dtype,
            "extra": batch.token_extras["scores"].dtype,
            "document_extra": batch.document_extras["value"].dtype,
            "bare": bare.dtype,
            "in_dict": in_dict["weights"].dtype,
        }
        self.batch = batch
        return self.linear(torch.ones(4, dtype=self.linear.weight.dtype)).float().sum()


@on_ranks(2)
def test_fsdp2_in_bfloat16_leaves_a_batch_unharmed() -> None:
    batch = build_batch(
        [
            [
                Document(
                    [1, 2, 3],
                    weight=[0.1, 0.2, 0.3],
                    token_extras={"scores": torch.rand(3)},
                    document_extras={"value": torch.tensor(0.1)},
                )
            ]
        ],
        8,
    )
    topology = Topology()
    model = fully_shard(
        Spy(),
        mesh=topology.fsdp_mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    model(batch, torch.ones(2), {"weights": torch.ones(2)}).backward()
    assert model.batch is batch
    assert model.seen["weights"] == model.seen["extra"] == model.seen["document_extra"] == torch.float32
    assert batch.weights["text"].tolist()[:2] == torch.tensor([0.2, 0.3]).tolist()
    # the reason for a plain class: what FSDP2 does to tensors that it can see
    assert model.seen["bare"] == model.seen["in_dict"] == torch.bfloat16


LAYOUT = Layout([3, 2], document_groups=[0, 0], document_parents=[-1, 0], alignment=4, padded_length=12)


def column(*values: int, fill: int = IGN) -> Tensor:
    return torch.tensor([*values, *[fill] * (12 - len(values))])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": torch.zeros(11, dtype=torch.int64)}, r"input_ids has shape \[11\], the layout has 12"),
        ({"input_ids": torch.zeros(1, 12, dtype=torch.int64)}, r"input_ids has shape \[1, 12\]"),
        ({"targets": {"text": torch.zeros(3, dtype=torch.int64)}}, r"targets\['text'\] has shape \[3\]"),
        ({"targets": {"text": torch.zeros(12)}}, r"targets\['text'\] must be int64, got torch.float32"),
        ({"targets": {"text": column(IGN, IGN, IGN, 5)}}, r"targets\['text'\] has a target in an alignment"),
        ({"targets": {"text": column(*[IGN] * 11, 5)}}, r"alignment or padding slot"),
        ({"targets": {"text": column(5)}}, r"is the parent of another; a prefix holds the prompt"),
        ({"weights": {"text": torch.ones(11)}}, r"weights\['text'\] has shape \[11\]"),
        ({"weights": {"other": torch.ones(12)}}, r"weights\['other'\] has no targets; .* \['text'\]"),
        ({"weights": {"text": torch.ones(12, dtype=torch.int64)}}, r"must be float32, got torch.int64"),
        ({"weights": {"text": torch.full((12,), -1.0)}}, r"negative or non-finite weight; use weights >= 0"),
        ({"weights": {"text": torch.full((12,), float("nan"))}}, r"negative or non-finite weight"),
        ({"token_extras": {"scores": torch.zeros(11, 2)}}, r"token_extras\['scores'\] has shape \[11, 2\]"),
        ({"document_extras": {"value": [1, 2]}}, r"document_extras\['value'\] has 2 entries for 1 documents"),
        ({"document_extras": {"value": torch.tensor(1.0)}}, r"document_extras\['value'\] is one value for 1"),
        ({"document_extras": {"value": 1.0}}, r"document_extras\['value'\] is one value for 1 documents"),
    ],
)
def test_errors_name_the_field_the_value_and_what_to_do(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "input_ids": torch.zeros(12, dtype=torch.int64),
        "targets": {"text": column(IGN, IGN, IGN, IGN, 5)},
        "layout": LAYOUT,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        PackedBatch(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": [1] * 12}, r"input_ids must be a Tensor, got \[1, 1, .* \(list\); make it with torch"),
        ({"targets": {"text": [1] * 12}}, r"targets\['text'\] must be a Tensor"),
        ({"targets": column(1)}, r"targets must be a Mapping, got tensor.* \(Tensor\); give \{'text'"),
        ({"weights": {"text": [1.0] * 12}}, r"weights\['text'\] must be a Tensor"),
        ({"token_extras": {"scores": [1.0] * 12}}, r"token_extras\['scores'\] must be a Tensor"),
        ({"layout": [12]}, r"layout must be a Layout, got \[12\] \(list\); make it with Layout"),
    ],
)
def test_what_is_no_tensor_is_named(changes: dict[str, object], message: str) -> None:
    arguments = {"input_ids": column(), "targets": {"text": column(IGN)}, "layout": LAYOUT, **changes}
    with pytest.raises(TypeError, match=message):
        PackedBatch(**arguments)  # type: ignore[arg-type]
