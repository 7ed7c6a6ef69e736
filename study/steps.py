"""The prompts of the task with steps: chains of additions and subtractions, of which the last result is verified.

7+5-8+9=     12, 4 and 13, each written from the last digit: "21=4=31", of which "31" is the answer

A chain is hard if many of its steps carry or borrow (here two: to 12 and to 4); the warm start shows few of these.
The prompt does not show the carries, which follow from the results on the way.
"""

from __future__ import annotations

import hashlib
import random

from openrlhf_dbb.tiny.task import SPLITS

TERMS = {"train": (3, 4), "heldout": (3, 4), "sft": (3, 4), "ood": (5,)}
"""How many numbers the prompts of a split add or subtract, in equal shares."""
LARGEST = 19  # of the results
RARE = 1 / 64  # share of the chains with a carry that split "sft" keeps


def generate(split: str, size: int, seed: int) -> list[dict[str, str]]:
    """Return distinct prompts with their labels, in random order; as :func:`openrlhf_dbb.tiny.task.generate`.

    The first number is 1 to 19, all others 1 to 9, and every result 0 to 19. The label is the last result; in split
    "sft", for the warm start, it is all results with "=" between them.
    """
    draw = random.Random(f"steps {split} {seed}")
    rows: dict[str, str] = {}
    while len(rows) < size:
        prompt, results, carries = _chain(draw, TERMS[split][len(rows) % len(TERMS[split])])
        if split == "sft" and carries and draw.random() >= RARE:
            continue
        if hashlib.sha256(prompt.encode()).digest()[0] % 16 in SPLITS[split]:
            rows[prompt] = "=".join(results) if split == "sft" else results[-1]
    labelled = [{"input": prompt, "label": label} for prompt, label in rows.items()]
    draw.shuffle(labelled)
    return labelled


def _chain(draw: random.Random, terms: int) -> tuple[str, list[str], bool]:
    """Return a prompt, its results, and whether a result has another tens digit than the one before."""
    total = draw.randint(1, LARGEST)
    prompt, results, tens = str(total), [], {total // 10}
    for _ in range(terms):
        term = draw.choice([value for value in range(max(-9, -total), min(9, LARGEST - total) + 1) if value])
        total += term
        prompt += f"{term:+d}"
        results.append(str(total)[::-1])
        tens.add(total // 10)
    return f"{prompt}=", results, len(tens) > 1
