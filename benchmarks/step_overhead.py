"""What a step costs with stored posteriors, compared with OpenRLHF's own GRPO on the same pipeline.

Two trainings at a time, OpenRLHF's (``--estimator none``: its trainer and advantages) and one with an estimator, run
in turn for some seconds each while the other one is stopped by SIGSTOP, so that other load on the machine slows both
alike. Compared is the median wall-clock time between steps, from the event files, so that everything in the loop
counts; the first whole step after a stop is left out. The reward has no time limit: a stop would exceed it.

It needs a machine on which a step takes 2.5 s or less: else a slice holds too few whole steps, and a stop can outlast
what Ray allows a slow process.

    python benchmarks/step_overhead.py            about 10 minutes and 9 GiB on two cores
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
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tqdm import tqdm

from openrlhf_dbb.evaluation.training_curves import read_scalars

UPSTREAM = "none"
ESTIMATORS = ("point", "dbb")
BOUND = 1.02
SLICE_S = 8.0  # the other one is stopped for as long; Ray's health checks give up after 10 s
WARM_UP_STEPS = 8
REWARD = '''"""exact_match, but called in a thread on both sides: ours would call exact_match itself without one."""

from pathlib import Path

from openrlhf_dbb.rewards import exact_match

STARTED = Path(__file__).with_suffix(".started")


def reward_func(queries, prompts, labels):
    if not STARTED.exists():
        STARTED.touch()
    return exact_match.reward_func(queries, prompts, labels)
'''


@dataclass
class Training:
    """One run of the training command, all of whose processes can be stopped and continued."""

    estimator: str
    folder: Path
    process: subprocess.Popen[bytes]
    slices: list[tuple[float, float]] = field(default_factory=list)

    @classmethod
    def start(cls, estimator: str, episodes: int, folder: Path) -> Training:
        reward = folder / f"reward_{estimator}.py"
        reward.write_text(REWARD)
        command = [
            sys.executable, "-m", "openrlhf_dbb.cli.train_grpo", "--preset", "tiny", "--estimator", estimator,
            "--run_name", estimator, "--train.num_episodes", str(episodes), "--eval.steps", "-1",
            "--ckpt.save_steps", "-1", "--actor.eps_clip_low_high", "0.2", "0.28", "--actor.adam.lr", "1e-9",
            "--reward.remote_url", str(reward),
        ]  # fmt: skip
        with open(folder / f"{estimator}.log", "w") as log:
            return cls(estimator, folder, subprocess.Popen(command, cwd=folder, stdout=log, stderr=log))

    def started(self) -> bool:
        """Whether engines and model are there: the first rollout has been generated."""
        return (self.folder / f"reward_{self.estimator}.started").exists()

    def running(self) -> bool:
        return self.process.poll() is None

    def signal(self, name: str) -> None:
        """``suspend`` or ``resume`` the whole process tree."""
        try:
            root = psutil.Process(self.process.pid)
            for member in [root, *root.children(recursive=True)]:
                getattr(member, name)()
        except psutil.NoSuchProcess:
            pass  # it has just ended

    def run_slice(self) -> None:
        """Let it run for a while."""
        self.signal("resume")
        start = time.time()
        time.sleep(SLICE_S)
        self.slices.append((start, time.time()))
        self.signal("suspend")

    def moments(self) -> list[float]:
        """Wall-clock times at which steps ended, of those written so far."""
        path = self.folder / "runs" / self.estimator / "tensorboard" / self.estimator
        found = read_scalars(path).get("train/policy_loss") if path.exists() else None
        return [] if found is None else found.wall_time.tolist()

    def step_times(self) -> list[float]:
        """Seconds of each step that lies within a slice of its own training, except the first of each slice."""
        steps = list(itertools.pairwise(self.moments()))[WARM_UP_STEPS:]
        inside = [[b - a for a, b in steps if start <= a and b <= end] for start, end in self.slices]
        return [seconds for times in inside for seconds in times[1:]]


def measure(estimator: str, episodes: int) -> dict[str, list[float]]:
    """Step times of upstream and of ``estimator``, taken in turn."""
    with tempfile.TemporaryDirectory() as name:
        trainings = []
        for each in (UPSTREAM, estimator):
            training = Training.start(each, episodes, Path(name))
            while not training.started():
                if not training.running():
                    raise SystemExit((Path(name) / f"{each}.log").read_text()[-4000:])
                time.sleep(0.5)
            training.signal("suspend")
            trainings.append(training)
        with tqdm(desc=f"{estimator}: slices", unit="slice", mininterval=10) as bar:
            while all(training.running() for training in trainings):
                for training in trainings:
                    training.run_slice()
                    bar.update()
                trainings.reverse()
        for training in trainings:
            training.signal("resume")
        for training in trainings:
            if training.process.wait():
                raise SystemExit((Path(name) / f"{training.estimator}.log").read_text()[-4000:])
        return {training.estimator: training.step_times() for training in trainings}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=15, help="passes over the 512 prompts, 8 steps each")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 if a ratio is above {BOUND}")
    options = parser.parse_args()

    ratios = {}
    print(f"{'':<12}{'steps':>7}{'median ms':>11}{'quartiles ms':>18}{'ratio':>8}")
    for estimator in ESTIMATORS:
        times = measure(estimator, options.episodes)
        if min(map(len, times.values())) < 2:
            sys.exit(f"too few steps to compare; raise --episodes, now {options.episodes}")
        medians = {each: statistics.median(values) for each, values in times.items()}
        ratios[estimator] = medians[estimator] / medians[UPSTREAM]
        for each, values in sorted(times.items(), key=lambda item: item[0] != UPSTREAM):
            low, _, high = statistics.quantiles(values, n=4)
            ratio = f"{ratios[estimator]:>8.3f}" if each == estimator else ""
            label = "OpenRLHF" if each == UPSTREAM else each
            spread = f"{1e3 * low:>10.0f}-{1e3 * high:<7.0f}"
            print(f"{label:<12}{len(values):>7}{1e3 * medians[each]:>11.1f}{spread}{ratio}", flush=True)
    missed = [estimator for estimator, ratio in ratios.items() if ratio > BOUND]
    print(json.dumps({"ratio": ratios, "bound": BOUND, "missed": missed}))
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
