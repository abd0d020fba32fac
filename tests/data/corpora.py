"""Small sources and tokenizers for the tests of the data layer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from isoloss.data.sources import SourceSpec
from isoloss.data.training_data import DataSettings, TrainingData

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_SHORT = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
# Shows only the last answer's thoughts, as templates of reasoning models do: earlier turns change.
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if not loop.last %}{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REFUSING = "{{ raise_exception('only user and assistant turns') }}"


def byte_tokenizer(template: str | None = PLAIN) -> PreTrainedTokenizerFast:
    """One token per byte, and the special tokens of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>"],
    )
    made.chat_template = template
    return made


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def numbered(path: Path, count: int, first: int = 0, length: int = 3) -> Path:
    """Rows of `input_ids` that carry their number, so that every document can be told from its tokens."""
    rows = [{"input_ids": [(first + n) % 251, (first + n) // 251] * (length + n % 5)} for n in range(count)]
    return write_rows(path, rows)


def open_data(
    specs: Sequence[SourceSpec], *, data_rank: int = 0, data_size: int = 1, **settings: Any
) -> TrainingData:
    chosen = {"window": 64, "alignment": 8, "windows_per_step": 4, "seed": 3} | settings
    return TrainingData(
        DataSettings(sources=tuple(specs), **chosen),
        byte_tokenizer(),
        data_rank=data_rank,
        data_size=data_size,
    )
