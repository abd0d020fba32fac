"""The layouts and models that an audit goes through."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from isoloss.audit.case import AuditRow, Strategy

ModelKind = Literal["dense tied", "dense untied", "mixture of experts"]
VOCABULARY = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditLayout:
    """One way to split a step."""

    name: str
    world_size: int
    strategy: Strategy
    accumulation: int = 1
    sizes: Mapping[str, int] = field(default_factory=dict)
    experts_only: bool = False
    """Whether it makes sense for a mixture of experts alone."""

    @property
    def data_size(self) -> int:
        """Ranks that read different documents."""
        shared = 1
        for axis in ("sp_size", "cp_size", "tp_size"):
            shared *= self.sizes.get(axis, 1)
        return self.world_size // shared


def data_layouts() -> Iterator[AuditLayout]:
    """Layouts that any trainer has: accumulation, DDP, FSDP2."""
    yield AuditLayout(name="one rank", world_size=1, strategy="single")
    yield AuditLayout(name="one rank, accumulation 3", world_size=1, strategy="single", accumulation=3)
    for size in (2, 4):
        for strategy in ("ddp", "fsdp2"):
            yield AuditLayout(name=f"{strategy} {size}", world_size=size, strategy=strategy)
            yield AuditLayout(
                name=f"{strategy} {size}, accumulation 3",
                world_size=size,
                strategy=strategy,
                accumulation=3,
            )


def own_layouts() -> Iterator[AuditLayout]:
    """All layouts of isoloss."""
    yield from data_layouts()
    yield AuditLayout(name="hsdp 2x2", world_size=4, strategy="fsdp2", sizes={"dp_replicate_size": 2})
    further = [
        {"sp_size": 2},
        {"cp_size": 2},
        {"tp_size": 2},
        {"sp_size": 4},
        {"cp_size": 4},
        {"tp_size": 4},
        {"dp": 2, "sp_size": 2},
        {"dp": 2, "cp_size": 2},
        {"dp": 2, "tp_size": 2},
        {"sp_size": 2, "cp_size": 2},
        {"tp_size": 2, "sp_size": 2},
        {"dp": 2, "sp_size": 2, "cp_size": 2},
        {"dp": 2, "cp_size": 2, "tp_size": 2},
    ]
    for sizes in further:
        world_size = 1
        for size in sizes.values():
            world_size *= size
        name = " ".join(f"{axis.removesuffix('_size')}{size}" for axis, size in sizes.items())
        axes = {axis: size for axis, size in sizes.items() if axis != "dp"}
        for accumulation in (1, 3):
            yield AuditLayout(
                name=name if accumulation == 1 else f"{name}, accumulation {accumulation}",
                world_size=world_size,
                strategy="fsdp2",
                accumulation=accumulation,
                sizes=axes,
            )
    for name, world_size, sizes in (
        ("ep2", 2, {"ep_size": 2}),
        ("ep4", 4, {"ep_size": 4}),
        ("dp4 ep2", 4, {"ep_size": 2}),
        ("ep2 cp2", 4, {"ep_size": 2, "cp_size": 2}),
        ("ep2 sp2", 4, {"ep_size": 2, "sp_size": 2}),
    ):
        yield AuditLayout(
            name=name,
            world_size=world_size,
            strategy="fsdp2",
            accumulation=3,
            sizes=sizes,
            experts_only=True,
        )


def audit_rows() -> list[AuditRow]:
    """Documents of very unequal lengths from three sources: one token, no target, prompts left out."""
    generator = torch.Generator().manual_seed(11)
    rows: list[AuditRow] = []
    for number, length in enumerate([37, 1, 2, 23, 3, 14, 1, 29, 5, 8, 19, 2, 11, 31, 1, 7]):
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        prompt = [0, length // 2, length][number % 3] if number % 4 else 0
        rows.append(
            AuditRow(
                input_ids=ids,
                labels=[-100] * prompt + ids[prompt:],
                source=(0, 0, 1, 0, 2, 1)[number % 6],
            )
        )
    return rows


def assign_rows(num_rows: int, layout: AuditLayout) -> list[list[list[int]]]:
    """Rows to micro-batches, unevenly: the first data rank gets most, the last micro-batch of all none."""
    places = [
        (rank, micro_batch) for rank in range(layout.data_size) for micro_batch in range(layout.accumulation)
    ]
    assignment: list[list[list[int]]] = [
        [[] for _ in range(layout.accumulation)] for _ in range(layout.data_size)
    ]
    used = places[:-1] if len(places) > 4 else places
    for row in range(num_rows):
        rank, micro_batch = used[(row * row) % len(used)] if len(used) > 2 else used[row % len(used)]
        assignment[rank][micro_batch].append(row)
    return assignment


def model_builder(kind: ModelKind) -> Callable[[], Any]:
    """Makes the same small model on every rank."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 128,
    }

    def build() -> Any:
        torch.manual_seed(5)
        if kind == "dense tied":
            return Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True))
        if kind == "dense untied":
            return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False))
        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **shape,
                moe_intermediate_size=16,
                num_experts=8,
                num_experts_per_tok=2,
                norm_topk_prob=True,
                tie_word_embeddings=False,
                experts_implementation="eager",  # the grouped product of torch knows no float64
            )
        )

    return build
