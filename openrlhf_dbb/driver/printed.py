"""What the training command prints: the effective configuration before, the summary after."""

from __future__ import annotations

import sys
import tempfile
import traceback
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import estimators
import storage
import storage.read
from openrlhf_dbb import __version__, methods, presets
from openrlhf_dbb.core import checkpoints
from openrlhf_dbb.core.step import probed_prompts
from openrlhf_dbb.driver.settings import Settings
from openrlhf_dbb.driver.start import Start
from openrlhf_dbb.inspect.overview import groups_in_words
from storage import TRAINING
from storage.url import DEFAULT_URL, parse_url


def configuration(settings: Settings, start: Start | None) -> str:
    """Every value that is not OpenRLHF's default, where it comes from, and what differs from the paper."""
    # Flags alone are compared with the paper's own method.
    recipe = methods.recipe("grpo" if settings.method == methods.NONE else settings.method, settings.estimator)
    paper = presets.paper(settings.estimator) | recipe
    lines = [
        f"openrlhf_dbb {__version__} - preset {settings.preset}, method {settings.method}, "
        f"estimator {settings.estimator}",
        f"method     {methods.describe(settings.method, settings.args, settings.estimator)}",
    ]
    preset = presets.load(settings.preset)
    about = [f"preset     {preset.description}"] * bool(preset.description)
    about += [f"made for   {preset.expects}"] * bool(preset.expects)
    lines[1:1] = [*about, *_machine(settings)]
    if start is not None:
        verb = f"continues after step {start.run.last_step} at most" if start.resumed else "is new"
        lines += [
            f"run        {start.run.name} ({verb})",
            f"store      {start.location}",
            f"data       {start.prompts.report}",
            f"budget     {_budget(settings.args, start)}",
        ]
        lines += _few_visits(settings, start)
        if settings.strategy.needs_scores and settings.args.actor.lr_scheduler != "constant":
            lines.append(
                f"note: --actor.lr_scheduler {settings.args.actor.lr_scheduler} is planned for a run that trains on "
                "every rollout; this one discards some and will end before the schedule does"
            )
        if start.warm_start is not None:
            warm = start.warm_start
            lines.append(
                f"warm start {warm.matched} prompts from {warm.source.name}, weight {settings.warm_start_weight:g}; "
                f"{warm.unmatched} start from the prior"
            )
        if settings.args.probe.fraction:
            lines.append(_probes(settings.args, start))
        lines += _validation(settings.args, start)
        lines += start.notes
    lines.append("configuration (others: OpenRLHF's defaults; * differs from the paper)")
    for flag, value in settings.flags.items():
        known = paper.get(flag)
        differs = known is not None and not _equal(value, known.value)
        if flag in settings.origin or differs:
            note = f"  paper: {_text(known.value)}" if known is not None and differs else ""
            origin = settings.origin.get(flag, "OpenRLHF's default")
            lines.append(f" {'*' if differs else ' '} --{flag} {_text(value)}  [{origin}]{note}")
    # At the end, where they are still on the screen when the training begins.
    warnings = [line for line in lines if line.startswith("warning:")]
    return "\n".join([line for line in lines if line not in warnings] + warnings)


def _machine(settings: Settings) -> list[str]:
    """The GPUs that are used, or that some are not."""
    if not settings.on_cpu:
        return [f"machine    {settings.machine.describe()}"]
    unused = settings.machine.describe()
    if not unused:
        return []
    return [
        f"warning: there is {unused}, but the installed torch is built without CUDA, so that it is not used; "
        "OPENRLHF_DBB_PLATFORM=cuda bash scripts/setup_env.sh installs the stack for it"
    ]


def summary(start: Start, progress: Any, seconds: float) -> str:
    """Return accuracy, steps, rollouts, groups, warnings and where to look; the counts come from the store."""
    with storage.open_store(start.store_url) as store:
        used = storage.read.progress(store, start.run)
        evaluations = _evaluations(store, start)
    minutes, rest = divmod(round(seconds), 60)
    lines = ["", f"run {start.run.name} finished in {minutes:02d}:{rest:02d} min"]
    if len(progress.accuracy) > 1:
        first, last = min(progress.accuracy), max(progress.accuracy)
        lines.append(
            f"  accuracy     {progress.accuracy[first]:.1%} before, {progress.accuracy[last]:.1%} after "
            "(held-out prompts, mean over samples)"
        )
    lines.append(f"  steps        {progress.step}")
    lines += _rollouts(used)
    if used["probes"]:
        lines.append(f"  probes       {used['samples']} extra rollouts of {used['probes']} groups, not trained on")
    lines += evaluations
    if progress.best is not None:
        best = progress.best
        lines.append(f"  best model   step {best.step}, {best.measure} {best.value:.3f}: {progress.best_folder}")
    elsewhere = start.store_url.startswith("sqlite") and start.location != parse_url(DEFAULT_URL).location
    lines += [
        f"  database     {start.location}",
        f"  look         openrlhf-dbb serve{f' --store.url {start.location}' * elsewhere}",
    ]
    lines += [f"warning: {warning}" for warning in progress.warnings]
    return "\n".join(lines)


def unfinished(start: Start, settings: Settings) -> str:
    """That a run has not finished, where it continues, and how."""
    found, _ = checkpoints.newest_whole(Path(settings.args.ckpt.path), start.run.uuid, sys.maxsize)
    name = start.run.name
    where = "it has no checkpoint yet" if found is None else f"its last checkpoint is {found}"
    return f"run {name} has not finished, {where}; continue it with --resume {name}"


def keep_trace(settings: Settings) -> Path:
    """Write the traceback of the exception that is being handled beside the checkpoints, if that can be; its path."""
    name, text = f"failure-{datetime.now():%Y%m%d-%H%M%S}.txt", traceback.format_exc()
    path = Path(settings.args.ckpt.path) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError:  # what has ended the run may be a full disk
        path = Path(tempfile.gettempdir()) / name
        path.write_text(text, encoding="utf-8")
    return path


def _rollouts(used: dict[str, Any]) -> list[str]:
    """Where the rollouts of the run went; ``used`` as :func:`storage.read.progress` gives it."""
    generated = used["generated"] + used["unused_rollouts"]
    lines = [f"  rollouts     {generated} generated, {used['trained']} trained on"]
    if used["unused_rollouts"]:
        lines[0] += f", {used['unused_rollouts']} left over at the end"
    if used["replayed"]:
        lines[0] += f"; {used['replayed']} replayed"
    if used["skipped"]:
        lines[0] += f"; prompts were skipped {used['skipped']} times"
    for name, line in zip(("groups", ""), groups_in_words(used), strict=False):
        lines.append(f"  {name:<12} {line}")
    return lines


def _probes(args: SimpleNamespace, start: Start) -> str:
    texts, labels = start.prompts.texts, start.prompts.labels
    keys = list(zip(texts, labels, strict=True))
    probed = probed_prompts(keys, args.probe.fraction, args.train.seed)
    visits = sum(key in probed for key in keys)
    trained = len(texts) * args.rollout.n_samples_per_prompt
    return (
        f"probes     {len(probed)} of {len(texts)} prompts, {args.probe.samples} extra rollouts at each visit: "
        f"{visits * args.probe.samples} an epoch beside {trained} of training"
    )


def _validation(args: SimpleNamespace, start: Start) -> list[str]:
    """What the benchmarks cost, and what should be known of them."""
    if not start.benchmarks:
        return []
    sizes = {name: len(prompts.texts) for name, prompts in start.benchmarks.items()}
    samples = args.eval.n_samples_per_prompt
    of, rollouts = ", ".join(f"{name} ({size})" for name, size in sizes.items()), sum(sizes.values()) * samples
    lines = [
        f"validation {of} prompts x {samples} samples = {rollouts} rollouts every {args.eval.steps} steps, beside "
        "those of training"
    ]
    return lines + [f"note: {name}: {note}" for name, of in start.benchmarks.items() for note in of.notes]


def _evaluations(store: storage.PosteriorStore, start: Start) -> list[str]:
    """What the evaluations during the run have cost; empty without any."""
    made = [each for each in storage.read_evaluations(store, start.run) if each.name == TRAINING]
    if not made:
        return []
    rollouts = sum(int(rows.samples.sum()) for each in made for rows in each.results.values())
    seconds = sum(each.config.get("seconds", 0) for each in made)
    return [f"  evaluations  {len(made)} with {rollouts} rollouts in {seconds:.0f} s, not counted above"]


def _budget(args: SimpleNamespace, start: Start) -> str:
    """The training rollouts that will be generated at most, and how that comes about."""
    prompts, group = len(start.prompts.texts), args.rollout.n_samples_per_prompt
    if args.train.max_rollouts is not None:
        passes = f"{_passes(args, start):.3g} passes over the prompts"
        return f"{args.train.max_rollouts} rollouts at most, as many as {passes}"
    rollouts = prompts * group * args.train.num_episodes
    return f"{rollouts} rollouts: {prompts} prompts x {group} samples x {args.train.num_episodes} episodes"


def _few_visits(settings: Settings, start: Start) -> list[str]:
    """A warning if history will hardly matter."""
    visits = _passes(settings.args, start)
    estimator = estimators.build(settings.estimator, **settings.parameters)
    if visits >= 2 or start.resumed or start.warm_start is not None or not estimator.state_fields:
        return []
    return [
        f"warning: a prompt is visited {visits:.1f} times on average, so that history hardly matters; the paper "
        "visits each 4 times: raise --train.num_episodes or --train.max_rollouts, use fewer prompts "
        "(--data.max_samples), or begin from another run's posteriors (--warm_start RUN)"
    ]


def _passes(args: SimpleNamespace, start: Start) -> float:
    """Visits of the average prompt."""
    if args.train.max_rollouts is None:
        return float(args.train.num_episodes)
    return float(args.train.max_rollouts / (len(start.prompts.texts) * args.rollout.n_samples_per_prompt))


def _equal(value: Any, paper: Any) -> bool:
    if isinstance(paper, list):
        return value is not None and list(value) == paper
    return bool(value == paper)


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
