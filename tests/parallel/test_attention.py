"""Attention by document against eager attention over one document at a time, in float64."""

import math

import pytest
import torch
import transformers
from torch import nn

from isoloss import Layout, PackedBatch
from isoloss.parallel.attention import packed_attention, use_packed_attention

F64 = torch.float64


def eager(query, key, value, *, scaling=None, sliding_window=None, softcap=None):
    """Plain attention of the last rows of one sequence to all of it: [heads, n, d] each, bottom-right."""
    rows, columns = query.shape[1], key.shape[1]
    repeats = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
    scores = query @ key.transpose(1, 2) * (1 / math.sqrt(query.shape[2]) if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    for row in range(rows):
        place = columns - rows + row
        for column in range(columns):
            if column > place or (sliding_window is not None and place - column >= sliding_window):
                scores[:, row, column] = float("-inf")
    return torch.softmax(scores, -1) @ value


def by_document(layout, query, key, value, **options):
    """[T, heads, d], zeros where no token is; a document's context is its parent, and the parent's."""
    output = torch.zeros(layout.physical_tokens, query.shape[0], value.shape[2], dtype=F64)
    spans = [
        list(range(start, start + length))
        for start, length in zip(layout.document_starts, layout.document_lengths, strict=True)
    ]
    pieces = []
    for document, own in enumerate(spans):
        seen, parent = list(own), layout.document_parents[document]
        while parent != -1:
            seen = spans[parent] + seen
            parent = layout.document_parents[parent]
        out = eager(query[:, own], key[:, seen], value[:, seen], **options)
        pieces.append((own, out.transpose(0, 1)))
    return output.index_put(
        (torch.tensor([slot for own, _ in pieces for slot in own], dtype=torch.int64),),
        torch.cat([out for _, out in pieces]) if pieces else output[:0],
    )


def tensors(layout, heads=4, key_value_heads=4, head_dim=8, value_dim=8):
    generator = torch.Generator().manual_seed(layout.physical_tokens)
    shapes = ((heads, head_dim), (key_value_heads, head_dim), (key_value_heads, value_dim))
    return [
        torch.randn(1, count, layout.physical_tokens, width, dtype=F64, generator=generator).requires_grad_()
        for count, width in shapes
    ]


PLAIN = Layout([5, 1, 9, 3], alignment=4, padded_length=32)
TREE = Layout([4, 3, 5, 2, 6], None, [0, 0, 0, 0, -1], [-1, 0, 0, 1, -1], alignment=2, padded_length=30)


@pytest.mark.parametrize("layout", [PLAIN, TREE, Layout([7]), Layout([1, 1, 1])], ids=repr)
@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scaling": 0.3},
        {"sliding_window": 3},
        {"sliding_window": 1},
        {"sliding_window": 100},
        {"softcap": 0.7},
        {"softcap": 2.0, "sliding_window": 4, "scaling": 1.5},
    ],
    ids=str,
)
def test_packed_attention_is_eager_attention_by_document(layout, key_value_heads, options):
    query, key, value = tensors(layout, key_value_heads=key_value_heads, value_dim=6)
    expected = by_document(layout, query[0], key[0], value[0], **options)
    output, weights = packed_attention(nn.Identity(), query, key, value, None, layout=layout, **options)
    assert weights is None and output.shape == (1, *expected.shape)
    torch.testing.assert_close(output[0], expected, rtol=0, atol=1e-14)
    upstream = torch.randn(expected.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((output[0] * upstream).sum(), (query, key, value))
    theirs = torch.autograd.grad((expected * upstream).sum(), (query, key, value))
    for found, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=2e-14)


def test_slots_without_a_token_reach_nothing_and_hold_zeros():
    query, key, value = tensors(PLAIN)
    blank = ~PLAIN.is_token()
    assert blank.sum() == 14
    with torch.no_grad():
        for part in (query, key, value):
            part[:, :, blank] = float("nan")
    output, _ = packed_attention(nn.Identity(), query, key, value, None, layout=PLAIN)
    assert output[0, blank].eq(0).all()
    assert output.isfinite().all()
    output.sum().backward()
    for part in (query, key, value):
        assert part.grad[:, :, blank].eq(0).all() and part.grad.isfinite().all()


def test_an_empty_window_keeps_its_projections_in_the_graph():
    """Gradients are zeros, not None: a rank without data takes part in the reduction."""
    query, key, value = tensors(Layout([], padded_length=6))
    output, _ = packed_attention(nn.Identity(), query, key, value, None, layout=Layout([], padded_length=6))
    assert output.shape == (1, 6, 4, 8) and output.eq(0).all()
    output.sum().backward()
    assert all(part.grad is not None and part.grad.eq(0).all() for part in (query, key, value))


def test_what_cannot_be_right_is_an_error():
    query, key, value = tensors(PLAIN)

    def attend(*parts, mask=None, layout=PLAIN, **options):
        packed_attention(nn.Identity(), *parts, mask, layout=layout, **options)

    with pytest.raises(ValueError, match="needs the layout of the window"):
        attend(query, key, value, layout=None)
    with pytest.raises(ValueError, match="got 1 rows and a mask"):
        attend(query, key, value, mask=torch.ones(1))
    with pytest.raises(ValueError, match="one packed row and no mask, got 2 rows;"):
        attend(*(part.expand(2, -1, -1, -1) for part in (query, key, value)))
    with pytest.raises(ValueError, match=r"attention dropout is 0.1"):
        attend(query, key, value, dropout=0.1)
    with pytest.raises(ValueError, match="Identity asks for attention in both directions"):
        attend(query, key, value, is_causal=False)
    with pytest.raises(NotImplementedError, match="attention sinks"):
        attend(query, key, value, s_aux=torch.zeros(4))


# -- transformers models

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "initializer_range": 0.4,  # large enough for softcaps and windows to matter
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class GemmaNorm(nn.Module):
    """Gemma's norm in float64; that of transformers sums its gradient over the rows in float32."""

    def __init__(self, original):
        super().__init__()
        self.weight = nn.Parameter(torch.randn_like(original.weight))
        self.eps = original.eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


def with_exact_norms(model):
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "Gemma2RMSNorm":
                setattr(parent, name, GemmaNorm(child))
    return model


def gemma2():
    return transformers.Gemma2Model(
        transformers.Gemma2Config(
            **SIZES,
            sliding_window=3,
            attn_logit_softcapping=0.5,
            query_pre_attn_scalar=2,
            layer_types=["sliding_attention", "full_attention"],
        )
    )


def mistral():
    return transformers.MistralModel(transformers.MistralConfig(**SIZES, sliding_window=3))


def outputs(model, batch):
    return model(**batch.model_inputs(), use_cache=False).last_hidden_state[0]


def window(lengths, ids, **options):
    layout = Layout(lengths, **options)
    filled = torch.zeros(layout.physical_tokens, dtype=torch.int64)
    filled[layout.is_token()] = ids
    return PackedBatch(filled, {}, layout)


@pytest.mark.parametrize("build", [gemma2, mistral])
def test_a_packed_window_is_its_documents_one_at_a_time(build):
    torch.manual_seed(0)
    model = with_exact_norms(build().double())
    use_packed_attention(model)
    lengths = [6, 1, 9]
    ids = torch.randint(3, 32, (sum(lengths),))
    packed = window(lengths, ids, alignment=4, padded_length=28)
    singles = [window([len(part)], part) for part in ids.split(lengths)]
    together = outputs(model, packed)[packed.layout.is_token()]
    apart = torch.cat([outputs(model, single) for single in singles])
    # transformers keeps float32 islands (norms, rotary embedding) in a float64 model; both sides share them
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-12)
    upstream = torch.randn(together.shape, dtype=F64)
    ours = torch.autograd.grad((together * upstream).sum(), model.parameters())
    theirs = torch.autograd.grad((apart * upstream).sum(), model.parameters())
    for found, right in zip(ours, theirs, strict=True):
        assert (found - right).abs().max() <= 1e-12 * right.abs().max()


@pytest.mark.parametrize("build", [gemma2, mistral])
def test_one_document_is_what_eager_attention_of_transformers_computes(build):
    """Softcap, sliding window and scale reach our attention as the model means them."""
    torch.manual_seed(0)
    model = build().double()
    batch = window([12], torch.randint(3, 32, (12,)))
    model.set_attn_implementation("eager")
    inputs = {name: values for name, values in batch.model_inputs().items() if name != "layout"}
    expected = model(**inputs, use_cache=False).last_hidden_state[0]
    use_packed_attention(model)
    # its eager softmax is float32
    torch.testing.assert_close(outputs(model, batch), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Bloom", "its attention cannot be replaced"),
        ("Mamba", "it has recurrent layers"),
        ("Llama4", "it has layers of type chunked_attention"),
    ],
)
def test_models_that_would_mix_documents_are_refused(name, reason):
    if name == "Llama4":
        config = transformers.Llama4TextConfig(
            **SIZES, intermediate_size_mlp=24, num_local_experts=2, attention_chunk_size=4
        )
        model = transformers.Llama4ForCausalLM(config)
    elif name == "Mamba":
        model = transformers.MambaModel(
            transformers.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1)
        )
    else:
        config = transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2)
        model = transformers.BloomModel(config)
    with pytest.raises(ValueError, match=f"does not keep packed documents apart: {reason}"):
        use_packed_attention(model)
