"""Read what is stored: columns of numpy for analysis, rows for people, held-out accuracy.

Axes: V rows of a run; T steps; of an evaluation P prompts of a benchmark.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.storage import decode
from openrlhf_dbb.storage.damage import check_rows
from openrlhf_dbb.storage.engine import chunks, table
from openrlhf_dbb.storage.errors import StoreError, retried
from openrlhf_dbb.storage.records import (
    TOTALS,
    UNVERIFIED,
    Floats,
    Integers,
    RunRecord,
    SharedState,
)
from openrlhf_dbb.storage.run import newest_shared
from openrlhf_dbb.storage.schema import MEAN, VARIANCE, VIEWS
from openrlhf_dbb.storage.store import PosteriorStore

Rows = list[dict[str, Any]]

# SQL of a rollout ``r`` and its step ``s``: NULL if nobody knows what the step was trained with.
ADVANTAGE = """
    CASE WHEN s.generated IS NULL OR s.informative IS NOT NULL THEN r.advantage END AS advantage"""
_TEXTS = {"prompt", "label", "response", "read", "form", "state", "last_step_at"}

TRAINING = "training"
"""Name of the evaluations that are made during training."""

# The sum of big integers is a decimal on PostgreSQL.
_COUNTS = {**dict(zip(TOTALS, TOTALS, strict=True)), "filtered": "generated - trained"}
SUMS = ", ".join(f"CAST(sum({count}) AS BIGINT) AS {name}" for name, count in _COUNTS.items())
"""SQL that sums over steps every count of :class:`openrlhf_dbb.storage.Usage`, and "filtered": not trained on."""


@dataclass(frozen=True)
class StepLog:
    """The groups of rollouts that a run has seen, ordered by step, then prompt_id; each column has shape (V,)."""

    step: Integers  # from 1
    prompt_id: Integers  # as in the run's database
    rollouts: Integers  # >= 1, rewards seen (N)
    successes: Floats  # their sum (S), in reward units
    mean: Floats  # mean and variance: the estimate of one reward that the step was scored with
    variance: Floats
    lag: Floats  # >= 0, training steps between the policy that generated the group and the step's; 0: on-policy
    alpha: Floats  # alpha and beta: the posterior after the step, rollouts, > 0; NaN if the estimator has none
    beta: Floats


@dataclass(frozen=True)
class ProbeLog:
    """The probes of a run, of each step's policy, ordered by step, then prompt_id; each column has shape (V,)."""

    step: Integers  # step and prompt_id as in StepLog
    prompt_id: Integers
    samples: Integers  # >= 1, rollouts of the probe
    successes: Floats  # sum of their scores
    squares: Floats  # sum of the squared scores
    mean: Floats  # mean and variance as in StepLog; NaN where the step trained on no rollout of the prompt
    variance: Floats


@dataclass(frozen=True)
class HeldOut:
    """The evaluations made during a run's training."""

    step: Integers  # (T,) ascending; 0 is before the training; T >= 1
    accuracy: (
        Floats  # (T,) mean score over verified responses, then over prompts, then over benchmarks
    )
    benchmarks: int  # their number at the last of these steps; all have the same weight
    prompts: int  # at that step, of all benchmarks together
    samples: int  # responses to each prompt

    @property
    def best(self) -> int:
        """Index of the highest accuracy; of the first one, if there are several."""
        return int(np.argmax(self.accuracy))


def read_log(store: PosteriorStore, run: RunRecord) -> StepLog:
    """Return all groups of rollouts of a run; empty columns if the run has no steps."""
    check_rows(store.database, run, "dbb_history")
    where = "FROM posterior_history WHERE run_id = :run ORDER BY step, prompt_id"
    return StepLog(**columns(store, _kinds(StepLog), where, run=run.run_id))


def read_probes(store: PosteriorStore, run: RunRecord) -> ProbeLog:
    """Return all probes of a run with the estimates of the same step; empty columns if the run has no probes."""
    check_rows(store.database, run, "dbb_probe", "dbb_history")
    where = """FROM (SELECT p.*, h.mean, h.variance FROM dbb_probe p LEFT JOIN dbb_history h
                     ON h.run_id = p.run_id AND h.step = p.step AND h.prompt_id = p.prompt_id) probed
               WHERE run_id = :run ORDER BY step, prompt_id"""
    return ProbeLog(**columns(store, _kinds(ProbeLog), where, run=run.run_id))


def _kinds(log: type) -> dict[str, str]:
    return {each.name: "<i8" if each.type == Integers else "<f8" for each in fields(log)}


@retried
def columns(
    store: PosteriorStore, kinds: Mapping[str, str], where: str, **parameters: Any
) -> dict[str, NDArray[Any]]:
    """Return columns of these names and numpy types; NULL is NaN. ``where``: the query from FROM on."""
    query = f"SELECT {', '.join(kinds)} {where}"
    with store.database.transaction() as connection:
        rows = table(connection, [*kinds.items()], query, parameters)
    return {name: np.ascontiguousarray(rows[name]) for name in kinds}


def held_out(store: PosteriorStore, run: RunRecord) -> HeldOut | None:
    """Return held-out accuracy over the steps of a run; None if it was not measured.

    Steps at which a benchmark has no verified response are left out.
    """
    check_rows(store.database, run, "dbb_evaluation", "dbb_evaluation_result")
    query = """SELECT step, avg(accuracy) AS accuracy, count(*) AS benchmarks, CAST(sum(prompts) AS BIGINT) AS prompts,
                      max(samples * repeats) AS samples
               FROM evaluations WHERE run_id = :run AND name = :name AND step IS NOT NULL
               GROUP BY step HAVING count(accuracy) = count(*) ORDER BY step"""
    rows = _rows(store, run, query, name=TRAINING)
    if not rows:
        return None
    steps = np.array([row["step"] for row in rows])
    accuracies = np.array([row["accuracy"] for row in rows])
    last = rows[-1]
    return HeldOut(steps, accuracies, last["benchmarks"], last["prompts"], last["samples"])


def held_out_prompts(
    store: PosteriorStore, run: RunRecord, step: int
) -> dict[str, tuple[Integers, Floats, Floats]]:
    """Return held-out accuracy after a step by benchmark: (P,) prompt ids, ascending, (P,) the accuracy of each, (P, 2)
    its verified responses and the sum of their scores.

    Accuracy is in [0, 1] for scores of 0 and 1. Prompts without a verified response are left out.
    """
    query = """SELECT benchmark, prompt_id, avg(successes / verified) AS accuracy,
                      CAST(sum(verified) AS BIGINT) AS verified, sum(successes) AS successes FROM evaluation_results
               WHERE run_id = :run AND name = :name AND step = :step AND verified > 0
               GROUP BY benchmark, prompt_id ORDER BY benchmark, prompt_id"""
    rows_of = defaultdict(list)
    for row in store.query(query, run=run.run_id, name=TRAINING, step=step):
        rows_of[row.benchmark].append(row[1:])
    found = {}
    for benchmark, rows in rows_of.items():
        values = np.array(rows, dtype=np.float64)
        found[benchmark] = (values[:, 0].astype(np.int64), values[:, 1], values[:, 2:])
    return found


def progress(store: PosteriorStore, run: RunRecord) -> dict[str, Any]:
    """Return totals of a run, with ``unused_rollouts``, as given to ``Run.finish``.

    ``visits`` are prompts trained on, summed over steps; ``prompts`` have a posterior, ``visited`` of them were trained
    on in this run, ``mean`` is of their posterior means; ``samples`` are of the probes, not counted in ``rollouts``.
    None: nothing to average, no checkpoint, or counts of :class:`openrlhf_dbb.storage.Usage` that were not made.
    """
    check_rows(store.database, run, "dbb_step", "dbb_posterior", "dbb_checkpoint", "dbb_probe")
    query = f"""
        SELECT s.*, q.prompts, q.visited, q.mean, c.checkpoint, p.probes, p.samples
        FROM (SELECT count(*) AS steps, CAST(coalesce(sum(prompts), 0) AS BIGINT) AS visits,
                     CAST(coalesce(sum(rollouts), 0) AS BIGINT) AS rollouts, coalesce(sum(successes), 0) AS successes,
                     max(created_at) AS last_step_at, {SUMS}
              FROM dbb_step WHERE run_id = :run) s
        CROSS JOIN (SELECT count(*) AS prompts, avg(mean) AS mean,
                           coalesce(sum(CASE WHEN visits > 0 THEN 1 ELSE 0 END), 0) AS visited
                    FROM posteriors WHERE run_id = :run) q
        CROSS JOIN (SELECT max(step) AS checkpoint FROM dbb_checkpoint WHERE run_id = :run) c
        CROSS JOIN (SELECT count(*) AS probes, CAST(coalesce(sum(samples), 0) AS BIGINT) AS samples
                    FROM dbb_probe WHERE run_id = :run) p"""
    totals = _rows(store, run, query)[0]
    totals["unused_rollouts"] = unused_rollouts(store, run)
    if totals["last_step_at"] is not None:
        what = f"the last created_at of run {run.name!r}"
        totals["last_step_at"] = decode.moment(totals["last_step_at"], what)
    return totals


def unused_rollouts(store: PosteriorStore, run: RunRecord) -> int:
    """Return the rollouts that belong to no step, as given to ``Run.finish``; 0 before."""
    ends = store.query(
        "SELECT detail FROM dbb_event WHERE run_id = :run AND kind = 'finish'", run=run.run_id
    )
    unused = 0
    for row in ends:
        what = f"detail of the finish of run {run.name!r}"
        unused += int(decode.numbers(row.detail, what).get("unused_rollouts") or 0)
    return unused


@retried
def shared_state(store: PosteriorStore, run: RunRecord) -> SharedState:
    """Return the estimator's run-wide vectors by name, as ``Run.load_shared``, whoever owns the run."""
    with store.database.transaction() as connection:
        return newest_shared(connection, run)


def unverified_visits(store: PosteriorStore, run: RunRecord) -> dict[int, int]:
    """Return by prompt id how many visits without any score it has had since its last score."""
    query = "SELECT step, shared FROM dbb_step WHERE run_id = :run AND shared LIKE :name"
    steps = store.query(query, run=run.run_id, name=f'%"{UNVERIFIED}"%')
    if not steps:
        return {}
    query = "SELECT prompt_id, step FROM dbb_posterior WHERE run_id = :run"
    scored = {row.prompt_id: row.step for row in store.query(query, run=run.run_id)}
    visits: Counter[int] = Counter()
    for row in steps:
        shared = decode.vectors(row.shared, f"shared of step {row.step} of run {run.name!r}")
        for prompt_id in map(int, shared.get(UNVERIFIED, [])):
            if row.step > scored.get(prompt_id, 0):
                visits[prompt_id] += 1
    return visits


def prompt_texts(
    store: PosteriorStore, prompt_ids: Integers, *, length: int = 2**31 - 1
) -> list[tuple[str, str]]:
    """Return text and label of each prompt, cut to ``length`` characters.

    Raises:
        StoreError: the store lacks a prompt's row.
    """
    query = f"""SELECT prompt_id, substr(prompt, 1, :length), substr(label, 1, :length)
                FROM dbb_prompt WHERE {store.database.one_of("prompt_id")}"""
    parameters = {"ids": store.database.ids(prompt_ids), "length": length}
    found = {}
    with store.database.transaction() as connection:
        for rows in chunks(connection, query, parameters):
            for prompt_id, text, label in rows:
                found[prompt_id] = (text, label)
    for prompt_id in prompt_ids.tolist():
        if prompt_id not in found:
            raise StoreError(
                f"prompt {prompt_id} is not in {store.location}; restore a backup that has its row"
            )
    return [found[prompt_id] for prompt_id in prompt_ids.tolist()]


def kept_rollouts(store: PosteriorStore, run: RunRecord, step: int, *, limit: int) -> Rows:
    """Return kept rollouts of the run's last step, with the posterior after and before it (None at a first visit)."""
    query = """
        SELECT p.prompt, p.label, r.text AS response, r.read, r.score, r.reward, r.advantage, q.visits,
               h.prev_alpha AS alpha_before, h.prev_beta AS beta_before,
               h.prev_alpha / nullif(h.prev_alpha + h.prev_beta, 0) AS mean_before,
               h.alpha, h.beta, coalesce(h.alpha / nullif(h.alpha + h.beta, 0), h.mean) AS mean
        FROM dbb_rollout r JOIN dbb_prompt p USING (prompt_id) LEFT JOIN dbb_history h USING (run_id, step, prompt_id)
        LEFT JOIN dbb_posterior q USING (run_id, prompt_id)
        WHERE r.run_id = :run AND r.step = :step ORDER BY r.prompt_id, r.sample LIMIT :limit"""
    return _rows(store, run, query, step=step, limit=limit)


def extremes(store: PosteriorStore, run: RunRecord, *, hardest: bool, limit: int = 10) -> Rows:
    """Return prompt_id, prompt, mean, variance, visits and step of the prompts with the lowest or highest mean."""
    order = "ASC" if hardest else "DESC"
    query = f"""
        SELECT q.prompt_id, p.prompt, q.mean, q.variance, q.visits, q.step
        FROM (SELECT prompt_id, mean, variance, visits, step FROM posteriors
              WHERE run_id = :run AND mean IS NOT NULL ORDER BY mean {order}, prompt_id LIMIT :limit) q
        JOIN dbb_prompt p ON p.prompt_id = q.prompt_id ORDER BY q.mean {order}, q.prompt_id"""
    return _rows(store, run, query, limit=limit)


def find_prompts(store: PosteriorStore, run: RunRecord, ref: str) -> Rows:
    """Return prompt_id, prompt and label of ten prompts at most of a run; raise StoreError if there is none.

    First the one with the id ``ref``, then those with ``ref`` in their prompt (case-insensitive), lowest id first.
    """
    query = """
        SELECT prompt_id, prompt, label FROM dbb_prompt JOIN dbb_posterior USING (prompt_id)
        WHERE run_id = :run AND (CAST(prompt_id AS TEXT) = :id OR lower(prompt) LIKE lower(:part) ESCAPE '/')
        ORDER BY CASE WHEN CAST(prompt_id AS TEXT) = :id THEN 0 ELSE 1 END, prompt_id LIMIT 10"""
    part = re.sub("[/%_]", r"/\g<0>", ref)
    prompts = _rows(store, run, query, id=ref.lstrip("0"), part=f"%{part}%")
    if not prompts:
        raise StoreError(
            f"run {run.name!r} has no posterior of a prompt with id or text {ref!r}; "
            "give a prompt_id, or part of the prompt's text"
        )
    return prompts


def prompt_history(store: PosteriorStore, run: RunRecord, prompt_id: int) -> Rows:
    """Return step, rollouts, successes, alpha, beta, mean, variance and lag of each visit of a prompt, oldest first.

    Mean and variance are the posterior's after the visit; those that it was scored with where there is no posterior.
    """
    # Walks back from step to step: an index of the history by prompt would slow every step down. SQLite keeps the
    # order of a cross join; of a plain join it may read all steps of the run first. An edited prev_step that is no
    # earlier step would let it walk for ever.
    query = f"""
        WITH RECURSIVE visit(step) AS (
            SELECT step FROM dbb_posterior WHERE run_id = :run AND prompt_id = :prompt
            UNION ALL
            SELECT h.prev_step FROM visit v
            JOIN dbb_history h ON h.run_id = :run AND h.step = v.step AND h.prompt_id = :prompt
            WHERE h.prev_step BETWEEN 1 AND v.step - 1)
        SELECT h.step, h.rollouts, h.successes, h.alpha, h.beta,
               {MEAN} AS mean, {VARIANCE} AS variance, coalesce(h.step - 1 - h.policy_version, 0.0) AS lag
        FROM visit v CROSS JOIN dbb_history h
        WHERE h.run_id = :run AND h.step = v.step AND h.prompt_id = :prompt ORDER BY h.step"""
    return _rows(store, run, query, prompt=prompt_id)


@dataclass(frozen=True)
class KeptScores:
    """The scores of a run's kept rollouts."""

    different: int  # how many different ones there are
    ends: tuple[float, ...]  # the lowest and the highest; empty if no score is kept


def kept_scores(store: PosteriorStore, run: RunRecord) -> KeptScores:
    """Return what the kept rollouts tell of the scores of a run.

    Raises:
        StoreError: a score is not a number.
    """
    query = """SELECT count(DISTINCT score) AS different, min(score) AS lowest, max(score) AS highest
               FROM dbb_rollout WHERE run_id = :run"""
    [row] = store.query(query, run=run.run_id)
    refuse_other_scores(store, run, row.highest)
    return KeptScores(row.different, (row.lowest, row.highest) if row.different else ())


def refuse_other_scores(store: PosteriorStore, run: RunRecord, highest: Any) -> None:
    """Raise StoreError if the highest of a run's scores is not a number."""
    if isinstance(highest, (str, bytes)):  # SQLite sorts them behind all numbers
        check_rows(store.database, run, "dbb_rollout")


# The number of right rollouts of a group; a sum of decimals has rounding errors.
_RIGHT = "(successes - :wrong * rollouts) / (:right - :wrong)"


def all_fit(store: PosteriorStore, run: RunRecord, wrong: float, right: float) -> bool:
    """Return whether every group's sum is one of rollouts that have these two scores."""
    query = f"""SELECT counted FROM
                (SELECT rollouts, {_RIGHT} AS counted FROM dbb_history WHERE run_id = :run) of_visit
                WHERE counted < -1e-6 OR counted > rollouts + 1e-6
                   OR abs(counted - round(counted)) > 1e-6 LIMIT 1"""
    return not store.query(query, run=run.run_id, wrong=wrong, right=right)


def prompt_rates(
    store: PosteriorStore, run: RunRecord, wrong: float, right: float
) -> dict[str, NDArray[Any]]:
    """Return the columns of the view ``prompt_rates`` of a run, (P,) each, ascending by prompt_id.

    ``wrong`` and ``right`` are the scores of a rollout; ``successes`` counts the right ones.
    """
    check_rows(store.database, run, "dbb_history")
    kinds = dict.fromkeys(("prompt_id", "visits", "rollouts", "flips"), "<i8")
    kinds |= dict.fromkeys(("successes", "best", "last"), "<f8")
    counted = f"""SELECT run_id, step, prompt_id, rollouts, round({_RIGHT}) AS successes
                  FROM dbb_history WHERE run_id = :run"""
    rates = VIEWS["prompt_rates"].replace("FROM dbb_history", f"FROM ({counted}) counted")
    where = f"FROM ({rates}) rates ORDER BY prompt_id"
    return columns(store, kinds, where, run=run.run_id, wrong=wrong, right=right)


def kept_group(
    store: PosteriorStore, run: RunRecord, step: int, prompt_id: int
) -> tuple[Rows, Rows]:
    """Return a group with its estimate and the posterior before and after, if there is one; and its kept rollouts."""
    group = """
        SELECT h.step, s.form, h.prev_step, h.prev_alpha AS alpha_before, h.prev_beta AS beta_before, h.rollouts,
               h.successes, h.alpha, h.beta, h.state, h.mean, h.variance
        FROM dbb_history h JOIN dbb_step s USING (run_id, step)
        WHERE h.run_id = :run AND h.step = :step AND h.prompt_id = :prompt"""
    rollouts = f"""
        SELECT sample, reward, score, read, baseline, scale, weight, {ADVANTAGE}, text AS response
        FROM rollouts r JOIN dbb_step s USING (run_id, step)
        WHERE run_id = :run AND step = :step AND prompt_id = :prompt ORDER BY sample"""
    check_rows(store.database, run, "dbb_history", "dbb_rollout", step=step)
    place = {"step": step, "prompt": prompt_id}
    return _rows(store, run, group, **place), _rows(store, run, rollouts, **place)


def _rows(store: PosteriorStore, run: RunRecord, query: str, **parameters: Any) -> Rows:
    """Return rows of a query about a run; raise StoreError if a value has another type."""
    rows = [dict(row._mapping) for row in store.query(query, run=run.run_id, **parameters)]
    for row in rows:
        for name, value in row.items():
            what = f"{name} of a row of run {run.name!r}"
            if name in _TEXTS:
                decode.typed(value, str, what)
            elif not (value is None or isinstance(value, (int, float))) or value != value:
                raise decode.refusal(what, value, "a number")
    return rows
