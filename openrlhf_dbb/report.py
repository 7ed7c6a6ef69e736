"""What the training command prints: the effective configuration before, the summary after."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import storage
from openrlhf_dbb import __version__, presets, probes
from openrlhf_dbb.arguments import Settings
from openrlhf_dbb.runs import Start

_ZERO_VARIANCE = "(successes = 0 OR successes = rollouts)"


def configuration(settings: Settings, start: Start | None) -> str:
    """Every value that is not OpenRLHF's default, where it comes from, and what differs from the paper."""
    paper = presets.paper(settings.estimator)
    lines = [f"openrlhf_dbb {__version__} - preset {settings.preset}, estimator {settings.estimator}"]
    if start is not None:
        verb = f"continues after step {start.run.last_step} at most" if start.resumed else "is new"
        lines += [
            f"run        {start.run.name} ({verb})",
            f"store      {start.location}",
            f"data       {start.prompts.report()}",
        ]
        if start.warm_start is not None:
            warm = start.warm_start
            lines.append(
                f"warm start {warm.matched} prompts from {warm.source.name}, weight {settings.warm_start_weight:g}; "
                f"{warm.unmatched} start from the prior"
            )
        if settings.args.probe.fraction:
            lines.append(_probes(settings.args, start))
        lines += start.notes
    lines.append("configuration (others: OpenRLHF's defaults; * differs from the paper)")
    for flag, value in settings.flags.items():
        known = paper.get(flag)
        differs = known is not None and not _equal(value, known.value)
        if flag in settings.origin or differs:
            note = f"  paper: {_text(known.value)}" if known is not None and differs else ""
            origin = settings.origin.get(flag, "OpenRLHF's default")
            lines.append(f" {'*' if differs else ' '} --{flag} {_text(value)}  [{origin}]{note}")
    return "\n".join(lines)


def summary(start: Start, progress: Any, seconds: float) -> str:
    """Accuracy, steps, rollouts, rescued groups, and where to look; the counts come from the store."""
    run = start.run.run_id
    with storage.open_store(start.store_url) as store:
        counts = store.query(
            f"SELECT sum(rollouts), count(*), sum(CASE WHEN {_ZERO_VARIANCE} THEN 1 ELSE 0 END), "
            f"sum(CASE WHEN {_ZERO_VARIANCE} AND variance > 0 THEN 1 ELSE 0 END) "
            "FROM posterior_history WHERE run_id = :run",
            run=run,
        )
        probe_counts = store.query("SELECT count(*), sum(samples) FROM probes WHERE run_id = :run", run=run)
    rollouts, groups, unanimous, rescued = tuple(counts[0])
    probed, samples = tuple(probe_counts[0])
    lines = ["", f"run {start.run.name} finished in {time.strftime('%M:%S', time.gmtime(seconds))} min"]
    if len(progress.accuracy) > 1:
        first, last = min(progress.accuracy), max(progress.accuracy)
        lines.append(
            f"  accuracy     {progress.accuracy[first]:.1%} before, {progress.accuracy[last]:.1%} after "
            "(held-out prompts, mean over samples)"
        )
    lines.append(f"  steps        {progress.step}")
    lines.append(f"  rollouts     {rollouts or 0}")
    if probed:
        lines.append(f"  probes       {samples} extra rollouts of {probed} groups, not trained on")
    if groups:
        share = f"{rescued / unanimous:.0%} of them still gave an advantage" if unanimous else "none to rescue"
        lines.append(f"  zero-variance groups  {unanimous} of {groups} ({unanimous / groups:.0%}); {share}")
    held = f"sqlite3 {start.location}" if start.store_url.startswith("sqlite") else f"psql {start.location}"
    lines += [
        f"  database     {start.location}",
        "  try          " + held + " \\",
        '    "SELECT step, count(*) AS prompts, avg(mean) AS posterior_mean FROM posterior_history '
        f'WHERE run_id = {run} GROUP BY step ORDER BY step"',
        "  or           openrlhf-dbb report " + start.run.name,
    ]
    return "\n".join(lines)


def _probes(args: SimpleNamespace, start: Start) -> str:
    texts, labels = start.prompts.texts, start.prompts.labels
    probed = probes.of(args, texts, labels)
    visits = sum(prompt in probed for prompt in zip(texts, labels, strict=True))
    trained = len(texts) * args.rollout.n_samples_per_prompt
    return (
        f"probes     {len(probed)} of {len(texts)} prompts, {args.probe.samples} extra rollouts at each visit: "
        f"{visits * args.probe.samples} an epoch beside {trained} of training"
    )


def _equal(value: Any, paper: Any) -> bool:
    if isinstance(paper, list):
        return value is not None and list(value) == paper
    return bool(value == paper)


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
