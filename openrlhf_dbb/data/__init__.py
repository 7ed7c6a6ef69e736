"""Loads the training prompts and the held-out prompts, and chooses those that a run trains on."""

import functools
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import tasks, upstream
from openrlhf_dbb.core.texts import contradictions, prompt_text
from openrlhf_dbb.data.files import RATE, SOURCE, read, records, refuse
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.rewards import MATH_FILE
from openrlhf_dbb.rewards.math_answer import unreadable_labels

TRAINING = "data.prompt_dataset"  # flags that name data sets
HELD_OUT = "eval.dataset"


@dataclass(frozen=True)
class Prompts:
    """The prompts that a run trains on, in the order of their rows."""

    texts: list[str]  # as the model sees them, with the template applied
    labels: list[str]  # all empty without ``--data.label_key``
    rows: list[int]  # their row numbers in the loaded data set, from 0
    # successes and attempts of each, NaN where unknown; None without a column
    pass_rates: list[list[float]] | None
    sources: list[str] | None  # the value of ``--data.group_key`` of each; None without the flag
    report: str  # a line that says how many prompts are used and why others are not
    warnings: list[str] = field(default_factory=list)  # of what the user should change


def load(args: SimpleNamespace, backend: Any, flag: str) -> Any:
    """Return the data set of a flag, at most ``--data.max_samples`` rows, with labels as text.

    Columns are ``--data.input_key`` and ``--data.label_key``, of training data also rate and
    source; dots in a key reach into nested columns.

    Args:
        backend: OpenRLHF's DeepSpeed strategy, or what its loader takes for one.
        flag: ``TRAINING`` or ``HELD_OUT``.

    Raises:
        UsageError: a row cannot be used, a column is missing, or the reward needs a label key.
    """
    rows = _load(args, backend, flag)
    rewards = args.reward.remote_url
    if rewards and Path(rewards[0]) == MATH_FILE:
        labels = rows[args.data.label_key][:]
        reasons = unreadable_labels(labels, rows[args.data.input_key][:])
        bad = {}
        for number, label in enumerate(labels, 1):
            if label in reasons:
                problem = f"no answer can earn the label {label[:60]!r} ({reasons[label]})"
                bad[f"row {number}"] = problem
        refuse(bad, len(labels), f"--{flag} {attrgetter(flag)(args)}")
    return rows


def train_on(rows: list[int], args: SimpleNamespace) -> None:
    """Make OpenRLHF's trainer load the chosen rows of the training data, and all held-out rows."""
    import openrlhf.trainer.ppo_trainer as ppo_trainer

    def chosen(
        datasets: str,
        probabilities: str | None,
        strategy: Any,
        *_: Any,
        **options: Any,
    ) -> Any:
        if "max_count" in options:  # OpenRLHF's trainer gives it for the training data only
            return _load(args, strategy, TRAINING).select(rows)
        return _load(args, strategy, HELD_OUT)

    upstream.replace(ppo_trainer, "blending_datasets", chosen)


def _load(args: SimpleNamespace, backend: Any, flag: str) -> Any:
    data = args.data
    listed = attrgetter(flag)(args)
    rewards = args.reward.remote_url or []
    if data.label_key is None and any(Path(url).parent == MATH_FILE.parent for url in rewards):
        raise UsageError(
            "--data.label_key is missing: name the column that holds the answer to verify against"
        )
    rows = _blended(listed, args, backend, flag)
    rows = rows.select(range(min(data.max_samples, len(rows))))
    if len(rows) == 0:
        raise UsageError(f"--{flag} {listed} has no rows")
    if flag == TRAINING and data.label_key is not None:
        labels = rows[data.label_key][:]
        if data.drop_duplicates:  # two labels of one problem differ in how it is made again
            labels = [tasks.answer(label) for label in labels]
        bad = contradictions(rows[data.input_key][:], labels)
        refuse(bad, len(rows), f"--{flag} {listed}")
    return rows


def _blended(listed: str, args: SimpleNamespace, backend: Any, flag: str) -> Any:
    """Return the rows of all data sets of a flag: one after another, or mixed in given shares."""
    from datasets import concatenate_datasets, interleave_datasets

    data = args.data
    keys = {"input_key": data.input_key, "label_key": data.label_key}
    split = args.eval.split
    shares = None
    if flag == TRAINING:
        keys["pass_rate_key"] = data.pass_rate_key
        keys["group_key"] = data.group_key
        split = data.prompt_split
        shares = data.prompt_probs
    keys = {name: key for name, key in keys.items() if key is not None}
    parts = [read(name, f"--{flag} {name}", keys, args, backend, split) for name in _names(listed)]
    if shares is None:
        return concatenate_datasets(parts)
    return interleave_datasets(
        parts,
        probabilities=[float(share) for share in shares.split(",")],
        seed=args.train.seed,
        stopping_strategy="all_exhausted",
    )


def _names(listed: str) -> list[str]:
    """Return the data sets of a flag's value; a file with a comma in its path is one."""
    if os.path.exists(listed):
        return [listed]
    return [name.strip() for name in listed.split(",")]


def give_template_arguments(tokenizer: Any, arguments: str, flag: str) -> None:
    """Let a tokenizer's chat template get the arguments of a flag, a JSON object, in every call.

    Raises:
        UsageError: there is no template, or it does not read an argument, or sets it itself.
    """
    values = json.loads(arguments)
    if not tokenizer.chat_template:
        raise UsageError(f"--{flag}: the tokenizer has no chat template; leave it out")
    for name in values:
        problem = f"--{flag}: the tokenizer's chat template does not read {name!r}"
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise UsageError(f"{problem}; name one that it reads, or leave it out")
        if name in ("messages", "add_generation_prompt"):
            raise UsageError(f"--{flag}: {name!r} is set for each prompt; leave it out")
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **values)


def control_tokens(
    source: str,
    prompts: Sequence[Any],
    tokenizer: Any,
    applied: bool,
) -> list[str]:
    """Return a warning if prompts contain control tokens of the model, such as an end of turn.

    Args:
        source: what names the data set in the warning.
        prompts: texts, or lists of messages.
        applied: whether the chat template is applied. Without it a token that all prompts have is
            the data's own template.
    """
    texts = [_question(prompt) for prompt in prompts]
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        if not token.special:
            continue
        rows = [row for row, text in enumerate(texts, 1) if str(token) in text]
        if rows and (applied or len(rows) < len(texts)):
            return [
                f"{source}: {len(rows)} of {len(texts)} prompts "
                f"contain the control token {str(token)!r}, first row {rows[0]}: "
                "the model does not read it as text; take it out"
            ]
    return []


def _question(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(message["content"] for message in prompt)


def choose(
    loaded: Any,
    args: SimpleNamespace,
    backend: Any,
    tokenizer: Any,
    held_out: Any = None,
) -> Prompts:
    """Choose the rows of the loaded data set that are trained on.

    Rows with an earlier row's prompt are dropped with ``--data.drop_duplicates``; too long and
    empty prompts always; prompts of the loaded held-out data if the training data are tasks, whose
    two seeds may give the same problem.

    Raises:
        UsageError: fewer prompts are left than one rollout batch has, or messages have no template.
    """
    data = args.data
    source = f"--{TRAINING} {data.prompt_dataset}"
    if isinstance(loaded[0][data.input_key], list) and not data.apply_chat_template:
        raise UsageError(
            f"{source}: "
            "the prompts are messages; give --data.apply_chat_template, and a model with one"
        )
    prompts = [prompt_text(prompt) for prompt in loaded[data.input_key][:]]
    warnings = _label_warnings(held_out, data)
    rows, notes = _distinct(prompts, held_out, args, warnings)
    texts, labels = _as_the_model_sees(loaded.select(rows), args, backend, tokenizer, source)
    fits, dropped, advice = _fitting(texts, labels, args, tokenizer)
    notes += dropped
    if not any(labels):
        notes.append(
            "no labels: a reward function gets empty ones (--data.label_key names their column)"
        )
    report = "; ".join([f"{len(fits)} of {len(prompts)} prompts", *notes])
    warnings += _size_warnings(len(fits), f"{source} leaves {report}", advice, args)
    chosen = [rows[i] for i in fits]
    used = loaded.select(chosen)
    rates = _column(used, RATE)
    if rates is not None:
        report += f"; {sum(not math.isnan(rate[0]) for rate in rates)} with a pass rate"
    return Prompts(
        texts=[texts[i] for i in fits],
        labels=[labels[i] for i in fits],
        rows=chosen,
        pass_rates=rates,
        sources=_column(used, SOURCE),
        report=report,
        warnings=warnings,
    )


def _column(rows: Any, name: str) -> list[Any] | None:
    """Return the values of a column, or None without one."""
    if name not in rows.column_names:
        return None
    values: list[Any] = rows[name][:]
    return values


def _size_warnings(count: int, problem: str, advice: str, args: SimpleNamespace) -> list[str]:
    """Return advice as a warning; refuse fewer prompts than a rollout batch has."""
    needed = args.rollout.batch_size
    if count < needed:
        step = advice or "lower it, or give more prompts"
        raise UsageError(f"{problem}: below --rollout.batch_size {needed}; {step}")
    if advice:
        return [f"--{TRAINING}: {advice}"]
    return []


def _distinct(
    prompts: list[str],
    held_out: Any,
    args: SimpleNamespace,
    warnings: list[str],
) -> tuple[list[int], list[str]]:
    """Return the rows without duplicates and, of tasks, held-out problems; and their counts.

    Prompts of a data set that are held out, too, stay, and are a warning.
    """
    first: dict[str, int] = {}
    for row, prompt in enumerate(prompts):
        first.setdefault(prompt, row)
    kept = list(range(len(prompts)))
    if args.data.drop_duplicates:
        kept = list(first.values())
    tested = [] if held_out is None else held_out[args.data.input_key][:]
    tested_texts = set(map(prompt_text, tested))
    untested = [row for row in kept if prompts[row] not in tested_texts]
    both = len(kept) - len(untested)
    notes = _counted(
        (len(prompts) - len(kept), "duplicates dropped"),
        (
            len(kept) - len(first),
            "duplicates kept, which share a posterior (--data.drop_duplicates drops them)",
        ),
    )
    if any(map(tasks.is_spec, _names(args.data.prompt_dataset))):
        return untested, notes + _counted((both, f"in --{HELD_OUT} dropped"))
    if both:
        warnings.append(
            f"--{TRAINING}: {both} of {len(kept)} prompts are in --{HELD_OUT}, too, "
            "so that they are not held out; drop them from one of the two"
        )
    return kept, notes + _counted((both, f"in --{HELD_OUT} too"))


def _counted(*counts: tuple[int, str]) -> list[str]:
    return [f"{count} {what}" for count, what in counts if count]


def _as_the_model_sees(
    rows: Any,
    args: SimpleNamespace,
    backend: Any,
    tokenizer: Any,
    source: str,
) -> tuple[list[str], list[str]]:
    """Return the prompts with their template applied, and their labels, by OpenRLHF's data set."""
    from jinja2 import TemplateError
    from openrlhf.datasets import PromptDataset, prompts_dataset

    upstream.replace(prompts_dataset, "tqdm", lambda rows, **_: rows)  # without a bar
    try:
        seen = PromptDataset(rows, tokenizer, backend, input_template=args.data.input_template)
    except TemplateError as error:
        raise UsageError(
            f"{source}: the model's chat template refuses a prompt: {error}; change the prompt, or "
            "leave the template out with --no-data.apply_chat_template"
        ) from error
    return seen.prompts, list(map(str, seen.labels))


def _fitting(
    texts: Sequence[str],
    labels: list[str],
    args: SimpleNamespace,
    tokenizer: Any,
) -> tuple[list[int], list[str], str]:
    """Return the places of the prompts that are used, counts of the others, and advice.

    The advice is empty unless many prompts are too long, or none has a token.
    """
    longest = args.data.max_len
    response = args.rollout.max_new_tokens
    limit = int(longest - (response or 1))  # OpenRLHF would cut longer ones from the left
    tokens = tokenizer(texts, add_special_tokens=False)["input_ids"]
    lengths = list(map(len, tokens))
    too_long = sum(length > limit for length in lengths)
    unwanted = _left_out(args.data.leave_out, list(zip(texts, labels, strict=True)))
    fits = [i for i, n in enumerate(lengths) if 0 < n <= limit and i not in unwanted]
    notes = _counted(
        (too_long, f"of more than {limit} tokens dropped (--data.max_len {longest})"),
        (lengths.count(0), "without a token dropped"),
        (len(unwanted), "left out by --data.leave_out"),
    )
    advice = ""
    if set(lengths) == {0}:
        model = args.actor.model_name_or_path
        advice = f"the tokenizer of {model} makes no token of any; put its files into the folder"
    elif too_long > len(lengths) / 10:
        advice = f"{too_long} prompts have more than {limit} tokens; raise --data.max_len {longest}"
        if response:
            advice += f", which also has to hold --rollout.max_new_tokens {response}"
    return fits, notes, advice


def _left_out(file: str | None, pairs: list[tuple[str, str]]) -> set[int]:
    """Return the places of the prompts, with their labels, that the file of a flag names."""
    if file is None:
        return set()
    source = f"--data.leave_out {file}"
    rows = records(Path(file), source).values()
    unwanted = {(row.get("prompt"), row.get("label")) for row in rows}
    places = {place for place, pair in enumerate(pairs) if pair in unwanted}
    if rows and not places:
        raise UsageError(
            f"{source}: none of its {len(rows)} prompts, as the model sees them, is in "
            f"--{TRAINING}; name the file that openrlhf-dbb prompts wrote for a run with this data "
            "set and chat template"
        )
    return places


def _label_warnings(held_out: Any, data: SimpleNamespace) -> list[str]:
    """Return a warning if a held-out prompt has two labels; it may be there several times."""
    if held_out is None or data.label_key is None:
        return []
    labels = [tasks.answer(label) for label in held_out[data.label_key][:]]
    bad = contradictions(held_out[data.input_key][:], labels)
    if not bad:
        return []
    place, reason = next(iter(bad.items()))
    return [
        f"--{HELD_OUT}: {len(bad)} of {len(labels)} rows "
        "have another label than an earlier row of their prompt, "
        f"{place}: {reason}; fix or drop them"
    ]
