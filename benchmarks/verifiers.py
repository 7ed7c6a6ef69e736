r"""Graders of mathematical answers side by side: what each pays wrongly, and what it fails to pay.

Two kinds of files, both JSON lines:

- cases: `question`, `response`, `label` and `want` (1, 0, "debatable", or "1|refused": the label may be refused too);
- label sets: `question` and `label`. A label has to be paid in each spelling below; its neighbour's text never.

Usage: python benchmarks/verifiers.py [--cases FILE] [--labels FILE...] [--graders MODULE:FUNCTION...] [--show]

A grader takes question, response and label, and returns whether the response is right. Without --graders, ours and
Math-Verify are measured, and the speed of ours. --show prints each fault.
"""

from __future__ import annotations

import argparse
import importlib
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
    "sized": lambda text: (
        r"\boxed{\displaystyle " + text.replace("(", r"\left(").replace(")", r"\right)") + "}"
    ),
    "spaced": lambda text: rf"So $\boxed{{\, {text} \;}}$.",
    "behind ####": lambda text: f"Some words.\n#### {text}",
    "after a denial": lambda text: f"It is not 12345 but \\boxed{{{text}}}.",
}
BOMBS = (
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{" * 20_000 + "5" + "}" * 20_000,
    r"\boxed{" + "1" * 5000 + "}",
    "$ " * 20_000,
)
PLAIN = [(f"12 + {n} = {12 + n}, so the answer is {12 + n}.", str(12 + n)) for n in range(1000)]
PLAIN += [(rf"\boxed{{\frac{{{n}}}{{7}}}}", f"{n}/7") for n in range(1, 1000, 2) if n % 7]


Grader = Callable[[str, str, str], float | None]


def ours(question: str, response: str, label: str) -> float | None:
    return math_answer.reward_func([question + response], [question], [label])["rewards"][0]


def math_verify(question: str, response: str, label: str) -> float:
    """Call Math-Verify as its documentation does."""
    from math_verify import parse, verify

    bare = not any(sign in label for sign in ("$", r"\boxed", r"\("))
    right = parse(f"${label}$" if bare else label, parsing_timeout=None)
    return float(verify(right, parse(response, parsing_timeout=None), timeout_seconds=None))


def math_verify_parsers(question: str, response: str, label: str) -> float:
    """Its parsers alone: only the last box or formula as a whole, no numbers in prose."""
    from math_verify import LatexExtractionConfig, parse, verify

    options = {"extraction_config": [LatexExtractionConfig()], "parsing_timeout": None}
    right, given = parse(rf"\boxed{{{label.strip('$')}}}", **options), parse(response, **options)
    return float(verify(right, given, timeout_seconds=None))


def found(name: str) -> Grader:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def verdict(grade: Grader, row: dict[str, Any]) -> float | str | None:
    try:
        return grade(row["question"], row["response"], row["label"])
    except Exception:
        return "refused"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def judged(grader: Grader, rows: list[dict[str, Any]], name: str, show: bool) -> None:
    """Print how many rows a grader pays wrongly, does not pay, and cannot judge."""
    if grader is ours:
        with ThreadPoolExecutor(2) as threads:
            verdicts = list(threads.map(lambda row: verdict(grader, row), rows))
    else:  # some have a time limit that works in the main thread alone
        verdicts = [verdict(grader, row) for row in rows]
    paid = lost = untold = 0
    for row, given in zip(rows, verdicts, strict=True):
        want = str(row["want"])
        if (
            want == "debatable"
            or (given == "refused" and "refused" in want)
            or given == float(want[0])
        ):
            continue
        paid, lost = paid + (given == 1.0), lost + (given == 0.0)
        untold += given in (None, "refused")
        if show:
            print(f"    {given}, want {want}: {row['response'][:80]!r} for {row['label'][:60]!r}")
    counted = sum(row["want"] != "debatable" for row in rows)
    print(
        f"{name:<40} {grader.__name__:<20} {counted:>6} {paid:>6} {lost:>6} {untold:>8}", flush=True
    )


def spelled(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return each distinct label in each spelling, and the next label boxed, which must not be paid."""
    rows = list({row["label"]: row for row in rows}.values())
    made: dict[str, list[dict[str, Any]]] = {name: [] for name in (*SPELLINGS, "neighbour")}
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        text, wrong = (
            each["label"].strip().removeprefix("$").removesuffix("$") for each in (row, other)
        )
        for name, spell in SPELLINGS.items():
            made[name].append({**row, "response": spell(text), "want": 1})
        made["neighbour"].append({**row, "response": rf"\boxed{{{wrong}}}", "want": 0})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--labels", type=Path, nargs="*", default=[])
    parser.add_argument(
        "--graders", nargs="*", type=found, default=[ours, math_verify, math_verify_parsers]
    )
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    print(f"{'rows':<40} {'grader':<20} {'rows':>6} {'paid':>6} {'lost':>6} {'untold':>8}")
    for grader in args.graders:
        if args.cases:
            judged(grader, read(args.cases), args.cases.stem, args.show)
        for path in args.labels:
            for name, rows in spelled(read(path)).items():
                judged(grader, rows, f"{path.stem}, {name}", args.show)
    if ours in args.graders:
        speed()


def speed() -> None:
    """Print plain verdicts a second, and how long responses that never end take."""
    began = time.perf_counter()
    assert all(ours("", response, label) == 1.0 for response, label in PLAIN)
    print(f"{len(PLAIN) / (time.perf_counter() - began):,.0f} plain verdicts a second")
    for bomb in BOMBS:
        for label in ("5", r"\sqrt{2}"):
            began = time.perf_counter()
            print(
                f"{bomb[:20]}, label {label}: {ours('', bomb, label)} after {time.perf_counter() - began:.2f} s"
            )
    math_answer._pool.close()


if __name__ == "__main__":
    main()
