r"""Graders of mathematical answers side by side: what each pays wrongly, and what it fails to pay.

Two kinds of files, both JSON lines:

- cases: `question`, `response`, `label` and `want` (1, 0, "debatable", or "1|refused": the label may be refused too);
- label sets: `question` and `label`. A label has to be paid in each spelling below; its neighbour's text never.

Usage: python benchmarks/verifiers.py [--cases FILE] [--labels FILE...] [--show]    --show prints each fault
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openrlhf_dbb.rewards import math_answer

SPELLINGS = {
    "boxed": lambda text: rf"\boxed{{{text}}}",
    "in words": lambda text: f"The answer is ${text}$.",
    "after Answer": lambda text: f"**Answer:** \\({text}\\)",
    "dfrac": lambda text: r"\[\boxed{" + text.replace(r"\frac", r"\dfrac") + r"}\]",
    "sized": lambda text: r"\boxed{\displaystyle " + text.replace("(", r"\left(").replace(")", r"\right)") + "}",
    "spaced": lambda text: rf"So $\boxed{{\, {text} \;}}$.",
    "behind ####": lambda text: f"Some words.\n#### {text}",
    "after a denial": lambda text: f"It is not 12345 but \\boxed{{{text}}}.",
}
BOMBS = (r"\boxed{9^{9^{9^9}}}", r"\boxed{" * 20_000 + "5" + "}" * 20_000, r"\boxed{" + "1" * 5000 + "}", "$ " * 20_000)
PLAIN = [(f"12 + {n} = {12 + n}, so the answer is {12 + n}.", str(12 + n)) for n in range(1000)]
PLAIN += [(rf"\boxed{{\frac{{{n}}}{{7}}}}", f"{n}/7") for n in range(1, 1000, 2) if n % 7]


def ours(question: str, response: str, label: str) -> float | None:
    return math_answer.reward_func([question + response], [question], [label])["rewards"][0]


def math_verify(question: str, response: str, label: str) -> float | None:
    from math_verify import parse, verify

    bare = not any(sign in label for sign in ("$", r"\boxed", r"\("))
    return float(verify(parse(f"${label}$" if bare else label, parsing_timeout=None),
                        parse(response, parsing_timeout=None), timeout_seconds=None))  # fmt: skip


GRADERS: dict[str, Callable[[str, str, str], float | None]] = {"ours": ours, "math-verify": math_verify}


def verdict(grade: Callable[[str, str, str], float | None], row: dict[str, Any]) -> float | str | None:
    try:
        return grade(row["question"], row["response"], row["label"])
    except Exception:
        return "refused"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def judged(grader: str, rows: list[dict[str, Any]], name: str, show: bool) -> None:
    """Print how many rows a grader pays wrongly, does not pay, and cannot judge."""
    with ThreadPoolExecutor(2 if grader == "ours" else 1) as threads:
        verdicts = list(threads.map(lambda row: verdict(GRADERS[grader], row), rows))
    paid = lost = untold = 0
    for row, given in zip(rows, verdicts, strict=True):
        want = str(row["want"])
        if want == "debatable" or (given == "refused" and "refused" in want) or given == float(want[0]):
            continue
        paid, lost = paid + (given == 1.0), lost + (given == 0.0)
        untold += given in (None, "refused")
        if show:
            print(f"    {given}, want {want}: {row['response'][:80]!r} for {row['label'][:60]!r}")
    counted = sum(row["want"] != "debatable" for row in rows)
    print(f"{name:<40} {grader:<12} {counted:>6} {paid:>6} {lost:>6} {untold:>8}", flush=True)


def spelled(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return each distinct label in each spelling, and the next label boxed, which must not be paid."""
    rows = list({row["label"]: row for row in rows}.values())
    made: dict[str, list[dict[str, Any]]] = {name: [] for name in (*SPELLINGS, "neighbour")}
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        text, wrong = (each["label"].strip().removeprefix("$").removesuffix("$") for each in (row, other))
        for name, spell in SPELLINGS.items():
            made[name].append({**row, "response": spell(text), "want": 1})
        made["neighbour"].append({**row, "response": rf"\boxed{{{wrong}}}", "want": 0})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--labels", type=Path, nargs="*", default=[])
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    print(f"{'rows':<40} {'grader':<12} {'rows':>6} {'paid':>6} {'lost':>6} {'untold':>8}")
    for grader in GRADERS:
        if args.cases:
            judged(grader, read(args.cases), args.cases.stem, args.show)
        for path in args.labels:
            for name, rows in spelled(read(path)).items():
                judged(grader, rows, f"{path.stem}, {name}", args.show)
    began = time.perf_counter()
    assert all(ours("", response, label) == 1.0 for response, label in PLAIN)
    print(f"{len(PLAIN) / (time.perf_counter() - began):,.0f} plain verdicts a second")
    for bomb in BOMBS:
        for label in ("5", r"\sqrt{2}"):
            began = time.perf_counter()
            print(f"{bomb[:20]}, label {label}: {ours('', bomb, label)} after {time.perf_counter() - began:.2f} s")
    math_answer._pool.close()


if __name__ == "__main__":
    main()
