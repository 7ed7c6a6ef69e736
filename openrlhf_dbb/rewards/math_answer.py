r"""Reward function for mathematics: 1.0 right, 0.0 wrong or no answer, None not verified.

``answers`` finds the answer, ``values`` reads and compares it, and Math-Verify compares formulas.
"""

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

# OpenRLHF runs this file outside its package, so imports are absolute.
from openrlhf_dbb.core import NO_ANSWER
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.rewards import answers, values
from openrlhf_dbb.rewards.verifier_pool import VerifierPool
from openrlhf_dbb.secrets import own_log

_NOTHING_READ = f"{NO_ANSWER} of the label's kind in a box, after 'answer is' or at the end"
_UNREAD = "it is not one number, formula, list, letter or phrase"
_PERCENT = re.compile("percent|%|\u767e\u5206", re.IGNORECASE)
_logger = own_log(__name__)
_pool = VerifierPool()
_read_label = functools.lru_cache(maxsize=4096)(answers.read_label)
_spelled = functools.lru_cache(maxsize=1024)(values.spelled)


def reward_func(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str | int]
) -> dict[str, Any]:
    """Verify responses against labels, under OpenRLHF's interface for reward functions.

    Args:
        queries: (B,) prompt + response, decoded with special tokens.
        prompts: (B,) the prompts as the model got them.
        labels: (B,) right answers: LaTeX with or without box or dollars, a number, a letter or words.

    Returns:
        ``rewards`` and ``scores``: (B,) each 1.0, 0.0 or None (missing: the verifier is broken); ``read``: (B,) each
        the answer that was read as LaTeX, or "no answer" and why.

    Raises:
        ValueError: lengths differ, a query does not start with its prompt, or the grammar cannot read a label.
    """
    return answers.rewards(lambda *row: judge(*row)[::2], queries, prompts, labels)


def judge(
    response: str, label: str, question: str = ""
) -> tuple[float | None, values.Value | None, str | None]:
    """Return verdict, answer and what was read, as in ``reward_func``; the question, repeated, is no answer.

    Raises:
        ValueError: the grammar cannot read the label.
    """
    right = _read_label(label)
    if right is None:
        problem = f"the verifier cannot read the label {label!r:.80}: {_UNREAD}"
        raise ValueError(f"{problem}; fix or drop this row of the data set")
    if question.strip():
        response = response.removeprefix(question.strip())
    try:
        answer = _answer(response, right)
        if answer is None:
            return 0.0, None, _NOTHING_READ
        if values.is_copied(answer, right, _spelled(question)):
            return (
                0.0,
                answer,
                f"{NO_ANSWER}: {answer.text} is left to be calculated, or the question's own",
            )
        verdict = _verdict(right, answer, question)
    except Exception:  # a fault of this package must not end a training
        _logger.exception("not verified: %r, label %r", response[-200:], label)
        return None, None, None
    return None if verdict is None else float(verdict), answer, answer.text


def _verdict(right: values.Value, answer: values.Value, question: str) -> bool | None:
    verdict = values.equal(right, answer, _ask)
    if verdict is False and isinstance(answer, values.Number) and _PERCENT.search(question or "%"):
        # "What percentage ...?" 28 %
        return values.equal(right, replace(answer, is_percent=False), _ask)
    return verdict


def _answer(response: str, right: values.Value) -> values.Value | None:
    if not isinstance(right, values.Words) or len(right.words[0]) > 1:
        return answers.find(response, right)
    said = answers.letter(response, answers.ALPHABET)
    return values.Words(said, (said.lower(),)) if said else None


def _ask(label: str, answer: str) -> bool | None:
    """Return Math-Verify's verdict. Where it fails on the answer and not on the label, the answer is wrong."""
    if r"\ln" in label and r"\log" not in label:
        answer = re.sub(r"\\log(?![A-Za-z_])", r"\\ln", answer)
    try:
        verdict = _pool.verify(answer, label)
        return False if verdict is None and _pool.verify(label, label) else verdict
    except (ValueError, UsageError):
        return None


def unreadable_labels(labels: Iterable[str], questions: Iterable[Any] = ()) -> dict[str, str]:
    """Return the labels that no answer can earn, with reasons.

    Args:
        labels: (B,) as in the data set.
        questions: (B,) their prompts, texts or messages, or none; a label is tried with its last one.

    Raises:
        UsageError: no process of the verifier could start.
    """
    question_of = dict(itertools.zip_longest(labels, map(str, questions), fillvalue=""))
    with ThreadPoolExecutor(_pool.size) as threads:
        reasons = list(threads.map(_fault, question_of.keys(), question_of.values()))
    _pool.close()
    return {label: why for label, why in zip(question_of, reasons, strict=True) if why}


def _fault(label: str, question: str) -> str | None:
    right = _read_label(label)
    if right is None:
        return _UNREAD
    for formula in values.formulas(right):
        reply = _pool.ask({"label": formula, "answer": formula})
        if not reply.get("correct"):
            return f"Math-Verify: {reply.get('bad_label') or reply.get('unverified') or 'it does not equal itself'}"
    for text in {answers.bare_label(label), values.inner(right).text}:
        if judge(f"\\boxed{{{text}}}", label, question)[0] != 1.0:
            return f"\\boxed{{{text}}} does not earn it"
    return None


def boxes_needed(labels: Iterable[str]) -> list[str]:
    """Return a warning if labels are not earned by "The answer is LABEL."."""
    distinct = list(dict.fromkeys(labels))
    lost = [
        label
        for label in distinct
        if judge(f"The answer is {answers.bare_label(label)}.", label)[0] != 1.0
    ]
    some = f"{len(lost)} of {len(distinct)} labels, such as {lost[0][:60]!r}," if lost else ""
    return [f"{some} are earned only in a box: ask for \\boxed{{}}"] if lost else []
