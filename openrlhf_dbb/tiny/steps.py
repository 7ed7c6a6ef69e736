"""Chains of additions and subtractions to work out step by step; only the last result is verified.

7+5-8+9=     12, 4 and 13, each written from the last digit on: "21=4=31", of which "31" is the answer

What makes a chain hard is how many of its steps carry or borrow (here two: to 12 and to 4), as the warm start sees few
that do. The prompt does not show it; it follows from the results on the way.
"""

from __future__ import annotations

import hashlib
import random

from openrlhf_dbb.tiny.task import SPLITS

TERMS = {"train": (3, 4), "heldout": (3, 4), "sft": (3, 4), "ood": (5,)}
"""How many numbers the prompts of a split add or subtract, in equal shares."""
LARGEST = 19  # of the results
RARE = 1 / 64  # share of the chains with a carry that split "sft" keeps
MAX_SIZE = 12_000


def generate(split: str, size: int, seed: int) -> list[dict[str, str]]:
    """Distinct prompts with their labels, in random order.

    The first number is 1 to 19, all others 1 to 9, and every result on the way 0 to 19. A prompt belongs to one split
    by its own hash, so splits have no prompt in common, whatever the seeds.

    Args:
        split: "train", "heldout", "sft" (for the supervised warm start, with few carries) or "ood" (longer chains).
        size: prompts, 0 to 12000; as many of each length in ``TERMS`` (to within one prompt).
        seed: the same seed gives the same prompts in the same order.

    Returns:
        ``{"input": prompt, "label": answer}`` per prompt: the last result, of one or two digits; in split "sft" all
        results, with "=" between them.

    Raises:
        ValueError: unknown split, or size out of range.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; allowed: {', '.join(SPLITS)}")
    if not 0 <= size <= MAX_SIZE:
        raise ValueError(f"size must be 0 to {MAX_SIZE}, got {size}; there are no more short prompts")
    draw = random.Random(f"steps {split} {seed}")
    rows: dict[str, str] = {}
    while len(rows) < size:
        prompt, results, carries = _chain(draw, TERMS[split][len(rows) % len(TERMS[split])])
        if split == "sft" and carries and draw.random() >= RARE:
            continue
        if hashlib.sha256(prompt.encode()).digest()[0] % 16 in SPLITS[split]:
            rows[prompt] = "=".join(results) if split == "sft" else results[-1]
    found = [{"input": prompt, "label": label} for prompt, label in rows.items()]
    draw.shuffle(found)
    return found


def _chain(draw: random.Random, terms: int) -> tuple[str, list[str], bool]:
    """A prompt, its results, and whether one of them has another tens digit than the one before."""
    total = draw.randint(1, LARGEST)
    prompt, results, tens = str(total), [], {total // 10}
    for _ in range(terms):
        term = draw.choice([each for each in range(max(-9, -total), min(9, LARGEST - total) + 1) if each])
        total += term
        prompt += f"{term:+d}"
        results.append(str(total)[::-1])
        tens.add(total // 10)
    return f"{prompt}=", results, len(tens) > 1
