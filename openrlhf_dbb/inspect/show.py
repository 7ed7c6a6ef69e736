"""The commands that look into runs.

runs     a table of all runs
show     one run on one screen
history  one prompt, visit by visit
explain  the arithmetic behind the advantages of one group
"""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf_dbb.estimators import FORMS
from openrlhf_dbb.inspect.overview import age, held_out_numbers, method, overview, parameters, status, usage_in_words
from openrlhf_dbb.options import add_json, add_run, chosen
from openrlhf_dbb.secrets import without_passwords, without_secrets
from openrlhf_dbb.storage import PosteriorStore, RunRecord, StoreError
from openrlhf_dbb.storage.read import extremes, find_prompts, kept_group, progress, prompt_history, shared_state
from openrlhf_dbb.storage.url import BadRow
from openrlhf_dbb.terminal import json_text, print_facts, print_table, print_title, safe, shown, template_of

_PROMPTS = 5  # hardest and easiest prompts that show lists
_RUNS = ("#", "name", "status", "held-out accuracy", "step", "method", "rollouts", "age")
_LONGEST = 200
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
    found = []
    for run in store.runs()[::-1]:
        try:
            found.append((run, overview(store, run)))
        except BadRow as error:
            store.report(error)
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
        print_table(_RUNS, rows)


def show_run(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run = chosen(store, arguments.run)
    hardest, easiest = (extremes(store, run, hardest=hardest, limit=_PROMPTS) for hardest in (True, False))
    if arguments.json:
        numbers = overview(store, run) | {
            "progress": progress(store, run),
            "reward": without_passwords(run.reward),
            "began_from": without_secrets(run.parent),
            "database": store.location,
            "hardest": hardest,
            "easiest": easiest,
            "configuration": without_secrets(run.config),
        }
        print(json_text(numbers))
    else:
        print_facts(facts(store, run).items())
        parts = {"hardest prompts": hardest, "easiest prompts": easiest}
        print_prompts(parts, ("prompt_id", "mean", "variance", "visits"))


def print_prompts(parts: Mapping[str, list[dict[str, Any]]], columns: Sequence[str]) -> None:
    """Print tables of prompts by title, texts without the template that all have in common."""
    start, end = template_of(list({row["prompt"] for rows in parts.values() for row in rows}))
    for title, rows in parts.items():
        if rows:
            print_title(title)
            texts = [shown(row["prompt"].removeprefix(start).removesuffix(end)) for row in rows]
            cells = [(*(row[name] for name in columns), text) for row, text in zip(rows, texts, strict=True)]
            print_table((*(name.replace("_", " ") for name in columns), "text"), cells)


def facts(store: PosteriorStore, run: RunRecord) -> dict[str, str]:
    """Return the facts about a run as texts by name, safe to print."""
    totals = progress(store, run)
    last, now = totals["last_step_at"], status(run)
    success = f"{100 * totals['successes'] / totals['rollouts']:.1f} %" if totals["rollouts"] else "none"
    texts = {
        "run": f"{run.name} (number {run.run_id})",
        "held-out accuracy": _held_out(held_out_numbers(store, run)),
        "status": f"{now}, step {run.last_step}",
        "started": run.created_at[:19] + ("" if last is None else f"; last step {age(last)} ago"),
        "training": f"{success} of the full reward, {totals['rollouts']} rollouts in {totals['visits']} visits",
        **usage_in_words(store, run, totals),
        "posterior mean": "none yet"
        if totals["mean"] is None
        else f"{totals['mean']:.4f} over {totals['prompts']} prompts, {totals['visited']} visited",
    }
    # Not the longer vectors, such as the weights of a regression.
    single = {name: values[0] for name, values in (shared_state(store, run) or {}).items() if len(values) == 1}
    texts["run-wide state"] = ", ".join(f"{name} {value:.4g}" for name, value in single.items())
    if totals["probes"]:
        texts["probes"] = f"{totals['samples']} rollouts of {totals['probes']} groups, never trained on"
    parent = run.parent
    texts |= {
        "checkpoint": "none yet" if totals["checkpoint"] is None else f"step {totals['checkpoint']}",
        "method": run.method or "the trainer's own",
        "estimator": f"{run.estimator} version {run.estimator_version}, {parameters(run)}".removesuffix(", "),
        "model": run.model,
        "data set": f"{run.dataset} ({run.dataset_digest})".removesuffix(" ()").strip(),
        "reward": run.reward,
        "began from": "its prior"
        if parent is None
        else f"run {parent['name']} at step {parent['step']}, weight {parent['weight']:g}, in {parent['database']}",
        "database": store.location,
    }
    # A stale run is not lost. Another trainer has its own way to go on.
    if now.startswith("stale") and run.method:
        texts["to go on"] = f"the same training command with --resume {shlex.quote(run.name)}"
    return {name: safe(value) for name, value in texts.items() if value}


def _held_out(numbers: Mapping[str, Any] | None) -> str:
    if numbers is None:
        return "not measured"
    points = {numbers[f"{name}_step"]: f"{100 * numbers[name]:.1f} % ({name})" for name in ("start", "best", "last")}
    texts = " -> ".join(f"{text} at step {step}" for step, text in points.items())
    return f"{texts}; {numbers['prompts']} prompts x {numbers['samples']} samples"


def _one_prompt(store: PosteriorStore, run: RunRecord, ref: str) -> dict[str, Any]:
    """Return prompt_id, prompt and label of the prompt with this id, or with this piece of text; refuse several."""
    matches = find_prompts(store, run, ref)
    if len(matches) > 1 and str(matches[0]["prompt_id"]) != ref:
        start, end = template_of(list({row["prompt"] for row in matches}))
        texts = [shown(row["prompt"].removeprefix(start).removesuffix(end), 30) for row in matches]
        named = ", ".join(
            f"{row['prompt_id']} ({text}, label {shown(row['label'], 20)})"
            for row, text in zip(matches, texts, strict=True)
        )
        raise StoreError(f"{ref!r} is in several prompts: {named}; give the id of one")
    return matches[0]


def show_history(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run = chosen(store, arguments.run)
    prompt = _one_prompt(store, run, arguments.prompt)
    visits = prompt_history(store, run, prompt["prompt_id"])
    if arguments.json:
        print(json_text({"run": run.name, **prompt, "visits": visits}))
        return
    text, label = shown(prompt["prompt"], _LONGEST), shown(prompt["label"], _LONGEST)
    print_facts([("run", run.name), ("prompt", f"{prompt['prompt_id']}: {text}"), ("label", label)])
    if visits:
        columns = [name for name in visits[0] if name != "lag" or any(row["lag"] for row in visits)]
        print_table(columns, [[row[name] for name in columns] for row in visits])
    else:
        print("not visited in this run; its posterior comes from the warm start")


def explain(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run = store.find_run(arguments.run)
    prompt = _one_prompt(store, run, arguments.prompt)
    groups, rollouts = kept_group(store, run, arguments.step, prompt["prompt_id"])
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
            ("mean p", f"{group['mean']:.6g}"),
            ("deviation", f"{group['variance'] ** 0.5:.6g}, the root of the variance {group['variance']:.6g}"),
        ]
    )
    if rollouts:
        names = ["sample", "reward", "score", "baseline", "scale", "weight", "advantage", "arithmetic"]
        names += ["read"] if any(row["read"] for row in rollouts) else []
        rows = [row | {"arithmetic": _arithmetic(row)} for row in rollouts]
        print_table(names, [[row[name] for name in names] for row in rows])
    else:
        print("none of its rollouts is kept; train with a greater --rollouts.keep to see each advantage")


def _parameters(group: Mapping[str, Any], when: str = "") -> str:
    alpha, beta = group[f"alpha{when}"], group[f"beta{when}"]
    return "its state, with --json" if alpha is None else f"alpha {alpha:.6g}, beta {beta:.6g}"


def _arithmetic(row: Mapping[str, Any]) -> str:
    if row["reward"] is None:
        return "could not be verified"
    if row["baseline"] is None:
        return "not trained on"
    if row["scale"] == 0:
        return "0, since the scale is 0"
    weight = "" if row["weight"] == 1 else f"{row['weight']:.6g} * "
    return f"{weight}({row['reward']:.6g} - {row['baseline']:.6g}) / {row['scale']:.6g} = {row['advantage']:.6g}"
