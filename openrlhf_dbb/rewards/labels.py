"""Find labels that Math-Verify cannot read, before a training."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.rewards.answers import label_expression
from openrlhf_dbb.rewards.final_answer import is_value
from openrlhf_dbb.rewards.verifier_pool import VerifierPool, VerifierStartError


def unreadable(labels: Iterable[str]) -> dict[str, str]:
    """Return the labels that Math-Verify cannot read, each with the label and the reason in words.

    Numbers and fractions are readable and not asked about; the others are asked about in several processes.

    Raises:
        UsageError: no verifier can be started.
    """
    from tqdm import tqdm

    formulas = [label for label in dict.fromkeys(labels) if not is_value(label)]
    if not formulas:
        return {}
    try:
        pool = VerifierPool.from_environment()
        try:
            with ThreadPoolExecutor(pool.size) as threads:
                reasons = threads.map(pool.why_unreadable, map(label_expression, formulas))
                counted = tqdm(
                    reasons, "Math-Verify reads the labels", len(formulas), unit="label", delay=1.0, mininterval=2.0
                )
                return {
                    label: f"{_short(label)}, {reason}"
                    for label, reason in zip(formulas, counted, strict=True)
                    if reason is not None
                }
        finally:
            pool.close()
    except (ValueError, VerifierStartError) as error:
        raise UsageError(f"the labels cannot be checked: {str(error).splitlines()[-1]}") from error


def _short(label: str) -> str:
    return repr(label if len(label) <= 60 else f"{label[:57]}...")
