"""The tutorial's data: which of four numbers is the largest?

python examples/tutorial/make_data.py        (writes train.jsonl and heldout.jsonl beside this file)
"""

import argparse
import json
import random
from pathlib import Path

argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
).parse_args()
TRAIN, HELDOUT = 64, 64

random.seed(7)
answers: dict[str, str] = {}
while len(answers) < TRAIN + HELDOUT:
    numbers = random.sample(range(10, 100), 4)
    question = f"Which is the largest of {', '.join(map(str, numbers))}?"
    answers[question] = str(max(numbers))
rows = [
    json.dumps({"question": question, "answer": answer}) for question, answer in answers.items()
]
folder = Path(__file__).parent
(folder / "train.jsonl").write_text("\n".join(rows[:TRAIN]) + "\n")
(folder / "heldout.jsonl").write_text("\n".join(rows[TRAIN:]) + "\n")
