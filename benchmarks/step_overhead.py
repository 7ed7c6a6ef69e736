"""What a step costs with stored posteriors, beside OpenRLHF's own GRPO on the same pipeline.

Runs upstream (``--estimator none``: OpenRLHF's trainer and advantages), ``point`` and ``dbb`` in turn,
several rounds, and compares the median wall-clock time between steps (from the event files, so that
everything in the loop counts), leaving out each run's first steps.

    python benchmarks/step_overhead.py            4 rounds, about 12 minutes on two cores
    python benchmarks/step_overhead.py --check    exit code 1 if a ratio is above 1.02
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

ESTIMATORS = ("none", "point", "dbb")
BOUND = 1.02
WARM_UP_STEPS = 8


def step_times(estimator: str, round_number: int, episodes: int, folder: Path) -> list[float]:
    """Seconds from step to step of one run, after the warm-up."""
    name = f"{estimator}-{round_number}"
    command = [
        sys.executable, "-m", "openrlhf_dbb.cli.train_grpo", "--preset", "tiny", "--estimator", estimator,
        "--run_name", name, "--train.num_episodes", str(episodes), "--eval.steps", "-1", "--ckpt.save_steps", "-1",
        "--actor.eps_clip_low_high", "0.2", "0.28", "--actor.adam.lr", "1e-9",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    events = EventAccumulator(str(folder / "runs" / name / "tensorboard" / name))
    events.Reload()
    moments = [event.wall_time for event in events.Scalars("train/policy_loss")]
    return [later - earlier for earlier, later in itertools.pairwise(moments)][WARM_UP_STEPS:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--episodes", type=int, default=6, help="passes over the 512 prompts, 8 steps each")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 if a ratio is above {BOUND}")
    options = parser.parse_args()

    times: dict[str, list[float]] = {estimator: [] for estimator in ESTIMATORS}
    with tempfile.TemporaryDirectory() as folder:
        runs = [(r, e) for r in range(options.rounds) for e in (ESTIMATORS if r % 2 == 0 else ESTIMATORS[::-1])]
        for round_number, estimator in tqdm(runs, unit="run"):
            times[estimator] += step_times(estimator, round_number, options.episodes, Path(folder))

    medians = {estimator: statistics.median(values) for estimator, values in times.items()}
    ratios = {estimator: medians[estimator] / medians["none"] for estimator in ESTIMATORS}
    print(f"{'estimator':<12}{'steps':>7}{'median ms':>11}{'quartiles ms':>18}{'ratio':>8}")
    for estimator, values in times.items():
        low, _, high = statistics.quantiles(values, n=4)
        label = "OpenRLHF" if estimator == "none" else estimator
        print(
            f"{label:<12}{len(values):>7}{1e3 * medians[estimator]:>11.1f}"
            f"{1e3 * low:>10.0f}-{1e3 * high:<7.0f}{ratios[estimator]:>8.3f}"
        )
    missed = [estimator for estimator, ratio in ratios.items() if ratio > BOUND]
    print(json.dumps({"median_s": medians, "ratio": ratios, "bound": BOUND, "missed": missed}))
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
