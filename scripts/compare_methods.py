"""Every method on the tiny preset with the same number of rollouts: what each costs, and what it reaches with them.

A smoke comparison, not a study: a tiny model and few seeds. Finished runs are not repeated.

    python scripts/compare_methods.py [--seeds 2] [--rollouts 16384] [--output methods]     about a minute a run

Writes ``OUTPUT/methods.db`` (the store), ``OUTPUT/NAME.log`` and prints a Markdown table, means over the seeds.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil

import storage
import storage.inspection

METHODS = ("grpo", "dr_grpo", "dapo", "greso", "repo")
ESTIMATORS = ("point", "dbb")
SAMPLED_EVERY_S = 1.0
_ACCURACY = re.compile(r"accuracy +([\d.]+)% before, ([\d.]+)% after")
COLUMNS = (
    "method", "estimator", "rollouts", "trained on", "replayed", "optimizer steps", "tokens", "seconds", "peak MiB",
    "informative %", "rollouts a group", "before %", "after %",
)  # fmt: skip


def train(name: str, method: str, estimator: str, seed: int, rollouts: int, folder: Path) -> None:
    """Train one run; its time, memory and accuracy go to ``NAME.json``."""
    command = [
        sys.executable, "-m", "openrlhf_dbb", "train", "--preset", "tiny", "--method", method,
        "--estimator", estimator, "--train.seed", str(seed), "--train.max_rollouts", str(rollouts),
        "--run_name", name, "--store.url", f"sqlite:///{folder}/methods.db",
        "--eval.n_samples_per_prompt", "32", "--eval.steps", "1000000",
    ]  # fmt: skip
    began, peak = time.monotonic(), 0
    with open(folder / f"{name}.log", "w+") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = max(peak, memory(process.pid))
            time.sleep(SAMPLED_EVERY_S)
        seconds = time.monotonic() - began
        log.seek(0)
        text = log.read()
    found = _ACCURACY.search(text)
    if process.returncode or found is None:
        sys.exit(f"{name} failed; see {folder / f'{name}.log'}")
    outcome = {"seconds": seconds, "peak": peak, "before": float(found[1]), "after": float(found[2])}
    (folder / f"{name}.json").write_text(json.dumps(outcome))


def memory(pid: int) -> int:
    """Bytes of a process and all its descendants; shared pages count once (PSS)."""
    total = 0
    try:
        root = psutil.Process(pid)
        members = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for member in members:
        try:
            total += member.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def row(store: storage.PosteriorStore, name: str, folder: Path) -> dict[str, float]:
    """The numbers of a finished run."""
    run = store.find_run(name)
    used = storage.inspection.progress(store, run)
    outcome = json.loads((folder / f"{name}.json").read_text())
    return {
        "rollouts": used["generated"] + used["unused_rollouts"],
        "trained on": used["trained"],
        "replayed": used["replayed"],
        "optimizer steps": used["trained"] // run.config["train.batch_size"],
        "tokens": used["generated_tokens"] + used["unused_tokens"],
        "seconds": outcome["seconds"],
        "peak MiB": outcome["peak"] / 2**20,
        "informative %": 100 * used["informative_groups"] / used["groups"],
        "rollouts a group": used["generated"] / used["informative_groups"],
        "before %": outcome["before"],
        "after %": outcome["after"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=16384)
    parser.add_argument("--output", type=Path, default=Path("methods"))
    arguments = parser.parse_args()
    folder = arguments.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows = {}
    for method in METHODS:
        for estimator in ESTIMATORS:
            rows[method, estimator] = []
            for seed in range(1, arguments.seeds + 1):
                name = f"{method}-{estimator}-{seed}"
                if not (folder / f"{name}.json").exists():
                    print(name, file=sys.stderr, flush=True)
                    train(name, method, estimator, seed, arguments.rollouts, folder)
                with storage.open_store(f"sqlite:///{folder}/methods.db") as store:
                    rows[method, estimator].append(row(store, name, folder))
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + " --- |" * len(COLUMNS))
    for (method, estimator), found in rows.items():
        means = {column: np.mean([numbers[column] for numbers in found]) for column in COLUMNS[2:]}
        cells = [f"{mean:.1f}" if column in COLUMNS[-4:] else f"{mean:.0f}" for column, mean in means.items()]
        each = ", ".join(f"{numbers['after %']:.1f}" for numbers in found)
        print("| " + " | ".join([f"`{method}`", f"`{estimator}`", *cells]) + f" ({each}) |")


if __name__ == "__main__":
    main()
