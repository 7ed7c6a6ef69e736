"""What the training command prints before the training, and when it ends too early."""

import sys
import traceback
from datetime import datetime
from pathlib import Path
from typing import Any

from openrlhf_dbb import __version__, methods, storage
from openrlhf_dbb.data import HELD_OUT, TRAINING
from openrlhf_dbb.driver.arguments import MODEL_FLAG, Settings
from openrlhf_dbb.driver.prepare import Prepared
from openrlhf_dbb.saved import checkpoints
from openrlhf_dbb.secrets import without_passwords
from openrlhf_dbb.storage.address import parse_url
from openrlhf_dbb.terminal import safe

_DEFAULT = "OpenRLHF's default"


def plan(prepared: Prepared) -> str:
    """Return what a training prints before it begins.

    Warnings come last, where they are still on the screen.
    """
    settings = prepared.settings
    lines = [
        f"openrlhf_dbb {__version__} - preset {settings.preset}{_about_preset(settings)}",
        f"model      {settings.args.actor.model_name_or_path}",
        *prepared.machine,
        f"method     {methods.describe(settings.method, settings.args, settings.estimator)}",
        *prepared.notes,
    ]
    if prepared.run is not None:
        lines += _run(prepared, prepared.run)
    lines.sort(key=lambda line: line.startswith("warning:"))
    return without_passwords("\n".join(lines))


def _about_preset(settings: Settings) -> str:
    """Return the description, which tells of the preset's own model and data."""
    preset = settings.preset_read
    for flag in (MODEL_FLAG, TRAINING):
        if settings.given(flag) and flag in preset.flags:
            return ""
    return f": {preset.description}" if preset.description else ""


def _run(prepared: Prepared, run: storage.RunRecord) -> list[str]:
    args = prepared.settings.args
    lines = [
        f"data       {prepared.prompts.report} ({args.data.prompt_dataset})",
        f"budget     {_budget(prepared)}",
    ]
    warm = prepared.warm_start
    if warm is not None:
        lines.append(
            f"warm start {warm.matched} prompts from {safe(warm.source.name)}, "
            f"weight {args.warm_start_weight:g}; {warm.unmatched} start from the prior"
        )
    if args.probe.fraction:
        visits = f"{args.probe.samples} rollouts a visit"
        lines.append(f"probes     {args.probe.fraction:.0%} of the prompts, {visits}")
    verb = f"continues after step {run.last_step} at most" if prepared.resumed else "is new"
    if prepared.record is None:
        lines.append(_held_out(prepared))
    lines.append(f"run        {run.name} ({verb}) in {prepared.location}")
    lines.append(f"look       {look(prepared, 'serve')}; --dry_run shows every value")
    return lines


def _budget(prepared: Prepared) -> str:
    args = prepared.settings.args
    prompts = len(prepared.prompts.texts)
    samples = args.rollout.n_samples_per_prompt
    most = args.train.max_rollouts
    if most is not None:
        passes = f"{most / (prompts * samples):.3g} passes over the prompts"
        return f"{most} rollouts at most, as many as {passes}"
    episodes = args.train.num_episodes
    counts = f"{prompts} prompts x {samples} samples x {episodes} episodes"
    return f"{prompts * samples * episodes} rollouts: {counts}"


def _held_out(prepared: Prepared) -> str:
    """Return what held-out accuracy is measured on, or a warning that it is not measured."""
    args = prepared.settings.args
    sets = []
    if args.eval.dataset:
        sets.append(f"{len(prepared.questions(HELD_OUT))} prompts ({args.eval.dataset})")
    for name, benchmark in prepared.benchmarks.items():
        sets.append(f"{len(benchmark.tokens)} prompts of {name}")
    if sets and args.eval.steps > 0:
        return (
            f"held-out   {', '.join(sets)}: "
            f"{args.eval.n_samples_per_prompt} samples a prompt, every {args.eval.steps} steps"
        )
    flags = "--eval.dataset"
    if args.eval.steps < 0:
        flags += " and --eval.steps"
    problem = "held-out accuracy is not measured, so that no run can be compared"
    return f"warning: {problem}: give {flags}"


def look(prepared: Prepared, command: str) -> str:
    """Return a command line that looks into the run's store."""
    line = f"openrlhf-dbb {command}"
    if prepared.location != parse_url(None).location:
        line += f" --store.url {prepared.location}"
    return line


def configuration(settings: Settings) -> str:
    """Return a line for each value that is not OpenRLHF's default or not the paper's."""
    lines = ["configuration (others: OpenRLHF's defaults; * differs from the paper)"]
    for flag, value in settings.flags.items():
        line = f"--{flag} {_text(value)}  [{settings.origin.get(flag, _DEFAULT)}]"
        if flag in settings.paper and value != settings.paper[flag]:
            lines.append(f" * {line}  paper: {_text(settings.paper[flag])}")
        elif flag in settings.origin:
            lines.append(f"   {line}")
    return "\n".join(lines)


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def unfinished(prepared: Prepared) -> str:
    """Return that the run has not finished, where it continues, and the flag that continues it."""
    run = prepared.run
    assert run is not None
    folder = Path(prepared.settings.args.ckpt.path)
    newest, _ = checkpoints.newest_whole(folder, run.uuid, sys.maxsize)
    advice = "it has no checkpoint; start it over"
    if newest:
        advice = f"its last checkpoint is {newest}; continue it"
    return f"run {run.name} has not finished, {advice} with --resume {run.name}"


def ended_silently(prepared: Prepared) -> str:
    """Return the line for a training whose process is gone and has said nothing."""
    run = prepared.run
    assert run is not None
    cause = "somebody stopped Ray, or the kernel killed it for want of memory (see dmesg)"
    advice = f"continue run {run.name} with --resume {run.name}"
    return f"error: the training was killed, or lost the Ray of this host: {cause}; {advice}"


def keep_trace(settings: Settings) -> Path:
    """Write the traceback of the exception that is being handled beside the checkpoints.

    Returns:
        Its file.
    """
    path = Path(settings.args.ckpt.path) / f"failure-{datetime.now():%Y%m%d-%H%M%S}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    trace = without_passwords(traceback.format_exc())
    path.write_text(trace, encoding="utf-8", errors="backslashreplace")
    return path
