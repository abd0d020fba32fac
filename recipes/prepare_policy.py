"""Samples answers of a trained model, rewards them by a rule, and writes rows for a policy gradient.

    python recipes/prepare_policy.py [--policy runs/quickstart/export-200] [--output runs/policy-data]
    python recipes/prepare_policy.py --measure MODEL        mean reward of MODEL on held-out questions

The questions are those of the quickstart ("What does this function do?"). The rule wants plain prose: the
reward of an answer is the share of its characters that are letters or blanks. It is a rule that fits in a
line of Python, not one that makes answers true: the quickstart's model is far too small for that.

Each line of answers.jsonl is one sampled answer:

    input_ids, labels    the question, and the answer with the end that the model gave it, if it did
    advantage            reward less the mean of the answers to the same question, over their deviation
    old_log_probs        of the answer's tokens under the model that sampled them
    reward               what the rule said

Questions whose answers all have the same reward say nothing and are left out. The held-out questions are
never sampled for training.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_TOKENS = 32
SAMPLES = 8
TRAINED, HELD_OUT = 320, 96
"""Questions of each kind."""

BATCH = 32
"""Questions that are answered at the same time."""


def main() -> None:
    """Sample, or measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", type=Path, default=Path("runs/quickstart/export-200"), metavar="MODEL")
    parser.add_argument("--questions", type=Path, default=Path("runs/quickstart-data/qa.jsonl"))
    parser.add_argument("--output", type=Path, default=Path("runs/policy-data"), metavar="DIR")
    parser.add_argument(
        "--measure", type=Path, metavar="MODEL", help="print the held-out reward; write nothing"
    )
    options = parser.parse_args()
    for folder in (options.measure or options.policy, options.questions):
        if not folder.exists():
            parser.error(f"{folder} is not there; run `make quickstart` and `isoloss export runs/quickstart`")
    rows = [json.loads(line) for line in options.questions.read_text(encoding="utf-8").splitlines()]
    questions = [row["messages"][:1] for row in rows]
    if options.measure is not None:
        reward = held_out_reward(options.measure, questions)
        print(f"{options.measure}: mean reward {reward:.3f} on {HELD_OUT} held-out questions")
        return
    count, reward = write_answers(options.policy, questions, options.output)
    print(f"policy data: {count:,} answers, mean reward {reward:.3f} before groups were left out")


def held_out_reward(folder: Path, questions: list[Any], *, num_questions: int = HELD_OUT) -> float:
    """Mean reward of answers to the last questions, with the same random numbers for every model."""
    asked = questions[-num_questions:]
    return statistics.fmean(reward for group in sample(folder, asked) for _, _, reward in group)


def write_answers(
    policy: Path, questions: list[Any], output: Path, *, num_questions: int = TRAINED
) -> tuple[int, float]:
    """Write answers.jsonl; return the number of rows and the mean reward of all samples."""
    output.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(policy).eval()
    count, rewards = 0, []
    with (output / "answers.jsonl").open("w", encoding="utf-8") as lines:
        for group in sample(policy, questions[:num_questions]):
            given = [reward for _, _, reward in group]
            rewards += given
            deviation = statistics.pstdev(given)
            if deviation == 0:
                continue
            for question, answer, reward in group:
                row = {
                    "input_ids": question + answer,
                    "labels": [-100] * len(question) + answer,
                    "advantage": (reward - statistics.fmean(given)) / deviation,
                    "old_log_probs": log_probs(model, question, answer),
                    "reward": reward,
                }
                lines.write(json.dumps(row) + "\n")
                count += 1
    return count, statistics.fmean(rewards)


def sample(folder: Path, questions: list[Any]) -> Iterator[list[tuple[list[int], list[int], float]]]:
    """For each question its samples: tokens of the question, tokens of the answer, reward."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(0)
    for start in range(0, len(questions), BATCH):
        asked = tokenizer.apply_chat_template(
            questions[start : start + BATCH],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        # The whole distribution at temperature 1: only of that are the log-probabilities those of training.
        made = model.generate(
            **asked,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=MAX_TOKENS,
            num_return_sequences=SAMPLES,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        width = asked["input_ids"].shape[1]
        for number in range(len(asked["input_ids"])):
            question = asked["input_ids"][number][asked["attention_mask"][number] == 1].tolist()
            group = []
            for answer in made[number * SAMPLES : (number + 1) * SAMPLES, width:].tolist():
                if tokenizer.eos_token_id in answer:
                    answer = answer[: answer.index(tokenizer.eos_token_id) + 1]
                group.append((question, answer, rule(answer, tokenizer)))
            yield group


def rule(answer: list[int], tokenizer: Any) -> float:
    """Share of characters that are letters or blanks; 0 for an empty answer."""
    text = tokenizer.decode(answer, skip_special_tokens=True)
    return sum(one.isalpha() or one == " " for one in text) / max(len(text), 1)


@torch.no_grad()
def log_probs(model: Any, question: list[int], answer: list[int]) -> list[float]:
    """Log-probability of each token of an answer."""
    logits = model(input_ids=torch.tensor([question + answer])).logits[0, len(question) - 1 : -1]
    every = torch.log_softmax(logits.float(), dim=-1)
    return [min(0.0, value) for value in every.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()]


if __name__ == "__main__":
    main()
