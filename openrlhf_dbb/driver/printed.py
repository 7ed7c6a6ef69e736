"""Writes what the training command prints: the plan before the training, a line during it, the summary after it."""

import contextlib
import math
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from openrlhf_dbb import __version__, methods, storage
from openrlhf_dbb.data import HELD_OUT, TRAINING
from openrlhf_dbb.driver.arguments import MODEL_FLAG, Settings
from openrlhf_dbb.driver.prepare import Prepared
from openrlhf_dbb.inspect.compare_runs import difference_in_words, held_out_difference
from openrlhf_dbb.inspect.show import usage_in_words
from openrlhf_dbb.lab.replay import unreplayable
from openrlhf_dbb.platform.ray_start import busyness
from openrlhf_dbb.saved import checkpoints
from openrlhf_dbb.secrets import without_passwords
from openrlhf_dbb.storage import read
from openrlhf_dbb.storage.address import parse_url
from openrlhf_dbb.terminal import drop, safe, shown, without_shared
from openrlhf_dbb.watch.serve import PORT

_TOLD = 8  # visits of the prompt that the summary tells of
_MOSTLY_EQUAL = 0.75  # share of rollouts in groups of equal rewards, from which on draws by the memory save the most
_BETWEEN = " · "
_LOG_EVERY_S = 10.0
_PACE_STEPS = 10  # the mean over more steps would follow a changing length of responses too slowly


def plan(prepared: Prepared) -> str:
    """Return what a training prints before it begins; warnings last, where they are still on the screen."""
    settings = prepared.settings
    args, preset = settings.args, settings.preset_read
    # The description tells of the preset's own model and data.
    others = any(settings.given(flag) and flag in preset.flags for flag in (MODEL_FLAG, TRAINING))
    about = f": {preset.description}" * (bool(preset.description) and not others)
    lines = [
        f"openrlhf_dbb {__version__} - preset {settings.preset}{about}",
        f"model      {args.actor.model_name_or_path}",
        *prepared.machine,
        f"method     {methods.describe(settings.method, args, settings.estimator)}",
        *prepared.notes,
        *(_run(prepared, prepared.run) if prepared.run is not None else []),
    ]
    return without_passwords("\n".join(sorted(lines, key=lambda line: line.startswith("warning:"))))


def _run(prepared: Prepared, run: storage.RunRecord) -> list[str]:
    settings, warm, chosen = prepared.settings, prepared.warm_start, prepared.prompts
    args = settings.args
    prompts, group, episodes = len(chosen.texts), args.rollout.n_samples_per_prompt, args.train.num_episodes
    budget = f"{prompts * group * episodes} rollouts: {prompts} prompts x {group} samples x {episodes} episodes"
    if args.train.max_rollouts is not None:
        passes = args.train.max_rollouts / (prompts * group)
        budget = f"{args.train.max_rollouts} rollouts at most, as many as {passes:.3g} passes over the prompts"
    lines = [f"data       {chosen.report} ({args.data.prompt_dataset})", f"budget     {budget}"]
    if warm is not None:
        lines.append(
            f"warm start {warm.matched} prompts from {safe(warm.source.name)}, weight {args.warm_start_weight:g}; "
            f"{warm.unmatched} start from the prior"
        )
    if args.probe.fraction:
        lines.append(f"probes     {args.probe.fraction:.0%} of the prompts, {args.probe.samples} rollouts a visit")
    held_out = [f"{len(prepared.questions(HELD_OUT))} prompts ({args.eval.dataset})"] if args.eval.dataset else []
    held_out += [f"{len(each.tokens)} prompts of {name}" for name, each in prepared.benchmarks.items()]
    if held_out and args.eval.steps > 0:
        each = f"{args.eval.n_samples_per_prompt} samples a prompt, every {args.eval.steps} steps"
        lines.append(f"held-out   {', '.join(held_out)}: {each}")
    else:
        flags = "--eval.dataset" + " and --eval.steps" * (args.eval.steps < 0)
        lines.append(f"warning: held-out accuracy is not measured, so that no run can be compared: give {flags}")
    verb = f"continues after step {run.last_step} at most" if prepared.resumed else "is new"
    lines.append(f"run        {run.name} ({verb}) in {prepared.location}")
    return [*lines, f"look       {_look(prepared)}; --dry_run shows every value"]


def configuration(settings: Settings) -> str:
    """Return a line for each value that is not OpenRLHF's default or not the paper's."""
    lines = ["configuration (others: OpenRLHF's defaults; * differs from the paper)"]
    for flag, value in settings.flags.items():
        differs = flag in settings.paper and value != settings.paper[flag]
        if flag in settings.origin or differs:
            note = f"  paper: {_text(settings.paper[flag])}" if differs else ""
            origin = settings.origin.get(flag, "OpenRLHF's default")
            lines.append(f" {'*' if differs else ' '} --{flag} {_text(value)}  [{origin}]{note}")
    return "\n".join(lines)


def summary(prepared: Prepared, progress: Any, seconds: float) -> str:
    """Return accuracy, examples, steps, rollouts, groups, the next step and warnings; counts come from the store."""
    run = prepared.run
    assert run is not None
    problems = examples(prepared.questions(HELD_OUT), progress.before, progress.after) if progress.before else []
    with storage.open_store(prepared.store_url) as store:
        used, log = read.progress(store, run), read.read_log(store, run)
        replays = bool((log.rollouts > 1).any() and not unreplayable(log).any())
        story, words = _story(prepared, store, log), usage_in_words(store, run, used)
        evaluated = sorted(progress.accuracy)
        change = held_out_difference(store, run, run, (evaluated[0], evaluated[-1])) if len(evaluated) > 1 else None
    lines = ["", f"run {run.name} finished in {duration(seconds)}"]
    if change is not None:
        first, last = (progress.accuracy[step] for step in change["steps"])
        lines.append(f"  accuracy     {first:.1%} before, {last:.1%} after (held-out): {difference_in_words(change)}")
    lines += [*problems, f"  steps        {progress.step}", *(f"  {name:<12} {text}" for name, text in words.items())]
    if used["probes"]:
        lines.append(f"  probes       {used['samples']} extra rollouts of {used['probes']} groups, not trained on")
    if progress.best is not None:
        best = progress.best
        lines.append(f"  best model   step {best.step}, {best.measure} {best.value:.3f}: {progress.best_folder}")
    equal = used["zero_variance"] / used["generated"] if used["generated"] else 0.0
    draws = f"your command with --method draws --warm_start {run.name}   draws where rewards differ"
    lines += [
        f"  database     {prepared.location}",
        *[f"  one prompt   {story}"] * bool(story),
        f"  next         {_look(prepared)}   a live page, http://127.0.0.1:{PORT}/: all prompts, curves, responses",
        *[f"               {_look(prepared, f'lab replay {run.name}')}   what a memory would have said"] * replays,
        *[f"               {draws}"] * (equal >= _MOSTLY_EQUAL and run.config.get("rollout.strategy") != "posterior"),
        *(f"warning: {warning}" for warning in progress.warnings),
    ]
    return without_passwords("\n".join(lines))


def _story(prepared: Prepared, store: storage.PosteriorStore, log: read.StepLog) -> str:
    """Return in words how the posterior moved that moved most; "" if no prompt was visited twice."""
    mean_V = np.where(np.isnan(log.alpha), log.mean, log.alpha / (log.alpha + log.beta))
    by_prompt = np.argsort(log.prompt_id, kind="stable")  # and by step
    ids_P, first_P, visits_P = np.unique(log.prompt_id[by_prompt], return_index=True, return_counts=True)
    last_P = first_P + visits_P - 1
    moved_P = np.abs(mean_V[by_prompt[last_P]] - mean_V[by_prompt[first_P]])
    if not moved_P.any():
        return ""
    most = int(moved_P.argmax())
    places = np.linspace(first_P[most], last_P[most], min(visits_P[most], _TOLD))
    told = by_prompt[places.round().astype(int)]
    texts = [text for text, _ in read.whole_prompts(store, np.array([ids_P[most], *ids_P[:_TOLD]]))]
    question = shown(_questions(texts)[0])
    means = ", ".join(f"{mean:.2f}" for mean in mean_V[told])
    steps = ", ".join(map(str, log.step[told]))
    return f"{question}  posterior mean {means} after steps {steps}: {_look(prepared, f'history {ids_P[most]}')}"


def _look(prepared: Prepared, command: str = "serve") -> str:
    elsewhere = prepared.location != parse_url(None).location
    return f"openrlhf-dbb {command}{f' --store.url {prepared.location}' * elsewhere}"


def unfinished(prepared: Prepared) -> str:
    """Return that the run has not finished, where it continues, if anywhere, and the flag that continues it."""
    run = prepared.run
    assert run is not None
    newest, _ = checkpoints.newest_whole(Path(prepared.settings.args.ckpt.path), run.uuid, sys.maxsize)
    advice = f"its last checkpoint is {newest}; continue it" if newest else "it has no checkpoint; start it over"
    return f"run {run.name} has not finished, {advice} with --resume {run.name}"


def keep_trace(settings: Settings) -> Path:
    """Write the traceback of the exception that is being handled beside the checkpoints; return its file."""
    path = Path(settings.args.ckpt.path) / f"failure-{datetime.now():%Y%m%d-%H%M%S}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    trace = without_passwords(traceback.format_exc())
    path.write_text(trace, encoding="utf-8", errors="backslashreplace")
    return path


def examples(prompts: Sequence[Any], before: Sequence[Any], after: Sequence[Any]) -> list[str]:
    """Return a heading and up to three held-out prompts with an answer before and after the training.

    Answers whose score rose come first, then those whose score fell; if there is none, the first of all. ``prompts``
    are (P,) texts or lists of messages, ``before`` and ``after`` (P,) pairs: the end of an answer, its score or NaN.
    """
    gain = [new - old for (_, old), (_, new) in zip(before, after, strict=True)]  # NaN is neither above nor below 0
    better, worse = ([place for place, by in enumerate(gain) if sign * by > 0] for sign in (1, -1))
    counts = f"{len(better)} scored higher, {len(worse)} lower"
    lines = [f"  problems     of the first answers to {len(prompts)} held-out ones, {counts}:"]
    chosen = [*better[: max(2, 3 - len(worse))], *worse[: max(1, 3 - len(better))]]
    width, questions = shutil.get_terminal_size().columns - 6, _questions(prompts)
    for place in chosen or range(len(prompts))[:3]:
        lines.append(f"    {shown(questions[place], width)}")
        for when, (text, score) in (("before", before[place]), ("after", after[place])):
            mark = {1: "right", 0: "wrong"}.get(score, "unverified" if math.isnan(score) else f"score {score:.2g}")
            answer = shown(" ".join(text.split()) or "(empty)", None)
            room = width - len(mark) - 10
            # The result is mostly at the end of an answer.
            lines.append(f"      {when:<6}  {mark}  {answer if len(answer) <= room else '...' + answer[3 - room :]}")
    return lines


def _questions(prompts: Sequence[Any]) -> list[str]:
    """Return the last line of each prompt that not all of them have: all may end with the same instruction."""
    texts = [prompt if isinstance(prompt, str) else str(prompt[-1]["content"]) for prompt in prompts]
    lines = [[line for line in text.splitlines() if line.strip()] for text in texts]
    shared = set.intersection(*map(set, lines))
    questions = [([line for line in own if line not in shared] or own)[-1] for own in lines]
    shortened = without_shared(questions)
    return [shortened[question] for question in questions]


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def progress_text(progress: Any, done: int | None, now: float) -> str:
    """Return the line, its most important fields first; ``done`` counts the phase's rollouts, if they are counted."""
    held_out = [f"held-out {100 * progress.accuracy[max(progress.accuracy)]:.1f} %"] if progress.accuracy else []
    if progress.phase == "finished":
        parts = [f"finished {progress.step} of {progress.total} steps", *held_out]
    elif progress.phase == "starting":
        parts = [f"starting engines {duration(now - progress.since)}"]
    else:
        count = f" {min(done, progress.size)}/{progress.size}" if done is not None and progress.size else ""
        # The time shows that the run is not frozen where nothing is counted, or where the count stands still.
        time_too = f" {duration(seconds)}" if (seconds := now - progress.since) >= (10 if count else 2) else ""
        step = f"step {min(progress.step + 1, progress.total)} of {progress.total}"
        parts = [step, *held_out, f"{progress.phase}{count}{time_too}"]
    if progress.reward is not None:
        parts.append(f"reward {progress.reward:.3f}")
    ends = progress.ends[-_PACE_STEPS - 1 :]  # of whole steps, with evaluations and checkpoints
    if len(ends) > 1:
        pace = (ends[-1] - ends[0]) / (len(ends) - 1)
        parts.append(f"{duration(pace)} a step")
        left = (progress.total - progress.step) * pace - (now - progress.ends[-1])
        if progress.phase != "finished" and progress.total > progress.step:
            parts.append(f"{duration(max(left, 0))} left")
    if progress.zero_variance is not None:
        parts.append(f"zero variance {100 * progress.zero_variance:.0f} %")
    return _BETWEEN.join(parts)


def duration(seconds: float) -> str:
    """Return a duration in the unit that a person would use: "2.4 s", "74 s", "10 min", "1 h 07 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


@contextlib.contextmanager
def waiting(why: str) -> Iterator[None]:
    """Show a line such as ``starting Ray 12 s (load 38 on 2 cores)`` for as long as the block takes; then remove it."""
    line, done, began = ProgressLine(), threading.Event(), time.monotonic()

    def show() -> None:
        # The first seconds are silent in a log, where lines stay.
        while not done.wait(1 if line.in_place else _LOG_EVERY_S):
            line.show(f"{why} {duration(time.monotonic() - began)} ({busyness()})")

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        line.clear()


class ProgressLine:
    """One line that a terminal rewrites; any other stream gets a line every 10 seconds, and the last one."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self.in_place = self._stream.isatty()
        self._shown, self._written = "", 0.0

    def show(self, line: str, *, last: bool = False) -> None:
        """Show a line; ``last`` ends it."""
        if line == self._shown and not last:
            return
        if self.in_place:
            fits, width = line, shutil.get_terminal_size().columns
            while len(fits) >= width and _BETWEEN in fits:
                fits = fits.rpartition(_BETWEEN)[0]
            self._write("\r" + fits[: width - 1] + "\x1b[K" + ("\n" if last else ""))
        else:
            due = time.monotonic() - self._written >= _LOG_EVERY_S
            if not (due or (last and line != self._shown)):
                return
            self._write(line + "\n")
            self._written = time.monotonic()
        self._shown = line

    def warn(self, warning: str) -> None:
        """Write a warning above the line."""
        self.clear()
        self._write(f"warning: {without_passwords(warning)}\n")

    def clear(self) -> None:
        self._write("\r\x1b[K" * self.in_place)
        self._shown = ""

    def _write(self, characters: str) -> None:
        try:
            self._stream.write(characters)
            self._stream.flush()
        except OSError:  # nobody reads it any more, and the training goes on
            drop(self._stream)
