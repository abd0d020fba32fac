"""What every objective's run through a recipe must show: it learns, resumes to the bit, and can be moved."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from isoloss.train.recipe import Recipe, parse_recipe
from train.runs import differences, numbers, train

TEXT = """
model:
  config: {{model_type: qwen3, vocab_size: 64, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
            num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, tie_word_embeddings: true}}
data:
  sources: [{{name: words, path: {rows}}}]
  tokenizer: {tokenizer}
  window: 64
  eval_fraction: 0.2
objective: {objective}
train: {{output_dir: {output}, max_steps: 12, windows_per_step: 4, learning_rate: 0.01, logging_steps: 1,
         save_steps: 5, eval_steps: 6, warmup_steps: 2}}
"""

Make = Callable[..., Recipe]


def recipe_maker(rows: Path, tokenizer: Path, objective: str) -> Make:
    """(output, *overrides) -> a short run on one file of rows."""

    def make(output: Path, *overrides: str) -> Recipe:
        text = TEXT.format(rows=rows, tokenizer=tokenizer, objective=objective, output=output)
        return parse_recipe(text, overrides)

    return make


def run_everywhere(
    make: Make, scratch: Path, layouts: Sequence[tuple[int, tuple[str, ...]]]
) -> list[dict[str, Any]]:
    """The lines of a run on two ranks; killed and resumed they are the same to the bit, and in other layouts
    to rounding."""
    assert train(make(scratch / "run"), 2, scratch) == []
    lines = numbers(scratch / "run")
    train(make(scratch / "killed"), 2, scratch, kill_after_step=7)
    assert train(make(scratch / "killed", "train.resume_from_checkpoint=auto"), 2, scratch) == []
    assert differences(lines, numbers(scratch / "killed"), 0.0) == []
    for number, (ranks, overrides) in enumerate(layouts):
        output = scratch / f"other{number}"
        assert train(make(output, *overrides), ranks, scratch) == []
        found = differences(lines, numbers(output), 5e-4)
        assert found == [], (ranks, overrides, found[:5])
    return lines
