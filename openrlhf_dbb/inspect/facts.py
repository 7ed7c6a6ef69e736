"""A run in words: what the store holds about it, read once, and the facts in it."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf_dbb.core import IMPORTED
from openrlhf_dbb.core.scale import verdicts
from openrlhf_dbb.inspect.numbers import Numbers, held_out_numbers, mixed_groups
from openrlhf_dbb.inspect.status import age, parameters, state, status
from openrlhf_dbb.storage import PosteriorStore, RunRecord, StoreError, read
from openrlhf_dbb.storage.records import SharedState
from openrlhf_dbb.terminal import safe

_COUNTED = """
    SELECT generated, zero_variance FROM dbb_step
    WHERE run_id = :run AND generated > 0 ORDER BY step"""


@dataclass(frozen=True)
class RunView:
    """What the store holds about a run."""

    record: RunRecord
    database: str  # location of the store
    totals: Numbers  # as of storage.read.progress
    counted: Sequence[Any]  # generated and zero_variance of each step that counted rollouts
    scores: tuple[float, float] | None  # of a wrong and of a right rollout; None if not known
    held_out: Numbers | None  # as of inspect.numbers
    shared: SharedState  # the estimator's run-wide vectors


def read_view(store: PosteriorStore, run: RunRecord) -> RunView:
    """Read what the store holds about a run.

    Raises:
        StoreError: a value cannot be read, or the run was deleted meanwhile.
    """
    totals = read.progress(store, run)
    counted = store.query(_COUNTED, run=run.run_id)
    if totals["generated"] and not counted:
        raise StoreError(
            f"run {run.name!r} has been deleted meanwhile; openrlhf-dbb runs lists the others"
        )
    return RunView(
        record=run,
        database=store.location,
        totals=totals,
        counted=counted,
        scores=verdicts(store, run),
        held_out=held_out_numbers(store, run),
        shared=read.shared_state(store, run),
    )


def facts(view: RunView) -> dict[str, str]:
    """Return the facts about a run as texts by name, safe to print."""
    run = view.record
    totals = view.totals
    started = f"{run.created_at[:19]}Z"
    if totals["last_step_at"] is not None:
        started += f"; last step {age(totals['last_step_at'])} ago"
    checkpoint = totals["checkpoint"]
    texts = {
        "run": f"{run.name} (number {run.run_id})",
        "held-out accuracy": _held_out(view.held_out),
        "status": f"{status(run)}, step {run.last_step}",
        "started": started,
        "training": f"{_reward(view)}, {totals['rollouts']} rollouts in {totals['visits']} visits",
        **usage_in_words(view),
        "posterior mean": _mean(totals),
        "run-wide state": _shared(view.shared),
        "probes": _probes(totals),
        "checkpoint": "none yet" if checkpoint is None else f"step {checkpoint}",
        "method": run.method or "the trainer's own",
        "estimator": _estimator(run),
        "model": run.model,
        "data set": f"{run.dataset} ({run.dataset_digest})".removesuffix(" ()").strip(),
        "reward": run.reward,
        "began from": _began_from(run),
        "database": view.database,
        "to go on": _to_go_on(run),
    }
    return {name: safe(text) for name, text in texts.items() if text}


def _held_out(numbers: Numbers | None) -> str:
    if numbers is None:
        return "not measured"
    points = {}  # one of two names for a step stays
    for name in ("start", "best", "last"):
        step = numbers[f"{name}_step"]
        points[step] = f"{100 * numbers[name]:.1f} % ({name}) at step {step}"
    return (
        f"{' -> '.join(points.values())}; "
        f"{numbers['prompts']} prompts x {numbers['samples']} samples"
    )


def _reward(view: RunView) -> str:
    """Return in words the share of right rollouts, or the mean score if scores are others."""
    totals = view.totals
    if not totals["rollouts"]:
        return "none of the full reward"
    mean = totals["successes"] / totals["rollouts"]
    if view.scores is None:
        return f"mean score {mean:.4g}"
    wrong, right = view.scores
    return f"{100 * (mean - wrong) / (right - wrong):.1f} % of the full reward"


def usage_in_words(view: RunView) -> dict[str, str]:
    """Return where the rollouts went and, unless N = 1, how many groups had equal rewards.

    Empty if usage was not recorded. A quarter is one of the steps.
    """
    totals = view.totals
    if totals["generated"] is None:
        return {}
    unused = totals["unused_rollouts"]
    counts = {
        "generated": totals["generated"] + unused,
        "trained on": totals["trained"],
        "left over at the end": unused,
        "filtered": totals["filtered"],
        "prompts skipped": totals["skipped"],
    }
    words = {"rollouts": ", ".join(f"{count} {name}" for name, count in counts.items() if count)}
    if mixed_groups(totals) is not None:
        quarter = -(-len(view.counted) // 4)
        rescued = "which of these were given an advantage is not known"
        if totals["rescued"] is not None:
            share = totals["rescued"] / max(totals["zero_variance"], 1)
            rescued = f"{share:.0%} of these were given an advantage"
        words["groups"] = (
            f"{_equal_share(view.counted)} of {totals['groups']} had equal rewards "
            f"(first quarter {_equal_share(view.counted[:quarter])}, "
            f"last {_equal_share(view.counted[-quarter:])}): "
            f"plain GRPO learns nothing from these; {rescued}"
        )
    return words


def _equal_share(counted: Sequence[Any]) -> str:
    equal = sum(step.zero_variance for step in counted)
    return f"{equal / sum(step.generated for step in counted):.0%}"


def _mean(totals: Numbers) -> str:
    if totals["mean"] is None:
        return "none yet"
    return f"{totals['mean']:.4f} over {totals['prompts']} prompts, {totals['visited']} visited"


def _shared(shared: SharedState) -> str:
    """Return single numbers, not the longer vectors, such as the weights of a regression."""
    numbers = [f"{name} {vector[0]:.4g}" for name, vector in shared.items() if len(vector) == 1]
    return ", ".join(numbers)


def _probes(totals: Numbers) -> str:
    if not totals["probes"]:
        return ""
    return f"{totals['samples']} rollouts of {totals['probes']} groups, never trained on"


def _estimator(run: RunRecord) -> str:
    if run.method == IMPORTED:
        return f"not known, the run was read from a log; {parameters(run)}"
    return f"{run.estimator} version {run.estimator_version}, {parameters(run)}".removesuffix(", ")


def _began_from(run: RunRecord) -> str:
    parent = run.parent
    if parent is None:
        return "its prior"
    return (
        f"run {parent['name']} at step {parent['step']}, "
        f"weight {parent['weight']:g}, in {parent['database']}"
    )


def _to_go_on(run: RunRecord) -> str:
    if state(run) != "stale" or not run.method:  # another trainer has its own way to go on
        return ""
    return f"the same training command with --resume {shlex.quote(run.name)}"
