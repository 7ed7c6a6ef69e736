"""The command explain prints the arithmetic behind the advantages of one group."""

import argparse
from collections.abc import Mapping
from typing import Any

from openrlhf_dbb.estimators import FORMS
from openrlhf_dbb.inspect.show import LONGEST, one_prompt
from openrlhf_dbb.options import add_json
from openrlhf_dbb.storage import PosteriorStore, StoreError
from openrlhf_dbb.storage.read import kept_group
from openrlhf_dbb.terminal import json_text, print_facts, print_table, shown


def add_commands(add: Any) -> None:
    parser = add("explain", explain)
    parser.add_argument("run", metavar="RUN", help="name, number or uuid")
    parser.add_argument("step", metavar="STEP", type=int, help="training step, from 1")
    parser.add_argument("prompt", metavar="PROMPT", help="id of the prompt, or a piece of its text")
    add_json(parser)


def explain(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run = store.find_run(arguments.run)
    prompt = one_prompt(store, run, arguments.prompt)
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
    after = "" if group["alpha"] is None else f"alpha {group['alpha']:.6g}, beta {group['beta']:.6g}"
    print_facts(
        [
            ("run", f"{run.name}, step {group['step']}"),
            ("prompt", f"{prompt['prompt_id']}: {shown(prompt['prompt'], LONGEST)}"),
            ("label", shown(prompt["label"], LONGEST)),
            ("form", f"{group['form'] or 'not known'}{f': {form.formula}' if form else ''}"),
            ("known before", _before(group)),
            ("rewards seen", f"{group['rollouts']}, sum {group['successes']:.6g}"),
            ("known after", after or "its state, with --json"),
            ("mean p", f"{group['mean']:.6g}"),
            ("deviation", f"{group['variance'] ** 0.5:.6g}, the root of the variance {group['variance']:.6g}"),
        ]
    )
    if rollouts:
        names = ["sample", "reward", "score", "baseline", "scale", "weight", "advantage", "arithmetic"]
        names += ["read"] if any(row["read"] for row in rollouts) else []
        rows = [row | {"arithmetic": _arithmetic(row)} for row in rollouts]
        print_table(names, [[row[name] for name in names] for row in rows], cut=["read"])
    else:
        print("none of its rollouts is kept; train with a greater --rollouts.keep to see each advantage")


def _before(group: Mapping[str, Any]) -> str:
    if group["prev_step"] < 0:
        return "nothing but the prior"
    since = f"since step {group['prev_step']}" if group["prev_step"] else "from the warm start"
    if group["alpha_before"] is None:
        return since
    return f"alpha {group['alpha_before']:.6g}, beta {group['beta_before']:.6g}, {since}"


def _arithmetic(row: Mapping[str, Any]) -> str:
    if row["reward"] is None:
        return "could not be verified"
    if row["baseline"] is None:
        return "not trained on"
    if row["scale"] == 0:
        return "0, since the scale is 0"
    weight = "" if row["weight"] == 1 else f"{row['weight']:.6g} * "
    return f"{weight}({row['reward']:.6g} - {row['baseline']:.6g}) / {row['scale']:.6g} = {row['advantage']:.6g}"
