"""Causal attention by document, as an attention function of transformers.

The layout of the window reaches it as a keyword argument of the model's forward; no model file is patched
and boundaries are never guessed from positions. Work and memory are per document. Where a window lies on
several ranks the topology comes along: the sequence ranks swap slots for heads, the context ranks gather keys
and values.
"""

import math
import sys
from typing import Any

import torch
from torch import Tensor, nn

from isoloss.batch.layout import Layout
from isoloss.parallel.document_attention import Scores, attend_pieces, copy_to_device
from isoloss.parallel.exchange import gather_heads, gather_slots, scatter_heads
from isoloss.parallel.keyword_arguments import find_dropping_module
from isoloss.sharding import document_pieces, window_order
from isoloss.topology import Topology

ATTENTION_NAME = "isoloss"
SUPPORTED_LAYER_TYPES = ("full_attention", "sliding_attention")


def is_transformers_model(model: nn.Module) -> bool:
    """Whether `model` is a transformers model; transformers is not imported for it."""
    # A transformers model cannot exist before its library was imported; importing it here would make
    # transformers a dependency of loops that do not use it.
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def use_packed_attention(model: nn.Module) -> None:
    """Set attention by document on a transformers model.

    Raises:
        ValueError: a part of the model mixes tokens in another way than by attention that can be replaced.
            It would take the layout, ignore it, and let packed documents see each other.
    """
    import transformers

    assert isinstance(model, transformers.PreTrainedModel), (
        "only transformers models have an attention to set"
    )
    transformers.AttentionInterface.register(ATTENTION_NAME, packed_attention)
    model.set_attn_implementation(ATTENTION_NAME)
    config = model.config.get_text_config()
    layer_types = vars(config).get("layer_types") or ()
    other = sorted(set(layer_types).difference(SUPPORTED_LAYER_TYPES))
    if config._attn_implementation != ATTENTION_NAME:
        reason = "its attention cannot be replaced"
    elif other:
        reason = f"it has layers of type {', '.join(other)}"
    elif model._is_stateful:
        reason = "it has recurrent layers"
    elif (dropping := find_dropping_module(model.get_decoder(), config)) is not None:
        reason = f"its {dropping} calls attention without the keyword arguments that bring the layout"
    else:
        return
    raise ValueError(
        f"{type(model).__name__} does not keep packed documents apart: {reason}; use a model whose layers "
        f"are {' or '.join(SUPPORTED_LAYER_TYPES)} through transformers' attention interface"
    )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    topology: Topology | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Each document attends to its context (its parent's tokens, and theirs), then causally to itself.

    Args:
        module: the attention module that calls; named in errors.
        query: [1, heads, n, head_dim], for the slots that this rank holds: n = T, or T / (cp * sp).
        key: [1, key_value_heads, n, head_dim].
        value: [1, key_value_heads, n, value_dim].
        attention_mask: None; the layout says all.
        layout: of the whole window, as `PackedBatch.model_inputs` passes it to the model.
        topology: over whose cp and sp ranks the window is cut; None: it is whole.
        scaling: factor on the scores; None: 1 / sqrt(head_dim).
        dropout: 0; another value would make the loss depend on the order of the work.
        sliding_window: a query sees that many tokens of its document, itself included; None: all.
        softcap: scores become softcap * tanh(scores / softcap).
        s_aux: attention sinks, which this function does not support.
        is_causal: False, from an encoder, is an error.
        **unused: what the model hands to every attention function.

    Returns:
        ([1, n, heads, value_dim], None); zeros in slots that hold no token.

    Collectives: under sp two all-to-alls, under cp one all-gather; in backward under sp two all-to-alls,
    under cp one reduce-scatter. Never more or fewer, whatever the window holds.

    Raises:
        ValueError: no layout, a mask, a batch of several rows, dropout, attention that is not causal, slots
            that are not this rank's, or heads that sp_size does not divide.
        NotImplementedError: attention sinks.
    """
    if layout is None:
        raise ValueError(
            "attention 'isoloss' needs the layout of the window: call the model with "
            "**batch.model_inputs(), or model.set_attn_implementation('sdpa') to use it outside training"
        )
    if attention_mask is not None or query.shape[0] != 1:
        raise ValueError(
            f"attention 'isoloss' takes one packed row and no mask, got {query.shape[0]} rows"
            f"{'' if attention_mask is None else ' and a mask'}; the layout holds the document boundaries"
        )
    if dropout:
        raise ValueError(
            f"attention dropout is {dropout}; the loss would depend on the order of the work. "
            "Set attention_dropout: 0 in the model's config"
        )
    if is_causal is False:
        raise ValueError(
            f"{type(module).__name__} asks for attention in both directions, attention 'isoloss' is causal; "
            "use a decoder"
        )
    if s_aux is not None:
        raise NotImplementedError("attention sinks (s_aux) are not supported by attention 'isoloss'")
    query, key, value = _autocast(query, key, value)
    scores = Scores(scaling, sliding_window, softcap)
    if topology is None:
        _check_slots(query, layout, cp_size=1, sp_size=1)
        pieces = document_pieces(layout, cp_size=1, cp_rank=0)
        output = attend_pieces(query, key, value, layout, pieces, scores)
    else:
        _check_slots(query, layout, cp_size=topology.cp_size, sp_size=topology.sp_size)
        query, key, value = _gather_window(query, key, value, layout, topology)
        pieces = document_pieces(layout, cp_size=topology.cp_size, cp_rank=topology.cp_rank)
        output = attend_pieces(query, key, value, layout, pieces, scores)
        if topology.sp_group is not None:
            output = gather_heads(output, topology.sp_group)
    return output.transpose(1, 2).contiguous(), None


def _autocast(*parts: Tensor) -> list[Tensor]:
    """What autocast would make of them: they are computed with in backward too, where it is off."""
    device = parts[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(parts)
    dtype = torch.get_autocast_dtype(device)
    return [part if part.dtype == torch.float64 else part.to(dtype) for part in parts]


def _check_slots(query: Tensor, layout: Layout, *, cp_size: int, sp_size: int) -> None:
    heads, slots = query.shape[1:3]
    expected = layout.physical_tokens // (cp_size * sp_size)
    if slots != expected:
        raise ValueError(
            f"attention 'isoloss' got {slots} slots of a window of {layout.physical_tokens}, of which a "
            f"rank holds {expected} (cp_size={cp_size}, sp_size={sp_size}); call the model with "
            "**batch.model_inputs() of the batch that the step yields"
        )
    if heads % sp_size:
        raise ValueError(
            f"sp_size={sp_size} does not divide the {heads} attention heads of a rank, which it spreads over "
            "its ranks; use an sp_size that does, or cp_size, which needs no heads"
        )


def _gather_window(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, topology: Topology
) -> tuple[Tensor, Tensor, Tensor]:
    """The context rank's queries of some heads, and the whole window's keys and values for them.

    Collectives: one all-to-all under sp, one all-gather under cp, and as many in backward.
    """
    if topology.sp_group is not None:
        # As few copies as let every rank have the key heads of its query heads.
        repeats = math.lcm(key.shape[1], topology.sp_size) // key.shape[1]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        query, key, value = scatter_heads([query, key, value], topology.sp_group)
    if topology.cp_group is not None:
        order = copy_to_device(window_order(layout, cp_size=topology.cp_size), key.device)
        key, value = (part.index_select(2, order) for part in gather_slots([key, value], topology.cp_group))
    return query, key, value
