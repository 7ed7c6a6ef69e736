"""Describe a run in numbers: held-out accuracy, state, rollouts, and how many groups were mixed."""

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from openrlhf_dbb.secrets import without_passwords
from openrlhf_dbb.storage import PosteriorStore, RunRecord
from openrlhf_dbb.storage.owner import SILENT_S
from openrlhf_dbb.storage.read import COUNTED, SUMS, held_out
from openrlhf_dbb.terminal import Styled

_STYLES = {"running": "green", "stale": "yellow", "finished": ""}
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def overview(store: PosteriorStore, run: RunRecord) -> dict[str, Any]:
    """Return a run in numbers by name, ready for JSON; None where a number is not known.

    A share of zero-variance rollouts is None at N = 1, where it is not defined.
    """
    totals = usage_totals(store, run)
    mixed, equal = totals["mixed_groups"], totals["zero_variance"]
    counts = ("trained", "filtered", "skipped", "groups", "mixed_groups", "rollouts_per_mixed_group",
              "tokens_per_mixed_group")  # fmt: skip
    return {
        "number": run.run_id,
        "name": run.name,
        "uuid": run.uuid,
        "status": state(run),
        "step": run.last_step,
        "held_out": held_out_numbers(store, run),
        "method": run.method or None,
        "estimator": run.estimator,
        "parameters": run.parameters,
        "rollouts": totals["generated"],
        "tokens": totals["generated_tokens"],
        **{name: totals[name] for name in counts},
        "zero_variance_share": None if mixed is None else ratio(equal, totals["generated"]),
        "given_advantage_share": None if mixed is None else ratio(totals["rescued"], equal),
        "model": without_passwords(run.model),
        "dataset": without_passwords(run.dataset),
        "started": run.created_at,
        "last_write": run.heartbeat_at,
    }


def usage_totals(store: PosteriorStore, run: RunRecord) -> dict[str, Any]:
    """Return the sums of a run's usage, "filtered" (generated, not trained on), and what a mixed group cost.

    All numbers are None if usage was not recorded. "single": groups have one rollout (fewer than two on average), so
    that zero variance is not defined.
    """
    (row,) = store.query(f"SELECT {SUMS} FROM dbb_step WHERE run_id = :run", run=run.run_id)
    totals = row._asdict()
    mixed = mixed_groups(totals)
    return totals | {
        "single": bool(totals["groups"]) and mixed is None,
        "mixed_groups": mixed,
        "rollouts_per_mixed_group": ratio(totals["generated"], mixed),
        "tokens_per_mixed_group": ratio(totals["generated_tokens"], mixed),
    }


def mixed_groups(totals: Mapping[str, Any]) -> float | None:
    """Return how many groups had some rollouts right and some wrong; None at N = 1 or if usage was not recorded.

    The store counts the rollouts of the other groups, so the number is exact where all groups have the same size.
    """
    if not totals["generated"] or totals["generated"] < 2 * totals["groups"]:
        return None
    return float(totals["groups"] * (totals["generated"] - totals["zero_variance"]) / totals["generated"])


def usage_in_words(store: PosteriorStore, run: RunRecord, totals: Mapping[str, Any]) -> dict[str, str]:
    """Return where the rollouts went and, unless N = 1, how many groups had equal rewards; nothing if not recorded.

    ``totals``: from :func:`openrlhf_dbb.storage.read.progress`. A quarter is one of the steps. Draws add a line.
    """
    if totals["generated"] is None:
        return {}
    unused = totals["unused_rollouts"]
    counts = {"generated": totals["generated"] + unused, "trained on": totals["trained"],
              "left over at the end": unused, "filtered": totals["filtered"],
              "prompts skipped": totals["skipped"]}  # fmt: skip
    words = {"rollouts": ", ".join(f"{count} {what}" for what, count in counts.items() if count)}
    if mixed_groups(totals) is None:
        return words
    query = f"""SELECT generated, zero_variance, metrics FROM dbb_step
                WHERE run_id = :run AND generated > 0 AND {COUNTED} ORDER BY step"""
    steps = store.query(query, run=run.run_id)
    quarter = -(-len(steps) // 4)
    whole, early, late = (
        f"{sum(step.zero_variance for step in part) / sum(step.generated for step in part):.0%}"
        for part in (steps, steps[:quarter], steps[-quarter:])
    )
    given = f"{totals['rescued'] / max(totals['zero_variance'], 1):.0%} of these were given an advantage"
    equal = f"{whole} of {totals['groups']} had equal rewards (first quarter {early}, last {late})"
    words["groups"] = f"{equal}: plain GRPO learns nothing from these; {given}"
    logged = [json.loads(step.metrics or "{}") for step in steps]
    drawn = [(each["posterior/mixed"], each["posterior/mixed_even"]) for each in logged if "posterior/mixed" in each]
    if drawn:
        mixed, even = (sum(shares) / len(drawn) for shares in zip(*drawn, strict=True))
        words["drawn"] = f"{mixed:.0%} of the groups were mixed, with even draws about {even:.0%}"
    return words


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return part / whole; None if a number is not known, or whole is 0."""
    return None if part is None or not whole else part / whole


def held_out_numbers(store: PosteriorStore, run: RunRecord) -> dict[str, Any] | None:
    """Return held-out accuracy at the start, the best and the last step of a run; None if it was not measured."""
    measured = held_out(store, run)
    if measured is None:
        return None
    numbers: dict[str, Any] = {}
    for name, place in (("start", 0), ("best", measured.best), ("last", -1)):
        numbers |= {name: float(measured.accuracy[place]), f"{name}_step": int(measured.step[place])}
    return numbers | {"prompts": measured.prompts, "samples": measured.samples, "benchmarks": measured.benchmarks}


def state(run: RunRecord) -> str:
    """Return "finished", "running", or "stale": not finished, and its owner seems to have ended."""
    # A killed process cannot write that its run has ended.
    silent = seconds_since(run.heartbeat_at) > SILENT_S
    stale = run.status == "running" and (run.owner.is_gone or (silent and not run.owner.is_local))
    return "stale" if stale else run.status


def status(run: RunRecord) -> Styled:
    """Return the state of a run in colour; a stale run's has the time since its last write, such as "stale 3 h"."""
    name = state(run)
    return Styled(f"{name} {age(run.heartbeat_at)}" if name == "stale" else name, _STYLES[name])


def age(moment: str) -> str:
    """Return the time since a moment (UTC, ISO 8601) in its largest unit, such as "3 h"."""
    seconds = max(seconds_since(moment), 0)
    name, size = next((unit for unit in _UNITS if seconds >= unit[1]), _UNITS[-1])
    return f"{int(seconds // size)} {name}"


def seconds_since(moment: str) -> float:
    """Return the time since a moment (UTC, ISO 8601), in seconds."""
    return (datetime.now(timezone.utc) - datetime.fromisoformat(moment.replace("Z", "+00:00"))).total_seconds()


def method(run: RunRecord) -> str:
    """Return method and estimator of a run, such as "dapo+dbb"."""
    return f"{run.method}+{run.estimator}" if run.method else run.estimator


def parameters(run: RunRecord) -> str:
    """Return the estimator's parameters, such as "discount = 0.5, prior_alpha = 1.0"."""
    return ", ".join(f"{key} = {value}" for key, value in run.parameters.items())
