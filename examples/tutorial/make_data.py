"""The tutorial's data: questions whose answer is a number, as people write it.

    python examples/tutorial/make_data.py        (writes train.jsonl and heldout.jsonl beside this file)

12+9=     a sum: "21"
s3142=    the largest number with these digits: "4321"
"""

import json
import random
from pathlib import Path

TRAIN, HELDOUT = 256, 64


def addition() -> tuple[str, str]:
    left, right = (random.randrange(10 ** random.randint(1, 2)) for _ in range(2))
    return f"{left}+{right}=", str(left + right)


def largest() -> tuple[str, str]:
    digits = random.sample("123456789", random.choice([3, 4, 7, 8]))
    return f"s{''.join(digits)}=", "".join(sorted(digits, reverse=True))


random.seed(7)
answers: dict[str, str] = {}
while len(answers) < TRAIN + HELDOUT:
    question, answer = random.choice([addition, largest])()
    answers[question] = answer
rows = [json.dumps({"question": question, "answer": answer}) for question, answer in answers.items()]
folder = Path(__file__).parent
(folder / "train.jsonl").write_text("\n".join(rows[:TRAIN]) + "\n")
(folder / "heldout.jsonl").write_text("\n".join(rows[TRAIN:]) + "\n")
