"""A model with its loss in one forward: transformers models, modules and objectives of one's own."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy

from isoloss import Layout, Ledger, LossModel, PackedBatch, Term, shift_targets
from isoloss.objectives.loss_model import causal_lm, logit_options

F64 = torch.float64
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def window(lengths, alignment=4, padded_length=None):
    layout = Layout(lengths, [0] * len(lengths), alignment=alignment, padded_length=padded_length)
    ids = torch.randint(3, 32, (layout.physical_tokens,), generator=torch.Generator().manual_seed(0))
    return PackedBatch(ids, {"text": shift_targets(ids, layout)}, layout)


def train_step(model, *windows, **options):
    """One step; its metrics, and the gradients by name."""
    ledger = Ledger([Term("text")], channels=["docs"])
    with ledger.step(windows) as step:
        for batch in step:
            model(step, batch, **options).backward()
    return step.metrics(), {name: parameter.grad for name, parameter in model.named_parameters()}


CONFIGS = {
    "qwen3 tied": lambda: transformers.Qwen3Config(**SIZES, head_dim=4, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=4, final_logit_softcapping=2.0),
    "cohere": lambda: transformers.CohereConfig(**SIZES, logit_scale=0.3),
    "granite": lambda: transformers.GraniteConfig(**SIZES, logits_scaling=4.0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a72_row_12_the_loss_of_a_transformers_model_is_its_own(name):
    """row 12: documents one at a time through the model's own forward; softcap and logit scale included."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    reference = transformers.AutoModelForCausalLM.from_config(config).double()
    reference.load_state_dict(model.state_dict())
    batch = window([6, 1, 9], padded_length=28)
    total = torch.zeros((), dtype=F64)
    layout = batch.layout
    for start, length in zip(layout.document_starts, layout.document_lengths, strict=True):
        ids = batch.input_ids[start : start + length]
        logits = reference(ids.unsqueeze(0), use_cache=False).logits[0, :-1]
        share = cross_entropy(logits, ids[1:], reduction="sum") / 13
        share.backward()
        total += share.detach()
    metrics, gradients = train_step(LossModel(model), batch)
    # float32 softmax in transformers' own attention and, in some families, float32 logits
    assert metrics["train/loss"] == pytest.approx(total.item(), rel=1e-5)
    for parameter_name, parameter in reference.named_parameters():
        difference = (gradients[f"model.{parameter_name}"] - parameter.grad).abs().max()
        assert difference <= 1e-4 * parameter.grad.abs().max(), parameter_name


def test_logit_options_refuse_what_they_do_not_know():
    assert logit_options(transformers.LlamaConfig(**SIZES)) == {}
    assert logit_options(transformers.GraniteConfig(**SIZES, logits_scaling=1.0)) == {}
    strange = transformers.LlamaConfig(**SIZES, logits_scaling=8.0)
    with pytest.raises(NotImplementedError, match=r"config.logits_scaling = 8.0 of a 'llama' model"):
        logit_options(strange)
    assert logit_options(transformers.CohereConfig(**SIZES, logit_scale=0.5)) == {"logit_scale": 0.5}


def test_two_micro_batches_are_one_of_both():
    torch.manual_seed(0)
    config = CONFIGS["qwen3 tied"]()
    model = LossModel(transformers.AutoModelForCausalLM.from_config(config).double())
    metrics, gradients = train_step(model, window([5]), window([3, 8]))
    expected = {name: gradient.clone() for name, gradient in gradients.items()}
    loss = metrics["train/loss"]
    model.zero_grad()
    metrics, gradients = train_step(model, window([3, 8]), window([5]), PackedBatch.empty(8, ["text"]))
    assert metrics["train/loss"] == pytest.approx(loss, rel=1e-13)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-13)


def test_an_empty_window_gives_every_parameter_zeros():
    model = LossModel(transformers.AutoModelForCausalLM.from_config(CONFIGS["qwen3 tied"]()))
    metrics, gradients = train_step(model, PackedBatch.empty(8, ["text"]))
    assert metrics["train/loss"] == 0
    for name, gradient in gradients.items():
        assert gradient is not None and gradient.eq(0).all(), name


class ToyModel(nn.Module):
    """What a module of one's own needs: `get_decoder` and `get_output_embeddings`."""

    def __init__(self, bias, wraps_output):
        super().__init__()
        self.embedding = nn.Embedding(32, 8, dtype=F64)
        self.head = nn.Linear(8, 32, bias=bias, dtype=F64)
        self.wraps_output = wraps_output
        self.seen = []

    def get_decoder(self):
        return self.decode

    def decode(self, input_ids, position_ids, layout):
        self.seen.append((input_ids.shape, position_ids.tolist(), layout))
        hidden = self.embedding(input_ids)
        return transformers.modeling_outputs.BaseModelOutput(hidden) if self.wraps_output else hidden

    def get_output_embeddings(self):
        return self.head


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("wraps_output", [False, True])
def test_a_module_of_ones_own(bias, wraps_output):
    torch.manual_seed(0)
    toy = ToyModel(bias, wraps_output)
    batch = window([3, 2], alignment=1)
    metrics, gradients = train_step(LossModel(toy), batch)
    logits = toy.head(toy.embedding(batch.input_ids))
    expected = cross_entropy(logits, batch.targets["text"], ignore_index=-100)
    assert metrics["train/loss"] == pytest.approx(expected.item(), rel=1e-14)
    by_hand = torch.autograd.grad(expected, list(toy.parameters()))
    for (name, _), right in zip(toy.named_parameters(), by_hand, strict=True):
        torch.testing.assert_close(gradients[f"model.{name}"], right, rtol=0, atol=1e-15)
    assert toy.seen == [((1, 5), [[0, 1, 2, 0, 1]], batch.layout)]


def test_a_head_may_be_the_embedding_itself():
    torch.manual_seed(0)
    toy = ToyModel(bias=False, wraps_output=False)
    toy.head = toy.embedding
    batch = window([3, 2], alignment=1)
    metrics, gradients = train_step(LossModel(toy), batch)
    logits = toy.embedding(batch.input_ids) @ toy.embedding.weight.T
    expected = cross_entropy(logits, batch.targets["text"], ignore_index=-100)
    assert metrics["train/loss"] == pytest.approx(expected.item(), rel=1e-14)
    [right] = torch.autograd.grad(expected, [toy.embedding.weight])
    torch.testing.assert_close(gradients["model.embedding.weight"], right, rtol=0, atol=1e-15)


def test_it_has_no_parameter_of_its_own():
    toy = ToyModel(True, False)
    assert [id(p) for p in LossModel(toy).parameters()] == [id(p) for p in toy.parameters()]


def test_an_objective_of_ones_own_gets_model_step_and_batch():
    model = nn.Linear(1, 1, bias=False, dtype=F64)
    batch = window([3], alignment=1)

    def squares(model, step, batch):
        values = model(batch.input_ids.to(F64).unsqueeze(1)).squeeze(1)
        return step.add("text", values.square(), batch)

    metrics, gradients = train_step(LossModel(model), batch, objective=squares)
    used = batch.input_ids[:2].to(F64)
    weight = model.weight.item()
    assert metrics["train/loss"] == pytest.approx((used * weight).square().mean().item(), rel=1e-14)
    assert gradients["model.weight"].item() == pytest.approx(
        (2 * weight * used.square()).mean().item(), rel=1e-14
    )


def test_causal_lm_passes_options_of_the_kernel():
    torch.manual_seed(0)
    toy = ToyModel(False, False)
    batch = window([3, 2], alignment=1)
    ledger = Ledger([Term("text"), Term("other")])
    with ledger.step([batch]) as step:
        share = causal_lm(toy, step, batch, term="text", label_smoothing=0.2, softcap=3.0)
    logits = toy.head(toy.embedding(batch.input_ids))
    logits = 3.0 * torch.tanh(logits / 3.0)
    expected = cross_entropy(logits, batch.targets["text"], ignore_index=-100, label_smoothing=0.2)
    assert share.item() == pytest.approx(expected.item(), rel=1e-14)
