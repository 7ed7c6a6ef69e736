r"""Graders of mathematical answers side by side: what each pays wrongly, and what it fails to pay.

Two kinds of files, both JSON lines:

- cases: `question`, `response`, `label` and `want` (1, 0, "debatable", or "1|refused": the label may be refused too);
- label sets: `question` and `label`. A label's own text has to be paid, in a box and in words; the neighbour's never.

Usage: python benchmarks/verifiers.py [--cases FILE] [--labels FILE...] [--show]    --show prints each fault
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openrlhf_dbb.rewards import math_answer

Verdict = float | None | str
"""1.0, 0.0, None (cannot tell) or the text "raises"."""


def ours(question: str, response: str, label: str) -> Verdict:
    try:
        return math_answer.reward_func([question + response], [question], [label])["rewards"][0]
    except ValueError:
        return "raises"


def math_verify(question: str, response: str, label: str) -> Verdict:
    from math_verify import parse, verify

    try:
        with time_limit_of_its_own():
            gold = parse(label if "boxed" in label or "$" in label else f"${label}$")
            return float(verify(gold, parse(response)))
    except Exception:
        return "raises"


@contextlib.contextmanager
def time_limit_of_its_own():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


GRADERS: dict[str, Callable[[str, str, str], Verdict]] = {"ours": ours, "math-verify": math_verify}


def read(path: str) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
