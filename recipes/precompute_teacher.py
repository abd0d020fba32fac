"""Stores a teacher's most probable tokens with the rows that it is asked about.

    python recipes/precompute_teacher.py TEACHER ROWS.jsonl OUTPUT.jsonl [--top-k 16] [--max-tokens 512]

ROWS may have any shape that isoloss trains on (text, messages, prompt and completion, input_ids). Each line
of OUTPUT has

    input_ids, labels     what is distilled, as the trainer would have made it of the row
    teacher_token_ids     [n][k]: entry i are the k most probable tokens AFTER token i
    teacher_logprobs      [n][k]: their log-probabilities, at temperature 1, of the whole vocabulary

Train on it with `objective: {type: distillation}` and no `teacher`. What is minimised then: with
`kl_direction: forward` the divergence from the teacher's distribution cut off at k tokens (normalised over
them), to the student's over the whole vocabulary, so probability on any other token costs; with `reverse`
both are normalised over the k tokens, and what the student gives to others is free.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from isoloss.data.sources import Source, SourceSpec
from isoloss.data.tokenising import Tokeniser


def main() -> None:
    """Ask the teacher about every row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher", help="folder of a transformers causal language model with its tokenizer")
    parser.add_argument("rows", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--top-k", type=int, default=16)
    parser.add_argument(
        "--max-tokens", type=int, default=512, help="longer rows are cut; data.window or less"
    )
    parser.add_argument("--loss-on", choices=("assistant", "completion", "all"), default="assistant")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.teacher).eval()
    tokeniser = Tokeniser(AutoTokenizer.from_pretrained(options.teacher), options.loss_on)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    partial = options.output.with_name(options.output.name + ".partial")
    count, covered, tokens = 0, 0.0, 0
    with partial.open("w", encoding="utf-8") as lines:
        for row in Source(SourceSpec(name="rows", path=str(options.rows))).rows():
            document = tokeniser.document(row, 0)
            ids = torch.as_tensor(document.input_ids)[: options.max_tokens].to(torch.int64)
            with torch.no_grad():
                log_probs = torch.log_softmax(model(input_ids=ids[None]).logits[0].float(), dim=-1)
            best = log_probs.topk(options.top_k)
            stored = {
                "input_ids": ids.tolist(),
                "teacher_token_ids": best.indices.tolist(),
                "teacher_logprobs": [
                    [round(value, 6) for value in values] for values in best.values.tolist()
                ],
            }
            if document.labels is not None:
                labels = torch.as_tensor(document.labels)[: options.max_tokens].tolist()
                if all(label == -100 for label in labels[1:]):
                    continue  # the cut took every target
                stored["labels"] = labels
            lines.write(json.dumps(stored) + "\n")
            count += 1
            tokens += len(ids)
            covered += float(best.values.exp().sum())
    partial.rename(options.output)
    print(
        f"{options.output}: {count:,} rows, {tokens:,} tokens; {options.top_k} tokens hold "
        f"{covered / max(tokens, 1):.1%} of the teacher's probability"
    )


if __name__ == "__main__":
    main()
