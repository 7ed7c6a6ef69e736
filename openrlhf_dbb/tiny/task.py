"""The prompts of the tiny preset: additions, subtractions and sorting, a third each, with verifiable answers.

12+9=     the answer is 21, written from the last digit: "12"
s3142=    the answer is the digits in ascending order: "1234"

The digits to sort are all different, except in the split "ood" (out of distribution).
"""

import hashlib
import random

# A prompt belongs to a split by its hash modulo 16.
SPLITS = {"train": range(0, 3), "heldout": range(3, 6), "sft": range(6, 16), "ood": range(0, 16)}
CHARACTERS = "0123456789+-s="


def generate(split: str, size: int, seed: int) -> list[dict[str, str]]:
    """Return ``{"input": prompt, "label": answer}`` of up to 20,000 distinct prompts, in an order by the seed.

    The hash of a prompt decides its split, so splits of any seeds have no prompt in common. "sft" is for the supervised
    warm start. Labels are integers of 2 to 7 digits without a leading zero.
    """
    draw = random.Random(f"{split} {seed}")
    makers = (_sorting_repeated,) if split == "ood" else (_addition, _subtraction, _sorting)
    rows: dict[str, str] = {}
    while len(rows) < size:
        prompt, label = makers[len(rows) % len(makers)](draw)
        # Math-Verify compares values, and 019 = 19. With a palindrome, copying the question "9-4" would be right.
        is_usable = label[0] != "0" and label != label[::-1]
        if is_usable and hashlib.sha256(prompt.encode()).digest()[0] % 16 in SPLITS[split]:
            rows[prompt] = label
    result = [{"input": prompt, "label": label} for prompt, label in rows.items()]
    draw.shuffle(result)
    return result


def _operand(draw: random.Random) -> int:
    digits = draw.randint(1, 3)
    return draw.randint(10 ** (digits - 1), 10**digits - 1)


def _addition(draw: random.Random) -> tuple[str, str]:
    left, right = _operand(draw), _operand(draw)
    return f"{left}+{right}=", str(left + right)[::-1]


def _subtraction(draw: random.Random) -> tuple[str, str]:
    right, left = sorted((_operand(draw), _operand(draw)))
    return f"{left}-{right}=", str(left - right)[::-1]


def _sorting(draw: random.Random) -> tuple[str, str]:
    digits = draw.sample("123456789", draw.randint(3, 7))
    return f"s{''.join(digits)}=", "".join(sorted(digits))


def _sorting_repeated(draw: random.Random) -> tuple[str, str]:
    size = draw.randint(3, 7)
    digits = draw.choices("123456789", k=size)
    while len(set(digits)) == size:
        digits = draw.choices("123456789", k=size)
    return f"s{''.join(digits)}=", "".join(sorted(digits))
