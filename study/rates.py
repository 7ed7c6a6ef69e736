"""The pool of protocol "draws" with the pass rates that its gate measured, as a data set for ``--data.pass_rate_key``.

python -m study.rates study-runs/rates.jsonl
"""

import csv
import json
import sys
from pathlib import Path

from openrlhf_dbb import tasks
from study import protocol

GATE = Path(__file__).parent / "results" / "draws" / "gate.csv"


def main(path: str) -> None:
    spec = protocol.load("draws").choose(["gate"])[0].flags["data.prompt_dataset"]
    with GATE.open() as file:
        rates = {
            row["prompt"]: f"{row['successes']}/{row['samples']}" for row in csv.DictReader(file)
        }
    with open(path, "w", encoding="utf-8") as out:
        for problem in tasks.problems(spec, instruction=""):
            question = problem["prompt"].removeprefix(
                "State the final answer to the following arithmetic problem: "
            )
            if question in rates:
                out.write(json.dumps(problem | {"rate": rates[question]}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
