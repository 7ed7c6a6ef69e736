"""The command compare: two or more evaluations on the benchmarks and prompts they share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import alignment, results
from openrlhf_dbb.evaluation.comparison_tables import as_json, text
from openrlhf_dbb.evaluation.differences import compare_models
from openrlhf_dbb.evaluation.results import Evaluation


def add_command(commands: Any) -> None:
    """Add ``compare`` to the sub-parsers of the evaluate command."""
    summary = "are differences between evaluations real: paired tests over prompts, intervals"
    parser = commands.add_parser("compare", help=summary, description=summary)
    parser.set_defaults(command=compare)
    parser.add_argument(
        "evaluations", nargs="+", metavar="EVALUATION", help=f"two or more: folders, or names under {results.FOLDER}/"
    )
    reference = parser.add_mutually_exclusive_group()
    reference.add_argument("--against", metavar="NAME", help="compare all others with this one (default: the first)")
    reference.add_argument("--of", metavar="NAME", help="compare this one with all others, as in the paper's Table 1")
    parser.add_argument("--benchmarks", metavar="NAME,...", help="only these (default: all that the evaluations share)")
    parser.add_argument("--json", action="store_true", help="print JSON: differences, measures and notes, all digits")


def compare(arguments: argparse.Namespace) -> None:
    """Print a comparison as tables or JSON.

    Raises:
        UsageError: an evaluation or a flag does not fit, or the evaluations have different prompts.
    """
    evaluations = _read(arguments.evaluations)
    models = [evaluation.name for evaluation in evaluations]
    pairs = _pairs(models, arguments.against, arguments.of)
    chosen = None if arguments.benchmarks is None else arguments.benchmarks.split(",")
    benchmarks = alignment.shared(evaluations, chosen)
    comparison = compare_models(models, benchmarks, pairs, alignment.notes(evaluations, benchmarks))
    print(as_json(comparison) if arguments.json else text(comparison), end="")


def _read(names: Sequence[str]) -> list[Evaluation]:
    if len(names) < 2:
        raise UsageError(f"nothing to compare {names[0]} with; name at least two evaluations")
    evaluations = [results.read_evaluation(results.find(name)) for name in names]
    seen: set[str] = set()
    for evaluation in evaluations:
        if evaluation.name in seen:
            raise UsageError(f"two evaluations are named {evaluation.name!r}; rename the folder of one")
        seen.add(evaluation.name)
    return evaluations


def _pairs(models: Sequence[str], against: str | None, of: str | None) -> list[tuple[str, str]]:
    """(model, baseline) of each comparison."""
    flag, name = ("--against", against) if of is None else ("--of", of)
    reference = models[0] if name is None else Path(name).resolve().name
    if reference not in models:
        raise UsageError(f"{flag} {name} is not one of the evaluations: {', '.join(models)}")
    others = [model for model in models if model != reference]
    return [(other, reference) if of is None else (reference, other) for other in others]
