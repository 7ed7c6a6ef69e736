"""The commands runs, show and history print a table of runs, a run on one screen, and a prompt visit by visit."""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf_dbb.inspect.overview import age, held_out_numbers, method, overview, parameters, status, usage_in_words
from openrlhf_dbb.options import add_json, add_run, chosen
from openrlhf_dbb.secrets import without_passwords, without_secrets
from openrlhf_dbb.storage import PosteriorStore, RunRecord, StoreError
from openrlhf_dbb.storage.read import extremes, find_prompts, progress, prompt_history, shared_state
from openrlhf_dbb.terminal import Styled, apart, json_text, print_facts, print_table, print_title, shown, template_of

_PROMPTS = 5  # hardest and easiest prompts that show lists
_BAR = 20
_RUNS = ("#", "name", "status", "held-out accuracy", "step", "method", "rollouts", "age")
LONGEST = 200


def add_commands(add: Any) -> None:
    add_json(add("runs", list_runs))
    parser = add("show", show_run)
    add_run(parser)
    add_json(parser)
    parser = add("history", show_history)
    parser.add_argument("prompt", metavar="PROMPT", help="id of the prompt, or a piece of its text")
    add_run(parser)
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
                accuracy = Styled(f"{start}{100 * measured['last']:.1f} %", "bold")
            named = (run.run_id, run.name, status(run), accuracy, run.last_step, method(run))
            rows.append((*named, numbers["rollouts"], age(run.created_at)))
        print_table(_RUNS, rows, cut=("name", "method"))


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
            print_table((*(name.replace("_", " ") for name in columns), "text"), cells, cut=("text",))


def facts(store: PosteriorStore, run: RunRecord) -> dict[str, str]:
    """Return the facts about a run as texts by name, safe to print."""
    totals = progress(store, run)
    last, now = totals["last_step_at"], status(run)
    success = f"{100 * totals['successes'] / totals['rollouts']:.1f} %" if totals["rollouts"] else "none"
    texts = {
        "run": Styled(f"{run.name} (number {run.run_id})", "bold"),
        "held-out accuracy": Styled(_held_out(held_out_numbers(store, run)), "bold"),
        "status": Styled(f"{now}, step {run.last_step}", now.style),
        "started": run.created_at[:19] + ("" if last is None else f"; last step {age(last)} ago"),
        "training": f"{success} of the full reward, {totals['rollouts']} rollouts in {totals['visits']} visits",
        **usage_in_words(store, run, totals),
        "posterior mean": "none yet"
        if totals["mean"] is None
        else f"{totals['mean']:.4f} over {totals['prompts']} prompts, {totals['visited']} visited",
    }
    # Not the longer vectors, such as the weights of a regression.
    single = {name: values[0] for name, values in shared_state(store, run).items() if len(values) == 1}
    texts["run-wide state"] = ", ".join(f"{name} {value:.4g}" for name, value in single.items())
    if totals["probes"]:
        texts["probes"] = f"{totals['samples']} rollouts of {totals['probes']} groups, never trained on"
    estimator = f"{run.estimator} version {run.estimator_version}"
    texts |= {
        "checkpoint": "none yet" if totals["checkpoint"] is None else f"step {totals['checkpoint']}",
        "preset": run.config.get("preset", ""),
        "method": run.method or "the trainer's own",
        "estimator": f"{estimator}, {parameters(run)}" if run.parameters else estimator,
        "model": run.model,
        "data set": f"{run.dataset} ({run.dataset_digest})".removesuffix(" ()").strip(),
        "reward": run.reward,
        "began from": _lineage(run),
        "uuid": run.uuid,
        "database": store.location,
    }
    # A stale run is not lost. Another trainer has its own way to go on.
    if now.startswith("stale") and run.method:
        texts["to go on"] = f"the same training command with --resume {shlex.quote(run.name)}"
    safe = {name: shown(without_passwords(value), width=None) for name, value in texts.items() if value}
    return {name: Styled(value, getattr(texts[name], "style", "")) for name, value in safe.items()}


def _held_out(numbers: Mapping[str, Any] | None) -> str:
    if numbers is None:
        return "not measured"
    at = {numbers[f"{name}_step"]: numbers[name] for name in ("start", "best", "last")}
    points = [
        f"{100 * accuracy:.1f} % at step {step}" + (" (best)" if len(at) > 1 and step == numbers["best_step"] else "")
        for step, accuracy in at.items()
    ]
    measured = f"{numbers['prompts']} prompts x {numbers['samples']} samples"
    if numbers["benchmarks"] > 1:
        measured += f", mean of {numbers['benchmarks']} benchmarks"
    return f"{' -> '.join(points)}; {measured}"


def _lineage(run: RunRecord) -> str:
    parent = run.parent
    if parent is None:
        return "its prior"
    weight = "" if parent["weight"] == 1 else f", weight {parent['weight']:g}"
    return f"run {parent['name']} at step {parent['step']}{weight} ({parent['uuid']} in {parent['database']})"


def one_prompt(store: PosteriorStore, run: RunRecord, ref: str) -> dict[str, Any]:
    """Return prompt_id, prompt and label of the prompt with this id, or with this piece of text; refuse several."""
    matches = find_prompts(store, run, ref)
    if len(matches) > 1 and str(matches[0]["prompt_id"]) == ref:
        print(f"{ref} is taken as an id; it is also in the text of other prompts", file=sys.stderr)
    elif len(matches) > 1:
        texts = [shown(text, 30) for text in apart([row["prompt"] for row in matches])]
        named = ", ".join(
            f"{row['prompt_id']} ({text}, label {shown(row['label'], 20)})"
            for row, text in zip(matches, texts, strict=True)
        )
        raise StoreError(f"{ref!r} is in several prompts: {named}; give the id of one")
    return matches[0]


def show_history(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run = chosen(store, arguments.run)
    prompt = one_prompt(store, run, arguments.prompt)
    visits = prompt_history(store, run, prompt["prompt_id"])
    if arguments.json:
        print(json_text({"run": run.name, **prompt, "visits": visits}))
        return
    text, label = shown(prompt["prompt"], LONGEST), shown(prompt["label"], LONGEST)
    print_facts([("run", run.name), ("prompt", f"{prompt['prompt_id']}: {text}"), ("label", label)])
    if visits:
        columns = [name for name in visits[0] if name != "lag" or any(row["lag"] for row in visits)]
        # A bar as long as a mean in [0, 1]; no bar for another mean.
        bars = [Styled("#" * round(_BAR * row["mean"]) if 0 <= row["mean"] <= 1 else "", "cyan") for row in visits]
        cells = [(*(row[name] for name in columns), bar) for row, bar in zip(visits, bars, strict=True)]
        print_table((*columns, ""), cells)
    else:
        print("not visited in this run; its posterior comes from the warm start")
