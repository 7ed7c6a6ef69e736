"""What it buys to generate ahead of the training: step time, how idle vLLM is, and accuracy at equal rollouts.

Every candidate trains with the same model, data, seeds and rollouts (estimator dbb); the candidates take turns, round
by round with another seed, in an order that is reversed each time.

sync        training waits for generation
async       ``--train.async_enable``: one batch ahead
corrected   the same with truncated importance sampling at 2
more        two batches ahead (``--train.async_queue_size 2``)

A step's time is from one step's row in the store to the next, without evaluations and the first steps. vLLM is idle
while no rollout batch is being generated. Accuracy is that of the held-out prompts after the last step, and its
difference to that of sync is paired by seed.

Without CUDA both share the same cores; with a GPU for the engine it is what async training is for. Protocol, fixed
before the first run: three seeds, four passes over the tiny preset's 512 prompts (64 a step), the first four steps of
each run left out of the times.

    python benchmarks/async_overlap.py               ten minutes on two quiet cores
    python benchmarks/async_overlap.py --seeds 1 --episodes 1     to see whether it works
    python benchmarks/async_overlap.py -- --preset tiny --actor.adam.lr 1e-4     other flags of the trainings
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from start import at_least_one
from tqdm import tqdm

from storage import open_store
from storage.engine import execute

AHEAD = ["--train.async_enable"]
CORRECTION = [
    "--algo.advantage.is_correction_level", "token", "--algo.advantage.is_correction_mode", "clip",
    "--algo.advantage.is_correction_threshold", "2",
]  # fmt: skip
CANDIDATES = {
    "sync": [],
    "async": AHEAD,
    "corrected": [*AHEAD, *CORRECTION],
    "more": [*AHEAD, "--train.async_queue_size", "2"],
}
WARM_UP_STEPS = 4
COMMAND = [
    sys.executable, "-m", "openrlhf_dbb.cli.train_grpo", "--estimator", "dbb", "--run_name", "run",
    "--eval.steps", "1000000", "--eval.skip_start", "--ckpt.save_steps", "-1", "--rollouts.keep", "0",
]  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What a training took and gave.

    Attributes:
        seconds: of each step after the first ones.
        idle: share of the time of these steps in which vLLM generated no rollouts, in [0, 1].
        lag: mean over the rollouts, in training steps.
        accuracy: of the held-out prompts after the last step.
        rollouts: trained on.
    """

    seconds: list[float]
    idle: float
    lag: float
    accuracy: float
    rollouts: int


def train(candidate: str, seed: int, flags: list[str], folder: Path) -> Run:
    """A training of its own in an empty folder."""
    command = [*COMMAND, *flags, *CANDIDATES[candidate], "--train.seed", str(seed)]
    log = folder / "log"
    with log.open("w") as output:
        ended = subprocess.run(command, cwd=folder, stdout=output, stderr=output, check=False)
    if ended.returncode:
        raise SystemExit(f"{candidate}, seed {seed}, failed:\n{log.read_text(errors='replace')[-3000:]}")
    return read(folder / "openrlhf_dbb.db")


def read(database: Path) -> Run:
    """What a finished run has stored."""
    with open_store(str(database), create=False) as store, store.database.transaction() as connection:
        steps = execute(connection, "SELECT created_at, metrics, trained FROM steps ORDER BY step", {}).all()
        ((accuracy,),) = execute(
            connection,
            """SELECT sum(r.successes) / sum(r.verified) FROM dbb_evaluation e
               JOIN dbb_evaluation_result r ON r.evaluation_id = e.evaluation_id
               WHERE e.step = (SELECT max(step) FROM dbb_evaluation)""",
            {},
        ).all()
    written = [datetime.fromisoformat(at) for at, _, _ in steps]
    metrics = [json.loads(text) for _, text, _ in steps][WARM_UP_STEPS:]
    return Run(
        seconds=[(b - a).total_seconds() for a, b in itertools.pairwise(written)][WARM_UP_STEPS - 1 :],
        idle=statistics.mean(_idle(each) for each in metrics),
        lag=statistics.mean(each.get("async/lag", 0.0) for each in metrics),
        accuracy=float(accuracy),
        rollouts=sum(trained for _, _, trained in steps),
    )


def _idle(metrics: dict[str, float]) -> float:
    if "async/generating" in metrics:
        return 1 - metrics["async/generating"]
    return 1 - metrics["timing/generation"] / metrics["timing/step_total"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=at_least_one, default=3)
    parser.add_argument("--episodes", type=at_least_one, default=4)
    parser.add_argument("flags", nargs="*", help="of the trainings, after --; default: --preset tiny")
    options = parser.parse_args()
    flags = [*(options.flags or ["--preset", "tiny"]), "--train.num_episodes", str(options.episodes)]
    print("load average before: {:.2f}, {:.2f}, {:.2f}; it should be near 0".format(*os.getloadavg()), flush=True)
    names = list(CANDIDATES)
    turns = [(seed, name) for seed in range(1, options.seeds + 1) for name in (names if seed % 2 else names[::-1])]
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for seed, name in (progress := tqdm(turns, unit="run")):
        progress.set_description(f"seed {seed}, {name}")
        with tempfile.TemporaryDirectory(prefix="dbb_async_") as folder:
            runs[name].append(train(name, seed, flags, Path(folder)))
    head = "".join(f"{name:>10}" for name in ("step ms", "of sync", "vLLM idle", "lag", "rollouts", "accuracy"))
    print(f"\n{'':<11}{head}   difference")
    for name, of_seeds in runs.items():
        pairs = list(zip(of_seeds, runs["sync"], strict=True))
        step = statistics.median(second for run in of_seeds for second in run.seconds)
        ratio = statistics.median(statistics.median(run.seconds) / statistics.median(of.seconds) for run, of in pairs)
        idle, lag, accuracy = (
            statistics.mean(getattr(run, value) for run in of_seeds) for value in ("idle", "lag", "accuracy")
        )
        differences = ", ".join(f"{run.accuracy - of.accuracy:+.1%}" for run, of in pairs)
        print(
            f"{name:<11}{1e3 * step:>10.0f}{ratio:>10.2f}{idle:>10.0%}{lag:>10.2f}{of_seeds[0].rollouts:>10,}"
            f"{accuracy:>10.1%}   {differences}"
        )
    print(json.dumps({name: [vars(run) for run in of_seeds] for name, of_seeds in runs.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
