"""Causal attention by document, as an attention function of transformers.

The layout of the window reaches it as a keyword argument of the model's forward; no model file is patched
and boundaries are never guessed from positions. Work and memory are per document.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from isoloss.batch.layout import Layout

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
        query: [1, heads, T, head_dim].
        key: [1, key_value_heads, T, head_dim].
        value: [1, key_value_heads, T, value_dim].
        attention_mask: None; the layout says all.
        layout: of the window, as `PackedBatch.model_inputs` passes it to the model.
        scaling: factor on the scores; None: 1 / sqrt(head_dim).
        dropout: 0; another value would make the loss depend on the order of the work.
        sliding_window: a query sees that many tokens of its document, itself included; None: all.
        softcap: scores become softcap * tanh(scores / softcap).
        s_aux: attention sinks, which this function does not support.
        is_causal: False, from an encoder, is an error.
        **unused: what the model hands to every attention function.

    Returns:
        ([1, T, heads, value_dim], None); zeros in slots that hold no token.

    Raises:
        ValueError: no layout, a mask, a batch of several rows, dropout, or attention that is not causal.
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
    outputs = []
    for document, (start, length, stride) in enumerate(
        zip(layout.document_starts, layout.document_lengths, layout.document_strides, strict=True)
    ):
        slots = [slice(start, start + length)]
        ancestor = layout.document_parents[document]
        while ancestor != -1:
            first = layout.document_starts[ancestor]
            slots.insert(0, slice(first, first + layout.document_lengths[ancestor]))
            ancestor = layout.document_parents[ancestor]
        outputs.append(
            _attend(
                query[:, :, start : start + length],
                _gather(key, slots),
                _gather(value, slots),
                scaling=scaling,
                sliding_window=sliding_window,
                softcap=softcap,
            )
        )
        if stride > length:
            outputs.append(_no_tokens(query, value, stride - length))
    if layout.physical_tokens > layout.aligned_tokens:
        outputs.append(_no_tokens(query, value, layout.physical_tokens - layout.aligned_tokens))
    if not layout.document_lengths:
        # An empty window keeps the projections in the graph: with gradients of None instead of zeros a rank
        # would leave the others alone in the reduction. Sums of nothing are 0 whatever the slots hold.
        outputs[-1] = outputs[-1] + sum(part[:, :, :0].sum() for part in (query, key, value))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _gather(values: Tensor, slots: list[slice]) -> Tensor:
    parts = [values[:, :, part] for part in slots]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _no_tokens(query: Tensor, value: Tensor, slots: int) -> Tensor:
    """Zeros for slots that hold no token."""
    return query.new_zeros(1, query.shape[1], slots, value.shape[3])


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention of one document's queries to its context and itself, bottom-right causal."""
    rows, columns = query.shape[2], key.shape[2]
    if softcap is None and rows == columns and (sliding_window is None or sliding_window >= rows):
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
    places = torch.arange(columns, device=query.device)
    distance = places[columns - rows :, None] - places[None, :]
    visible = distance >= 0
    if sliding_window is not None:
        visible &= distance < sliding_window
    if softcap is None:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=visible,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * factor / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, dim=-1, dtype=_softmax_dtype(query)).to(query.dtype) @ value


def _softmax_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32
