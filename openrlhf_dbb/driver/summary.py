"""The summary that a training prints at its end; counts come from the store.

Axes: V visits, P prompts.
"""

import math
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np

from openrlhf_dbb import storage
from openrlhf_dbb.data import HELD_OUT
from openrlhf_dbb.driver.prepare import Prepared
from openrlhf_dbb.driver.printed import look
from openrlhf_dbb.driver.progress_line import duration
from openrlhf_dbb.inspect.compare_runs import difference_in_words, held_out_difference
from openrlhf_dbb.inspect.facts import RunView, read_view, usage_in_words
from openrlhf_dbb.inspect.numbers import ratio
from openrlhf_dbb.lab.replay import unreplayable
from openrlhf_dbb.secrets import without_passwords
from openrlhf_dbb.storage import read
from openrlhf_dbb.terminal import shown, without_shared
from openrlhf_dbb.watch.serve import PORT

_TOLD = 8  # visits of the prompt that the summary tells of
# Share of rollouts in groups of equal rewards, from which on draws by the memory save the most.
_MOSTLY_EQUAL = 0.75

Answer = tuple[str, float]
"""The end of an answer, and its score or NaN."""


def summary(prepared: Prepared, progress: Any, seconds: float) -> str:
    """Return accuracy, examples, steps, rollouts, groups, the next step and warnings.

    Args:
        progress: the trainer's, an :class:`openrlhf_dbb.actors.progress.Progress`.
        seconds: how long the training took.

    Raises:
        StoreError: the run cannot be read.
    """
    run = prepared.run
    assert run is not None
    with storage.open_store(prepared.store_url) as store:
        view = read_view(store, run)
        log = read.read_log(store, run)
        story = _story(prepared, store, log)
        accuracy = _accuracy(store, run, progress.accuracy)
    lines = ["", f"run {run.name} finished in {duration(seconds)}", *accuracy]
    if progress.before:
        lines += examples(prepared.questions(HELD_OUT), progress.before, progress.after)
    lines.append(f"  steps        {progress.step}")
    lines += [f"  {name:<12} {text}" for name, text in usage_in_words(view).items()]
    used = view.totals
    if used["probes"]:
        probes = f"{used['samples']} extra rollouts of {used['probes']} groups"
        lines.append(f"  probes       {probes}, not trained on")
    best = progress.best
    if best is not None:
        chosen = f"step {best.step}, {best.measure} {best.value:.3f}"
        lines.append(f"  best model   {chosen}: {progress.best_folder}")
    lines.append(f"  database     {prepared.location}")
    if story:
        lines.append(f"  one prompt   {story}")
    lines += _next(prepared, view, log)
    lines += [f"warning: {warning}" for warning in progress.warnings]
    return without_passwords("\n".join(lines))


def _next(prepared: Prepared, view: RunView, log: read.StepLog) -> list[str]:
    """Return lines of commands for after the run, each with what it does."""
    run = view.record
    page = f"a live page, http://127.0.0.1:{PORT}/: all prompts, curves, responses"
    lines = [f"  next         {look(prepared, 'serve')}   {page}"]
    if (log.rollouts > 1).any() and not unreplayable(log).any():
        replay = look(prepared, f"lab replay {run.name}")
        lines.append(f"               {replay}   what a memory would have said")
    equal = ratio(view.totals["zero_variance"], view.totals["generated"]) or 0.0
    if equal >= _MOSTLY_EQUAL and run.config.get("rollout.strategy") != "posterior":
        draws = f"your command with --method draws --warm_start {run.name}"
        lines.append(f"               {draws}   draws where rewards differ")
    return lines


def _accuracy(
    store: storage.PosteriorStore,
    run: storage.RunRecord,
    accuracy: dict[int, float],
) -> list[str]:
    """Return a line on held-out accuracy, by step, if it was measured twice."""
    if len(accuracy) < 2:
        return []
    change = held_out_difference(store, run, run, (min(accuracy), max(accuracy)))
    if change is None:
        return []
    first, last = change["steps"]
    points = f"{accuracy[first]:.1%} before, {accuracy[last]:.1%} after"
    return [f"  accuracy     {points} (held-out): {difference_in_words(change)}"]


def _story(prepared: Prepared, store: storage.PosteriorStore, log: read.StepLog) -> str:
    """Return in words how the posterior moved that moved most; "" if none was visited twice."""
    mean_V = np.where(np.isnan(log.alpha), log.mean, log.alpha / (log.alpha + log.beta))
    by_prompt = np.argsort(log.prompt_id, kind="stable")  # and by step
    ids_P, first_P, visits_P = np.unique(
        log.prompt_id[by_prompt],
        return_index=True,
        return_counts=True,
    )
    last_P = first_P + visits_P - 1
    moved_P = np.abs(mean_V[by_prompt[last_P]] - mean_V[by_prompt[first_P]])
    if not moved_P.any():
        return ""
    most = int(moved_P.argmax())
    places = np.linspace(first_P[most], last_P[most], min(visits_P[most], _TOLD))
    visits = by_prompt[places.round().astype(int)]
    prompts = read.prompt_texts(store, np.array([ids_P[most], *ids_P[:_TOLD]]))
    question = shown(_questions([text for text, _ in prompts])[0])
    means = ", ".join(f"{mean:.2f}" for mean in mean_V[visits])
    steps = ", ".join(map(str, log.step[visits]))
    more = look(prepared, f"history {ids_P[most]}")
    return f"{question}  posterior mean {means} after steps {steps}: {more}"


def examples(
    prompts: Sequence[Any],
    before: Sequence[Answer],
    after: Sequence[Answer],
) -> list[str]:
    """Return a heading and up to three prompts with an answer before and after the training.

    Answers whose score rose come first, then those whose score fell; if there is none, the first of
    all.

    Args:
        prompts: (P,) held-out texts or lists of messages.
        before, after: (P,) an answer to each.
    """
    better = []
    worse = []
    for place, (_, old) in enumerate(before):
        _, new = after[place]
        if new > old:  # NaN is neither above nor below
            better.append(place)
        elif new < old:
            worse.append(place)
    heading = f"  problems     of the first answers to {len(prompts)} held-out ones"
    lines = [f"{heading}, {len(better)} scored higher, {len(worse)} lower:"]
    chosen = better[: max(2, 3 - len(worse))]
    chosen += worse[: max(1, 3 - len(better))]
    width = shutil.get_terminal_size().columns - 6
    questions = _questions(prompts)
    for place in chosen or range(len(prompts))[:3]:
        lines.append(f"    {shown(questions[place], width)}")
        lines.append(f"      before  {_answer(before[place], width - 10)}")
        lines.append(f"      after   {_answer(after[place], width - 10)}")
    return lines


def _answer(answer: Answer, width: int) -> str:
    """Return the mark of an answer, and what fits of its end: the result is mostly there."""
    text, score = answer
    mark = f"score {score:.2g}"
    if math.isnan(score):
        mark = "unverified"
    elif score in (0, 1):
        mark = "right" if score else "wrong"
    line = shown(" ".join(text.split()) or "(empty)", None)
    room = width - len(mark)
    if len(line) > room:
        line = f"...{line[3 - room :]}"
    return f"{mark}  {line}"


def _questions(prompts: Sequence[Any]) -> list[str]:
    """Return the last line of each prompt that not all of them have.

    All may end with the same instruction.
    """
    lines_of = []
    for prompt in prompts:
        text = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
        lines_of.append([line for line in text.splitlines() if line.strip()])
    shared = set.intersection(*map(set, lines_of))
    questions = []
    for lines in lines_of:
        own = [line for line in lines if line not in shared]
        questions.append((own or lines)[-1])
    shortened = without_shared(questions)
    return [shortened[question] for question in questions]
