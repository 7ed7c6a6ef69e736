"""A run in numbers: the sums of its usage, and its held-out accuracy."""

from collections.abc import Mapping
from typing import Any

from openrlhf_dbb.core import IMPORTED
from openrlhf_dbb.inspect.status import state
from openrlhf_dbb.secrets import without_passwords
from openrlhf_dbb.storage import PosteriorStore, RunRecord, StoreError, read
from openrlhf_dbb.storage.damage import check_rows
from openrlhf_dbb.storage.decode import naming_damage

Numbers = dict[str, Any]
"""Numbers by name; None where one is not known."""

_USAGE = f"SELECT {read.SUMS} FROM dbb_step WHERE run_id = :run"
_COUNTS = (
    "trained",
    "filtered",
    "skipped",
    "groups",
    "mixed_groups",
    "rollouts_per_mixed_group",
    "tokens_per_mixed_group",
)


def overview(store: PosteriorStore, run: RunRecord) -> Numbers:
    """Return a run in numbers, ready for JSON, with the status "damaged" if a value of it cannot be read."""
    try:
        with naming_damage(f"run {run.name!r}"):
            totals = usage_totals(store, run)
            measured = held_out_numbers(store, run)
    except StoreError:  # told where this run is asked for; a list has others
        return in_numbers(run, {}, None) | {"status": "damaged"}
    return in_numbers(run, totals, measured)


def in_numbers(run: RunRecord, totals: Numbers, measured: Numbers | None) -> Numbers:
    """Return a run in numbers, ready for JSON.

    A share of zero-variance rollouts is None at N = 1, where it is not defined.

    Args:
        totals: of :func:`usage_totals`.
        measured: of :func:`held_out_numbers`.
    """
    equal = None
    rescued = None
    if totals.get("mixed_groups") is not None:
        equal = ratio(totals["zero_variance"], totals["generated"])
        rescued = ratio(totals["rescued"], totals["zero_variance"])
    return {
        "number": run.run_id,
        "name": run.name,
        "uuid": run.uuid,
        "status": state(run),
        "step": run.last_step,
        "held_out": measured,
        "method": run.method or None,
        "estimator": None if run.method == IMPORTED else run.estimator,
        "parameters": run.parameters,
        "rollouts": totals.get("generated"),
        "tokens": totals.get("generated_tokens"),
        **{name: totals.get(name) for name in _COUNTS},
        "zero_variance_share": equal,
        "given_advantage_share": rescued,
        "model": without_passwords(run.model),
        "dataset": without_passwords(run.dataset),
        "started": run.created_at,
        "last_write": run.heartbeat_at,
    }


def usage_totals(store: PosteriorStore, run: RunRecord) -> Numbers:
    """Return the sums of a run's usage, and what a mixed group cost.

    "filtered" were generated and not trained on. All are None if usage was not recorded. "single":
    groups have one rollout (fewer than two on average), so that zero variance is not defined.
    """
    check_rows(store.database, run, "dbb_step")
    [row] = store.query(_USAGE, run=run.run_id)
    return with_mixed_groups(row._asdict())


def with_mixed_groups(totals: Numbers) -> Numbers:
    """Add what a mixed group cost to the sums of a run's usage, as :func:`usage_totals`."""
    mixed = mixed_groups(totals)
    return totals | {
        "single": bool(totals["groups"]) and mixed is None,
        "mixed_groups": mixed,
        "rollouts_per_mixed_group": ratio(totals["generated"], mixed),
        "tokens_per_mixed_group": ratio(totals["generated_tokens"], mixed),
    }


def mixed_groups(totals: Mapping[str, Any]) -> int | None:
    """Return how many groups had some rollouts right and some wrong.

    None at N = 1 or if usage was not recorded. The store counts the rollouts of the other groups,
    so the number is exact where all groups have the same size.
    """
    generated = totals["generated"]
    if not generated or generated < 2 * totals["groups"]:
        return None
    return round(totals["groups"] * (generated - totals["zero_variance"]) / generated)


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return part / whole; None if a number is not known, or whole is 0."""
    return None if part is None or not whole else part / whole


def held_out_numbers(store: PosteriorStore, run: RunRecord) -> Numbers | None:
    """Return held-out accuracy at the start, the best and the last step of a run.

    None if it was not measured.
    """
    measured = read.held_out(store, run)
    if measured is None:
        return None
    numbers: Numbers = {}
    for name, place in (("start", 0), ("best", measured.best), ("last", -1)):
        numbers[name] = float(measured.accuracy[place])
        numbers[f"{name}_step"] = int(measured.step[place])
    return {
        **numbers,
        "prompts": measured.prompts,
        "samples": measured.samples,
        "benchmarks": measured.benchmarks,
    }
