"""Tensor parallelism by the plan that a transformers model brings along.

The one place that knows transformers' `apply_tensor_parallelism`, `tp_plan` and the names of its styles, all
of which are young. Each tensor rank holds a part of the matrices (whole heads, columns, rows of the
vocabulary), and the plan's own collectives make activations whole where the model needs them whole.
"""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from isoloss.losses.linear_cross_entropy.problem import VocabularyShard
from isoloss.losses.linear_cross_entropy.vocab_parallel import shard_of
from isoloss.parallel.attention import is_transformers_model
from isoloss.reduction.gradients import PartialOverTensorRanks
from isoloss.topology import Topology

PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
"""Style of a replicated module that sees this rank's heads alone, such as q_norm.

Its own rule sums `.grad` over the ranks in every backward: with accumulation, what was summed before once
more per micro-batch (gradients were wrong by 0.8 to 2.4 of themselves with two).
"""
VOCABULARY_ROWS = "embedding_rowwise"
HEAD_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def apply_tensor_plan(model: Any, topology: Topology) -> None:
    """Spread a built transformers model over the tensor ranks, in place. Does nothing with tp_size 1.

    Call it before `fully_shard`, with the same weights on every rank, and train as without: `sum_gradients`
    and `Step.loss` see what is spread. Parameters become DTensors on `topology.tp_mesh` where the plan shards
    them. Embedding and head are sharded by rows of the vocabulary, tied ones as one parameter; the head's own
    forward is for the loss alone (`Step.loss`).

    Args:
        model: a transformers model with a tensor plan, its parameters on their device and not sharded yet.
        topology: of the run.

    Raises:
        ValueError: no plan, a model that is sharded already, or tp_size does not divide the heads.
    """
    if topology.tp_mesh is None:
        return
    # Level 2 may use transformers, a loop without it must not need it.
    from transformers.integrations.tensor_parallel import apply_tensor_parallelism

    plan = _plan_of(model, topology)
    modules = dict(model.named_modules())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    names = {module: name for name, module in modules.items()}
    if is_tied:
        # One parameter of two modules: sharded as the embedding's, and given to the head again.
        for name in (names[head], f"{names[head]}.weight"):
            plan.pop(name, None)
    if plan.get(names[embedding]) == VOCABULARY_ROWS and type(embedding) is nn.Embedding:
        for name in (names[embedding], f"{names[embedding]}.weight"):
            del plan[name]
        embedding = VocabularyParallelEmbedding(embedding, topology.tp_mesh)
        model.set_input_embeddings(embedding)
    for name in [name for name, style in plan.items() if style == PARTIAL_GRADIENT]:
        del plan[name]
        if name in modules:
            modules[name].add_module("partial_over_tensor_ranks", PartialOverTensorRanks())
    apply_tensor_parallelism(model, topology.tp_mesh, plan)
    if is_tied:
        head.weight = embedding.weight


@final
class VocabularyParallelEmbedding(nn.Module):
    """An embedding whose rows are spread over the tensor ranks, each of which looks up its own.

    In place of the style `embedding_rowwise`, whose backward makes the gradient of the whole vocabulary on
    every rank and keeps a slice of it.

    Args:
        embedding: alike on every rank.
        mesh: of the tensor ranks.
    """

    def __init__(self, embedding: nn.Embedding, mesh: DeviceMesh) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        self.weight = nn.Parameter(
            distribute_tensor(embedding.weight.detach(), mesh, [Shard(0)], src_data_rank=None),
            requires_grad=embedding.weight.requires_grad,
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        """[...] to [..., H], the same on every rank.

        Collectives: one SUM over the tensor ranks; none in backward.
        """
        weight = self.weight
        assert isinstance(weight, DTensor), "a wrapper made a plain tensor of the embedding's shard"
        shard, rows = shard_of(weight), weight.to_local()
        places = input_ids - shard.start
        is_here = (places >= 0) & (places < rows.shape[0])
        padding = None if self.padding_idx is None else self.padding_idx - int(shard.start)
        if padding is None or not 0 <= padding < rows.shape[0]:
            padding = None
        if rows.shape[0] == 0:  # fewer rows than ranks; a part of the graph all the same
            found = rows.sum() + rows.new_zeros(*input_ids.shape, self.embedding_dim)
        else:
            found = nn.functional.embedding(places.where(is_here, 0), rows, padding)
        return _SumOverRanks.apply(found.where(is_here.unsqueeze(-1), 0.0), shard)


class _SumOverRanks(torch.autograd.Function):
    """Each rank's part of a sum that all ranks use alike: the incoming gradient is that of every part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, shard: VocabularyShard) -> Tensor:
        summed = part.clone()
        shard.reduce_sum(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _plan_of(model: Any, topology: Topology) -> dict[str, str]:
    """The model's plan, one entry per module or parameter, after all that can be checked was."""
    if not is_transformers_model(model) or not model.tp_plan:
        raise ValueError(
            f"tp_size={topology.tp_size}, but {type(model).__name__} has no tensor plan; use a transformers "
            "model whose config has base_model_tp_plan, or tp_size=1"
        )
    sharded = next((name for name, one in model.named_parameters() if isinstance(one, DTensor)), None)
    if sharded is not None:
        raise ValueError(
            f"{sharded} is sharded already; apply the tensor plan to a built model once, before fully_shard"
        )
    plan = expand_plan(model, model.tp_plan)
    if topology.ep_size > 1:  # each rank has whole experts then
        plan = {name: style for name, style in plan.items() if "experts" not in name.split(".")}
    config = model.config.get_text_config()
    shards_heads = any(
        name.rsplit(".", 1)[-1] in HEAD_PROJECTIONS and style == "colwise" for name, style in plan.items()
    )
    for key in ("num_attention_heads", "num_key_value_heads") if shards_heads else ():
        heads = vars(config).get(key)
        if heads is not None and heads % topology.tp_size:
            raise ValueError(
                f"tp_size={topology.tp_size} does not divide {key} = {heads}, and a tensor rank holds whole "
                "heads; use a tp_size that does, or sp_size or cp_size for the rest"
            )
    return plan


def expand_plan(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """A plan with the layers' numbers in place of its stars: one entry per parameter and per module.

    A rule of a module is also that of its own parameters, which come first, as they are sharded before the
    module's forward is changed.
    """
    expanded = {}
    for module_name, module in model.named_modules():
        rule = plan.get(_with_stars(module_name))
        for parameter_name, _ in module.named_parameters(recurse=False):
            name = f"{module_name}.{parameter_name}" if module_name else parameter_name
            style = plan.get(_with_stars(name), rule)
            if style is not None:
                expanded[name] = style
        if rule is not None:
            expanded[module_name] = rule
    return expanded


def _with_stars(name: str) -> str:
    """Stars in place of numbers: layers.3.mlp as layers.*.mlp."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))
