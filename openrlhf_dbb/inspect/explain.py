"""The commands history and explain: the visits of one prompt, the advantages of one group."""

import argparse
from typing import Any

from openrlhf_dbb.core import IMPORTED
from openrlhf_dbb.core.scale import verdicts
from openrlhf_dbb.estimators import FORMS
from openrlhf_dbb.options import add_json, add_run, chosen
from openrlhf_dbb.storage import PosteriorStore, RunRecord, StoreError, read
from openrlhf_dbb.terminal import (
    json_text,
    print_facts,
    print_rows,
    shown,
    without_shared,
)

Row = dict[str, Any]
"""A row of the store by column."""

_LONGEST = 200  # characters of a text
_PROMPT_HELP = "id of the prompt, or a piece of its text"


def add_commands(add: Any) -> None:
    """Declare the commands by ``cli.main``'s function."""
    parser = add("history", show_history)
    parser.add_argument("prompt", metavar="PROMPT", help=_PROMPT_HELP)
    add_run(parser)
    add_json(parser)
    parser = add("explain", explain)
    parser.add_argument("run", metavar="RUN", help="name, number or uuid")
    parser.add_argument("step", metavar="STEP", type=int, help="training step, from 1")
    parser.add_argument("prompt", metavar="PROMPT", help=_PROMPT_HELP)
    add_json(parser)


def _one_prompt(store: PosteriorStore, run: RunRecord, ref: str) -> Row:
    """Return prompt_id, prompt and label of the prompt with this id, or this piece of text.

    Raises:
        StoreError: no prompt of the run has it, or several have.
    """
    matches = read.find_prompts(store, run, ref)
    if len(matches) > 1 and str(matches[0]["prompt_id"]) != ref:
        shortened = without_shared([row["prompt"] for row in matches], 30)
        named = []
        for row in matches:
            text = shown(shortened[row["prompt"]], 30)
            named.append(f"{row['prompt_id']} ({text}, label {shown(row['label'], 20)})")
        raise StoreError(f"{ref!r} is in several prompts: {', '.join(named)}; give the id of one")
    return matches[0]


def show_history(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    """Print every visit of one prompt.

    Raises:
        StoreError: there is no such run or prompt, or a value cannot be read.
    """
    run = chosen(store, arguments.run)
    prompt = _one_prompt(store, run, arguments.prompt)
    visits = read.prompt_history(store, run, prompt["prompt_id"])
    if arguments.json:
        print(json_text({"run": run.name, **prompt, "visits": visits}))
        return
    print_facts([("run", run.name), *_prompt_facts(prompt)])
    if not visits:
        print("not visited in this run; its posterior comes from the warm start")
        return
    names = list(visits[0])
    if not any(row["lag"] for row in visits):
        names.remove("lag")
    if verdicts(store, run) != (0, 1):
        names[names.index("successes")] = "sum of scores"
        for row in visits:
            row["sum of scores"] = row["successes"]
    print_rows(names, visits)


def _prompt_facts(prompt: Row) -> list[tuple[str, str]]:
    return [
        ("prompt", f"{prompt['prompt_id']}: {shown(prompt['prompt'], _LONGEST)}"),
        ("label", shown(prompt["label"], _LONGEST)),
    ]


def explain(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    """Print the arithmetic of each advantage of one group.

    Raises:
        StoreError: there is no such run, prompt or group, or a value cannot be read.
    """
    run = store.find_run(arguments.run)
    prompt = _one_prompt(store, run, arguments.prompt)
    prompt_id = prompt["prompt_id"]
    groups, rollouts = read.kept_group(store, run, arguments.step, prompt_id)
    if not groups:
        raise StoreError(
            f"run {run.name!r} has no group of prompt {prompt_id} at step {arguments.step}; "
            f"openrlhf-dbb history {prompt_id} {run.run_id} lists its steps"
        )
    [group] = groups
    if arguments.json:
        print(json_text({"run": run.name, **prompt, **group, "rollouts": rollouts}))
        return
    step = ("run", f"{run.name}, step {group['step']}")
    print_facts([step, *_prompt_facts(prompt), *_group_facts(run, group)])
    if rollouts:
        _print_rollouts(rollouts, group["form"])
    else:
        print(
            "none of its rollouts is kept; "
            "train with a greater --rollouts.keep to see each advantage"
        )


def _group_facts(run: RunRecord, group: Row) -> list[tuple[str, str]]:
    name = group["form"] or "not known"
    form = FORMS.available().get(name)
    if form:
        name += f": {form.formula}"
    facts = [
        ("form", name),
        ("known before", _before(group)),
        ("rewards seen", f"{group['rollouts']}, sum {group['successes']:.6g}"),
        ("known after", _parameters(group["alpha"], group["beta"])),
    ]
    if run.method != IMPORTED:  # no advantage was made of an imported run's
        facts += [
            ("mean p", f"{group['mean']:.6g}"),
            ("deviation", _deviation(group["variance"])),
        ]
    return facts


def _deviation(variance: float) -> str:
    if variance < 0:  # edited by hand
        return f"none: the stored variance {variance:.6g} is negative"
    return f"{variance**0.5:.6g}, the root of the variance {variance:.6g}"


def _before(group: Row) -> str:
    step = group["prev_step"]
    if step < 0:
        return "nothing but the prior"
    since = f"since step {step}" if step else "from the warm start"
    return f"{_parameters(group['alpha_before'], group['beta_before'])}, {since}"


def _parameters(alpha: float | None, beta: float | None) -> str:
    if alpha is None and beta is None:
        return "its state, with --json"
    return f"alpha {_number(alpha)}, beta {_number(beta)}"


def _number(value: float | None) -> str:
    return "NULL" if value is None else f"{value:.6g}"  # NULL beside a number was edited by hand


def _print_rollouts(rollouts: read.Rows, form: str | None) -> None:
    names = [
        "sample",
        "reward",
        "score",
        "baseline",
        "scale",
        "weight",
        "advantage",
        "arithmetic",
    ]
    if any(row["read"] for row in rollouts):
        names.append("read")
    for row in rollouts:
        row["arithmetic"] = _arithmetic(row, form)
    print_rows(names, rollouts)


def _arithmetic(row: Row, form: str | None) -> str:
    if row["reward"] is None:
        return "could not be verified"
    if row["advantage"] is None:
        return "advantage not known"
    if None in (row["baseline"], row["scale"], row["weight"]):
        return "the trainer's own advantage" if form is None else "not trained on"
    if row["scale"] == 0:
        return "0, since the scale is 0"
    weight = "" if row["weight"] == 1 else f"{row['weight']:.6g} * "
    difference = f"({row['reward']:.6g} - {row['baseline']:.6g})"
    return f"{weight}{difference} / {row['scale']:.6g} = {row['advantage']:.6g}"
