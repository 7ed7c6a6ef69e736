"""The commands runs, show, history and explain: all runs, one run, one prompt, the advantages of one group.

The functions behind them, such as :func:`overview`, describe a run in numbers, also for the page and the summary.
"""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from openrlhf_dbb.core import IMPORTED
from openrlhf_dbb.core.scale import verdicts
from openrlhf_dbb.estimators import FORMS
from openrlhf_dbb.options import add_json, add_run, chosen
from openrlhf_dbb.secrets import without_passwords, without_secrets
from openrlhf_dbb.storage import PosteriorStore, RunRecord, StoreError, read
from openrlhf_dbb.storage.decode import naming_damage
from openrlhf_dbb.storage.owner import SILENT_S
from openrlhf_dbb.terminal import json_text, print_facts, print_table, print_title, safe, shown, without_shared

_PROMPTS = 5  # hardest and easiest prompts that show lists
_LONGEST = 200
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
_PROMPT_HELP = "id of the prompt, or a piece of its text"


def add_commands(add: Any) -> None:
    add_json(add("runs", list_runs))
    parser = add("show", show_run)
    add_run(parser)
    add_json(parser)
    parser = add("history", show_history)
    parser.add_argument("prompt", metavar="PROMPT", help=_PROMPT_HELP)
    add_run(parser)
    add_json(parser)
    parser = add("explain", explain)
    parser.add_argument("run", metavar="RUN", help="name, number or uuid")
    parser.add_argument("step", metavar="STEP", type=int, help="training step, from 1")
    parser.add_argument("prompt", metavar="PROMPT", help=_PROMPT_HELP)
    add_json(parser)


def list_runs(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    found = [(run, overview(store, run)) for run in store.runs()[::-1]]
    if arguments.json:
        print(json_text([numbers for _, numbers in found]))
    elif not found:
        print(f"no runs in {shown(store.location, width=None)}")
    else:
        rows = []
        for run, numbers in found:
            accuracy, measured = None, numbers["held_out"]
            if measured is not None:  # such as "39.6 -> 42.8 %"
                start = "" if measured["start_step"] == measured["last_step"] else f"{100 * measured['start']:.1f} -> "
                accuracy = f"{start}{100 * measured['last']:.1f} %"
            named = (run.run_id, run.name, status(run), accuracy, run.last_step, method(run))
            rows.append((*named, numbers["rollouts"], age(run.created_at)))
        print_table(("#", "name", "status", "held-out accuracy", "step", "method", "rollouts", "age"), rows)


def show_run(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run = chosen(store, arguments.run)
    hardest, easiest = (read.extremes(store, run, hardest=hardest, limit=_PROMPTS) for hardest in (True, False))
    if arguments.json:
        numbers = overview(store, run) | {"progress": read.progress(store, run)}
        numbers |= {"reward": without_passwords(run.reward), "began_from": without_secrets(run.parent)}
        numbers |= {"database": store.location, "hardest": hardest, "easiest": easiest}
        print(json_text(numbers | {"configuration": without_secrets(run.config)}))
    else:
        print_facts(facts(store, run).items())
        parts = {"hardest prompts": hardest, "easiest prompts": easiest}
        print_prompts(parts, ("prompt_id", "mean", "variance", "visits"))


def print_prompts(parts: Mapping[str, list[dict[str, Any]]], columns: Sequence[str]) -> None:
    """Print tables of prompts by title, texts without what they have in common."""
    shortened = without_shared([row["prompt"] for rows in parts.values() for row in rows])
    for title, rows in parts.items():
        if rows:
            print_title(title)
            cells = [(*(row[name] for name in columns), shown(shortened[row["prompt"]])) for row in rows]
            print_table((*(name.replace("_", " ") for name in columns), "text"), cells)


def facts(store: PosteriorStore, run: RunRecord) -> dict[str, str]:
    """Return the facts about a run as texts by name, safe to print."""
    totals = read.progress(store, run)
    last = totals["last_step_at"]
    texts = {
        "run": f"{run.name} (number {run.run_id})",
        "held-out accuracy": _held_out(held_out_numbers(store, run)),
        "status": f"{status(run)}, step {run.last_step}",
        "started": f"{run.created_at[:19]}Z" + ("" if last is None else f"; last step {age(last)} ago"),
        "training": f"{_reward(store, run, totals)}, {totals['rollouts']} rollouts in {totals['visits']} visits",
        **usage_in_words(store, run, totals),
        "posterior mean": "none yet"
        if totals["mean"] is None
        else f"{totals['mean']:.4f} over {totals['prompts']} prompts, {totals['visited']} visited",
    }
    # Not the longer vectors, such as the weights of a regression.
    single = {name: values[0] for name, values in read.shared_state(store, run).items() if len(values) == 1}
    texts["run-wide state"] = ", ".join(f"{name} {value:.4g}" for name, value in single.items())
    if totals["probes"]:
        texts["probes"] = f"{totals['samples']} rollouts of {totals['probes']} groups, never trained on"
    parent = run.parent
    estimator = f"{run.estimator} version {run.estimator_version}, {parameters(run)}".removesuffix(", ")
    if run.method == IMPORTED:
        estimator = f"not known, the run was read from a log; {parameters(run)}"
    texts |= {
        "checkpoint": "none yet" if totals["checkpoint"] is None else f"step {totals['checkpoint']}",
        "method": run.method or "the trainer's own",
        "estimator": estimator,
        "model": run.model,
        "data set": f"{run.dataset} ({run.dataset_digest})".removesuffix(" ()").strip(),
        "reward": run.reward,
        "began from": "its prior"
        if parent is None
        else f"run {parent['name']} at step {parent['step']}, weight {parent['weight']:g}, in {parent['database']}",
        "database": store.location,
    }
    if state(run) == "stale" and run.method:  # another trainer has its own way to go on
        texts["to go on"] = f"the same training command with --resume {shlex.quote(run.name)}"
    return {name: safe(value) for name, value in texts.items() if value}


def _reward(store: PosteriorStore, run: RunRecord, totals: Mapping[str, Any]) -> str:
    """Return in words the share of right rollouts, or the mean score if scores are others."""
    if not totals["rollouts"]:
        return "none of the full reward"
    mean, scores = totals["successes"] / totals["rollouts"], verdicts(store, run)
    if scores is None:
        return f"mean score {mean:.4g}"
    wrong, right = scores
    return f"{100 * (mean - wrong) / (right - wrong):.1f} % of the full reward"


def _held_out(numbers: Mapping[str, Any] | None) -> str:
    if numbers is None:
        return "not measured"
    points = {numbers[f"{name}_step"]: f"{100 * numbers[name]:.1f} % ({name})" for name in ("start", "best", "last")}
    texts = " -> ".join(f"{text} at step {step}" for step, text in points.items())
    return f"{texts}; {numbers['prompts']} prompts x {numbers['samples']} samples"


def _one_prompt(store: PosteriorStore, run: RunRecord, ref: str) -> dict[str, Any]:
    """Return prompt_id, prompt and label of the prompt with this id, or with this piece of text; refuse several."""
    matches = read.find_prompts(store, run, ref)
    if len(matches) > 1 and str(matches[0]["prompt_id"]) != ref:
        shortened = without_shared([row["prompt"] for row in matches], 30)
        named = ", ".join(
            f"{row['prompt_id']} ({shown(shortened[row['prompt']], 30)}, label {shown(row['label'], 20)})"
            for row in matches
        )
        raise StoreError(f"{ref!r} is in several prompts: {named}; give the id of one")
    return matches[0]


def show_history(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run = chosen(store, arguments.run)
    prompt = _one_prompt(store, run, arguments.prompt)
    visits = read.prompt_history(store, run, prompt["prompt_id"])
    if arguments.json:
        print(json_text({"run": run.name, **prompt, "visits": visits}))
        return
    text, label = shown(prompt["prompt"], _LONGEST), shown(prompt["label"], _LONGEST)
    print_facts([("run", run.name), ("prompt", f"{prompt['prompt_id']}: {text}"), ("label", label)])
    if visits:
        columns = [name for name in visits[0] if name != "lag" or any(row["lag"] for row in visits)]
        heads = list(columns)
        if verdicts(store, run) != (0, 1):
            heads[columns.index("successes")] = "sum of scores"
        print_table(heads, [[row[name] for name in columns] for row in visits])
    else:
        print("not visited in this run; its posterior comes from the warm start")


def explain(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run = store.find_run(arguments.run)
    prompt = _one_prompt(store, run, arguments.prompt)
    groups, rollouts = read.kept_group(store, run, arguments.step, prompt["prompt_id"])
    if not groups:
        raise StoreError(
            f"run {run.name!r} has no group of prompt {prompt['prompt_id']} at step {arguments.step}; "
            f"openrlhf-dbb history {prompt['prompt_id']} {run.run_id} lists its steps"
        )
    group = groups[0]
    if arguments.json:
        print(json_text({"run": run.name, **prompt, **group, "rollouts": rollouts}))
        return
    form = FORMS.available().get(group["form"])
    estimate = [
        ("mean p", f"{group['mean']:.6g}"),
        ("deviation", f"{group['variance'] ** 0.5:.6g}, the root of the variance {group['variance']:.6g}"),
    ]
    if run.method == IMPORTED:  # no advantage was made of these
        estimate = []
    before = "nothing but the prior"
    if group["prev_step"] >= 0:
        since = f"since step {group['prev_step']}" if group["prev_step"] else "from the warm start"
        before = f"{_parameters(group, '_before')}, {since}"
    print_facts(
        [
            ("run", f"{run.name}, step {group['step']}"),
            ("prompt", f"{prompt['prompt_id']}: {shown(prompt['prompt'], _LONGEST)}"),
            ("label", shown(prompt["label"], _LONGEST)),
            ("form", f"{group['form'] or 'not known'}{f': {form.formula}' if form else ''}"),
            ("known before", before),
            ("rewards seen", f"{group['rollouts']}, sum {group['successes']:.6g}"),
            ("known after", _parameters(group)),
            *estimate,
        ]
    )
    if rollouts:
        names = ["sample", "reward", "score", "baseline", "scale", "weight", "advantage", "arithmetic"]
        names += ["read"] if any(row["read"] for row in rollouts) else []
        rows = [row | {"arithmetic": _arithmetic(row, group["form"])} for row in rollouts]
        print_table(names, [[row[name] for name in names] for row in rows])
    else:
        print("none of its rollouts is kept; train with a greater --rollouts.keep to see each advantage")


def _parameters(group: Mapping[str, Any], when: str = "") -> str:
    alpha, beta = group[f"alpha{when}"], group[f"beta{when}"]
    return "its state, with --json" if alpha is None else f"alpha {alpha:.6g}, beta {beta:.6g}"


def _arithmetic(row: Mapping[str, Any], form: str | None) -> str:
    if row["reward"] is None:
        return "could not be verified"
    if row["advantage"] is None:
        return "advantage not known"
    if form is None and row["baseline"] is None:
        return "the trainer's own advantage"
    if row["baseline"] is None:
        return "not trained on"
    if row["scale"] == 0:
        return "0, since the scale is 0"
    weight = "" if row["weight"] == 1 else f"{row['weight']:.6g} * "
    return f"{weight}({row['reward']:.6g} - {row['baseline']:.6g}) / {row['scale']:.6g} = {row['advantage']:.6g}"


# ---- a run in numbers


def overview(store: PosteriorStore, run: RunRecord) -> dict[str, Any]:
    """Return a run in numbers by name, ready for JSON; None where a number is not known.

    A share of zero-variance rollouts is None at N = 1, where it is not defined.
    """
    status = state(run)
    totals = {}
    measured = None
    try:
        with naming_damage(f"run {run.name!r}"):
            totals = usage_totals(store, run)
            measured = held_out_numbers(store, run)
    except StoreError:  # told where this run is asked for; a list has others
        status = "damaged"
    mixed = totals.get("mixed_groups")
    equal = totals.get("zero_variance")
    counts = ("trained", "filtered", "skipped", "groups", "mixed_groups", "rollouts_per_mixed_group",
              "tokens_per_mixed_group")  # fmt: skip
    return {
        "number": run.run_id,
        "name": run.name,
        "uuid": run.uuid,
        "status": status,
        "step": run.last_step,
        "held_out": measured,
        "method": run.method or None,
        "estimator": None if run.method == IMPORTED else run.estimator,
        "parameters": run.parameters,
        "rollouts": totals.get("generated"),
        "tokens": totals.get("generated_tokens"),
        **{name: totals.get(name) for name in counts},
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
    (row,) = store.query(f"SELECT {read.SUMS} FROM dbb_step WHERE run_id = :run", run=run.run_id)
    totals = row._asdict()
    mixed = mixed_groups(totals)
    return totals | {
        "single": bool(totals["groups"]) and mixed is None,
        "mixed_groups": mixed,
        "rollouts_per_mixed_group": ratio(totals["generated"], mixed),
        "tokens_per_mixed_group": ratio(totals["generated_tokens"], mixed),
    }


def mixed_groups(totals: Mapping[str, Any]) -> int | None:
    """Return how many groups had some rollouts right and some wrong; None at N = 1 or if usage was not recorded.

    The store counts the rollouts of the other groups, so the number is exact where all groups have the same size.
    """
    if not totals["generated"] or totals["generated"] < 2 * totals["groups"]:
        return None
    return round(totals["groups"] * (totals["generated"] - totals["zero_variance"]) / totals["generated"])


def usage_in_words(store: PosteriorStore, run: RunRecord, totals: Mapping[str, Any]) -> dict[str, str]:
    """Return where the rollouts went and, unless N = 1, how many groups had equal rewards; nothing if not recorded.

    ``totals``: from :func:`openrlhf_dbb.storage.read.progress`. A quarter is one of the steps.
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
    query = """SELECT generated, zero_variance FROM dbb_step
                WHERE run_id = :run AND generated > 0 ORDER BY step"""
    steps = store.query(query, run=run.run_id)
    if not steps:
        raise StoreError(f"run {run.name!r} has been deleted meanwhile; openrlhf-dbb runs lists the others")
    quarter = -(-len(steps) // 4)
    whole, early, late = (
        f"{sum(step.zero_variance for step in part) / sum(step.generated for step in part):.0%}"
        for part in (steps, steps[:quarter], steps[-quarter:])
    )
    given = "which of these were given an advantage is not known"
    if totals["rescued"] is not None:
        given = f"{totals['rescued'] / max(totals['zero_variance'], 1):.0%} of these were given an advantage"
    equal = f"{whole} of {totals['groups']} had equal rewards (first quarter {early}, last {late})"
    words["groups"] = f"{equal}: plain GRPO learns nothing from these; {given}"
    return words


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return part / whole; None if a number is not known, or whole is 0."""
    return None if part is None or not whole else part / whole


def held_out_numbers(store: PosteriorStore, run: RunRecord) -> dict[str, Any] | None:
    """Return held-out accuracy at the start, the best and the last step of a run; None if it was not measured."""
    measured = read.held_out(store, run)
    if measured is None:
        return None
    numbers: dict[str, Any] = {}
    for name, place in (("start", 0), ("best", measured.best), ("last", -1)):
        numbers |= {name: float(measured.accuracy[place]), f"{name}_step": int(measured.step[place])}
    return numbers | {"prompts": measured.prompts, "samples": measured.samples, "benchmarks": measured.benchmarks}


def state(run: RunRecord) -> str:
    """Return "finished", "running", "stale" (not finished, and its owner seems to have ended) or "damaged"."""
    # A killed process cannot write that its run has ended.
    silent = seconds_since(run.heartbeat_at) > SILENT_S
    if run.damage:
        return "damaged"
    stale = run.status == "running" and (run.owner.is_gone or (silent and not run.owner.is_local))
    return "stale" if stale else run.status


def status(run: RunRecord) -> str:
    """Return the state of a run; a stale run's has the time since its last write, such as "stale 3 h"."""
    name = state(run)
    return f"{name} {age(run.heartbeat_at)}" if name == "stale" else name


def age(moment: str) -> str:
    """Return the time since a moment (UTC, ISO 8601) in its largest unit, such as "3 h"."""
    seconds = max(seconds_since(moment), 0)
    name, size = next((unit for unit in _UNITS if seconds >= unit[1]), _UNITS[-1])
    return f"{int(seconds // size)} {name}"


def seconds_since(moment: str) -> float:
    """Return the time since a moment (UTC, ISO 8601), in seconds."""
    return (datetime.now(timezone.utc) - datetime.fromisoformat(moment.replace("Z", "+00:00"))).total_seconds()


def method(run: RunRecord) -> str:
    """Return method and estimator of a run, such as "dapo+dbb"; "import" for a run read from a log."""
    if run.method == IMPORTED:
        return run.method
    return f"{run.method}+{run.estimator}" if run.method else run.estimator


def parameters(run: RunRecord) -> str:
    """Return the estimator's parameters, such as "discount = 0.5, prior_alpha = 1.0"."""
    return ", ".join(f"{key} = {value}" for key, value in run.parameters.items())
