"""The table that ends an evaluation: measures of each benchmark, and averages of each group.

Axes: R evaluation runs.
"""

from typing import Any

import numpy as np

from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.evaluation.metrics import measures, percent
from openrlhf_dbb.evaluation.results import Evaluation, Results
from openrlhf_dbb.terminal import print_table, safe


def print_summary(evaluation: Evaluation) -> None:
    """Print the table of a finished evaluation, with an average for each group."""
    settings = evaluation.settings
    n = settings["n"]
    runs = settings["runs"]
    shown = (f"mean@{n}", f"best@{n}", f"majority@{n}")
    # The majority of a benchmark without answers.
    unknown = {name: np.full(runs, np.nan) for name in shown}
    groups: dict[str, list[dict[str, Any]]] = {}
    rows = []
    for name, measured in evaluation.results.items():
        about = settings["benchmarks"][name]
        values = unknown | measures(measured)
        groups.setdefault(about["group"], []).append(values | {"prompts": about["prompts"]})
        percents = [percent(values[measure]) for measure in shown]
        rows.append((about["title"], about["prompts"], *percents, *_shares(values, measured)))
    for group, members in groups.items():
        if len(members) > 1:
            prompts = sum(member["prompts"] for member in members)
            percents = [_average(members, measure) for measure in shown]
            rows.append((f"average {group}".strip(), prompts, *percents, "", "", "", ""))
    over = f"mean and standard deviation over {runs} runs"
    if runs == 1:
        over = "one run"
    print(
        safe(f"evaluation {evaluation.name}: {settings['model']}, {n} samples per prompt, {over}")
    )
    header = ("", "prompts", f"Acc@{n} %", f"Best@{n} %", f"maj@{n} %")
    print_table((*header, "equal", "tokens", "truncated", "missing"), rows)


def _shares(values: dict[str, Floats], measured: Results) -> tuple[str, str, str, str]:
    """Return the cells "equal", "tokens", "truncated" and "missing" of a benchmark."""
    # A missing score equals no other.
    is_equal = np.ptp(measured.scores_R_P_N, axis=-1) == 0
    return (
        f"{np.mean(is_equal):.0%}",
        f"{values['response_length_mean'].mean():.0f}",
        f"{values['truncated_rate'].mean():.1%}",
        f"{values['missing'].mean():.1%}",
    )


def _average(members: list[dict[str, Any]], measure: str) -> str:
    return percent(np.mean([member[measure] for member in members], axis=0))
